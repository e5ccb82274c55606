"""What is recommended, on machines and with drafters that are made up: the arithmetic, the choice, and its reasons."""

from __future__ import annotations

import math
import re

import pytest
import torch

import specnb
from specnb import CostCurve
from specnb.advice import Candidate, best, better_drafters, bound, listed, outcome, recommend, spoken, withdraw
from specnb.replay import Replay

LENGTHS = (1, 2, 3, 4, 6, 8, 12)
MEMORY_BOUND = CostCurve((1, 16), (50.0, 65.0))  # a position more costs a fiftieth of a pass
COMPUTE_BOUND = CostCurve((1, 16), (50.0, 800.0))  # each position costs as much as the first
LOOKUP = "specnb.PromptLookup(num_draft_tokens={k})"


def tried(alpha: float, found: float = 1.0, places: int = 600, seed: int = 0, **times) -> Replay:
    """A drafter that has a guess in the share ``found`` of the places, and is right with probability α, each time."""
    generator = torch.Generator().manual_seed(seed)
    right = (torch.rand(places, 40, generator=generator) < alpha).long().cumprod(dim=1).sum(dim=1)
    has_one = (torch.rand(places, generator=generator) < found).long()
    return Replay(tuple((40 * has_one).tolist()), tuple((right * has_one).tolist()), **times)


def candidate(**replays: Replay) -> Candidate:
    return Candidate("prompt lookup", LOOKUP, "", tuple(replays.items()))


def advised(cost: CostCurve, drafter: Candidate):
    return recommend([outcome(drafter, k, cost) for k in LENGTHS], cost)


# --- the arithmetic ---


def test_an_outcome_by_hand():
    """Seven tokens. With k = 2 the rounds are (2, 2), (2, 0), (0, 0), (1, 1): 3 + 1 + 1 + 2 tokens."""
    replay = Replay((2, 9, 9, 3, 0, 5, 9), (2, 0, 0, 0, 0, 4, 1), start_ms=4.0, call_ms=1.0)
    cost = CostCurve((1, 2, 3), (10.0, 12.0, 20.0))
    found = outcome(candidate(a=replay), 2, cost, loop_ms=1.0)
    assert replay.rounds(2) == [(2, 2), (2, 0), (0, 0), (1, 1)]
    ms = 4 + (20 + 1 + 1) + (20 + 1 + 1) + (10 + 1) + (12 + 1 + 1)
    assert found.speedup == pytest.approx(7 * 11 / ms)
    assert found.tokens_per_round == 7 / 4
    assert found.round_cost == pytest.approx(ms / 4 / 11)
    assert found.tokens_per_round / found.round_cost == pytest.approx(found.speedup)
    assert found.alpha == 3 / 4  # three accepted, one turned down
    assert found.step_cost == pytest.approx(1.0 / 2 / 10)
    assert found.by_group == {"a": pytest.approx(found.speedup)}


@pytest.mark.parametrize("cost", [MEMORY_BOUND, COMPUTE_BOUND], ids=["memory", "compute"])
@pytest.mark.parametrize(("alpha", "k"), [(0.3, 1), (0.7, 4), (0.9, 8)])
def test_a_drafter_that_always_drafts_brings_what_the_closed_form_says(alpha, k, cost):
    c = 0.1
    drafter = candidate(a=tried(alpha, places=60_000, call_ms=c * cost(1), per_token=True))
    found = outcome(drafter, k, cost)
    assert found.speedup == pytest.approx(specnb.speedup(alpha, k, c, cost), rel=0.02)
    assert found.alpha == pytest.approx(alpha, abs=0.01)
    assert found.step_cost == pytest.approx(c)


def test_groups_are_told_apart_and_weighed_by_their_time():
    good, bad = tried(1.0, places=100), tried(0.0, places=300)
    found = outcome(candidate(good=good, bad=bad), 4, MEMORY_BOUND)
    alone = {name: outcome(candidate(x=one), 4, MEMORY_BOUND).speedup for name, one in (("good", good), ("bad", bad))}
    assert found.by_group == pytest.approx(alone)
    assert 1 / found.speedup == pytest.approx(0.25 / alone["good"] + 0.75 / alone["bad"])


def test_of_equally_good_lengths_the_shortest_is_taken():
    cost = CostCurve.free(50.0)
    outcomes = [outcome(candidate(a=tried(0.5, places=4000)), k, cost) for k in (2, 8, 12)]
    assert outcomes[2].speedup >= outcomes[1].speedup > 1.1 * outcomes[0].speedup
    assert best(outcomes).k == 8


# --- the choice ---


def test_where_memory_is_the_limit_a_good_drafter_is_used():
    answer = advised(MEMORY_BOUND, candidate(a=tried(0.7)))
    assert answer.verdict == "use"
    assert answer.outcome.k >= 3
    assert answer.outcome.speedup > 2
    assert f"k = {answer.outcome.k}" in answer.headline
    assert "reading the weights takes most of the time" in answer.reasons[0]
    assert f"{answer.outcome.tokens_per_round:.2f} / {answer.outcome.round_cost:.2f}" in answer.reasons[1]


def test_where_arithmetic_is_the_limit_nothing_is_used():
    answer = advised(COMPUTE_BOUND, candidate(a=tried(0.7)))
    assert answer.verdict == "do not use"
    assert answer.headline.startswith("Do not use")
    assert "arithmetic takes most of the time" in answer.reasons[0]
    assert "limited by arithmetic here, not by memory" in answer.reasons[1]
    assert "drafter" not in answer.code


def test_a_drafter_that_is_seldom_right_is_to_blame_itself():
    answer = advised(MEMORY_BOUND, candidate(a=tried(0.01)))
    assert answer.verdict == "do not use"
    assert "reading the weights takes most of the time" in answer.reasons[0]
    assert not any("limited by arithmetic" in reason for reason in answer.reasons)
    assert "to break even; it was right 1% of the time" in answer.reasons[-1]


def test_a_drafter_that_finds_nothing_is_told_so():
    answer = advised(MEMORY_BOUND, candidate(a=tried(0.9, found=0.0)))
    assert answer.verdict == "do not use"
    assert math.isnan(answer.outcome.alpha)
    assert answer.outcome.speedup == pytest.approx(1.0)
    assert answer.reasons[-1].endswith("it found nothing to draft.")


def test_a_slow_drafter_is_told_so():
    answer = advised(MEMORY_BOUND, candidate(a=tried(0.9, call_ms=120.0, per_token=True)))
    assert answer.verdict == "do not use"
    assert "Drafting itself takes so long" in answer.reasons[-1]


def test_kinds_of_prompts_that_lose_are_left_out():
    answer = advised(CostCurve((1, 2, 13), (50.0, 60.0, 80.0)), candidate(copies=tried(0.9), open_story=tried(0.0)))
    assert answer.verdict == "use"
    assert answer.groups == ("open_story",)
    assert "Leave it out for open story prompts" in answer.headline
    assert "most with copies" in answer.reasons[-2]
    wrapped = re.search(r"drafter = (.*) chooses anew in every round", answer.reasons[-1]).group(1)
    assert isinstance(eval(wrapped, {"specnb": specnb}), specnb.Adaptive)


def test_where_only_some_kinds_gain_these_are_named():
    story = {f"story_{i}": tried(0.0, seed=i) for i in range(3)}
    cost = CostCurve((1, 2, 13), (50.0, 70.0, 90.0))
    answer = advised(cost, candidate(copies=tried(0.9, places=200), **story))
    assert answer.verdict == "use for some"
    assert answer.groups == ("copies",)
    assert "only for copies prompts" in answer.headline
    assert answer.outcome.by_group["copies"] > 1.15


def test_where_no_kind_loses_one_length_will_do():
    answer = advised(MEMORY_BOUND, candidate(a=tried(0.7), b=tried(0.6)))
    assert not any("Adaptive" in reason for reason in answer.reasons)


def test_a_recommendation_can_be_taken_back():
    answer = advised(MEMORY_BOUND, candidate(a=tried(0.7)))
    taken_back = withdraw(answer, 0.9)
    assert taken_back.verdict == "do not use"
    assert f"should have been {answer.outcome.speedup:.2f} times as fast" in taken_back.headline
    assert "(0.90 times as fast)" in taken_back.headline
    assert "drafter" not in taken_back.code


def test_with_nothing_tried_the_passes_still_speak():
    assert recommend([], MEMORY_BOUND).reasons[0].startswith("A pass over 5 positions takes 1.08 times")
    answer = recommend([], COMPUTE_BOUND)
    assert (answer.verdict, answer.outcome) == ("do not use", None)
    assert len(answer.reasons) == 2


@pytest.mark.parametrize("cost", [MEMORY_BOUND, COMPUTE_BOUND], ids=["memory", "compute"])
def test_the_code_runs_as_it_stands(llama, cost):
    names = {"specnb": specnb, "model": llama, "input_ids": torch.tensor([[1, 2, 3, 1, 2]])}
    drafter = Candidate("prompt lookup", LOOKUP, "before = 1", (("a", tried(0.8)),))
    answer = advised(cost, drafter)
    exec(answer.code, names)
    assert names["out"].stats.emitted.item() > 0
    assert ("before" in names) == (answer.verdict == "use")


def test_the_bound_is_where_a_position_costs_half_its_price():
    assert bound(CostCurve((1, 9), (1.0, 4.9)), 9) == "memory"
    assert bound(CostCurve((1, 9), (1.0, 5.1)), 9) == "compute"


def test_hopes_grow_with_alpha_and_vanish_where_positions_cost_their_price():
    hopes = better_drafters(MEMORY_BOUND)
    assert [alpha for alpha, _, _ in hopes] == [0.5, 0.7, 0.9]
    assert 1 < hopes[0][2] < hopes[1][2] < hopes[2][2]
    assert [k for _, k, _ in better_drafters(COMPUTE_BOUND)] == [0, 0, 0]


def test_names_become_words():
    assert spoken("copy_heavy_summary") == "copy heavy summary"
    assert spoken("") == "prompts of no group"
    assert [listed(["a"]), listed(["a", "b_c"]), listed(["a", "b", "c"])] == ["a", "a and b c", "a, b and c"]
