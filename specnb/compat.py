"""Everything that differs between the supported transformers releases (5.17 to the newest), in one place.

* 5.24 renames the forward argument ``past_key_values`` to ``cache``.
* ``generate(custom_generate=callable, streamer=…)`` shows the prompt to the streamer and then drops it.
* What kind of cache a model needs is asked of transformers' own ``DynamicCache``.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

# layer types whose entries sit at their own position, so that dropping the newest ones is a rollback
_ATTENTION_TYPES = {"full_attention", "sliding_attention"}


_FORWARD_PARAMETERS: dict[type, frozenset[str]] = {}  # reading a signature takes longer than a small pass


def accepts(model: PreTrainedModel, argument: str) -> bool:
    """Whether ``model.forward`` names this argument."""
    kind = type(model)
    if kind not in _FORWARD_PARAMETERS:
        _FORWARD_PARAMETERS[kind] = frozenset(inspect.signature(kind.forward).parameters)
    return argument in _FORWARD_PARAMETERS[kind]


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which ``model.forward`` takes its cache."""
    return "cache" if accepts(model, "cache") else "past_key_values"


def text_config(config: Any) -> Any:
    """The configuration of the language model itself, also inside a multimodal one."""
    return config.get_text_config(decoder=True)


def vocab_size(model: PreTrainedModel) -> int:
    """V, the number of tokens the model scores."""
    return text_config(model.config).vocab_size


def layer_windows(config: Any) -> list[int | None]:
    """Per layer: the sliding window in tokens, or None for full attention.

    Raises:
        ValueError: for layers that keep a running state or compress their past: they cannot forget single tokens.
    """
    config = text_config(config)
    foreign = sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION_TYPES)
    if foreign or getattr(config, "attention_chunk_size", None):
        raise ValueError(_no_rollback(config, ", ".join(foreign) or "chunked attention"))
    windows = [_window(config, layer) for layer in _default_layers(config)]
    if len(set(windows) - {None}) > 1:
        raise ValueError(
            f"{config.model_type}: sliding windows of several sizes are not supported, got {set(windows)}."
        )
    return windows


def _default_layers(config: Any) -> list[Any]:
    """The layers of the cache transformers itself would use (one per layer, also before the first pass)."""
    layers = DynamicCache(config=config).layers
    return layers or [DynamicLayer() for _ in range(config.num_hidden_layers)]


def _window(config: Any, layer: Any) -> int | None:
    if type(layer) is DynamicSlidingWindowLayer:
        return int(layer.sliding_window)
    if type(layer) is DynamicLayer:
        return None
    raise ValueError(_no_rollback(config, type(layer).__name__))


def _no_rollback(config: Any, kind: str) -> str:
    return (
        f"{config.model_type}: its cache cannot be rolled back ({kind}). Speculative decoding drops rejected tokens "
        "from the cache, which a running or compressed state does not allow. Use model.generate, or a model whose "
        "layers are full or sliding-window attention."
    )


def calling_streamer() -> Any | None:
    """The ``streamer=`` of the ``model.generate`` call that called ``decode``, which transformers does not pass on.

    Without it a ``TextIteratorStreamer`` would wait for ever for tokens that nobody sends.
    """
    generate = inspect.unwrap(GenerationMixin.generate).__code__
    frame = sys._getframe(1)
    for _ in range(4):  # decode, the wrapper of torch.no_grad, generate
        if frame.f_code is generate:
            return frame.f_locals.get("streamer")
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None
