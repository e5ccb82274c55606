"""A cache handed from one call to the next, so that the second turn of a chat reads only what is new.

The rows of the next call need not go on where those of the last one ended: what both have in common at the beginning
is kept, the rest is rolled back. Used in notebook 08.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from transformers import PreTrainedModel

from specnb.cache import RaggedCache
from specnb.prefill import FIXED_CHUNK


class Remembered:
    """What a cache holds, and how it came there.

    Attributes:
        tokens: the token ids of each row; the cache holds them up to its row's length.
        fixed: tokens at each row's beginning that were read in prefill chunks of fixed width; their entries are those
            that a fresh run of fixed width computes, bit for bit.
        by_twin: whether the passes went through the model's compiled twin, whose bits are others.
    """

    def __init__(
        self, model: PreTrainedModel, tokens: list[list[int]], fixed: list[int], by_twin: bool = False
    ) -> None:
        self.model, self.tokens, self.fixed, self.by_twin = weakref.ref(model), tokens, fixed, by_twin


def cache_for(
    prompts: list[list[int]], model: PreTrainedModel, cache: Any, *, fixed: bool, by_twin: bool = False
) -> RaggedCache:
    """An empty cache, or the given one cut back to what its rows and the prompts have in common.

    With a fixed pass width only whole prefill chunks are kept, so that the text is that of a run without the cache; and
    nothing, with a warning, if they were computed by the other kind of pass than this run's (compiled or not).

    Raises:
        TypeError, ValueError: for something that is no cache of `generate`, or of another model or number of rows.
    """
    if cache is None:
        return RaggedCache(model.config, len(prompts), 1)
    if not isinstance(cache, RaggedCache):
        raise TypeError(f"cache must be the out.cache of an earlier specnb.generate, got {type(cache).__name__}.")
    known, cache.remembered = cache.remembered, None  # until the run has ended well, nobody knows what it holds
    if known is None:
        raise ValueError("This cache comes from no finished specnb.generate(..., return_cache=True); leave it out.")
    if known.model() is not model:
        raise ValueError("This cache comes from another model; leave it out.")
    if len(cache.lengths) != len(prompts):
        raise ValueError(f"This cache has {len(cache.lengths)} rows, the call has {len(prompts)}; leave it out.")
    keep = [
        min(common_prefix(tokens[:held], prompt), len(prompt) - 1)
        for tokens, held, prompt in zip(known.tokens, cache.lengths.tolist(), prompts)
    ]
    if fixed and known.by_twin != by_twin:
        kinds = ("uncompiled", "compiled")
        warnings.warn(
            f"The cache comes from {kinds[known.by_twin]} passes, and this call's are {kinds[by_twin]}. Their bits "
            "differ, and at a pass width they are not mixed: the prompt is read anew. Call both times with the same "
            "compile=... to keep what was read.",
            stacklevel=2,
        )
        keep = [0] * len(keep)
    elif fixed:
        keep = [min(n, whole) // FIXED_CHUNK * FIXED_CHUNK for n, whole in zip(keep, known.fixed)]
    cache.rollback(cache.lengths - torch.tensor(keep))
    return cache


def common_prefix(one: list[int], other: list[int]) -> int:
    """How many tokens two rows share from the beginning."""
    return next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
