"""What specnb refuses, before the first pass, and in which words.

Each check raises a ValueError or TypeError that says what was wrong, what was expected and what to do.
"""

from __future__ import annotations

import math
import warnings
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessorList, PreTrainedModel

from specnb import compat, trees
from specnb.cache import MOST_NODES, RaggedCache, context_size, target_pass
from specnb.drafters.base import Draft, Drafter
from specnb.lossy import TypicalAcceptance

# families whose every layer was compared with a fresh prefill in the test-suite; others are tried once before use
TESTED_FAMILIES = frozenset(
    ["llama", "qwen2", "qwen3", "mistral", "gpt2", "gpt_neox", "opt", "phi", "gemma3_text", "gemma3", "smollm3"]
)
_STATEFUL_PROCESSORS = {"UnbatchedClassifierFreeGuidanceLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor"}
# built from the length of the padded prompt, and wrong for rows that are shorter
_PADDED_LENGTH_PROCESSORS = {
    "ExponentialDecayLengthPenalty", "ForcedEOSTokenLogitsProcessor", "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor", "RepetitionPenaltyLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor",
}  # fmt: skip
# built from all prompts of a batch, and wrong for one row of it
_WHOLE_BATCH_PROCESSORS = {
    "EncoderNoRepeatNGramLogitsProcessor", "EncoderRepetitionPenaltyLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
}  # fmt: skip
_MASKABLE_ATTENTION = ("eager", "sdpa")
_PROBED: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


def check_model(model: Any, role: str = "target model") -> None:
    """Raise unless ``model`` is a causal LM in eval mode, on one device, whose cache can be rolled back."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(_not_a_model(model, role))
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"The {role} is {type(model).__name__}, an encoder-decoder model; specnb decodes decoder-only causal "
            "language models. Load it with AutoModelForCausalLM if it has such a form."
        )
    if not isinstance(model, GenerationMixin) or model.get_output_embeddings() is None:
        raise ValueError(
            f"The {role} is {type(model).__name__}, which has no language-modelling head; "
            "load it with transformers.AutoModelForCausalLM."
        )
    _check_placement(model, role)
    _check_attention(model, role)
    if model.training:
        raise ValueError(f"The {role} is in training mode, where dropout makes passes random: call model.eval() first.")
    _probe_once(model, role)


def _not_a_model(model: Any, role: str) -> str:
    found = f"The {role} is a {type(model).__name__}"
    if hasattr(model, "merge_and_unload"):
        return f"{found}, a wrapper with adapters: pass model.merge_and_unload(), the plain model with them merged in."
    return f"{found}; expected a transformers causal language model, as from specnb.load_model()."


def _check_placement(model: PreTrainedModel, role: str) -> None:
    spread = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(spread) > 1 or "meta" in {p.device.type for p in model.parameters()}:
        raise ValueError(
            f"The {role} is spread over {', '.join(sorted(spread)) or 'devices that hold no weights yet'} (device_map "
            "or offloading). specnb keeps one cache on one device: load the model whole with "
            "specnb.load_model(name, device=...)."
        )


def _check_attention(model: PreTrainedModel, role: str) -> None:
    compat.layer_windows(model.config)  # raises for layers that cannot forget single tokens
    attention = compat.text_config(model.config)._attn_implementation
    if attention not in _MASKABLE_ATTENTION:
        raise ValueError(
            f"The {role} uses {attention!r} attention, which takes no 4-D mask; rows of different length need one. "
            "Call model.set_attn_implementation('sdpa') first."
        )


def _probe_once(model: PreTrainedModel, role: str) -> None:
    """Compare a ragged, rolled-back cache with a fresh pass, for a family the test-suite does not know."""
    if model.config.model_type in TESTED_FAMILIES or model in _PROBED:
        return
    try:
        error = _rollback_error(model)
    except Exception as reason:
        raise ValueError(
            f"The {role}, {type(model).__name__}, cannot run on specnb's cache: it raised {type(reason).__name__}: "
            f"{reason}. Use model.generate for this family."
        ) from reason
    if not error < (1e-3 if model.dtype == torch.float32 else 0.1):
        raise ValueError(
            f"The {role}, {type(model).__name__}, computes other scores on a rolled-back cache than on a fresh one "
            f"(they differ by {error:.2g} relative to their size): it does not place or mask tokens by position_ids "
            "and a 4-D mask, as rows of different length need. Use model.generate for this family."
        )
    _PROBED.add(model)


def _rollback_error(model: PreTrainedModel) -> float:
    """Largest relative difference of two rows' scores after a rejected draft, against each row alone from scratch."""
    n = _own_window(model.config) + 5
    tokens = (torch.arange(2 * n + 4).reshape(2, -1) * 7 + 3) % compat.vocab_size(model)
    cache = RaggedCache(model.config, 2, n + 8)
    target_pass(model, cache, tokens[:, :n])
    cache.rollback([1, 3])  # rows of length n - 1 and n - 3
    rows = [tokens[0, : n + 1], tokens[1, : n - 1]]
    ragged = target_pass(model, cache, torch.stack([row[-2:] for row in rows]), attended=n + 4)
    with torch.no_grad():
        fresh = [model(input_ids=row[None].to(model.device), use_cache=False).logits[0, -2:] for row in rows]
    expected = torch.stack(fresh)
    return float((ragged - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def _own_window(config: Any) -> int:
    """A window that the model's code keeps to itself (GPT-Neo's local layers): the probe must be longer than that."""
    if any(compat.layer_windows(config)):
        return 0  # a window that our mask knows
    sizes = [value for name, value in compat.text_config(config).to_dict().items() if "window" in name]
    return max((size for size in sizes if type(size) is int and size <= 2048), default=0)


def check_input_ids(input_ids: Any, vocab_size: int, context: int) -> None:
    """Raise unless input_ids is an integer tensor [B, n ≥ 1] of ids inside the vocabulary that fits the context."""
    if not isinstance(input_ids, Tensor):
        raise TypeError(
            f"input_ids must be a LongTensor [B, n], got {type(input_ids).__name__}. "
            "From text: tokenizer(text, return_tensors='pt').input_ids."
        )
    if input_ids.ndim != 2:
        raise ValueError(f"input_ids must be [B, n], got {list(input_ids.shape)}. For one prompt: input_ids[None].")
    if input_ids.dtype not in (torch.long, torch.int32):
        raise TypeError(f"input_ids must hold token ids (torch.long), got {input_ids.dtype}.")
    if input_ids.numel() == 0:
        raise ValueError(
            f"The prompt is empty (input_ids {list(input_ids.shape)}). Give at least one token, such as the "
            "tokenizer's bos token."
        )
    _check_range(input_ids, vocab_size)
    if input_ids.shape[1] > context:
        raise ValueError(
            f"The prompt has {input_ids.shape[1]} tokens, the model's context holds {context}. Shorten the prompt."
        )


def _check_range(input_ids: Tensor, vocab_size: int) -> None:
    outside = (input_ids < 0) | (input_ids >= vocab_size)
    if bool(outside.any()):
        row, column = outside.nonzero()[0].tolist()
        raise ValueError(
            f"input_ids[{row}, {column}] = {int(input_ids[row, column])} is outside the vocabulary 0…{vocab_size - 1}. "
            "Was the text encoded with another model's tokenizer?"
        )


def unpadded_rows(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Each row's own tokens, padding taken off by the mask (padding may equal the end-of-sequence token).

    Raises:
        ValueError: if the mask has another shape, hides a whole row, or has holes.
    """
    if attention_mask is None:
        return input_ids.tolist()
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor [B, n] of 0 and 1, got {type(attention_mask).__name__}.")
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask {list(attention_mask.shape)} must have the shape of input_ids {list(input_ids.shape)}."
        )
    rows = []
    for b, (ids, keep) in enumerate(zip(input_ids.cpu(), attention_mask.cpu().bool())):
        places = keep.nonzero().flatten()
        if len(places) == 0 or len(places) != int(places[-1] - places[0]) + 1:
            raise ValueError(
                f"attention_mask of row {b} must mark one unbroken stretch of at least one token; padding belongs "
                "before it (or after it), never inside."
            )
        rows.append(ids[keep].tolist())
    return rows


def check_return_trace(return_trace: Any) -> None:
    if return_trace not in (False, True, "probs"):
        raise ValueError(f"return_trace must be False, True or 'probs', got {return_trace!r}.")


def check_pass_width(pass_width: Any) -> None:
    if pass_width is not None and (isinstance(pass_width, bool) or not isinstance(pass_width, int) or pass_width < 1):
        raise ValueError(f"pass_width must be a whole number of at least 1 (positions per pass), got {pass_width!r}.")


def check_lossy(lossy: Any, do_sample: Any) -> None:
    if lossy is None:
        return
    if not isinstance(lossy, TypicalAcceptance):
        raise TypeError(f"lossy must be a specnb.TypicalAcceptance or None, got {type(lossy).__name__}.")
    if not do_sample:
        raise ValueError(
            "lossy: typical acceptance is a rule for sampling; greedy verification needs none. do_sample=True?"
        )


def check_compile(compile: Any) -> None:
    if not isinstance(compile, bool):
        raise TypeError(f"compile must be True or False, got {compile!r}.")


def check_rope(config: Any, longest: int) -> None:
    """Raise if a pass could reach the positions where a longrope model changes its rotation for the whole pass."""
    config = compat.text_config(config)
    rope = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if one.get("rope_type") != "longrope":
            continue
        switch = one.get("original_max_position_embeddings") or config.max_position_embeddings
        if longest > switch:
            raise ValueError(
                f"{config.model_type} turns all positions of a pass differently once one of them reaches {switch} "
                f"(longrope), so entries cached before no longer fit; this run could reach {longest} with its drafts. "
                f"Keep prompt, max_new_tokens and draft together below {switch}, or use model.generate."
            )


def context_budgets(lengths: list[int], wanted: list[int], config: Any) -> list[int]:
    """New tokens per row, cut (with a warning) where the model's context ends."""
    size = context_size(config)
    budgets = [min(new, size + 1 - n) for n, new in zip(lengths, wanted)]
    if budgets != wanted:
        warnings.warn(
            f"The model's context holds {size} tokens; rows stop there instead of after {max(wanted)} new tokens.",
            stacklevel=2,
        )
    return budgets


# options of GenerationConfig that ask for another way of decoding, and what to do instead
_OTHER_MODES = {
    "num_beams": (1, "beam search keeps several hypotheses; specnb verifies one. Use num_beams=1."),
    "penalty_alpha": (None, "contrastive search is not speculative decoding. Leave penalty_alpha out."),
    "dola_layers": (None, "DoLa decoding is not supported. Leave dola_layers out."),
    "prompt_lookup_num_tokens": (None, "use drafter=specnb.PromptLookup(num_draft_tokens=...) instead."),
    "assistant_early_exit": (None, "early exit of the target is not available as an option here; use a drafter."),
    "cache_implementation": (None, "specnb brings its own cache, the one that rolls back. Leave it out."),
    "guidance_scale": (1.0, "classifier-free guidance runs the model inside a processor and keeps state there."),
}


def check_generation_config(config: Any) -> None:
    """Raise for options that ask for something other than greedy search or sampling."""
    for name, (neutral, reason) in _OTHER_MODES.items():
        value = getattr(config, name, None)
        if value is not None and value != neutral:
            raise ValueError(f"{name}={value!r}: {reason}")
    temperature = config.temperature
    if config.do_sample and temperature is not None and not 0 < temperature < math.inf:
        raise ValueError(
            f"temperature={temperature!r}: sampling needs a finite number above 0. For the limit 0, the most likely "
            "token always, pass do_sample=False."
        )


def check_processors(processors: LogitsProcessorList, prompts: list[list[int]], padded_length: int) -> None:
    """Raise for processors that keep state between calls, or that look at a whole padded batch."""
    names = {type(p).__name__ for p in processors}
    if stateful := sorted(names & _STATEFUL_PROCESSORS):
        raise ValueError(
            f"{stateful[0]} keeps state from call to call; a round scores several places and may take some back. "
            "Use a stateless processor."
        )
    padded = any(len(prompt) != padded_length for prompt in prompts)
    several = any(prompt != prompts[0] for prompt in prompts)
    unfit = (_PADDED_LENGTH_PROCESSORS if padded else set()) | (_WHOLE_BATCH_PROCESSORS if several else set())
    if batched := sorted(names & unfit):
        raise ValueError(
            f"{batched[0]} was built for the whole padded batch; here each row is decoded by itself. "
            "Use specnb.generate, which prepares every row alone, or one row at a time."
        )


def check_drafter(drafter: Any) -> None:
    if drafter is not None and not isinstance(drafter, Drafter):
        hint = " Wrap a model: specnb.DraftModel(model)." if isinstance(drafter, PreTrainedModel) else ""
        raise TypeError(
            f"drafter must be a specnb.Drafter or None, got {type(drafter).__name__}.{hint} "
            "A drafter of your own is a subclass of specnb.Drafter with propose(context, limit)."
        )


def check_chains(drafter: Drafter, reason: str) -> None:
    """Raise for a drafter of trees, or one that lives on the target's hidden states, inside of another drafter."""
    if drafter.trees or drafter.needs_hidden:
        raise ValueError(
            f"{reason}, and {type(drafter).__name__} drafts trees. Use it by itself; the tree that suits a machine is "
            "found by specnb.trees.best_shape."
        )


def check_streamer(streamer: Any, batch_size: int) -> None:
    if streamer is not None and batch_size > 1:
        raise ValueError(f"A streamer follows one row, but the batch has {batch_size}: decode one prompt at a time.")


def checked_draft(draft: Any, limits: list[int], vocab_size: int) -> Draft:
    """The draft, cut to the rows' limits, once its shapes and token ids are known to be sound."""
    if not isinstance(draft, Draft):
        raise TypeError(f"A drafter must return a specnb.Draft, got {type(draft).__name__}; see Draft.from_lists.")
    tokens, lengths = draft.tokens, torch.as_tensor(draft.lengths).cpu()
    if tokens.ndim != 2 or tokens.shape[0] != len(limits) or lengths.shape != (len(limits),):
        raise ValueError(
            f"The draft must have {len(limits)} rows: tokens [B, K] and lengths [B], got {list(tokens.shape)} and "
            f"{list(lengths.shape)}."
        )
    counts = lengths.tolist()
    if tokens.dtype != torch.long or lengths.dtype != torch.long or min(counts, default=0) < 0:
        raise ValueError(
            f"A draft's tokens and lengths are whole numbers (torch.long), lengths from 0 to K; got {tokens.dtype}, "
            f"{lengths.dtype} and lengths {counts}."
        )
    if draft.probs is not None and draft.probs.shape != (*tokens.shape, vocab_size):
        raise ValueError(
            f"The draft's probs must be q [B, K, V] = {[*tokens.shape, vocab_size]}, got {list(draft.probs.shape)}."
        )
    for name, values in (("planned", draft.planned), ("kinds", draft.kinds)):
        if values is not None and len(values) != len(limits):
            raise ValueError(f"The draft's {name} must be one number per row [{len(limits)}], got {len(values)}.")
    given, counts = counts, [min(n, limit, tokens.shape[1]) for n, limit in zip(counts, limits)]
    used = max(counts)
    if tokens.device.type == "cpu":  # elsewhere the look would hold up the device; its tokens come from an argmax
        _check_guesses(tokens.tolist(), counts, vocab_size)
    if draft.parents is None and counts == given and used == tokens.shape[1]:  # nothing to cut, as in most rounds
        return replace(draft, lengths=lengths)
    lengths = torch.tensor(counts)
    parents = None if draft.parents is None else _checked_parents(draft, lengths)[:, :used]
    probs = None if draft.probs is None else draft.probs[:, :used]
    return replace(draft, tokens=tokens[:, :used], lengths=lengths, probs=probs, parents=parents)


def _checked_parents(draft: Draft, lengths: Tensor) -> Tensor:
    """The parents of the nodes that count; the others follow the root."""
    parents = torch.as_tensor(draft.parents).cpu()
    if parents.shape != draft.tokens.shape:
        raise ValueError(
            f"A draft's parents must be {list(draft.tokens.shape)} as its tokens, got {list(parents.shape)}."
        )
    counts = torch.arange(parents.shape[1]) < lengths[:, None]
    parents = parents.where(counts, trees.ROOT)
    trees.check_parents(parents, draft.tokens)
    if int(lengths.max()) > MOST_NODES:
        raise ValueError(f"A tree of {int(lengths.max())} guesses: a row's may have {MOST_NODES} at most.")
    return parents


def _check_guesses(tokens: list[list[int]], counts: list[int], vocab_size: int) -> None:
    for row, (guesses, n) in enumerate(zip(tokens, counts)):
        outside = next((place for place, token in enumerate(guesses[:n]) if not 0 <= token < vocab_size), None)
        if outside is not None:
            raise ValueError(
                f"The drafter proposed token {guesses[outside]} in row {row} at place {outside}; "
                f"the target's vocabulary is 0…{vocab_size - 1}."
            )
