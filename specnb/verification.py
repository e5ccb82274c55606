"""Accept or reject: pure tensor maths on a row of guesses and what the target says. No model, no loop, no cache.

p is the target, q the draft. K is the number of draft columns; a row uses the first ``draft_lengths[b]`` of them, the
rest is padding. The target has scored K + 1 places: one before each guess, and one after the last.

Derived in notebook 03, "Guess and check". Sources: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023
(arXiv 2302.01318).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Verdict:
    """What one target pass decides for every row.

    Attributes:
        num_accepted: LongTensor [B], how many of the row's guesses stand (a prefix).
        next_token: LongTensor [B], the token after them: the correction at the first rejection, or the bonus token
            when all of the row's guesses passed.
        invalid: BoolTensor [B, K+1], places the row uses where the target's scores are NaN.
    """

    num_accepted: Tensor
    next_token: Tensor
    invalid: Tensor


def verify_greedy(draft_tokens: Tensor, target_logits: Tensor, draft_lengths: Tensor | None = None) -> Verdict:
    """Greedy verification: a guess stands while it is the token the target would have written itself.

    Args:
        draft_tokens: LongTensor [B, K] (K may be 0).
        target_logits: [B, K+1, V]; position i scores the token at draft place i.
        draft_lengths: LongTensor [B] in 0…K, how many guesses each row holds; default K.

    Returns:
        Verdict. Ties go to the lowest token id, as in ``torch.argmax``.

    Raises:
        ValueError: if shapes or lengths do not fit, or if a place the row uses holds NaN (row and position named).

    Derived in notebook 03.
    """
    lengths = _checked_lengths(draft_tokens, target_logits, draft_lengths)
    verdict = judge_greedy(draft_tokens, target_logits, lengths)
    raise_for_nan(verdict.invalid)
    return verdict


def judge_greedy(draft_tokens: Tensor, target_logits: Tensor, draft_lengths: Tensor) -> Verdict:
    """`verify_greedy` without its checks, and so without waiting for the device: what the loop calls."""
    best, choice = target_logits.max(dim=-1)  # [B, K+1]; the maximum of a row with a NaN is NaN
    num_accepted = accepted_prefix(draft_tokens == choice[:, :-1], draft_lengths)
    next_token = choice.gather(1, num_accepted[:, None]).squeeze(1)
    return Verdict(num_accepted, next_token, best.isnan() & _in_use(choice, draft_lengths))


def accepted_prefix(matches: Tensor, draft_lengths: Tensor) -> Tensor:
    """How many guesses stand before the first that does not: matches [B, K] → [B]. Everything after it is dropped."""
    if matches.shape[1] == 0:
        return torch.zeros_like(draft_lengths)
    drafted = torch.arange(matches.shape[1], device=matches.device) < draft_lengths[:, None]
    return (matches & drafted).cumprod(dim=1).sum(dim=1)


def raise_for_nan(invalid: Tensor, rows: Sequence[int] | None = None) -> None:
    """Raise a ValueError that names the first row (of ``rows``, default all) and place marked in invalid [B, K+1]."""
    found = [(row, place) for row, place in invalid.nonzero().tolist() if rows is None or row in rows]
    if found:
        row, position = found[0]
        raise ValueError(
            f"The target's scores hold NaN in row {row} at position {position} of the pass. Nothing was committed in "
            "this round. Check the model's weights and dtype (float16 overflows easily; try bfloat16 or float32) and "
            "any custom logits processor."
        )


def _in_use(places: Tensor, draft_lengths: Tensor) -> Tensor:
    """Which of the K+1 places a row uses: its guesses' and the one after the last."""
    return torch.arange(places.shape[1], device=places.device) <= draft_lengths[:, None]


def _checked_lengths(draft_tokens: Tensor, target_scores: Tensor, draft_lengths: Tensor | None) -> Tensor:
    """The draft lengths [B] on the draft's device, once shapes, dtypes and ranges have been checked."""
    if draft_tokens.ndim != 2 or draft_tokens.dtype != torch.long:
        raise ValueError(
            f"draft_tokens must be a LongTensor [B, K], got {draft_tokens.dtype} {list(draft_tokens.shape)}."
        )
    rows, places = draft_tokens.shape
    if target_scores.ndim != 3 or target_scores.shape[:2] != (rows, places + 1):
        raise ValueError(
            f"The target must score K + 1 places of each row: expected [{rows}, {places + 1}, V] for draft_tokens "
            f"{list(draft_tokens.shape)}, got {list(target_scores.shape)}."
        )
    if draft_lengths is None:
        return torch.full((rows,), places, device=draft_tokens.device)
    lengths = torch.as_tensor(draft_lengths, device=draft_tokens.device)
    if lengths.shape != (rows,) or bool(((lengths < 0) | (lengths > places)).any()):
        raise ValueError(f"draft_lengths must be [{rows}] with values 0…{places}, got {lengths.tolist()}.")
    return lengths
