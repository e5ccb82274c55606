"""Tiny random models of every supported family, small enough that a whole test costs milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers as hf

VOCAB = 61
CONTEXT = 512

_SIZES = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, bos_token_id=None,
              eos_token_id=None, pad_token_id=None, initializer_range=0.3)  # fmt: skip
_MODERN = dict(_SIZES, intermediate_size=48, num_key_value_heads=2, max_position_embeddings=CONTEXT)
_GPT2 = dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, bos_token_id=None,
             eos_token_id=None, initializer_range=0.3)  # fmt: skip
_SLIDING = ["sliding_attention", "full_attention"]

# family → (configuration, its sizes)
_CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (hf.LlamaConfig, _MODERN),
    "qwen2": (hf.Qwen2Config, _MODERN),
    "qwen3": (hf.Qwen3Config, dict(_MODERN, head_dim=8)),
    "mistral": (hf.MistralConfig, dict(_MODERN, sliding_window=8)),
    "gpt2": (hf.GPT2Config, _GPT2),
    "gpt_neox": (hf.GPTNeoXConfig, dict(_SIZES, intermediate_size=48, max_position_embeddings=CONTEXT)),
    "opt": (hf.OPTConfig, dict(_SIZES, ffn_dim=48, max_position_embeddings=CONTEXT, word_embed_proj_dim=32,
                               init_std=0.3)),
    "phi": (hf.PhiConfig, dict(_MODERN, num_key_value_heads=4)),
    "gemma3": (hf.Gemma3TextConfig, dict(_MODERN, head_dim=8, sliding_window=8, layer_types=_SLIDING)),
}  # fmt: skip
FAMILIES = list(_CONFIGS)


def tiny_model(family: str = "llama", attention: str = "sdpa", seed: int = 0, **changes: Any) -> hf.PreTrainedModel:
    """A random model of the family in eval mode, on the CPU, float32; the same seed gives the same weights."""
    make, sizes = _CONFIGS[family]
    torch.manual_seed(seed)
    config = make(**{**sizes, **changes})
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def perturbed(model: hf.PreTrainedModel, scale: float = 0.05, seed: int = 1) -> hf.PreTrainedModel:
    """A copy with noise on its weights: a draft that is often, but not always, right."""
    copy = type(model)(model.config).eval()
    copy.load_state_dict(model.state_dict())
    copy.set_attn_implementation(model.config._attn_implementation)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in copy.parameters():
            weight += scale * weight.std() * torch.randn(weight.shape, generator=noise)
    return copy


def prompt(length: int = 12, seed: int = 0, batch: int = 1) -> torch.Tensor:
    """Random token ids [batch, length] with a repeated stretch, so that prompt lookup has something to find."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (batch, length), generator=generator)
    if length >= 8:
        ids[:, -3:] = ids[:, 1:4]
    return ids


def padded(lengths: Sequence[int], side: str = "left") -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of these lengths as input_ids and attention_mask."""
    longest, rows, mask = max(lengths), [], []
    for n in lengths:
        filler = torch.zeros(longest - n, dtype=torch.long)
        parts, seen = [filler, prompt(n, seed=n)[0]], [filler, torch.ones(n, dtype=torch.long)]
        rows.append(torch.cat(parts if side == "left" else parts[::-1]))
        mask.append(torch.cat(seen if side == "left" else seen[::-1]))
    return torch.stack(rows), torch.stack(mask)


def plain(model: hf.PreTrainedModel, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """The oracle: transformers' own greedy search, tokens [1, n + new]."""
    mask = torch.ones_like(input_ids)
    return model.generate(input_ids, attention_mask=mask, **{"do_sample": False, "max_new_tokens": 24, **options})


def fresh_logits(model: hf.PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """The oracle for caches: all tokens [1, n] through the model at once, without a cache."""
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits
