"""What a run learns about itself while it decodes: how often guesses pass (`Acceptance`) and what a round takes
(`RoundCosts`).

Small estimators that forget, for texts and machines change. They know numbers only, no model and no loop; `Adaptive`
feeds and asks them. Explained in notebook 07.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence

from specnb.theory import CostCurve

Kind = Hashable
TICK = 1e-6  # ms; no pass takes no time, whatever a coarse clock says


class Chance:
    """The chance that the next guess passes, from how the earlier ones fared; older outcomes count less.

    Args:
        fade: what an outcome still counts after one more.
        prior_fade: the same for the prior; 1 if it is one that goes on being good advice.
    """

    PRIOR_WEIGHT = 2.0  # in outcomes, before the first one

    __slots__ = ("fade", "passed", "prior_fade", "prior_weight", "reached")

    def __init__(self, fade: float, prior_fade: float) -> None:
        self.fade, self.prior_fade, self.prior_weight = fade, prior_fade, self.PRIOR_WEIGHT
        self.passed = self.reached = 0.0

    def given(self, prior: float) -> float:
        """The chance, with this prior."""
        return (self.passed + self.prior_weight * prior) / (self.reached + self.prior_weight)

    def learn(self, passed: bool) -> None:
        self.passed = self.fade * self.passed + passed
        self.reached = self.fade * self.reached + 1.0
        self.prior_weight *= self.prior_fade

    def weaken(self, factor: float) -> None:
        """Outcomes count ``factor`` times what they did, and the prior more in their place."""
        lost = (1.0 - factor) * self.reached
        self.passed, self.reached = factor * self.passed, factor * self.reached
        self.prior_weight = min(self.prior_weight + lost, self.PRIOR_WEIGHT)


class Acceptance:
    """α by row, kind of guess and position. What all rows have seen is the prior of each.

    Args:
        rows: rows of the batch.
        shared: what earlier runs have learned, to go on from.
    """

    FADE, SHARED_FADE, MISSED_FADE = 0.9, 0.95, 0.97
    FIRST_GUESS = 0.5  # the chance of a kind of guess nobody has tried

    def __init__(self, rows: int, shared: dict[Kind, list[Chance]] | None = None) -> None:
        self.shared = {} if shared is None else shared
        self.rows: list[dict[Kind, list[Chance]]] = [{} for _ in range(rows)]

    def everywhere(self, kind: Kind, k: int) -> list[float]:
        """α_1 … α_k over all rows. A position nobody has reached is expected to be as good as the one before it."""
        alphas, last = [], self.FIRST_GUESS
        for chance in self.shared.get(kind, ())[:k]:
            last = chance.given(last)
            alphas.append(last)
        return alphas + [last] * (k - len(alphas))

    def of(self, row: int, kind: Kind, k: int) -> list[float]:
        """α_1 … α_k of one row's guesses of this kind."""
        priors, own = self.everywhere(kind, k), self.rows[row].get(kind, ())
        return [chance.given(prior) for chance, prior in zip(own, priors)] + priors[len(own) :]

    def learn(self, row: int, kind: Kind, position: int, passed: bool) -> None:
        """A guess that was reached at this position (counted from 0) passed, or did not."""
        fades = (self.FADE, 1.0), (self.SHARED_FADE, self.SHARED_FADE)
        for seen, (fade, prior_fade) in zip((self.rows[row], self.shared), fades):
            chances = seen.setdefault(kind, [])
            while len(chances) <= position:
                chances.append(Chance(fade, prior_fade))
            chances[position].learn(passed)

    def missed(self, row: int, kind: Kind, position: int) -> None:
        """A guess at this position would have been reached, but was not made: what is known of it grows old.

        Otherwise a few bad outcomes would keep drafts short for ever.
        """
        for seen in (self.rows[row], self.shared):
            for chance in seen.get(kind, ())[position : position + 1]:
                chance.weaken(self.MISSED_FADE)

    def weaken(self, factor: float) -> None:
        """The rows' own outcomes are old news; what all rows have seen stays."""
        for chance in (chance for row in self.rows for chances in row.values() for chance in chances):
            chance.weaken(factor)


class Pace:
    """Tokens per one-position pass, lately: the λ of the choice. Plain decoding's 1 is the least it can be.

    Estimates are noisy, and the best of several noisy ones is flattered. With caution a draft has to earn a bit more
    than it costs, and much more in a run that has fallen behind plain decoding.
    """

    FADE = 0.95
    MARGIN, MARGIN_BEHIND = 0.1, 2.0

    def __init__(self) -> None:
        self.tokens = self.time = 3.0
        self.lead = 0.0  # of the run over plain decoding, in tokens of a row

    def add(self, tokens: float, cost: float) -> None:
        self.tokens = self.FADE * self.tokens + tokens
        self.time = self.FADE * self.time + cost
        self.lead += tokens - cost

    @property
    def caution(self) -> float:
        """How much more than its cost a draft has to earn."""
        return 1.0 + (self.MARGIN_BEHIND if self.lead < 0 else self.MARGIN)

    @property
    def rate(self) -> float:
        return max(1.0, self.tokens / self.time)


class Times:
    """The latest few times of one thing, and the one that stands for them.

    The lower median: what disturbs a clock makes times longer, never shorter.
    """

    LATEST = 9

    __slots__ = ("latest", "median")

    def __init__(self, first: Sequence[float] = ()) -> None:
        self.latest = deque(first, maxlen=self.LATEST)
        self.median = lower_median(first) if first else math.nan

    def __len__(self) -> int:
        return len(self.latest)

    def add(self, time: float) -> None:
        self.latest.append(time)
        self.median = lower_median(self.latest)

    def forget_oldest(self) -> None:
        self.latest.popleft()
        self.median = lower_median(self.latest) if self.latest else math.nan

    def believed(self, expected: float) -> float:
        """The median; of a single time that is slower than expected, what was expected."""
        return self.median if len(self.latest) > 1 else min(self.median, expected)


def lower_median(times: Iterable[float]) -> float:
    """The middle one, or the lower of two."""
    ordered = sorted(times)
    return ordered[(len(ordered) - 1) // 2]


class RoundCosts:
    """What passes and drafts take, from their times.

    A pass is known by its size, the positions of all its rows together: R rows with k drafts each make R · (k + 1).
    `Times` are kept by size, divided by the machine's drift (other work beside, a longer context). A single time that
    is slower than expected is not believed until a second one confirms it; a size without a time lies between its
    neighbours. Times need not rise with size: some machines take longer over 3 positions than over 8.

    Args:
        curve: v(T), if it was measured. Counts as ``GIVEN`` times at each of its positions.
        c: cost of one draft step in target passes, if known; it stands for the longest draft until that is timed.
        longest: k, the longest draft.
    """

    GIVEN = 3
    SLOPE = 0.03  # what a further position is expected to add to a pass nobody has timed, in one-position passes
    C = 0.1  # what a draft step is expected to cost before one was timed, likewise
    DRIFT = 16  # passes that tell the machine's drift
    STALE = 256  # passes after which a size that was not seen again is slowly forgotten

    def __init__(self, curve: CostCurve | None = None, c: float | None = None, longest: int = 1) -> None:
        self.passes: dict[int, Times] = {}  # ms by size
        self.drafts: dict[int, Times] = {}  # ms by number of drafted tokens
        self.drift = 1.0
        self._ratios: deque[tuple[int, float]] = deque(maxlen=self.DRIFT)  # (size, time over what it was before)
        self._usual = 0
        self._latest_drafts = Times()
        self._seen: dict[int, int] = {}  # size → when
        self._now = 0
        self.given_c, self.longest = c, longest
        if curve is not None:
            rows = getattr(curve, "batch_size", 1)
            self.passes = {rows * T: Times([curve(T)] * self.GIVEN) for T in curve.positions}

    def add_pass(self, size: int, ms: float) -> None:
        """A pass over ``size`` positions took so long."""
        times = self.passes.setdefault(size, Times())
        if len(times) > 1:
            self._ratios.append((size, max(ms, TICK) / times.median))
            self.drift = self._present_drift()
        times.add(max(ms / self.drift, TICK))
        self._now += 1
        self._seen[size] = self._now
        if self._now % (self.STALE // 4) == 0:
            self._forget_stale()

    def _present_drift(self) -> float:
        """How much slower the machine is than it was, by the latest passes of one size that is often seen of late.

        It follows within two passes, before sizes would take a slower machine for their own doing. One size alone tells
        it, and goes on to tell it while it is seen, so that two that disagree do not pull it to and fro.
        """
        seen = Counter(size for size, _ in self._ratios)
        usual = max(seen, key=lambda size: (seen[size], -size))
        if 2 * seen[self._usual] < seen[usual]:
            self._usual = usual
        return lower_median([ratio for size, ratio in self._ratios if size == self._usual][-3:])

    def _forget_stale(self) -> None:
        """A size thought slow would never be tried again: take away one of its old times, in the end all of them."""
        smallest = min(self.passes)
        for size in [n for n in self.passes if n > smallest and self._now - self._seen.get(n, 0) > self.STALE]:
            self.passes[size].forget_oldest()
            if not self.passes[size]:
                del self.passes[size]

    def add_draft(self, k: int, ms: float, at_most: bool = False) -> None:
        """Drafting k tokens took so long; ``at_most``: and a part of that for something else."""
        ms = max(ms / self.drift, TICK)
        if at_most and k in self.drafts:
            ms = min(ms, self.drafts[k].median)
        self.drafts.setdefault(k, Times()).add(ms)
        self._latest_drafts.add(ms)

    def drafting(self, rows: int = 1) -> float | None:
        """What a draft lately took, of whatever length, in plain passes over so many rows; None before the first."""
        if self._latest_drafts and self.passes:
            return self._latest_drafts.median / self.milliseconds([rows])[0]
        return self.given_c

    def milliseconds(self, sizes: Sequence[int]) -> list[float]:
        """Passes of these sizes in ms, at no drift."""
        smallest = min(self.passes)
        one = self.passes[smallest].median / self._expected(smallest)
        points = [(n, self.passes[n].believed(one * self._expected(n))) for n in sorted(self.passes)]
        if smallest > 1:
            points.insert(0, (1, one))
        return [interpolated(points, n, self.SLOPE * one) for n in sizes]

    def _expected(self, size: int) -> float:
        """A pass nobody has timed, in one-position passes."""
        return 1.0 + self.SLOPE * (size - 1)

    def relative(self, sizes: Sequence[int]) -> list[float]:
        """Passes of these sizes in units of the first, which none of the larger ones can cost less than."""
        plain, *others = self.milliseconds(sizes)
        return [1.0, *(max(ms / plain, 1.0) for ms in others)]

    def drafts_up_to(self, k: int, rows: int = 1) -> list[float]:
        """d(j) / v(1), the time to draft j tokens for each of so many rows, for j = 0 … k."""
        plain = self.milliseconds([rows])[0]
        c = self.C if self.given_c is None else self.given_c
        points = [(j, self.drafts[j].believed(plain * c * j) / plain) for j in sorted(self.drafts)]
        if self.given_c is not None and self.longest not in self.drafts:
            points.append((self.longest, c * self.longest))
        j, d = points[-1] if points else (1, c)
        return [interpolated([(0, 0.0), *points], i, d / j) for i in range(k + 1)]

    def curve(self) -> CostCurve | None:
        """The passes by size, in ms at the present drift; None before the first."""
        if not self.passes:
            return None
        sizes = sorted(self.passes)
        times = tuple(self.drift * self.passes[n].median for n in sizes)
        return CostCurve(tuple(sizes), times, label="timed while decoding")


def interpolated(points: Sequence[tuple[int, float]], x: int, slope: float) -> float:
    """Linear between rising points, with ``slope`` after the last; ``x`` is not before the first."""
    after = bisect_left(points, (x, float("-inf")))
    if after == len(points):
        return points[-1][1] + slope * (x - points[-1][0])
    (right, y) = points[after]
    if right == x:
        return y
    left, y0 = points[after - 1]
    return y0 + (y - y0) * (x - left) / (right - left)
