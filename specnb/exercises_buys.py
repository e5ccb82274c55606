"""Checks for the exercises of notebook 07, what speculation buys. Used as `specnb.exercises.check_…`, like the others.

The framework, and what a check tells, is in `specnb.exercises`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

from specnb.exercises import CheckResult, Exercise, Slip


def _chains(alphas: Sequence[float]) -> list[float]:
    """The chance that the first j guesses all pass, j = 1, 2, …"""
    return list(accumulate(alphas, mul))


def _mean(alphas: Sequence[float]) -> float:
    return sum(alphas) / len(alphas) if alphas else 0.0


TOKENS_BY_POSITION = Exercise(
    "tokens_by_position",
    ("alphas",),
    right=lambda alphas: 1.0 + sum(_chains(alphas)),
    cases=(([],), ([0.5],), ([0.5, 1.0],), ([0.8, 0.8, 0.8, 0.8],), ([0.3, 0.9, 0.95],), ([1.0, 0.0, 1.0],)),
    slips=(
        Slip(
            "the target's own token is missing: every round writes one, also where no guess passes. Start at 1.",
            lambda alphas: float(sum(_chains(alphas))),
        ),
        Slip(
            "a guess counts only if all before it passed as well: multiply the α up to it, then add.",
            lambda alphas: 1.0 + sum(alphas),
        ),
        Slip(
            "this is the round in which every guess passes: each shorter run of passed guesses writes tokens, too.",
            lambda alphas: 1.0 + len(alphas) * (_chains(alphas) or [0.0])[-1],
        ),
        Slip(
            "the average α in the formula for one α: that is the independence assumption, and the places differ.",
            lambda alphas: sum(_mean(alphas) ** j for j in range(len(alphas) + 1)),
        ),
        Slip(
            "the last place is left out: k guesses give k products, and one token of the target's.",
            lambda alphas: 1.0 + sum(_chains(alphas)[:-1]),
        ),
    ),
)


def _measured_speedup(
    tokens: float, k: int, c: float, ms: Sequence[float], *, shift: int = 0, drafts: float = 1.0, plain: int = 0
) -> float:
    return tokens / (ms[k - shift] / ms[plain] + drafts * k * c)


_MS = [50.0, 55.0, 60.0, 70.0, 90.0, 120.0]

MEASURED_SPEEDUP = Exercise(
    "measured_speedup",
    ("tokens", "k", "c", "ms"),
    right=_measured_speedup,
    cases=((1.0, 0, 0.1, _MS), (1.5, 1, 0.0, _MS), (3.36, 4, 0.05, _MS), (2.0, 2, 0.25, _MS), (1.2, 5, 0.0, _MS)),
    slips=(
        Slip(
            "a round of k drafts is a pass over k + 1 positions: the newest token goes in with them, so `ms[k]`.",
            lambda tokens, k, c, ms: _measured_speedup(tokens, k, c, ms, shift=min(k, 1)),
        ),
        Slip(
            "drafting is not in the sum: k drafts take k·c passes.",
            lambda tokens, k, c, ms: _measured_speedup(tokens, k, c, ms, drafts=0.0),
        ),
        Slip(
            "drafts are made one after another: k·c, not c.",
            lambda tokens, k, c, ms: tokens / (ms[k] / ms[0] + (c if k else 0.0)),
        ),
        Slip(
            "this is the free pass: v(k+1) was measured, so put `ms[k] / ms[0]` in the place of the 1.",
            lambda tokens, k, c, ms: tokens / (1.0 + k * c),
        ),
        Slip(
            "milliseconds and passes are mixed: c counts in passes, so divide the pass by `ms[0]` first.",
            lambda tokens, k, c, ms: tokens / (ms[k] + k * c),
        ),
        Slip(
            "upside down: the speed-up is tokens per time, so the tokens go on top.",
            lambda tokens, k, c, ms: 1.0 / _measured_speedup(tokens, k, c, ms),
        ),
        Slip(
            "drafting *adds* to the time of a round: plus, not minus.",
            lambda tokens, k, c, ms: _measured_speedup(tokens, k, c, ms, drafts=-1.0),
        ),
        Slip(
            "the length of the draft is no cost of its own: a round has one pass, not k + 1.",
            lambda tokens, k, c, ms: tokens / (k + 1 + k * c),
        ),
    ),
)


def _values(alphas: Sequence[float], costs: Sequence[float], rate: float) -> list[float]:
    """What k drafts bring: expected tokens beyond the target's own, less what the time would have earned."""
    gains = [0.0, *accumulate(_chains(alphas))]
    return [gain - rate * (cost - costs[0]) for gain, cost in zip(gains, costs, strict=True)]


def _first_best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda k: values[k])


def _ratios(alphas: Sequence[float], costs: Sequence[float]) -> list[float]:
    return [(1.0 + gain) / cost for gain, cost in zip([0.0, *accumulate(_chains(alphas))], costs, strict=True)]


_COSTS = [1.0, 1.1, 1.2, 1.4, 1.6]

WORTH_SENDING = Exercise(
    "worth_sending",
    ("alphas", "costs", "rate"),
    right=lambda alphas, costs, rate: _first_best(_values(alphas, costs, rate)),
    cases=(
        ([0.5], [1.0, 1.25], 1.0),
        ([0.25], [1.0, 1.25], 1.0),
        ([0.05] * 4, _COSTS, 1.0),
        ([0.9] * 4, _COSTS, 1.0),
        ([0.9] * 4, _COSTS, 3.5),
        ([0.4, 0.9, 0.9, 0.9], _COSTS, 1.5),
        ([0.3, 0.3, 0.3, 0.3], _COSTS, 2.0),
        ([0.25, 0.9, 0.9, 0.9], [1.0, 1.3, 1.35, 1.4, 1.45], 1.0),
    ),
    slips=(
        Slip(
            "the ratio of this one round: what counts is the long run, so compare gain − rate·cost.",
            lambda alphas, costs, rate: _first_best(_ratios(alphas, costs)),
        ),
        Slip(
            "k = 0 is a choice, too, and often the best: its value is 0.",
            lambda alphas, costs, rate: 1 + _first_best(_values(alphas, costs, rate)[1:]),
        ),
        Slip(
            "time costs nothing here: without rate·cost the longest draft always wins.",
            lambda alphas, costs, rate: len(alphas) if any(alphas) else 0,
        ),
        Slip(
            "`rate` is not used: the same second is worth more where the run is fast.",
            lambda alphas, costs, rate: _first_best(_values(alphas, costs, 1.0)),
        ),
        Slip(
            "of equally good lengths take the smallest: it drafts less in vain. So `>`, not `>=`.",
            lambda alphas, costs, rate: max(
                range(len(costs)), key=lambda k: (round(_values(alphas, costs, rate)[k], 12), k)
            ),
        ),
        Slip(
            "a guess passes only if all before it did: add the running product of the α, not the α.",
            lambda alphas, costs, rate: _first_best(
                [g - rate * (v - costs[0]) for g, v in zip([0.0, *accumulate(alphas)], costs, strict=True)]
            ),
        ),
        Slip(
            "this stops at the first length that does not pay; a longer one may make up for it.",
            lambda alphas, costs, rate: _climb(_values(alphas, costs, rate)),
        ),
    ),
)


def _climb(values: Sequence[float]) -> int:
    k = 0
    while k + 1 < len(values) and values[k + 1] > values[k]:
        k += 1
    return k


def check_tokens_by_position(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 07. Wants `tokens_by_position(alphas: list[float]) -> float`.

    Expected tokens of a round, α_1, α_2, … by position: each the chance that a guess passes if all before it did.
    """
    return TOKENS_BY_POSITION.check(candidate)


def check_measured_speedup(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 07. Wants `measured_speedup(tokens: float, k: int, c: float, ms: list[float]) -> float`.

    The speed-up over plain decoding of rounds that write `tokens` on average with k drafts, each of which takes c
    passes over one position; `ms[T - 1]` is the time of a pass over T positions.
    """
    return MEASURED_SPEEDUP.check(candidate)


def check_worth_sending(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 07. Wants `worth_sending(alphas: list[float], costs: list[float], rate: float) -> int`.

    The k from 0 to len(alphas) with the highest expected gain − rate · cost: `costs[k]` is what a round with k drafts
    takes, in one-position passes, and `rate` the tokens per such pass of the run so far. Of equals the smallest.
    """
    return WORTH_SENDING.check(candidate)
