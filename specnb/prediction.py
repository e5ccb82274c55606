"""Predicted time of an answer: from what passes cost, and from how many tokens were drafted and accepted.

The prediction knows, all measured in the same run:

* v(T), what a pass over T positions costs with so much context (`specnb.forward_cost`, apart from any answer);
* from plain decoding of the same prompt by the same loop: the time that the prompt takes, which speculation does not
  change, and what a round takes beyond v(1), which is the loop itself and what else the machine was doing;
* from the drafter's own clock: its cost per prompt token when it starts and per drafted token afterwards, averaged over
  all answers (together c in the closed forms);
* from the answer in question: how many tokens each round drafted and how many it wrote. Nothing of its time.

    predicted = prompt + start + Σ over rounds (v(1 + drafted) + loop + drafted · cost per drafted token)

With a fixed pass width all passes cost the same, and plain decoding's rounds tell how much: v stands for nothing then,
and "loop" is the whole round. Compiled passes come in multiples of 4 positions up to the width, and v knows those.
Derived in notebook 07.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from specnb.cache import RaggedCache, bucket_size, context_size
from specnb.compiled import sizes_up_to, twin_for
from specnb.contestants import Way
from specnb.profiling import forward_cost
from specnb.theory import CostCurve

GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # positions measured, up to the widest pass
CONTEXTS = 2  # lengths of the context measured; attention grows linearly with it
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
        """v in ms; linear between the contexts measured. A compiled pass is filled up to a size that is compiled."""
        if self.way.compiled:
            positions = next(size for size in compiled_sizes(self.way.pass_width) if size >= positions)
        known = sorted(self.samples)
        low = max((c for c in known if c <= context), default=known[0])
        high = min((c for c in known if c >= context), default=known[-1])
        if low == high:
            return self._curves()[low](positions)
        share = (context - low) / (high - low)
        return (1 - share) * self._curves()[low](positions) + share * self._curves()[high](positions)

    def curve(self, context: int) -> CostCurve:
        """The medians at one of the measured contexts."""
        places = sorted(self.samples[context].items())
        return CostCurve(tuple(T for T, _ in places), tuple(median(ms) for _, ms in places), context=context)

    def _curves(self) -> dict[int, CostCurve]:
        if not hasattr(self, "_known"):
            self._known = {context: self.curve(context) for context in self.samples}
        return self._known


class PassSampler:
    """Takes a few samples of passes whenever it is called, so that they share the run's good and bad times.

    Args:
        model: the target.
        ways: how passes are made → most tokens drafted in a round. Passes of one fixed width are not sampled.
        shortest, longest: tokens in the cache, at the first pass of the shortest answer and the last of the longest.
    """

    def __init__(self, model: PreTrainedModel, ways: dict[Way, int], shortest: int, longest: int) -> None:
        self.model = model
        self.widths = {way: widths_up_to(1 + most) for way, most in ways.items() if way.pass_width is None}
        self.widths |= {way: compiled_sizes(way.pass_width) for way in ways if way.compiled}
        dtype = str(model.dtype).removeprefix("torch.")
        self.times = {way: PassTimes(way, dtype) for way in self.widths}
        widest = max((widths[-1] for widths in self.widths.values()), default=1)
        limit = context_size(model.config) - widest
        self.contexts = evenly(max(1, min(shortest, limit)), max(1, min(longest, limit)))

    def __call__(self) -> None:
        """Measure each way once more."""
        for way, widths in self.widths.items():
            run = compiled_pass(self.model, way.pass_width) if way.compiled else None
            table = forward_cost(self.model, widths, context=self.contexts, repeats=REPEATS, run=run)
            for context, cost in table.items():
                for positions, samples in zip(cost.positions, cost.samples):
                    self.times[way].add(context, positions, samples)


def compiled_sizes(pass_width: int | None) -> list[int]:
    """The numbers of positions for which passes up to this width are compiled."""
    assert pass_width is not None
    return sizes_up_to(pass_width)


def compiled_pass(model: PreTrainedModel, pass_width: int | None) -> Callable[[RaggedCache, Tensor], Tensor] | None:
    """The model's compiled pass over all rows of a cache; None where it has none, and passes run uncompiled."""
    assert pass_width is not None
    twin = twin_for(model, pass_width)
    return None if twin is None else lambda cache, tokens: twin.target_pass(cache, tokens, list(range(len(tokens))))


def evenly(shortest: int, longest: int) -> list[int]:
    """A few lengths from the shortest to the longest."""
    return sorted({shortest + (longest - shortest) * step // (CONTEXTS - 1) for step in range(CONTEXTS)})


def widths_up_to(widest: int) -> list[int]:
    """The grid's numbers of positions below the widest pass, and that one."""
    return [*itertools.takewhile(widest.__gt__, GRID), widest]


def buckets(shortest: int, longest: int) -> list[int]:
    """The sizes of attended buffers that contexts from the shortest to the longest go through."""
    sizes = [bucket_size(shortest)]
    while sizes[-1] < bucket_size(longest):
        sizes.append(bucket_size(sizes[-1]))
    return sizes


# --- the prediction ---


@dataclass(frozen=True)
class PlainCosts:
    """What plain decoding tells of a prompt, in ms; the keys are (prompt, turn).

    Attributes:
        prompt: until the first token, beyond what a round like the others takes.
        loop: per round, beyond its pass.
    """

    prompt: dict[tuple[str, int], float]
    loop: dict[tuple[str, int], float]


def plain_costs(plain: Sequence[Any], v: PassTimes | None) -> PlainCosts:
    """From answers by plain decoding, medians over repeats; an answer of one round borrows the others' loop."""
    loops: dict[tuple[str, int], list[float]] = {}
    for m in plain:
        loops.setdefault((m.prompt, m.turn), []).extend(_beyond_the_passes(m, v))
    usual = median([ms for several in loops.values() for ms in several] or [0.0])
    loop = {place: median(several or [usual]) for place, several in loops.items()}
    prompts: dict[tuple[str, int], list[float]] = {place: [] for place in loops}
    for m in plain:
        first_round = next(pass_times(m, v)) + loop[m.prompt, m.turn]
        prompts[m.prompt, m.turn].append(1000 * m.first_seconds - first_round)
    return PlainCosts({place: median(times) for place, times in prompts.items()}, loop)


def _beyond_the_passes(m: Any, v: PassTimes | None) -> list[float]:
    """What a round of this plain answer took on average beyond its pass; the first one, with the prompt, left out."""
    passes = list(pass_times(m, v))[1:]
    return [(1000 * (m.seconds - m.first_seconds) - math.fsum(passes)) / len(passes)] if passes else []


def pass_times(m: Any, v: PassTimes | None) -> Iterator[float]:
    """v of every pass of an answer, in ms, by its width and the tokens in the cache before it; 0 without a v."""
    context = m.prompt_tokens - 1
    for drafted, _, emitted in m.rounds:
        yield 0.0 if v is None else v(1 + drafted, context)
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


def predicted_ms(m: Any, v: PassTimes | None, plain: PlainCosts, draft: DraftCosts) -> float:
    """Milliseconds the answer should have taken; the module's docstring says what goes in."""
    place = m.prompt, m.turn
    drafted = sum(drafted for drafted, _, _ in m.rounds)
    before = plain.prompt[place] + m.prompt_tokens * draft.per_prompt_token
    rounds = math.fsum(pass_times(m, v)) + len(m.rounds) * plain.loop[place]
    return before + rounds + drafted * draft.per_drafted_token
