"""Checks for the exercises of notebook 08, a crowd. Used as `specnb.exercises.check_…`, like the others.

The framework, and what a check tells, is in `specnb.exercises`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from typing import Any

from specnb.exercises import CheckResult, Exercise, Slip

THROWN_AWAY = Exercise(
    "thrown_away",
    ("rounds",),
    right=lambda rounds: sum(n - min(row) for row in rounds for n in row),
    cases=(([[2, 2]],), ([[1, 3]],), ([[5, 2, 3]],), ([[4, 2], [1, 3]],), ([[5, 1, 2], [3, 3, 4], [2, 5, 5]],)),
    slips=(
        Slip(
            "these are the tokens that are kept: every row goes on by the smallest number. What is beyond it is lost.",
            lambda rounds: sum(len(row) * min(row) for row in rounds),
        ),
        Slip(
            "this measures how far rows are behind the fastest. They wait for the *slowest*: min, not max.",
            lambda rounds: sum(max(row) - n for row in rounds for n in row),
        ),
        Slip(
            "the slowest row is another one in each round: take the smallest number round by round.",
            lambda rounds: sum(n - min(min(row) for row in rounds) for row in rounds for n in row),
        ),
        Slip(
            "every row keeps the smallest number of tokens, not only one row: subtract it from each.",
            lambda rounds: sum(sum(row) - min(row) for row in rounds),
        ),
        Slip(
            "the fastest row is not the only one that loses: add up all rows.",
            lambda rounds: sum(max(row) - min(row) for row in rounds),
        ),
        Slip("these are all tokens that were allowed, kept ones included.", lambda rounds: sum(map(sum, rounds))),
    ),
)


def _passes(lengths: Iterable[int], slots: int) -> int:
    """Each request goes to the slot that is free first."""
    ends = [0] * slots
    for length in lengths:
        heapq.heappush(ends, heapq.heappop(ends) + length)
    return max(ends)


PASSES_WITH_REFILL = Exercise(
    "passes_with_refill",
    ("lengths", "slots"),
    right=_passes,
    cases=(
        ([3], 1),
        ([2, 2], 2),
        ([3, 1, 2], 2),
        ([1, 5, 1, 1], 2),
        ([1, 1, 6], 2),
        ([4, 1, 1, 1, 5], 3),
        ([2, 3, 2, 3, 2], 2),
    ),
    slips=(
        Slip(
            "these are static batches, in which a slot stays empty until the longest of its batch has ended.",
            lambda lengths, slots: sum(max(lengths[i : i + slots]) for i in range(0, len(lengths), slots)),
        ),
        Slip(
            "this would be perfect packing: near the end slots stay empty, since a request cannot be split among them.",
            lambda lengths, slots: math.ceil(sum(lengths) / slots),
        ),
        Slip(
            "a lower bound, but first come, first served does not always reach it: let the slots play.",
            lambda lengths, slots: max(math.ceil(sum(lengths) / slots), *lengths, 0),
        ),
        Slip(
            "requests are dealt out in turn here: the next one goes to the slot that is *free* first.",
            lambda lengths, slots: max(sum(lengths[i::slots]) for i in range(slots)),
        ),
        Slip(
            "first come, first served: do not sort them.", lambda lengths, slots: _passes(sorted(lengths)[::-1], slots)
        ),
        Slip("one pass serves all slots at once: this is a single slot.", lambda lengths, slots: sum(lengths)),
    ),
)


def _roofline(positions: float, knee: float) -> float:
    return max(1.0, positions / knee)


CROWD_SPEEDUP = Exercise(
    "crowd_speedup",
    ("tokens", "positions", "rows", "knee"),
    right=lambda m, T, B, knee: m * _roofline(B, knee) / _roofline(B * T, knee),
    cases=((3.0, 5, 1, 100), (3.0, 5, 16, 64), (3.0, 5, 64, 64), (3.0, 5, 128, 64), (2.0, 3, 10, 25), (4.0, 9, 2, 6)),
    slips=(
        Slip(
            "plain decoding has B rows in its pass as well, and beyond the knee it slows down, too: v(B) on top.",
            lambda m, T, B, knee: m / _roofline(B * T, knee),
        ),
        Slip(
            "one row's pass: with B rows the pass has B·T positions.",
            lambda m, T, B, knee: m * _roofline(1, knee) / _roofline(T, knee),
        ),
        Slip(
            "T is k + 1 already: take B·T positions, the rows' newest tokens included.",
            lambda m, T, B, knee: m * _roofline(B, knee) / _roofline(B * (T - 1), knee),
        ),
        Slip(
            "this is the end of the story, where everything is bound by arithmetic. Below the knee a pass costs 1.",
            lambda m, T, B, knee: m / T,
        ),
        Slip("a free pass for any number of rows: where is the knee?", lambda m, T, B, knee: float(m)),
        Slip(
            "upside down: the wide pass is what speculation pays, so it goes below.",
            lambda m, T, B, knee: m * _roofline(B * T, knee) / _roofline(B, knee),
        ),
        Slip(
            "below the knee a pass costs 1, not less: it waits for the weights all the same.",
            lambda m, T, B, knee: m * (B / knee) / _roofline(B * T, knee),
        ),
    ),
)


def check_thrown_away(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 08. Wants `thrown_away(rounds: list[list[int]]) -> int`.

    `rounds[r][b]` tokens of row b passed the check in round r. Tokens lost if all rows go on by the smallest number.
    """
    return THROWN_AWAY.check(candidate)


def check_passes_with_refill(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 08. Wants `passes_with_refill(lengths: list[int], slots: int) -> int`.

    Passes until all requests are done, first come, first served; request i needs `lengths[i]` passes in a slot.
    """
    return PASSES_WITH_REFILL.check(candidate)


def check_crowd_speedup(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 08. Wants `crowd_speedup(tokens: float, positions: int, rows: int, knee: float) -> float`.

    The speed-up over plain decoding, with `tokens` written by a row in a pass of `positions` per row, where a pass over
    n positions takes max(1, n / knee).
    """
    return CROWD_SPEEDUP.check(candidate)
