"""Prefill: the prompt goes through the model in chunks before the first round. It emits nothing and is not a pass."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from specnb.cache import RaggedCache, bucket_size, target_pass

CHUNK = 512  # tokens per pass; bounds the memory of a long prompt
FIXED_CHUNK = 32  # with a fixed pass width every prefill pass has this width, so that its rounding is fixed too


def prefill(model: PreTrainedModel, cache: RaggedCache, prompts: list[list[int]], *, fixed: bool = False) -> None:
    """Append each row's tokens (rows may differ in length, and be empty) to the cache, in chunks.

    Args:
        model, cache: as in `target_pass`; the cache is enlarged as needed.
        prompts: B lists of token ids.
        fixed: all passes `FIXED_CHUNK` wide, filler included, over the bucket of their position.
    """
    chunk = FIXED_CHUNK if fixed else CHUNK
    for start in range(0, max(len(prompt) for prompt in prompts), chunk):
        pieces = [prompt[start : start + chunk] for prompt in prompts]
        counts = torch.tensor([len(piece) for piece in pieces])
        width = chunk if fixed else int(counts.max())
        attended = bucket_size(start) if fixed else None
        tokens = torch.tensor([piece + [0] * (width - len(piece)) for piece in pieces])
        cache.reserve(max(int(cache.lengths.max()) + width, attended or 0))
        target_pass(model, cache, tokens, attended=attended, need_logits=False)
        cache.rollback(width - counts)
