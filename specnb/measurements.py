"""What one answer took, and what many of them say together: ratios, intervals, predictions.

The unit is the prompt. A contestant's ms per token on a prompt is the median over repeats of (time of all turns ÷
tokens of all turns); its speed-up there is the ratio to the baseline's on the same prompt; a group's is the geometric
mean of those, with a bootstrap interval over prompts. These are answers to one request at a time; batches of requests
would be another measure, tokens per second, of other records.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import Any

from specnb.contestants import BASELINE
from specnb.prediction import PassTimes, draft_costs, plain_costs, predicted_ms

ENOUGH_PROMPTS = 5  # fewer say nothing about how much prompts differ: no interval then
CONFIDENCE = 0.95
RESAMPLES = 2000


@dataclass(frozen=True)
class Measurement:
    """One answer to one turn.

    Attributes:
        contestant, dtype, temperature: who, in which type of weights, and how it was sampled (0: greedy).
        group, prompt, turn, repeat: what was asked, and for the how manieth time.
        prompt_tokens: tokens it was given, the template's included.
        tokens: the new tokens, as committed.
        seconds: wall time of the call, the prompt's processing included.
        first_seconds: until the first token; None if the contestant cannot tell, as for the rest:
        passes: target passes.
        rounds: (drafted, accepted, emitted) of each round.
        start_seconds, draft_seconds: in the drafter, before and during the rounds.
    """

    contestant: str
    dtype: str
    temperature: float
    group: str
    prompt: str
    turn: int
    repeat: int
    prompt_tokens: int
    tokens: tuple[int, ...]
    seconds: float
    first_seconds: float | None = None
    passes: int | None = None
    rounds: tuple[tuple[int, int, int], ...] | None = None
    start_seconds: float = 0.0
    draft_seconds: float = 0.0

    @property
    def slot(self) -> tuple[str, float, str, int]:
        """What all contestants of one moment share: they follow each other directly."""
        return self.dtype, self.temperature, self.prompt, self.repeat


@dataclass(frozen=True)
class Row:
    """A line of the report: one contestant in one group (or "all"), at one dtype and temperature.

    Attributes:
        prompts: how many it answered.
        ms_per_token, first_token_ms: medians over prompts.
        tokens_per_pass: emitted tokens per target pass; alpha: accepted share of the drafted tokens that were reached.
        alpha_by_position: the same by place in the draft, among the rounds that reached the place.
        speedup: over transformers' plain generate, geometric mean over prompts; low, high: its 95 % interval.
        predicted: the speed-up that acceptance and pass costs predict (specnb/prediction.py).
        same_text, compared: greedy answers equal to the reference's, token for token, out of how many.
    Numbers that were not measured, or cannot be, are NaN.
    """

    dtype: str
    temperature: float
    group: str
    contestant: str
    prompts: int
    ms_per_token: float
    first_token_ms: float
    tokens_per_pass: float
    alpha: float
    alpha_by_position: tuple[float, ...]
    speedup: float
    low: float
    high: float
    predicted: float
    same_text: int
    compared: int

    @property
    def error(self) -> float:
        """(predicted − measured) / measured speed-up."""
        return self.predicted / self.speedup - 1


# --- numbers of one contestant in one group ---


def ms_per_token(measurements: Iterable[Measurement]) -> dict[str, float]:
    """Prompt → ms per token."""
    return _per_prompt(measurements, {m: 1000 * m.seconds for m in measurements})


def _per_prompt(measurements: Iterable[Measurement], ms: Mapping[Measurement, float]) -> dict[str, float]:
    """Prompt → median over repeats of time by token, of all its turns together."""
    by_repeat: dict[str, dict[int, list[Measurement]]] = {}
    for m in measurements:
        by_repeat.setdefault(m.prompt, {}).setdefault(m.repeat, []).append(m)
    return {
        prompt: median(sum(ms[m] for m in turns) / sum(len(m.tokens) for m in turns) for turns in repeats.values())
        for prompt, repeats in by_repeat.items()
    }


def ratios(slow: Mapping[str, float], fast: Mapping[str, float]) -> list[float]:
    """Speed-up on every prompt that both have answered."""
    return [slow[prompt] / fast[prompt] for prompt in slow if prompt in fast]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Bootstrap interval of the geometric mean, over prompts; NaN for fewer than five."""
    if len(values) < ENOUGH_PROMPTS:
        return math.nan, math.nan
    if max(values) == min(values):
        return values[0], values[0]
    import numpy as np
    from scipy.stats import bootstrap

    logs = np.log(values)
    found = bootstrap(
        (logs,), np.mean, confidence_level=CONFIDENCE, n_resamples=RESAMPLES, random_state=np.random.default_rng(0)
    ).confidence_interval
    return math.exp(found.low), math.exp(found.high)


def acceptance(rounds: Iterable[tuple[int, int, int]]) -> tuple[float, tuple[float, ...]]:
    """α over all positions, and by position; NaN where nothing was drafted."""
    passed: list[int] = []
    reached: list[int] = []
    for drafted, accepted, emitted in rounds:
        turned_down = int(emitted > accepted and accepted < drafted)
        _count_up(passed, accepted)
        _count_up(reached, accepted + turned_down)
    passed += [0] * (len(reached) - len(passed))
    return _share(sum(passed), sum(reached)), tuple(map(_share, passed, reached))


def _count_up(places: list[int], first: int) -> None:
    places.extend([0] * (first - len(places)))
    for place in range(first):
        places[place] += 1


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def first_difference(mine: Sequence[int], reference: Sequence[int]) -> int | None:
    """The place of the first token that differs; None for equal texts."""
    if tuple(mine) == tuple(reference):
        return None
    return next(
        (i for i, pair in enumerate(zip(mine, reference)) if pair[0] != pair[1]), min(len(mine), len(reference))
    )


# --- all of them ---


class Summary:
    """The rows of a report, from measurements of one dtype and temperature.

    Args:
        measurements: of all contestants.
        references: contestant → whose greedy text it must repeat; in the order of the report.
        plains: contestant → its way's plain decoding, and pass times if the width is free; of those to be predicted.
    """

    def __init__(
        self,
        measurements: Sequence[Measurement],
        references: Mapping[str, str],
        plains: Mapping[str, tuple[str, PassTimes | None]],
    ) -> None:
        self.by_name: dict[str, list[Measurement]] = {name: [] for name in references}
        for m in measurements:
            self.by_name.setdefault(m.contestant, []).append(m)
        self.references = references
        self.base = ms_per_token(self.by_name.get(BASELINE, []))
        self.predicted = self._predictions(plains)
        self.texts = {self._question(m): m.tokens for m in measurements if m.repeat == 0}

    def _predictions(self, plains: Mapping[str, tuple[str, PassTimes | None]]) -> dict[str, dict[str, float]]:
        """Contestant → prompt → predicted ms per token. Plain decoding is what is calibrated with: no prediction."""
        found = {}
        for name, (plain, v) in plains.items():
            if name == plain or not self.by_name.get(plain):
                continue
            known = plain_costs(self.by_name[plain], v)
            mine = [m for m in self.by_name.get(name, []) if (m.prompt, m.turn) in known.prompt]
            if mine:
                draft = draft_costs(mine)
                found[name] = _per_prompt(mine, {m: predicted_ms(m, v, known, draft) for m in mine})
        return found

    @staticmethod
    def _question(m: Measurement, contestant: str | None = None) -> tuple[str, str, int]:
        return contestant or m.contestant, m.prompt, m.turn

    def rows(self, groups: Sequence[str]) -> list[Row]:
        """One row per group, then "all" (if there are several), and contestant."""
        sections: list[tuple[str, Sequence[str]]] = [(group, [group]) for group in groups]
        sections += [("all", groups)] if len(groups) > 1 else []
        found = []
        for title, members in sections:
            for name, mine in self.by_name.items():
                part = [m for m in mine if m.group in members]
                found += [self._row(title, name, part)] if part else []
        return found

    def _row(self, title: str, name: str, mine: list[Measurement]) -> Row:
        own = ms_per_token(mine)
        gains = ratios({prompt: self.base[prompt] for prompt in own if prompt in self.base}, own)
        low, high = (math.nan, math.nan) if name == BASELINE else interval(gains)
        rounds = [r for m in mine for r in m.rounds or ()]
        alpha, by_position = acceptance(rounds)
        firsts = [1000 * m.first_seconds for m in mine if m.first_seconds is not None]
        same, compared = self._same_text(name, mine)
        return Row(
            mine[0].dtype, mine[0].temperature, title, name, len(own), median(own.values()),
            median(firsts) if firsts else math.nan, _tokens_per_pass(mine), alpha, by_position,
            _mean(gains), low, high, self._predicted(name, own), same, compared,
        )  # fmt: skip

    def _predicted(self, name: str, own: Mapping[str, float]) -> float:
        known = {prompt: ms for prompt, ms in self.predicted.get(name, {}).items() if prompt in own}
        return _mean(ratios(self.base, known))

    def _same_text(self, name: str, mine: Sequence[Measurement]) -> tuple[int, int]:
        """Greedy answers equal to the reference's, and answers compared; by prompt and turn."""
        reference = self.references.get(name, BASELINE)
        pairs = [
            (m.tokens, self.texts[self._question(m, reference)])
            for m in mine
            if m.temperature == 0 and m.repeat == 0 and reference != name and self._question(m, reference) in self.texts
        ]
        return sum(first_difference(*pair) is None for pair in pairs), len(pairs)

    def differences(self) -> list[dict[str, Any]]:
        """Greedy answers that are not the reference's: who, where asked, and the place of the first other token."""
        found = []
        for m in (m for mine in self.by_name.values() for m in mine if m.temperature == 0 and m.repeat == 0):
            reference = self.references.get(m.contestant, BASELINE)
            other = self.texts.get(self._question(m, reference))
            place = None if other is None else first_difference(m.tokens, other)
            if place is not None:
                found.append({"contestant": m.contestant, "reference": reference, "dtype": m.dtype, "group": m.group,
                              "prompt": m.prompt, "turn": m.turn, "place": place})  # fmt: skip
        return found


def _tokens_per_pass(mine: Sequence[Measurement]) -> float:
    known = [m for m in mine if m.passes]
    return _share(sum(len(m.tokens) for m in known), sum(m.passes or 0 for m in known))


def _mean(gains: Sequence[float]) -> float:
    return geometric_mean(gains) if gains else math.nan


def conditions(measurements: Sequence[Measurement]) -> list[tuple[str, float, list[Measurement]]]:
    """The measurements by dtype and temperature, in the order they came."""
    keys = list(dict.fromkeys((m.dtype, m.temperature) for m in measurements))
    return [(d, t, [m for m in measurements if (m.dtype, m.temperature) == (d, t)]) for d, t in keys]
