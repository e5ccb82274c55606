"""Is a sample drawn from the law it should follow? Tests of fit, their power, and an audit of any sampler.

This file counts tokens and knows no model: the law is a tensor of probabilities, the sample a table of draws.
`specnb.exact_law` makes the first from a small model; anything that generates makes the second. scipy does the maths.

A test that passes says little until its power is known: how often would it have caught the fault one fears? So
`audit` first draws enough for a stated fault, then judges. Derived in notebook 06, "Losslessness, proved and tested".
Sources: Pearson 1900 (chi-square), Cohen 1988 (effect size w and power), Holm 1979 (many tests), McDiarmid 1989
(interval of the total variation).
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

SMALL_EFFECT = 0.01  # w², Cohen's w = 0.1
_POWER = 0.99  # what an audit's default sample size gives
_AUDIT_CELL = 30  # expected draws of an audit's thinnest cell
_FEWEST, _MOST = 1_000, 100_000_000  # draws of an audit that chooses for itself


@dataclass(frozen=True)
class TestResult:
    """One test of fit.

    Attributes:
        statistic: chi-square or G; infinite if a draw fell where the law has probability 0.
        dof: degrees of freedom, cells left after pooling less one.
        pvalue: how often a right sampler gives such a statistic or a larger one.
        n: draws (of both samples together where there are two).
        method: the test's name.
        pooling: which cells were put together, in words.
        impossible: draws in cells of probability 0; one of them is enough to fail.
    """

    __test__ = False  # no test case, whatever pytest makes of the name

    statistic: float
    dof: int
    pvalue: float
    n: int
    method: str
    pooling: str
    impossible: int = 0

    def __repr__(self) -> str:
        fit = f"{self.method} {self.statistic:.4g} on {_count(self.dof, 'degree')} of freedom, p = {self.pvalue:.3g}"
        return f"TestResult({fit}; {self.n:,} draws; {self.pooling})"


def chi_square(counts: Any, probs: Any, *, min_expected: float = 5.0) -> TestResult:
    """Pearson's chi-square test that ``counts`` were drawn from ``probs``.

    Args:
        counts: whole numbers of any shape, how often each cell was drawn; tensor, array or nested lists.
        probs: the law, of the same shape, summing to 1.
        min_expected: cells with fewer expected draws are pooled into one (and that one, if still thin, into the
            thinnest of the others). The chi-square approximation needs this: with cells of 5 expected draws the
            true rate of p < 1e-6 is up to 4e-5, with 30 up to 3e-6.

    Returns:
        `TestResult`. A draw in a cell of probability 0 gives p-value 0 at once, and ``pooling`` says so.

    Raises:
        ValueError: for shapes that differ, counts that are no counts, or probs that are no distribution.

    Derived in notebook 06.
    """
    return _goodness_of_fit(counts, probs, "pearson", "chi-square", min_expected)


def g_test(counts: Any, probs: Any, *, min_expected: float = 5.0) -> TestResult:
    """The likelihood-ratio test, G = 2 Σ O log(O/E): as `chi_square`, and 2n times the Kullback–Leibler divergence."""
    return _goodness_of_fit(counts, probs, "log-likelihood", "G", min_expected)


def two_sample_chi_square(counts_a: Any, counts_b: Any, *, min_expected: float = 5.0) -> TestResult:
    """Chi-square test that two samples come from one law, which need not be known.

    Args:
        counts_a, counts_b: how often each cell was drawn, of the same shape.
        min_expected: as for `chi_square`, by the smaller sample.

    Returns:
        `TestResult`.
    """
    a, b = _counts(counts_a, "counts_a"), _counts(counts_b, "counts_b")
    _same_shape(a, b, "counts_a", "counts_b")
    both = (a + b).ravel()
    cells = _pooled_cells(both / both.sum(), min(a.sum(), b.sum()), min_expected)
    table = np.stack([_sums(a.ravel(), cells), _sums(b.ravel(), cells)])
    if table.shape[1] == 1:
        statistic, pvalue, dof = 0.0, 1.0, 0
    else:
        statistic, pvalue, dof, _ = stats.chi2_contingency(table, correction=False)
    pooling = _pooling(cells, min_expected)
    return TestResult(float(statistic), int(dof), float(pvalue), int(both.sum()), "two-sample chi-square", pooling)


@dataclass(frozen=True)
class Interval:
    """An estimate between its bounds: ``low`` ≤ truth ≤ ``high`` with probability ``confidence`` or more."""

    value: float
    low: float
    high: float
    confidence: float
    method: str = "McDiarmid's inequality, bias bounded"

    def __repr__(self) -> str:
        return (
            f"Interval({self.value:.4f}, {self.confidence:.0%} within {self.low:.4f} … {self.high:.4f}; {self.method})"
        )


def total_variation(counts: Any, probs: Any, *, confidence: float = 0.99) -> Interval:
    """Total variation distance, ½ Σ |share − p|, between the law that was drawn from and ``probs``.

    The plain estimate is too large: even the right sampler's shares miss p by chance, by at most ½ Σ √(p(1−p)/n) on
    average. One draw moves the estimate by at most 1/n, so by McDiarmid's inequality it stays within √(ln(2/δ)/2n) of
    its mean with probability 1 − δ. Together: an interval that holds for every law and every n, and is wide for it.

    Args:
        counts, probs: as for `chi_square`; nothing is pooled.
        confidence: 1 − δ.
    """
    observed, p = _checked(counts, probs)
    n = observed.sum()
    value = float(abs(observed / n - p).sum() / 2)
    slack = math.sqrt(math.log(2 / (1 - confidence)) / (2 * n))
    bias = math.sqrt((observed.size - 1) / n) / 2  # the largest ½ Σ √(p(1−p)/n) of any law on so many cells
    return Interval(value, max(0.0, value - slack - bias), min(1.0, value + slack), confidence)


def effect_size(alternative: Any, probs: Any) -> float:
    """Cohen's w² = Σ (p₁ − p₀)² / p₀ of a law p₁ against p₀ = ``probs``; inf if p₁ > 0 somewhere p₀ is 0."""
    p1, p0 = _law(alternative, "alternative"), _law(probs, "probs")
    _same_shape(p1, p0, "alternative", "probs")
    if (p1[p0 == 0] > 0).any():
        return math.inf
    return _effect(p1.ravel(), p0.ravel())


def power(effect: float, n: int, dof: int, level: float) -> float:
    """How often n draws of a law with this effect give a chi-square p-value below ``level``.

    Args:
        effect: w² of the law against the one tested, see `effect_size`.
        n: draws.
        dof: degrees of freedom of the test.
        level: the p-value below which the test rejects.

    The statistic is then noncentral chi-square with noncentrality n·w² (scipy's ncx2).
    """
    _check_level(level)
    if effect < 0 or n < 0 or dof < 0:
        raise ValueError(f"effect, n and dof must not be negative, got {effect}, {n} and {dof}.")
    if dof == 0:
        return 0.0
    if math.isinf(effect):
        return 1.0
    return float(stats.ncx2.sf(stats.chi2.isf(level, dof), dof, n * effect))


def required_sample_size(effect: float, dof: int, level: float, wanted_power: float = 0.99) -> int:
    """The fewest draws with which chi-square at ``level`` catches a law of this effect (w²) with the wanted power."""
    if not effect > 0 or dof < 1 or not 0 < wanted_power < 1:
        raise ValueError(f"need effect > 0, dof ≥ 1 and 0 < wanted_power < 1, got {effect}, {dof} and {wanted_power}.")
    return _smallest(lambda n: power(effect, n, dof, level) >= wanted_power, first=1)


@dataclass(frozen=True)
class Family:
    """Many tests judged together.

    Attributes:
        rejected: for each test, in the order given, whether it fails.
        adjusted: p-values to compare with ``level`` directly.
        level: for Holm and Bonferroni the chance that *any* right sampler fails; for Benjamini–Hochberg the expected
            share of right ones among those that fail.
        method: which.
    """

    rejected: list[bool]
    adjusted: list[float]
    level: float
    method: str


def correct(pvalues: Sequence[float], level: float, method: str = "holm") -> Family:
    """Judge many p-values together, so that many tests do not mean many false alarms.

    Args:
        pvalues: one per test.
        level: of the whole family.
        method: ``"holm"``, ``"bonferroni"`` (weaker) or ``"benjamini-hochberg"`` (controls the false discovery rate).
    """
    p = np.asarray(pvalues, dtype=float)
    if p.ndim != 1 or not p.size or not ((p >= 0) & (p <= 1)).all():
        raise ValueError(f"pvalues must be a list of numbers between 0 and 1, got {pvalues!r}.")
    _check_level(level)
    if method not in _CORRECTIONS:
        raise ValueError(f"method must be one of {', '.join(_CORRECTIONS)}, got {method!r}.")
    adjusted = _CORRECTIONS[method](p)
    return Family((adjusted < level).tolist(), adjusted.tolist(), level, method)


def _holm(p: np.ndarray) -> np.ndarray:
    order = p.argsort()
    stepped = np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1)).clip(max=1)
    return stepped[order.argsort()]


_CORRECTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "holm": _holm,
    "bonferroni": lambda p: (p * p.size).clip(max=1),
    "benjamini-hochberg": lambda p: stats.false_discovery_control(p, method="bh"),
}


# --- the audit ---


@dataclass(frozen=True)
class Cell:
    """One possible text: its tokens, how often it was drawn, how often the law expects it."""

    tokens: tuple[int, ...]
    observed: int
    expected: float


@dataclass(frozen=True)
class AuditResult:
    """The verdict of `audit`; prints itself.

    Attributes:
        passed: whether the draws fit the law.
        statistic, dof, pvalue: of the chi-square test, see ``test``.
        n: draws.
        level: the highest rate at which a right sampler would fail.
        threshold: the p-value below which the audit fails, level^1.25.
        power: how often n draws of the ``alternative`` would fail.
        alternative: the stated fault, in words.
        test: the `TestResult` with method and pooling.
        distance: total variation between sampler and law, an `Interval` (99 %).
        worst: the cells that stand out most, most first.
    """

    passed: bool
    n: int
    level: float
    threshold: float
    power: float
    alternative: str
    test: TestResult
    distance: Interval
    worst: tuple[Cell, ...]

    @property
    def statistic(self) -> float:
        return self.test.statistic

    @property
    def dof(self) -> int:
        return self.test.dof

    @property
    def pvalue(self) -> float:
        return self.test.pvalue

    @property
    def headline(self) -> str:
        verdict = "PASSED: the draws fit the law" if self.passed else "FAILED: the draws do not follow the law"
        return f"{verdict} ({self.n:,} draws)"

    def facts(self) -> list[tuple[str, str]]:
        """What there is to say, as (name, value) in words."""
        t, d = self.test, self.distance
        fit = f"{t.statistic:.4g} on {_count(t.dof, 'degree')} of freedom, p = {t.pvalue:.3g}"
        return [
            (t.method, f"{fit} (fails below {self.threshold:.1e}, false alarms below {self.level:g})"),
            ("power", f"{self.power:.4f} against {self.alternative}"),
            ("total variation", f"{d.value:.4f}, {d.confidence:.0%} within {d.low:.4f} … {d.high:.4f}"),
            ("pooling", t.pooling),
        ]

    def __repr__(self) -> str:
        facts = [f"  {name}: {value}" for name, value in self.facts()]
        cells = [f"    {c.tokens}: {c.observed:,} drawn, {c.expected:,.1f} expected" for c in self.worst]
        return "\n".join([f"AuditResult {self.headline}", *facts, "  worst cells:", *cells])

    def _repr_html_(self) -> str:
        facts = "".join(f"<tr><th>{html.escape(n)}</th><td>{html.escape(v)}</td></tr>" for n, v in self.facts())
        head = "<tr><th>tokens</th><th>drawn</th><th>expected</th></tr>"
        cells = "".join(
            f"<tr><td>{c.tokens}</td><td>{c.observed:,}</td><td>{c.expected:,.1f}</td></tr>" for c in self.worst
        )
        return f"<p><b>{html.escape(self.headline)}</b></p><table>{facts}</table><table>{head}{cells}</table>"


def audit(
    sampler: Callable[[int, int], Tensor],
    oracle: Any,
    n: int | None = None,
    level: float = 1e-6,
    alternative: Any = SMALL_EFFECT,
    seed: int = 0,
) -> AuditResult:
    """Does this sampler draw from this law? Chi-square over all texts of m tokens, with the power to mean something.

    Args:
        sampler: ``sampler(n, seed) -> LongTensor [n, m]``: n independent texts of m tokens each, from any decoder.
        oracle: the exact law, a tensor [V]*m of probabilities (`specnb.exact_law` makes it), or an object that has one
            as ``.probs``.
        n: draws; default: as many as catch the alternative with power 0.99.
        level: a right sampler fails at most this often. Chi-square's own tail is too light for such levels (the true
            rate of p < 1e-6 is up to 3e-6), so cells are pooled up to 30 expected draws and the audit fails below
            level^1.25, which holds the rate for levels between 0.05 and 1e-8.
        alternative: the fault that must not slip through: a law like ``oracle`` (such as that of a known bug), or its
            size as Cohen's w²; default 0.01, a small effect.
        seed: handed to the sampler.

    Returns:
        `AuditResult`: passed or not, statistic, p-value, power, the worst cells.

    Raises:
        ValueError, TypeError: for an oracle that is no law, samples that do not fit it, or an alternative so close to
            the law that no reasonable number of draws tells them apart.

    Derived in notebook 06.
    """
    probs = _law(getattr(oracle, "probs", oracle), "oracle")
    _check_level(level)
    fault, threshold = _Fault.of(alternative, probs), level**1.25
    if n is None:
        n = _smallest(lambda draws: fault.power(probs.ravel(), draws, threshold) >= _POWER, _FEWEST)
    counts = _tally(sampler(n, seed), n, probs.shape)
    test = chi_square(counts, probs, min_expected=_AUDIT_CELL)
    return AuditResult(
        passed=test.pvalue >= threshold,
        n=n,
        level=level,
        threshold=threshold,
        power=fault.power(probs.ravel(), n, threshold),
        alternative=fault.description,
        test=test,
        distance=total_variation(counts, probs),
        worst=_worst(counts, probs),
    )


@dataclass(frozen=True)
class _Fault:
    """The alternative of an audit: a law, or the size of its effect alone."""

    size: float
    law: np.ndarray | None
    description: str

    @classmethod
    def of(cls, alternative: Any, probs: np.ndarray) -> _Fault:
        if isinstance(alternative, float | int):
            if not alternative > 0:
                raise ValueError(f"alternative must be an effect w² > 0 or a law like the oracle, got {alternative}.")
            return cls(float(alternative), None, f"any law with Cohen's w² = {alternative:g}")
        size = effect_size(getattr(alternative, "probs", alternative), probs)
        if size < 1e-9:
            raise ValueError("alternative is the oracle's own law: there is nothing to tell apart.")
        law = _law(getattr(alternative, "probs", alternative), "alternative").ravel()
        return cls(size, law, f"the given alternative law (Cohen's w² = {size:.3g})")

    def power(self, probs: np.ndarray, n: int, threshold: float) -> float:
        """How often n draws fail, by the impossible cells or by chi-square over the pooled ones."""
        cells = _pooled_cells(probs, n, _AUDIT_CELL)
        dof = int(cells.max())
        if self.law is None:  # with one possible text only, the effect is the share of other ones
            impossible, size = (0.0, self.size) if dof else (min(self.size, 1.0), 0.0)
        else:
            impossible = float(self.law[probs == 0].sum())
            size = _effect(_sums(self.law, cells), _sums(probs, cells))
        return max(1 - (1 - impossible) ** n, power(size, n, dof, threshold))


def _tally(samples: Any, n: int, shape: tuple[int, ...]) -> np.ndarray:
    """How often each text was drawn, [V]*m."""
    if not isinstance(samples, Tensor) or samples.dtype != torch.long:
        raise TypeError(f"sampler must return a LongTensor [n, m], got {_kind(samples)}.")
    if samples.shape != (n, len(shape)):
        raise ValueError(
            f"sampler must return n texts of m tokens, [{n}, {len(shape)}] for this oracle, got {list(samples.shape)}. "
            "Cut longer texts to their first m new tokens."
        )
    outside = (samples < 0) | (samples >= torch.tensor(shape, device=samples.device))
    if bool(outside.any()):
        row = int(outside.any(dim=1).nonzero()[0])
        raise ValueError(
            f"sampler returned tokens outside the oracle's {list(shape)}: text {row} is {samples[row].tolist()}."
        )
    cells = np.ravel_multi_index(tuple(samples.cpu().numpy().T), shape)
    return np.bincount(cells, minlength=math.prod(shape)).reshape(shape)


def _worst(counts: np.ndarray, probs: np.ndarray, most: int = 5) -> tuple[Cell, ...]:
    """The cells with the largest (O − E)²/E; those that cannot be drawn come first."""
    observed, expected = counts.ravel(), counts.sum() * probs.ravel()
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.nan_to_num((observed - expected) ** 2 / expected, nan=0.0, posinf=np.inf)
    cells = np.argsort(-share, kind="stable")[:most]
    tokens = zip(*np.unravel_index(cells, probs.shape))
    return tuple(
        Cell(tuple(int(x) for x in text), int(observed[c]), float(expected[c])) for text, c in zip(tokens, cells)
    )


# --- cells ---


def _goodness_of_fit(counts: Any, probs: Any, kind: str, method: str, min_expected: float) -> TestResult:
    observed, p = _checked(counts, probs)
    n, possible = int(observed.sum()), p > 0
    cells = _pooled_cells(p, n, min_expected)
    dof = int(cells.max())
    impossible = int(observed[~possible].sum())
    if impossible:
        words = f"{_count(impossible, 'draw')} in cells of probability 0"
        return TestResult(math.inf, dof, 0.0, n, method, words, impossible)
    seen, expected = _sums(observed, cells), n * _sums(p, cells)
    statistic, pvalue = stats.power_divergence(seen, expected, lambda_=kind) if dof else (0.0, 1.0)
    return TestResult(float(statistic), dof, float(pvalue), n, method, _pooling(cells, min_expected))


def _pooled_cells(probs: np.ndarray, n: int, min_expected: float) -> np.ndarray:
    """The pooled cell 0, 1, … of every cell [C]; -1 where the probability is 0."""
    thin = n * probs < min_expected
    cells = np.where(thin, 0, np.cumsum(~thin))
    thick = np.flatnonzero(~thin)
    if thick.size and 0 < n * probs[thin].sum() < min_expected:
        cells[thin] = cells[thick[probs[thick].argmin()]]
    possible = probs > 0
    numbers = np.full(probs.shape, -1)
    numbers[possible] = np.unique(cells[possible], return_inverse=True)[1]
    return numbers


def _sums(values: np.ndarray, cells: np.ndarray) -> np.ndarray:
    """Sum of the values [C] in each pooled cell; impossible ones left out."""
    return np.bincount(cells[cells >= 0], weights=values[cells >= 0])


def _pooling(cells: np.ndarray, min_expected: float) -> str:
    possible = cells[cells >= 0]
    pooled = int((np.bincount(possible)[possible] > 1).sum())
    if not pooled:
        return f"none of {possible.size} cells pooled"
    return f"{pooled} of {possible.size} cells pooled into one (expected draws below {min_expected:g})"


def _effect(p1: np.ndarray, p0: np.ndarray) -> float:
    possible = p0 > 0
    return float(((p1 - p0)[possible] ** 2 / p0[possible]).sum())


def _smallest(enough: Callable[[int], bool], first: int) -> int:
    """The fewest draws that are enough, found by doubling, then by halving the gap (to a hundredth for large n)."""
    low, high = 0, first
    while not enough(high):
        low, high = high, 2 * high
        if high > _MOST:
            raise ValueError(f"more than {_MOST:,} draws would be needed: state a larger effect or a looser level.")
    while high - low > max(1, high // 100) and high > first:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


# --- what comes in ---


def _array(values: Any) -> np.ndarray:
    return values.detach().cpu().double().numpy() if isinstance(values, Tensor) else np.asarray(values, dtype=float)


def _counts(values: Any, name: str) -> np.ndarray:
    counts = _array(values)
    if not counts.size or not np.isfinite(counts).all() or (counts < 0).any() or (counts % 1).any() or not counts.any():
        raise ValueError(f"{name} must be whole numbers, none negative, not all 0: how often each cell was drawn.")
    return counts


def _law(values: Any, name: str) -> np.ndarray:
    probs = _array(values)
    if not probs.ndim or not (probs >= 0).all() or not abs(probs.sum() - 1) < 1e-3:
        raise ValueError(
            f"{name} must be probabilities, not negative and summing to 1; got {_kind(values)} that sums to "
            f"{probs.sum():.6g}. Logits need a softmax first."
        )
    return probs / probs.sum()


def _checked(counts: Any, probs: Any) -> tuple[np.ndarray, np.ndarray]:
    """Counts and probabilities, flat."""
    observed, p = _counts(counts, "counts"), _law(probs, "probs")
    _same_shape(observed, p, "counts", "probs")
    return observed.ravel(), p.ravel()


def _same_shape(a: np.ndarray, b: np.ndarray, name_a: str, name_b: str) -> None:
    if a.shape != b.shape:
        raise ValueError(f"{name_a} and {name_b} must have one shape, got {list(a.shape)} and {list(b.shape)}.")


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, such as 1e-6, got {level!r}.")


def _kind(values: Any) -> str:
    shape = f" {list(values.shape)}" if hasattr(values, "shape") else ""
    return f"{getattr(values, 'dtype', type(values).__name__)}{shape}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
