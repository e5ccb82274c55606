"""The benchmark's own weights, in a form that another engine loads: a folder for vLLM, a GGUF file for llama.cpp.

The GGUF file holds every weight in the model's dtype (one-dimensional ones in float32, as llama.cpp wants them), and no
tokenizer: peers are asked in token ids.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.peers import Peer, PeerError


@contextlib.contextmanager
def weights_for(peer: Peer, model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """What the peer is to load, and in words which weights these are; a converted file is removed afterwards.

    Raises:
        PeerError: if the model cannot be brought into the peer's form.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    if peer.weights is not None:
        yield str(peer.weights), f"the weights in {Path(peer.weights).name}, which may differ from this model's"
    elif peer.name.startswith("llama-cpp"):
        with tempfile.TemporaryDirectory(prefix="specnb-") as folder:
            path = Path(folder) / f"model-{dtype}.gguf"
            write_gguf(model, path)
            yield str(path), f"the same weights in {dtype}"
    else:
        yield str(model.name_or_path), f"the same weights in {dtype}"


def write_gguf(model: PreTrainedModel, path: Path) -> None:
    """Write a Llama model as a GGUF file in its own dtype.

    Raises:
        PeerError: for another architecture or dtype.
    """
    import gguf

    kinds = {torch.float32: gguf.GGMLQuantizationType.F32, torch.float16: gguf.GGMLQuantizationType.F16,
             torch.bfloat16: gguf.GGMLQuantizationType.BF16}  # fmt: skip
    if model.config.model_type != "llama" or model.dtype not in kinds:
        raise PeerError(
            f"a {model.config.model_type} in {model.dtype} is not converted to GGUF here; give --peer-weights a file"
        )
    writer = gguf.GGUFWriter(path, "llama")
    _add_sizes(writer, model.config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    for name, weight in _weights(model):
        kind = kinds[model.dtype] if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(weight.float().numpy(), kind)
        writer.add_tensor(str(names.get_name(name, try_suffixes=(".weight",))), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: Any, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(_head_size(config))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")


def _head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Name and weight; queries and keys in llama.cpp's order of rotary pairs. A tied head is left out, as there."""
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        rotated = next((n for part, n in heads.items() if part in name), None)
        yield name, weight if rotated is None else _interleaved(weight, rotated)


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """[heads · D, n] with each head's two halves of rows interleaved: (0, D/2, 1, D/2 + 1, …)."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
