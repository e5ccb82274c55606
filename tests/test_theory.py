"""The closed forms: against enumeration, against numerical sums, and against the tables of the paper they come from."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specnb
from specnb import CostCurve, best_draft_length, break_even_alpha, expected_tokens, speedup, tokens_per_round_law
from specnb.profiling import PassCost
from specnb.theory import operations_factor, round_cost

# Leviathan et al. 2023 (arXiv 2211.17192), table 4: T5-XXL with T5 small, base and large as drafts.
# (task, draft, temperature, k, α, c, predicted, measured)
T5_XXL = [
    ("EnDe", "small", 0, 7, 0.75, 0.02, 3.2, 3.4),
    ("EnDe", "base", 0, 7, 0.80, 0.04, 3.3, 2.8),
    ("EnDe", "large", 0, 7, 0.82, 0.11, 2.5, 1.7),
    ("EnDe", "small", 1, 7, 0.62, 0.02, 2.3, 2.6),
    ("EnDe", "base", 1, 5, 0.68, 0.04, 2.4, 2.4),
    ("EnDe", "large", 1, 3, 0.71, 0.11, 2.0, 1.4),
    ("CNNDM", "small", 0, 5, 0.65, 0.02, 2.4, 3.1),
    ("CNNDM", "base", 0, 5, 0.73, 0.04, 2.6, 3.0),
    ("CNNDM", "large", 0, 3, 0.74, 0.11, 2.0, 2.2),
    ("CNNDM", "small", 1, 5, 0.53, 0.02, 1.9, 2.3),
    ("CNNDM", "base", 1, 3, 0.55, 0.04, 1.8, 2.2),
    ("CNNDM", "large", 1, 3, 0.56, 0.11, 1.6, 1.7),
]


@pytest.mark.parametrize("row", T5_XXL, ids=lambda row: f"{row[0]}-{row[1]}-{row[2]}")
def test_predictions_of_the_first_paper(row):
    """The printed prediction follows from the printed α and c, as far as their two digits go."""
    *_, k, alpha, c, predicted, _ = row
    low, high = speedup(alpha - 0.005, k, c + 0.005), speedup(alpha + 0.005, k, c - 0.005)
    assert high < 1.15 * low  # narrow enough to mean something
    assert low - 0.05 <= predicted <= high + 0.05


def test_most_predictions_of_the_first_paper_agree_to_the_last_printed_digit():
    same = [f"{speedup(alpha, k, c):.1f}" == f"{predicted:.1f}" for *_, k, alpha, c, predicted, _ in T5_XXL]
    assert sum(same) == 9  # the other three hang on the third digit of α and c


# table 1 of the same paper: α, k, arithmetic, speed, both against plain decoding, with a free draft
@pytest.mark.parametrize(
    ("alpha", "k", "operations", "speed"),
    [(0.6, 2, 1.53, 1.96), (0.7, 3, 1.58, 2.53), (0.8, 2, 1.23, 2.44), (0.8, 5, 1.63, 3.69), (0.9, 2, 1.11, 2.71),
     (0.9, 10, 1.60, 6.86)],
)  # fmt: skip
def test_arithmetic_and_speed_of_the_first_paper(alpha, k, operations, speed):
    assert round(operations_factor(alpha, k), 2) == operations
    assert round(speedup(alpha, k, 0), 2) == speed


@pytest.mark.parametrize(("alpha", "k", "tokens"), [(0.8, 4, 3.36), (0.5, 4, 1.94), (0.8, 8, 4.33)])
def test_numbers_to_know(alpha, k, tokens):
    assert round(expected_tokens(alpha, k), 2) == tokens


def by_enumeration(alphas: list[Fraction]) -> dict[int, Fraction]:
    """The oracle: every outcome of k coins; tokens = passes before the first failure, and one more."""
    law: dict[int, Fraction] = {}
    for outcome in itertools.product([True, False], repeat=len(alphas)):
        chance = math.prod((a if passed else 1 - a) for a, passed in zip(alphas, outcome))
        tokens = 1 + sum(itertools.takewhile(bool, outcome))
        law[tokens] = law.get(tokens, Fraction(0)) + Fraction(chance)
    return law


@pytest.mark.parametrize("alphas", [[], ["1/3"], ["9/10", "1/2", "0"], ["1", "4/5", "2/3", "1/7"], ["1", "1"]])
def test_law_and_mean_against_enumeration(alphas):
    exact = [Fraction(a) for a in alphas]
    law, k = by_enumeration(exact), len(exact)
    expected = [float(law.get(n, 0)) for n in range(1, k + 2)]
    numbers = [float(a) for a in exact]
    assert tokens_per_round_law(numbers, k) == pytest.approx(expected, abs=1e-15)
    assert expected_tokens(numbers, k) == pytest.approx(float(sum(n * p for n, p in law.items())), rel=1e-14)


@settings(deadline=None, max_examples=200)
@given(alpha=st.floats(0, 1), k=st.integers(0, 40))
def test_closed_form_is_the_sum(alpha, k):
    total = math.fsum(alpha**j for j in range(k + 1))
    assert expected_tokens(alpha, k) == pytest.approx(total, rel=1e-13)
    assert expected_tokens([alpha] * k, k) == pytest.approx(total, rel=1e-13)
    law = tokens_per_round_law(alpha, k)
    assert math.fsum(law) == pytest.approx(1, rel=1e-12)
    assert math.fsum(n * p for n, p in enumerate(law, 1)) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("tiny", [1e-3, 1e-8, 1e-12, 1e-15, 2.0**-53])
@pytest.mark.parametrize("k", [1, 10, 1000])
def test_near_one_no_digit_is_lost(tiny, k):
    alpha = 1 - tiny
    exact = sum(Fraction(alpha) ** j for j in range(min(k, 60) + 1))
    assert expected_tokens(alpha, min(k, 60)) == pytest.approx(float(exact), rel=1e-15)
    assert expected_tokens(1, k) == k + 1
    assert expected_tokens(0, k) == 1


def test_acceptance_by_position_may_end_early_or_be_unknown():
    assert expected_tokens([0.5], 3) == 1.5  # beyond the end: nothing is promised
    assert expected_tokens([0.5, math.nan, 0.9], 3) == 1.5
    assert expected_tokens(torch.tensor([0.5, 0.5]), 2) == 1.75
    assert expected_tokens(torch.tensor(0.5), 2) == 1.75  # a tensor without dimensions is one α
    assert best_draft_length([0.9, 0.9], 0.0, 10) == 2  # no further than what was measured


def test_measured_statistics_predict_the_tokens_per_pass(llama):
    """Where every round drafts k tokens, the mean follows from acceptance by position without any assumption."""
    from tests.tiny import perturbed, prompt

    drafter = specnb.DraftModel(perturbed(llama), num_draft_tokens=3)
    out = specnb.generate(llama, prompt(), drafter, max_new_tokens=60, return_trace=True)
    whole = specnb.Stats(1)  # the last round is cut short by max_new_tokens; leave it out
    whole.on_commit([r for r in out.trace if len(r.drafted) == 3][:-1])
    assert expected_tokens(whole.acceptance_by_position, 3) == pytest.approx(float(whole.tokens_per_pass), rel=1e-6)


CURVE = CostCurve((1, 8, 16), (70.0, 77.0, 93.0), context=200, label="float32")


def test_cost_curve_interpolates_and_extrapolates():
    assert [CURVE(T) for T in (1, 2, 8, 12, 16, 20)] == pytest.approx([70, 71, 77, 85, 93, 101])
    assert CURVE.relative(16) == pytest.approx(93 / 70)
    falling = CostCurve((2, 4, 6), (10.0, 12.0, 11.0))
    assert [falling(T) for T in (1, 5, 9)] == [10.0, 11.5, 11.0]  # flat to the left; never falls to the right
    assert {CostCurve.free()(T) for T in (1, 5, 99)} == {1.0}
    assert CostCurve((3,), (5.0,)).relative(64) == 1.0


def test_cost_curve_is_a_value():
    assert repr(CURVE) == "CostCurve(1→70, 8→77, 16→93 ms; float32; context 200)"
    assert CostCurve([1, 8, 16], [70, 77, 93], context=200, label="float32") == CURVE
    assert hash(CURVE) == hash(CostCurve([1, 8, 16], [70, 77, 93], context=200, label="float32"))
    with pytest.raises(AttributeError):
        CURVE.label = "other"


@pytest.mark.parametrize(
    ("positions", "milliseconds", "error"),
    [
        ((), (), "at least one"),
        ((1, 2), (3.0,), "one time per position"),
        ((2, 1), (3.0, 4.0), "must rise"),
        ((1, 1), (3.0, 4.0), "must rise"),
        ((0, 1), (3.0, 4.0), "at least 1"),
        ((1, 2.5), (3.0, 4.0), "whole number"),
        ((1,), (0.0,), "above 0"),
        ((1,), (math.nan,), "above 0"),
        ((1,), (math.inf,), "finite"),
        ((1,), ("3",), "must be a number"),
    ],
)
def test_cost_curve_refuses_nonsense(positions, milliseconds, error):
    with pytest.raises((ValueError, TypeError), match=error):
        CostCurve(positions, milliseconds)


def test_a_pass_has_at_least_one_position():
    with pytest.raises(ValueError, match="at least 1 position"):
        CURVE(0)


def test_speedup_with_and_without_a_measured_curve():
    assert speedup(0.8, 4, 0.1) == pytest.approx(3.3616 / 1.4)
    assert speedup(0.8, 4, 0.1, CostCurve.free(70)) == speedup(0.8, 4, 0.1)
    assert speedup(0.8, 7, 0.1, CURVE) == pytest.approx(expected_tokens(0.8, 7) / (1.1 + 0.7))
    assert speedup(0.8, 0, 0.1, CURVE) == 1.0  # plain decoding against itself


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.3, 0.6, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("c", [0.0, 0.05, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("cost", [None, CURVE], ids=["free", "measured"])
def test_best_draft_length_beats_every_other(alpha, c, cost):
    best = best_draft_length(alpha, c, 12, cost)
    speeds = [speedup(alpha, k, c, cost) for k in range(13)]
    assert speeds[best] == max(speeds)
    assert speeds.index(max(speeds)) == best
    assert (best == 0) == (max(speeds[1:]) <= 1.0)
    if cost is None:
        assert (best > 0) == (alpha > c)  # corollary 3.9 of the paper


@pytest.mark.parametrize("k", [1, 2, 5, 12])
@pytest.mark.parametrize("c", [0.0, 0.02, 0.2, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("cost", [None, CURVE], ids=["free", "measured"])
def test_break_even_is_where_the_speedup_is_one(k, c, cost):
    alpha = break_even_alpha(k, c, cost)
    if alpha == math.inf:
        assert speedup(1, k, c, cost) < 1
    elif alpha == 0:
        assert round_cost(k, c, cost) <= 1
    else:
        assert speedup(alpha, k, c, cost) == pytest.approx(1, rel=1e-12)
        assert speedup(alpha * 0.999, k, c, cost) < 1


def test_break_even_of_one_draft_is_its_cost():
    assert break_even_alpha(1, 0.3) == pytest.approx(0.3)
    assert break_even_alpha(0, 0.3) == 0
    assert break_even_alpha(4, 1.0) == 1.0


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: expected_tokens(1.2, 3), "between 0 and 1"),
        (lambda: expected_tokens(math.nan, 3), "between 0 and 1"),
        (lambda: expected_tokens([0.5, 1.2], 3), r"alpha\[1\]"),
        (lambda: expected_tokens("0.5", 3), "must be a number"),
        (lambda: expected_tokens(True, 3), "must be a number"),
        (lambda: expected_tokens(None, 3), "must be a number"),
        (lambda: expected_tokens(0.5, -1), "at least 0"),
        (lambda: expected_tokens(0.5, 2.0), "whole number"),
        (lambda: speedup(0.5, 2, -0.1), "at least 0"),
        (lambda: speedup(0.5, 2, math.nan), "at least 0"),
        (lambda: speedup(0.5, 2, "0"), "must be a number"),
        (lambda: best_draft_length(0.5, 0.1, -1), "at least 0"),
        (lambda: break_even_alpha(True, 0.1), "whole number"),
    ],
)
def test_nonsense_is_refused(call, error):
    with pytest.raises((ValueError, TypeError), match=error):
        call()


# --- batches ---

ROOF = specnb.CostCurve((1, 16, 1600), (10.0, 10.0, 1000.0))  # memory takes 10 ms, as long as arithmetic for 16


def test_a_batch_gains_its_tokens_while_passes_are_free_and_loses_its_filler_afterwards():
    assert specnb.batch_speedup(3.0, 5, 1, ROOF) == 3.0
    assert specnb.batch_speedup(3.0, 5, 3, ROOF) == 3.0
    assert specnb.batch_speedup(3.0, 5, 300, ROOF) == pytest.approx(3 / 5, rel=0.02)
    assert specnb.batch_speedup(3.0, 5, 1, ROOF, c=0.25) == 1.5
    assert specnb.batch_speedup(2.0, 1, 7, ROOF) == 2.0


def test_the_break_even_is_where_the_speed_up_falls_below_one():
    found = specnb.break_even_batch(3.0, 5, ROOF)
    assert specnb.batch_speedup(3.0, 5, found, ROOF) < 1 <= specnb.batch_speedup(3.0, 5, found - 1, ROOF)
    assert 16 * 3 / 5 <= found <= 16  # v(5B) = 3 v(B), v(B) still flat
    assert specnb.break_even_batch(5.0, 5, ROOF) == specnb.break_even_batch(9, 5, specnb.CostCurve.free()) == math.inf
    assert specnb.break_even_batch(1.0, 5, ROOF, c=0.1) == 1
    assert specnb.break_even_batch(3.0, 5, ROOF, at_most=5) == math.inf


def test_a_curve_of_several_rows_counts_all_their_positions():
    curve = PassCost((1, 4, 400), (10.0, 10.0, 1000.0), batch_size=4)
    for B in (1, 2, 9, 100):
        assert specnb.batch_speedup(3.0, 5, B, curve) == pytest.approx(specnb.batch_speedup(3.0, 5, B, ROOF), rel=1e-6)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (dict(positions=0.5), "at least 1 position"),
        (dict(batch_size=0), "batch_size"),
        (dict(tokens=0.0), "tokens"),
        (dict(c=-1.0), "at least 0"),
    ],
)
def test_batches_that_make_no_sense_are_refused(wrong, match):
    with pytest.raises(ValueError, match=match):
        specnb.batch_speedup(**{"tokens": 2.0, "positions": 3, "batch_size": 2, "cost": ROOF, **wrong})
