"""The tests of fit themselves: against scipy, against hand-worked numbers, and against what they promise.

Tests marked statistical use fixed seeds and state their false-alarm rate: how often a right implementation would fail
them if the seed were drawn anew. Each shows a wrong one failing the same check.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats

import specnb
from specnb.stats import Interval, TestResult, correct, power, required_sample_size, total_variation

P = torch.tensor([0.5, 0.3, 0.2])
SKEWED = torch.tensor([0.55, 0.27, 0.18])


def draws(law, n, seed=0):
    """n texts of the law [V]*m, LongTensor [n, m]: the sampler that is right by construction."""
    generator = torch.Generator().manual_seed(seed)
    cells = torch.multinomial(law.flatten().double(), n, replacement=True, generator=generator)
    return torch.stack(torch.unravel_index(cells, law.shape), dim=1)


def sampler_of(law):
    return lambda n, seed: draws(law, n, seed)


def counts_of(law, n, seed=0):
    return np.random.default_rng(seed).multinomial(n, law.double().numpy())


# --- tests of fit ---


def test_chi_square_by_hand():
    result = specnb.chi_square([55, 25, 20], P)
    assert result.statistic == pytest.approx(5**2 / 50 + 5**2 / 30)
    assert (result.dof, result.n, result.pooling) == (2, 100, "none of 3 cells pooled")
    assert result.pvalue == pytest.approx(math.exp(-result.statistic / 2))  # chi-square with two degrees of freedom


@pytest.mark.parametrize(("test", "name"), [(specnb.chi_square, "pearson"), (specnb.g_test, "log-likelihood")])
def test_thick_cells_give_what_scipy_gives(test, name):
    law = torch.rand(12, generator=torch.Generator().manual_seed(1)) + 0.2
    law = law / law.sum()
    counts = counts_of(law, 5000)
    expected = scipy_stats.power_divergence(
        counts, 5000 * law.double().numpy() / float(law.double().sum()), lambda_=name
    )
    result = test(counts, law)
    assert (result.statistic, result.pvalue) == pytest.approx(tuple(expected))


def test_g_is_2n_times_the_divergence():
    counts = np.array([60, 25, 15])
    share = counts / 100
    assert specnb.g_test(counts, P).statistic == pytest.approx(200 * (share * np.log(share / P.double().numpy())).sum())


def test_thin_cells_are_pooled_and_said_so():
    law = [0.5, 0.44, 0.02, 0.02, 0.02]
    result = specnb.chi_square([50, 42, 3, 3, 2], law)
    assert result.statistic == pytest.approx(2**2 / 44 + 2**2 / 6)
    assert result.dof == 2
    assert result.pooling == "3 of 5 cells pooled into one (expected draws below 5)"


def test_a_pool_that_is_still_thin_joins_the_thinnest_other_cell():
    result = specnb.chi_square([60, 37, 1, 2], [0.6, 0.37, 0.02, 0.01])
    assert (result.dof, result.pooling) == (1, "3 of 4 cells pooled into one (expected draws below 5)")
    assert result.statistic == 0


def test_one_draw_that_cannot_happen_fails_at_once():
    result = specnb.chi_square([599_999, 400_000, 1], [0.6, 0.4, 0.0])
    assert (result.pvalue, result.statistic, result.impossible) == (0.0, math.inf, 1)
    assert "1 draw in cells of probability 0" in repr(result)


def test_impossible_cells_without_draws_do_not_count():
    assert repr(specnb.chi_square([5, 15, 10, 0], [0.2, 0.5, 0.3, 0])) == repr(
        specnb.chi_square([5, 15, 10], [0.2, 0.5, 0.3])
    )


def test_a_law_with_one_text_only():
    assert specnb.chi_square([10, 0], [1.0, 0.0]).pvalue == 1
    assert specnb.chi_square([9, 1], [1.0, 0.0]).pvalue == 0


def test_cells_may_have_any_shape_and_come_as_tensors():
    law, counts = torch.full((2, 3), 1 / 6), torch.tensor([[10, 12, 9], [11, 10, 8]])
    assert specnb.chi_square(counts, law) == specnb.chi_square(counts.flatten().tolist(), law.flatten().tolist())


@pytest.mark.parametrize(
    ("counts", "probs", "message"),
    [
        ([1, 2], P, "one shape"),
        ([1, -2, 3], P, "whole numbers"),
        ([1, 2.5, 3], P, "whole numbers"),
        ([0, 0, 0], P, "not all 0"),
        ([1, 2, float("nan")], P, "whole numbers"),
        ([1, 2, 3], [2.0, 0.5, -1.5], "softmax"),
        ([1, 2, 3], [0.5, 0.3, 0.3], "sums to 1.1"),
        ([1, 2, 3], [0.5, 0.5, float("nan")], "probabilities"),
    ],
)
@pytest.mark.parametrize("test", [specnb.chi_square, specnb.g_test, total_variation])
def test_what_is_no_count_or_no_law_is_refused(test, counts, probs, message):
    with pytest.raises(ValueError, match=message):
        test(counts, probs)


def test_two_samples_give_what_scipy_gives():
    a, b = counts_of(P, 900), counts_of(SKEWED, 1100, seed=1)
    expected = scipy_stats.chi2_contingency(np.stack([a, b]), correction=False)
    result = specnb.two_sample_chi_square(a, b)
    assert (result.statistic, result.pvalue) == pytest.approx((expected.statistic, expected.pvalue))
    assert (result.dof, result.n) == (2, 2000)


def test_two_samples_of_one_law_fit_and_of_two_laws_do_not():
    a, same, other = counts_of(P, 20_000), counts_of(P, 20_000, seed=1), counts_of(SKEWED, 20_000, seed=1)
    assert specnb.two_sample_chi_square(a, same).pvalue > 1e-3
    assert specnb.two_sample_chi_square(a, other).pvalue < 1e-6


def test_cells_that_neither_sample_drew_are_no_cells():
    assert specnb.two_sample_chi_square([10, 20, 0], [12, 18, 0]).dof == 1


def pvalues(law, drawn_from, repetitions=500, n=2000):
    counts = np.random.default_rng(0).multinomial(n, drawn_from.double().numpy(), size=repetitions)
    return [specnb.chi_square(c, law).pvalue for c in counts]


@pytest.mark.statistical
def test_pvalues_are_uniform_when_the_law_is_right():
    """Kolmogorov–Smirnov at 1e-6; samples of a law 0.05 away must fail it."""
    law = torch.tensor([0.3, 0.25, 0.2, 0.15, 0.1])
    skewed = torch.tensor([0.32, 0.25, 0.2, 0.13, 0.1])
    assert scipy_stats.kstest(pvalues(law, law), "uniform").pvalue > 1e-6
    assert scipy_stats.kstest(pvalues(law, skewed), "uniform").pvalue < 1e-6


# --- total variation ---


def test_total_variation_by_hand():
    interval = total_variation([600, 250, 150], P)
    assert interval.value == pytest.approx(0.1)
    assert interval.low < 0.1 < interval.high
    assert interval.high - interval.value == pytest.approx(math.sqrt(math.log(200) / 2000))


@pytest.mark.statistical
@pytest.mark.parametrize(("law", "truth"), [(P, 0.0), (SKEWED, 0.05), (torch.tensor([0.2, 0.3, 0.5]), 0.3)])
def test_the_interval_covers_the_truth_as_often_as_it_says(law, truth):
    """2,000 intervals at 90 %: fewer than 1,720 hits has probability below 1e-6. Without the slack it fails."""
    counts = np.random.default_rng(0).multinomial(500, law.double().numpy(), size=2000)
    intervals = [total_variation(c, P, confidence=0.9) for c in counts]
    assert sum(i.low <= truth + 1e-7 and truth <= i.high + 1e-7 for i in intervals) >= 1720
    assert sum(i.value <= truth <= i.value for i in intervals) < 1720


def test_the_interval_narrows_with_the_draws():
    few, many = (total_variation(counts_of(SKEWED, n), P) for n in (1_000, 1_000_000))
    assert few.low == 0 < 0.045 < many.low < 0.05 < many.high < 0.055
    assert "99% within" in repr(many)
    assert isinstance(many, Interval)


# --- power ---


def test_effect_size_by_hand():
    assert specnb.effect_size(SKEWED, P) == pytest.approx(0.05**2 / 0.5 + 0.03**2 / 0.3 + 0.02**2 / 0.2, rel=1e-5)
    assert specnb.effect_size([0.5, 0.5], [1.0, 0.0]) == math.inf
    assert specnb.effect_size(P, P) == 0


def test_power_without_an_effect_is_the_level():
    assert power(0.0, 10_000, 7, 0.01) == pytest.approx(0.01)
    assert power(math.inf, 1, 7, 0.01) == 1
    assert power(0.5, 100, 0, 0.01) == 0


@pytest.mark.statistical
@pytest.mark.parametrize("n", [400, 800, 1600])
def test_power_is_how_often_the_test_rejects(n):
    """2,000 repetitions against the formula, within 5 standard deviations (6e-7) and 0.01 for its approximation."""
    counts = np.random.default_rng(n).multinomial(n, SKEWED.double().numpy() / float(SKEWED.double().sum()), size=2000)
    found = np.mean([specnb.chi_square(c, P).pvalue < 0.01 for c in counts])
    stated = power(specnb.effect_size(SKEWED, P), n, 2, 0.01)
    tolerance = 5 * math.sqrt(stated * (1 - stated) / 2000) + 0.01
    assert abs(found - stated) < tolerance
    assert abs(found - power(specnb.effect_size(SKEWED, P), n // 2, 2, 0.01)) > tolerance


@pytest.mark.parametrize(("effect", "dof"), [(0.01, 5), (0.1, 35), (0.5, 215)])
def test_the_required_sample_is_the_smallest(effect, dof):
    n = required_sample_size(effect, dof, 1e-6)
    assert power(effect, n, dof, 1e-6) >= 0.99
    assert power(effect, int(0.985 * n) - 1, dof, 1e-6) < 0.99


@pytest.mark.parametrize(
    "arguments", [(0.0, 5, 0.01), (0.1, 0, 0.01), (0.1, 5, 0.0), (0.1, 5, 1.0), (0.1, 5, 0.01, 1.0)]
)
def test_a_sample_size_that_cannot_be_is_refused(arguments):
    with pytest.raises(ValueError, match=r"need|level"):
        required_sample_size(*arguments)


# --- many tests ---


def test_holm_by_hand():
    family = correct([0.01, 0.04, 0.03, 0.005], 0.05)
    assert family.adjusted == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert family.rejected == [True, False, False, True]


def test_the_other_corrections():
    p = [0.01, 0.04, 0.03, 0.005]
    assert correct(p, 0.05, "bonferroni").adjusted == pytest.approx([0.04, 0.16, 0.12, 0.02])
    assert correct(p, 0.05, "benjamini-hochberg").rejected == [True, True, True, True]


@pytest.mark.statistical
def test_holm_keeps_the_level_of_the_family():
    """4,000 families of 10 right tests at 0.05: more than 270 alarms has probability below 1e-6; uncorrected fails."""
    families = np.random.default_rng(0).uniform(size=(4000, 10))
    assert sum(any(correct(p, 0.05).rejected) for p in families) <= 270
    assert sum((p < 0.05).any() for p in families) > 270


@pytest.mark.parametrize(
    ("p", "level", "method"), [([], 0.05, "holm"), ([1.2], 0.05, "holm"), ([0.1], 0.0, "holm"), ([0.1], 0.05, "sidak")]
)
def test_corrections_that_cannot_be_are_refused(p, level, method):
    with pytest.raises(ValueError, match=r"pvalues|level|method"):
        correct(p, level, method)


# --- the audit ---

PAIRS = torch.outer(P, SKEWED).double()
PAIRS /= PAIRS.sum()
WRONG = torch.outer(SKEWED, SKEWED).double()
WRONG /= WRONG.sum()


def test_the_right_sampler_passes_and_a_wrong_one_fails():
    right, wrong = (specnb.audit(sampler_of(law), PAIRS, alternative=WRONG) for law in (PAIRS, WRONG))
    assert right.passed
    assert not wrong.passed
    assert right.n == wrong.n
    assert right.power >= 0.99


def test_the_default_draws_are_about_as_few_as_the_power_needs():
    n = specnb.audit(sampler_of(PAIRS), PAIRS, alternative=WRONG).n
    threshold = 1e-6**1.25
    assert power(specnb.effect_size(WRONG, PAIRS), n, 8, threshold) >= 0.99
    assert power(specnb.effect_size(WRONG, PAIRS), int(0.98 * n), 8, threshold) < 0.99


def test_the_power_of_a_small_audit_is_told():
    result = specnb.audit(sampler_of(WRONG), PAIRS, n=200, alternative=WRONG)
    assert result.passed
    assert result.power < 0.01


def test_a_token_that_cannot_come_fails_and_leads_the_worst_cells():
    law = torch.tensor([[0.5, 0.5], [0.0, 0.0]])
    tokens = draws(law, 1000)
    tokens[7] = torch.tensor([1, 0])
    result = specnb.audit(lambda n, seed: tokens, law, n=1000)
    assert not result.passed
    assert (result.worst[0].tokens, result.worst[0].observed, result.worst[0].expected) == ((1, 0), 1, 0.0)


def test_a_law_of_one_text_can_be_audited():
    law = torch.tensor([0.0, 1.0])
    assert specnb.audit(sampler_of(law), law).passed
    assert not specnb.audit(sampler_of(torch.tensor([0.01, 0.99])), law).passed


def test_a_fault_outside_the_support_needs_few_draws():
    law, fault = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.45, 0.45, 0.1])
    result = specnb.audit(sampler_of(fault), law, alternative=fault)
    assert (result.passed, result.n) == (False, 1000)
    assert result.power > 0.999


def test_the_oracle_may_be_an_object_with_its_law():
    class Oracle:
        probs = PAIRS

    assert repr(specnb.audit(sampler_of(PAIRS), Oracle(), n=2000)) == repr(
        specnb.audit(sampler_of(PAIRS), PAIRS, n=2000)
    )


def test_the_verdict_prints_itself_and_the_seed_decides_it():
    result = specnb.audit(sampler_of(PAIRS), PAIRS, n=2000, seed=3)
    assert repr(result) == repr(specnb.audit(sampler_of(PAIRS), PAIRS, n=2000, seed=3))
    assert repr(result) != repr(specnb.audit(sampler_of(PAIRS), PAIRS, n=2000, seed=4))
    for text in (repr(result), result._repr_html_()):
        for words in ("PASSED", "2,000 draws", "8 degrees of freedom", "power", "total variation", "expected"):
            assert words in text
    assert "FAILED" in repr(specnb.audit(sampler_of(WRONG), PAIRS))


@pytest.mark.parametrize(
    ("sampler", "error", "message"),
    [
        (lambda n, seed: [[0, 0]] * n, TypeError, "LongTensor"),
        (lambda n, seed: torch.zeros(n, 2), TypeError, "float32"),
        (lambda n, seed: torch.zeros(n, 3, dtype=torch.long), ValueError, "first m new tokens"),
        (lambda n, seed: torch.zeros(n - 1, 2, dtype=torch.long), ValueError, r"\[100, 2\]"),
        (lambda n, seed: torch.full((n, 2), 3), ValueError, r"text 0 is \[3, 3\]"),
    ],
)
def test_samples_that_do_not_fit_are_refused(sampler, error, message):
    with pytest.raises(error, match=message):
        specnb.audit(sampler, PAIRS, n=100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alternative": PAIRS}, "own law"),
        ({"alternative": 0.0}, "effect"),
        ({"alternative": 1e-9}, "larger effect"),
        ({"alternative": P}, "one shape"),
        ({"level": 0}, "level"),
    ],
)
def test_an_audit_that_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        specnb.audit(sampler_of(PAIRS), PAIRS, **options)


def true_rate(expected, cells, nominal, step=0.02):
    """How often Σ (O − E)²/E of Poisson counts exceeds chi-square's own bound: its law by convolution, on a grid."""
    observed = np.arange(int(expected + 16 * math.sqrt(expected) + 80))
    one = np.zeros(2**18)
    places = np.round((observed - expected) ** 2 / expected / step).astype(int)
    np.add.at(one, places, scipy_stats.poisson.pmf(observed, expected))
    law = np.fft.irfft(np.fft.rfft(one) ** cells)
    return law[int(scipy_stats.chi2.isf(nominal, cells) / step) :].sum()


@pytest.mark.parametrize("cells", [1, 2, 5, 20, 200])
@pytest.mark.parametrize("level", [0.05, 1e-2, 1e-4, 1e-6, 1e-8])
def test_the_audit_keeps_its_level_in_its_thinnest_cells(level, cells):
    assert true_rate(30, cells, level**1.25) <= level


def test_without_the_stricter_threshold_the_level_would_be_exceeded():
    assert true_rate(30, 5, 1e-6) > 2e-6
    assert true_rate(5, 5, 1e-6) > 2e-5


def test_pytest_does_not_take_the_result_for_a_test():
    assert not TestResult.__test__
