"""Predicted time of an answer: from what passes cost, and from how many tokens were drafted and accepted.

The prediction knows, all measured in the same run:

* v(T), what a pass over T positions costs at the context it stood at (`specnb.forward_cost`, apart from any answer);
* from plain decoding by the same loop: the time until the first round, which speculation does not change, and what a
  round takes beyond v(1) (the loop itself);
* from the drafter's own clock: its cost per prompt token when it starts and per drafted token afterwards, averaged over
  all answers (together c in the closed forms);
* from the answer in question: how many tokens each round drafted and how many it wrote. Nothing of its time.

    predicted = prompt + start + Σ over rounds (v(1 + drafted) + loop + drafted · cost per drafted token)

With a fixed pass width every v is that of the one width. Derived in notebook 07.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from transformers import PreTrainedModel

from specnb.cache import bucket_size, context_size
from specnb.contestants import Way
from specnb.profiling import Pass, forward_cost
from specnb.theory import CostCurve

GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # positions measured, up to the widest pass
CONTEXTS = 3  # lengths of the context measured where the pass width is free
REPEATS = 2  # per visit; there are many visits in a run


@dataclass
class PassTimes:
    """v(T) by context, for one way to make passes: all samples, in ms.

    Attributes:
        way: how the passes are made.
        dtype: of the weights, in words.
        samples: context → positions → milliseconds of every pass timed.
    """

    way: Way
    dtype: str
    samples: dict[int, dict[int, list[float]]] = field(default_factory=dict)

    def add(self, context: int, positions: int, milliseconds: Iterable[float]) -> None:
        self.samples.setdefault(context, {}).setdefault(positions, []).extend(milliseconds)

    def __call__(self, positions: int, context: int) -> float:
        """v in ms; linear between contexts, and with a fixed width that of the bucket the context lies in."""
        if self.way.pass_width is not None:
            return self._at(self._same_bucket(context), self.way.pass_width)
        return self._between(positions, context)

    def curve(self, context: int) -> CostCurve:
        """The medians at one of the measured contexts."""
        places = sorted(self.samples[context].items())
        return CostCurve(tuple(T for T, _ in places), tuple(median(ms) for _, ms in places), context=context)

    def _at(self, context: int, positions: int) -> float:
        return self._curves()[context](positions)

    def _curves(self) -> dict[int, CostCurve]:
        if not hasattr(self, "_known"):
            self._known = {context: self.curve(context) for context in self.samples}
        return self._known

    def _same_bucket(self, context: int) -> int:
        return min(self.samples, key=lambda measured: abs(bucket_size(measured) - bucket_size(context)))

    def _between(self, positions: int, context: int) -> float:
        known = sorted(self.samples)
        low = max((c for c in known if c <= context), default=known[0])
        high = min((c for c in known if c >= context), default=known[-1])
        if low == high:
            return self._at(low, positions)
        share = (context - low) / (high - low)
        return (1 - share) * self._at(low, positions) + share * self._at(high, positions)


class PassSampler:
    """Takes a few samples of every way's passes whenever it is called, so that they share the run's good and bad times.

    Args:
        model: the target.
        ways: how passes are made → most tokens drafted in a round.
        shortest, longest: tokens in the cache, at the first pass of the shortest answer and the last of the longest.
    """

    def __init__(self, model: PreTrainedModel, ways: dict[Way, int], shortest: int, longest: int) -> None:
        self.model, self.ways = model, ways
        dtype = str(model.dtype).removeprefix("torch.")
        self.times = {way: PassTimes(way, dtype) for way in ways}
        limit = context_size(model.config) - max([1, *(w.pass_width or 1 + most for w, most in ways.items())])
        self.shortest, self.longest = max(1, min(shortest, limit)), max(1, min(longest, limit))

    def __call__(self) -> None:
        """Measure each way once more."""
        for way, most in self.ways.items():
            table = forward_cost(
                self.model, positions_of(way, most), context=self.contexts(way), repeats=REPEATS,
                pass_width=way.pass_width, run=runner(self.model, way),
            )  # fmt: skip
            for context, cost in table.items():
                for positions, samples in zip(cost.positions, cost.samples):
                    self.times[way].add(context, positions, samples)

    def contexts(self, way: Way) -> list[int]:
        """Lengths to measure at: one per bucket with a fixed width, else from the shortest to the longest."""
        if way.pass_width is not None:
            return [max(self.shortest, min(self.longest, size - 1)) for size in buckets(self.shortest, self.longest)]
        steps = range(CONTEXTS)
        span = self.longest - self.shortest
        return sorted({self.shortest + span * step // (CONTEXTS - 1) for step in steps})


def positions_of(way: Way, most: int) -> list[int]:
    """Widths to measure: those of the grid below the widest pass, and that one; with a fixed width, that alone."""
    if way.pass_width is not None:
        return [way.pass_width]
    widest = 1 + most
    return [*itertools.takewhile(widest.__gt__, GRID), widest]


def buckets(shortest: int, longest: int) -> list[int]:
    """The sizes of attended buffers that contexts from the shortest to the longest go through."""
    sizes = [bucket_size(shortest)]
    while sizes[-1] < bucket_size(longest):
        sizes.append(bucket_size(sizes[-1]))
    return sizes


def runner(model: PreTrainedModel, way: Way) -> Pass | None:
    """The function that makes a pass of this way; None for the ordinary one."""
    if not way.compiled:
        return None
    raise NotImplementedError


# --- the prediction ---


@dataclass(frozen=True)
class PlainCosts:
    """What plain decoding of the same way tells.

    Attributes:
        loop: ms a round takes beyond its pass.
        prompt: (prompt, turn) → ms before the first round.
    """

    loop: float
    prompt: dict[tuple[str, int], float]


def plain_costs(plain: Sequence[Any], v: PassTimes) -> PlainCosts | None:
    """From the measurements of plain decoding; None if they hold no more than first tokens."""
    beyond = [ms for m in plain for ms in _beyond_the_pass(m, v)]
    if not beyond:
        return None
    loop = median(beyond)
    starts: dict[tuple[str, int], list[float]] = {}
    for m in plain:
        first_round = v(1, m.prompt_tokens - 1) + loop
        starts.setdefault((m.prompt, m.turn), []).append(1000 * m.first_seconds - first_round)
    return PlainCosts(loop, {place: median(times) for place, times in starts.items()})


def _beyond_the_pass(m: Any, v: PassTimes) -> Iterator[float]:
    """What a round of this plain answer took on average beyond its pass; the first one, with the prompt, left out."""
    passes = list(pass_times(m, v))[1:]
    if passes:
        yield (1000 * (m.seconds - m.first_seconds) - sum(passes)) / len(passes)


def pass_times(m: Any, v: PassTimes) -> Iterator[float]:
    """v of every pass of an answer, in ms, by its width and the tokens in the cache before it."""
    context = m.prompt_tokens - 1
    for drafted, _, emitted in m.rounds:
        yield v(1 + drafted, context)
        context += emitted


@dataclass(frozen=True)
class DraftCosts:
    """What a drafter costs, in ms: per prompt token when it starts, per drafted token afterwards."""

    per_prompt_token: float
    per_drafted_token: float


def draft_costs(measurements: Sequence[Any]) -> DraftCosts:
    """Averages over all answers of one contestant."""
    prompt_tokens = sum(m.prompt_tokens for m in measurements)
    drafted = sum(drafted for m in measurements for drafted, _, _ in m.rounds)
    start, draft = (
        1000 * math.fsum(getattr(m, name) for m in measurements) for name in ("start_seconds", "draft_seconds")
    )
    return DraftCosts(start / prompt_tokens, draft / drafted if drafted else 0.0)


def predicted_ms(m: Any, v: PassTimes, plain: PlainCosts, draft: DraftCosts) -> float:
    """Milliseconds the answer should have taken; the module's docstring says what goes in."""
    drafted = sum(drafted for drafted, _, _ in m.rounds)
    before = plain.prompt[m.prompt, m.turn] + m.prompt_tokens * draft.per_prompt_token
    return before + math.fsum(pass_times(m, v)) + len(m.rounds) * plain.loop + drafted * draft.per_drafted_token
