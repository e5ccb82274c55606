"""What speculation should buy: closed forms for tokens per round, speed-up, and the best draft length.

Everything here is arithmetic on four numbers, α, k, c and, where it was measured, the cost curve v(T) of a pass.
Time is counted in target passes over one position: a round of k drafted tokens costs v(k+1)/v(1) + k·c of them.
The first papers set v(k+1) = v(1), "the pass is free"; a `CostCurve` puts the measured curve in its place.

Source: Leviathan et al. 2023 (arXiv 2211.17192), section 3. Derived in notebook 07.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from numbers import Integral, Real
from operator import mul
from typing import Any, cast

Acceptance = float | Sequence[float]  # one α, or α_1, α_2, … by position


@dataclass(frozen=True)
class CostCurve:
    """v(T): how many milliseconds one forward pass over T positions takes.

    ``curve(T)`` interpolates linearly between the measured places. Left of the first one it stays at the first
    value; right of the last one it goes on with the slope of the last piece, but never falls.

    Args:
        positions: the T that were measured, whole numbers from 1 on, rising.
        milliseconds: v at each of them, above 0.
        context: tokens in the cache while it was measured, if known.
        label: what was measured, in words.

    Raises:
        ValueError, TypeError: for positions that do not rise, times that are not positive, or unequal lengths.
    """

    positions: tuple[int, ...]
    milliseconds: tuple[float, ...]
    context: int | None = field(default=None, kw_only=True)
    label: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        positions = tuple(whole_number("a position", T, at_least=1) for T in self.positions)
        times = tuple(_positive("a pass's time in milliseconds", ms) for ms in self.milliseconds)
        if len(positions) != len(times) or not positions:
            raise ValueError(
                f"CostCurve needs one time per position and at least one, got {len(positions)} positions and "
                f"{len(times)} times."
            )
        if any(left >= right for left, right in pairwise(positions)):
            raise ValueError(f"CostCurve's positions must rise, got {list(positions)}; sort them, and keep each once.")
        object.__setattr__(self, "positions", positions)
        object.__setattr__(self, "milliseconds", times)

    @classmethod
    def free(cls, milliseconds: float = 1.0) -> CostCurve:
        """The free-pass assumption: a pass over many positions costs what a pass over one costs."""
        return cls((1,), (milliseconds,), label="free pass")

    def __call__(self, T: float) -> float:
        """v(T) in milliseconds, for T ≥ 1."""
        if not T >= 1:
            raise ValueError(f"A pass has at least 1 position, got T = {T!r}.")
        places, times = self.positions, self.milliseconds
        after = bisect_left(places, T)  # the first measured place at or beyond T
        if after == 0 or len(places) == 1:
            return times[0]
        right = min(after, len(places) - 1)
        slope = (times[right] - times[right - 1]) / (places[right] - places[right - 1])
        if after == len(places):
            slope = max(slope, 0.0)
        return times[right] + slope * (T - places[right])

    def relative(self, T: float) -> float:
        """v(T) / v(1): the pass in units of a pass over one position."""
        return self(T) / self(1)

    def __repr__(self) -> str:
        points = ", ".join(f"{T}→{ms:.3g}" for T, ms in zip(self.positions, self.milliseconds))
        notes = [self.label] if self.label else []
        notes += [] if self.context is None else [f"context {self.context}"]
        return f"CostCurve({points} ms{''.join(f'; {note}' for note in notes)})"


def expected_tokens(alpha: Acceptance, k: int) -> float:
    """Tokens a round with k drafted tokens commits on average: (1 − α^(k+1)) / (1 − α), and k + 1 at α = 1.

    Args:
        alpha: α, one number in [0, 1]; or a sequence α_1, α_2, … by position, each the share accepted among the
            rounds that reached the position (such as ``stats.acceptance_by_position``): then 1 + Σ_j Π_{i≤j} α_i.
            A NaN, and every position beyond the end of the sequence, counts as 0: where nothing was measured,
            nothing is promised.
        k: drafted tokens, 0 or more.

    Source: Leviathan et al. 2023, equation 1. Accurate to the last digits near α = 1 as well.
    """
    k = whole_number("k", k)
    one = _one_alpha(alpha)
    if one is None:
        return 1.0 + sum(accumulate(by_position(alpha, k), mul))
    rejected = 1.0 - one
    if rejected in (0.0, 1.0):
        return 1.0 if rejected else k + 1.0
    return -math.expm1((k + 1) * math.log1p(-rejected)) / rejected


def tokens_per_round_law(alpha: Acceptance, k: int) -> list[float]:
    """The law of the number of tokens one round commits: entry n − 1 is P(n tokens), for n = 1 … k + 1.

    A geometric law cut off at k + 1: n − 1 proposals pass and the next one does not, or all k pass. Its mean is
    `expected_tokens`; ``alpha`` and ``k`` as there. Source: Leviathan et al. 2023, section 3.1.
    """
    chances = by_position(alpha, whole_number("k", k))
    reached = [1.0, *accumulate(chances, mul)]
    return [here * (1.0 - a) for here, a in zip(reached, chances)] + [reached[-1]]


def speedup(alpha: Acceptance, k: int, c: float, cost: CostCurve | None = None) -> float:
    """Predicted speed-up over plain decoding: tokens per round ÷ target passes' worth of time per round.

    Args:
        alpha, k: as in `expected_tokens`.
        c: cost of one draft step in units of a one-position target pass, 0 or more.
        cost: measured v(T); None assumes that the pass over k + 1 positions costs what one over 1 costs.

    Source: Leviathan et al. 2023, theorem 3.8, with v(k+1)/v(1) in the place of its 1.
    """
    return expected_tokens(alpha, k) / round_cost(k, c, cost)


def round_cost(k: int, c: float, cost: CostCurve | None = None) -> float:
    """What a round takes, in one-position target passes: v(k+1)/v(1) + k·c; arguments as in `speedup`."""
    k = whole_number("k", k)
    one_pass = 1.0 if cost is None else cost.relative(k + 1)
    return one_pass + k * _cost_ratio(c)


def best_draft_length(alpha: Acceptance, c: float, max_k: int, cost: CostCurve | None = None) -> int:
    """The k in 0 … max_k with the highest predicted `speedup`; 0 where speculation does not pay.

    Of equally good ones the smallest. Arguments as in `speedup`. Source: Leviathan et al. 2023, section 3.5.
    """
    return max(range(whole_number("max_k", max_k) + 1), key=lambda k: speedup(alpha, k, c, cost))


def break_even_alpha(k: int, c: float, cost: CostCurve | None = None) -> float:
    """The α at which a round of k drafts earns exactly what it costs: below it, plain decoding is faster.

    Returns:
        α in [0, 1]; ``math.inf`` where even α = 1 does not pay. Arguments as in `speedup`. For k = 1 and a free
        pass it is c itself (Leviathan et al. 2023, corollary 3.9).
    """
    needed = round_cost(k, c, cost)
    if needed <= 1.0:
        return 0.0
    if needed > k + 1:
        return math.inf
    low, high = 0.0, 1.0
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if expected_tokens(middle, k) < needed else (low, middle)
    return high


def batch_speedup(tokens: float, positions: float, batch_size: int, cost: CostCurve, c: float = 0.0) -> float:
    """Predicted speed-up over plain decoding when B rows share each pass: m·v(B) / (v(B·T) + k·c·v(B)).

    While a pass is bound by memory, v hardly rises and the speed-up is m, the tokens per round; once it is bound by
    arithmetic, v grows with its argument, and what counts is m / T: tokens that come out for positions that go in.

    Args:
        tokens: m, tokens a round writes per row, such as ``stats.tokens_per_pass``, or `expected_tokens`.
        positions: T, positions of a row in a pass, at least 1: k + 1; or the mean, where drafts differ in length.
        batch_size: B.
        cost: v by the number of positions of all rows together. Of a `forward_cost` measured with several rows, the
            positions are multiplied by them.
        c: cost of one draft step in target passes, both for all rows.

    Derived in notebook 08.
    """
    B = whole_number("batch_size", batch_size, at_least=1)
    if not positions >= 1:
        raise ValueError(f"A row has at least 1 position in a pass, got positions = {positions!r}.")
    rows = getattr(cost, "batch_size", 1)
    plain, round_ = (cost(max(1.0, B * T / rows)) for T in (1.0, positions))
    return _positive("tokens", tokens) * plain / (round_ + (positions - 1) * _cost_ratio(c) * plain)


def break_even_batch(
    tokens: float, positions: float, cost: CostCurve, c: float = 0.0, at_most: int = 4096
) -> int | float:
    """The smallest batch at which speculation no longer pays: where `batch_speedup` falls below 1.

    Returns:
        a batch size; ``math.inf`` if it pays up to ``at_most`` rows. Arguments as in `batch_speedup`.
    """
    sizes = range(1, whole_number("at_most", at_most, at_least=1) + 1)
    return next((B for B in sizes if batch_speedup(tokens, positions, B, cost, c) < 1.0), math.inf)


def operations_factor(alpha: Acceptance, k: int, c_operations: float = 0.0) -> float:
    """How many times more arithmetic a token costs than in plain decoding: (k·ĉ + k + 1) / expected tokens.

    The price of the speed: proposals that are turned down were computed in vain. It matters where arithmetic, not
    memory, is the limit: large batches, small models.

    Args:
        alpha, k: as in `expected_tokens`.
        c_operations: ĉ, the draft's arithmetic per token over the target's.

    Source: Leviathan et al. 2023, theorem 3.11.
    """
    return (k * _cost_ratio(c_operations) + k + 1) / expected_tokens(alpha, k)


def by_position(alpha: Acceptance, k: int) -> list[float]:
    """α_1 … α_k: one number repeated, or the sequence cut or filled up with 0; NaN becomes 0."""
    one = _one_alpha(alpha)
    if one is not None:
        return [one] * k
    given = [float(a) for a in cast(Sequence[float], alpha)][:k]
    known = [0.0 if math.isnan(a) else probability(f"alpha[{j}]", a) for j, a in enumerate(given)]
    return known + [0.0] * (k - len(known))


def _one_alpha(alpha: Any) -> float | None:
    """α if it is one number, or a tensor or array without dimensions; None for a sequence."""
    if getattr(alpha, "shape", None) == ():
        alpha = alpha.item()
    if isinstance(alpha, (Real, str)) or not hasattr(alpha, "__iter__"):
        return probability("alpha", alpha)
    return None


def probability(name: str, value: Any) -> float:
    """The value as a float, if it lies in [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number between 0 and 1, got {value!r}.")
    if not 0.0 <= float(value) <= 1.0:
        raise ValueError(f"{name} is a probability and must lie between 0 and 1, got {value!r}.")
    return float(value)


def whole_number(name: str, value: Any, at_least: int = 0) -> int:
    """The value as an int, if it is a whole number of at least ``at_least``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be a whole number, got {value!r}.")
    if int(value) < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value!r}.")
    return int(value)


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}.")
    if not 0.0 < float(value) < math.inf:
        raise ValueError(f"{name} must be finite and above 0, got {value!r}.")
    return float(value)


def _cost_ratio(c: Any) -> float:
    if isinstance(c, bool) or not isinstance(c, Real):
        raise TypeError(f"c, the draft's cost over the target's, must be a number, got {c!r}.")
    if not 0.0 <= float(c) < math.inf:
        raise ValueError(f"c, the draft's cost over the target's, must be finite and at least 0, got {c!r}.")
    return float(c)
