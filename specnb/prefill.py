"""Prefill: the prompt goes through the model in chunks before the first round. It emits nothing and is not a pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from specnb.cache import RaggedCache, bucket_size, target_pass

if TYPE_CHECKING:
    from specnb.compiled import Twin

CHUNK = 512  # tokens per pass; bounds the memory of a long prompt
FIXED_CHUNK = 32  # with a fixed pass width every prefill pass has this width, so that its rounding is fixed too


def prefill(
    model: PreTrainedModel,
    cache: RaggedCache,
    prompts: list[list[int]],
    *,
    fixed: bool = False,
    twin: Twin | None = None,
) -> None:
    """Append each row's tokens (rows may differ in length, and be empty) to the cache, in chunks.

    Args:
        model, cache: as in `target_pass`; the cache is enlarged as needed.
        prompts: B lists of token ids.
        fixed: all passes `FIXED_CHUNK` wide, filler included, over the bucket of their position.
        twin: the compiled twin whose network ``model`` is; then passes are compiled, too, if that can be.
    """
    chunk = FIXED_CHUNK if fixed or reads(twin) else CHUNK
    for start in range(0, max(len(prompt) for prompt in prompts), chunk):
        pieces = {b: prompt[start : start + chunk] for b, prompt in enumerate(prompts) if len(prompt) > start}
        for rows in same_bucket(cache, list(pieces)) if fixed else [list(pieces)]:
            read(model, cache, {b: pieces[b] for b in rows}, fixed=fixed, twin=twin)


def read(
    model: PreTrainedModel,
    cache: RaggedCache,
    pieces: dict[int, list[int]],
    *,
    fixed: bool = False,
    twin: Twin | None = None,
) -> None:
    """Append to each row named its piece of prompt, in one pass; if ``fixed``, rows of one bucket only.

    In a compiled pass so many positions cost what they compute, and rows gain nothing from each other: each has its
    own, and no size has to be compiled for several.
    """
    if twin is not None and reads(twin):
        for b, piece in pieces.items():
            cache.reserve(bucket_size(int(cache.lengths[b]) + len(piece)))
            twin.packed_pass(cache, torch.tensor([piece]), [b], [len(piece)], FIXED_CHUNK, scored=False)
        return
    rows, counts = list(pieces), [len(piece) for piece in pieces.values()]
    width = FIXED_CHUNK if fixed else max(counts)
    longest = max(cache.lengths[rows].tolist())
    attended = bucket_size(longest) if fixed else None
    tokens = torch.tensor([piece + [0] * (width - len(piece)) for piece in pieces.values()])
    cache.reserve(max(longest + width, attended or 0))
    target_pass(model, cache, tokens, rows=rows, attended=attended, logits_to_keep=1)
    filler = torch.zeros_like(cache.lengths)
    filler[rows] = width - torch.tensor(counts)
    cache.rollback(filler)


def reads(twin: Twin | None) -> bool:
    """Whether prompts go through compiled passes."""
    return twin is not None and twin.serves(FIXED_CHUNK) and twin.narrows


def same_bucket(cache: RaggedCache, rows: Sequence[int]) -> list[list[int]]:
    """The rows grouped by the bucket of their next position: a pass of fixed width attends to one bucket."""
    buckets: dict[int, list[int]] = {}
    for row, length in zip(rows, cache.lengths[list(rows)].tolist()):
        buckets.setdefault(bucket_size(length), []).append(row)
    return list(buckets.values())
