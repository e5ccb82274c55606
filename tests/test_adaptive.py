"""The adaptive draft length: in a world where what is best is known, and in the loop, whose text must not change."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

import specnb
from specnb import Adaptive, CostCurve, best_draft_length, speedup
from specnb.estimates import Acceptance, RoundCosts, Times
from tests.conftest import adaptive
from tests.tiny import perturbed, prompt, tiny_model
from tests.world import Clock, Model, Oracle, Paced, Timed, play

TEXT = [random.Random(7).randrange(1000) for _ in range(4000)]


def flat(size: int) -> float:
    return 1.0 + 0.01 * (size - 1)


def steep(size: int) -> float:
    return 1.0 + 0.12 * (size - 1)


def world(alpha, *, tokens=1500, k=8, c=0.0, cost=flat, kind=None, rows=1, given=None, **options):
    """Play one text (or several) with an adaptive drafter whose guesses are right with chance alpha(row, place)."""
    clock, texts = Clock(), [TEXT[:tokens]] * rows
    chance = alpha if callable(alpha) else lambda b, place: alpha
    drafter = Adaptive(Timed(Oracle(k, texts, chance, kind), clock, c), clock=clock, **(given or {}))
    return drafter, play(drafter, texts, clock, cost, **options)


def curve(cost, widest=17) -> CostCurve:
    return CostCurve(tuple(range(1, widest + 1)), tuple(1000 * cost(T) for T in range(1, widest + 1)))


# --- what it chooses ---


@pytest.mark.parametrize("c", [0.0, 0.05, 0.3, 1.0])
@pytest.mark.parametrize("cost", [flat, steep])
def test_an_always_wrong_drafter_ends_at_0_for_next_to_nothing(c, cost):
    _, played = world(0.0, c=c, cost=cost)
    assert played.seconds <= 1.02 * 1500
    drafted = sum(k > 0 for k in played.longest[750:])
    assert drafted <= 0.05 * 750
    spent = sum(cost(1 + k) - 1 + c * k for k in played.longest[100:])
    assert spent <= 0.015 * 1400


@pytest.mark.parametrize("c", [0.0, 0.1, 0.3])
def test_a_copy_of_the_target_that_is_cheaper_goes_to_the_longest_draft(c):
    _, played = world(1.0, c=c)
    last = played.longest[-80:-1]
    assert Counter(last).most_common(1)[0][0] == 8
    assert sum(k == 8 for k in last) >= len(last) - 2  # but for a look at a plain pass now and then


def test_a_copy_as_costly_as_the_target_ends_at_0():
    _, played = world(1.0, c=1.0, cost=lambda size: 1.0 + 0.03 * (size - 1))
    assert sum(played.longest[100:]) <= 0.05 * 1400
    assert played.seconds <= 1.02 * 1500


@pytest.mark.parametrize("cost", [flat, steep])
@pytest.mark.parametrize("c", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.8, 0.95])
def test_its_pace_is_within_a_few_percent_of_the_best_fixed_length(alpha, c, cost):
    _, played = world(alpha, c=c, cost=cost, tokens=3000)
    k = best_draft_length(alpha, c, 8, curve(cost))
    assert 3000 / played.seconds >= 0.93 * speedup(alpha, k, c, curve(cost))


@pytest.mark.parametrize("c", [0.0, 0.1])
def test_a_text_that_turns_is_followed_both_ways(c):
    turns = {range(600, 1800): 0.95}
    _, played = world(
        lambda b, place: next((a for places, a in turns.items() if place in places), 0.0), c=c, tokens=2400
    )
    before, during, after = (played.rounds_from(*places) for places in ((0, 600), (600, 1800), (1800, 2400)))

    def spent_on_drafts(rounds):
        return sum(flat(1 + k) - 1 + c * k for k in (played.longest[i] for i in rounds))

    assert spent_on_drafts(before[100:]) <= 0.015 * 500
    assert sum(played.longest[i] == 0 for i in during) <= 80  # seen within one wait of the retries
    assert Counter(played.longest[i] for i in during[-100:]).most_common(1)[0][0] == 8
    assert spent_on_drafts(after) <= 0.03 * 600 > 0.5 * 600 * 0.015 >= spent_on_drafts(after[300:])


def test_withheld_proposals_show_for_free_that_the_text_has_turned():
    """Drafting is free and passes are steep: nothing is sent while guesses are wrong, and the turn is seen at once."""
    drafter, played = world(lambda b, place: float(place >= 500), tokens=900, cost=steep)
    wrong, right = played.rounds_from(100, 495), played.rounds_from(500, 900)
    assert sum(played.longest[i] for i in wrong) == 0
    assert sum(played.longest[i] == 0 for i in right) <= 12
    assert drafter.retry.count == 0


def test_kinds_of_guesses_are_told_apart():
    """Sevens are right, ones are wrong: sevens are sent at full length, ones withheld."""
    drafter, played = world(
        lambda b, place: float(place % 40 >= 20),
        kind=lambda b, place: 7 if place % 40 >= 20 else 1,
        cost=steep,
        tokens=1200,
    )
    ones = [i for start in range(400, 1200, 40) for i in played.rounds_from(start, start + 20)]
    sevens = [i for start in range(400, 1200, 40) for i in played.rounds_from(start + 20, start + 21)]
    assert sum(played.longest[i] > 0 for i in ones) <= 0.02 * len(ones)
    assert all(played.longest[i] == 8 for i in sevens[:-1])
    summary = drafter.summary()
    assert summary.acceptance[7][0] > 0.9 > 0.1 > summary.acceptance[1][0]


@pytest.mark.parametrize("first", [0, 1, 2, 3, 4])
def test_a_slow_first_pass_of_any_width_misleads_for_a_moment_only(first):
    def hiccup(i):
        return 20.0 if i == first else 1.0

    for alpha, c, k in ((1.0, 0.1, 8), (0.0, 0.1, 0), (1.0, 0.0, 8)):
        _, played = world(alpha, c=c, tokens=600, hiccup=hiccup)
        assert Counter(played.longest[30:]).most_common(1)[0][0] == k


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_hiccups_of_a_busy_machine_change_little(alpha):
    rng = random.Random(3)
    slow = [1.0 + 9.0 * (rng.random() < 0.05) for _ in range(3000)]
    _, calm = world(alpha, c=0.1)
    _, busy = world(alpha, c=0.1, hiccup=lambda i: slow[i])
    assert nominal(busy) <= 1.03 * nominal(calm)


def nominal(played, c=0.1):
    """What the rounds would have taken on a machine with nothing else to do."""
    return sum(flat(1 + k) + c * k for k in played.longest)


@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.0])
def test_a_machine_that_slows_down_as_a_whole_changes_little(alpha):
    _, calm = world(alpha, c=0.1, tokens=2000)
    _, busy = world(alpha, c=0.1, tokens=2000, busy=lambda i: 3.0 if i // 150 % 2 else 1.0)
    assert nominal(busy) <= 1.03 * nominal(calm)


def test_costs_that_do_not_rise_with_width_are_learned():
    """Passes over 2 to 5 positions take longer than one over 9: a draft of 8 is better than one of 3."""

    def odd(size):
        return 1.6 if 2 <= size <= 5 else 1.05

    _, played = world(0.9, c=0.01, cost=odd)
    assert Counter(played.longest[100:]).most_common(1)[0][0] >= 5


def test_one_width_for_all_passes_is_filled_up_to_the_loops_limit():
    _, played = world(0.3, k=10, c=0.0, cost=lambda size: 1.0, limit=7, tokens=600)
    assert Counter(played.longest[20:]).most_common(1)[0][0] == 7
    assert all(planned is None or max(planned) <= 7 for planned in played.planned)


def test_rows_share_the_width_and_are_told_apart():
    """A good row and a hopeless one: the pass is as wide as pays for both together."""
    _, good = world(lambda b, place: float(b == 0), rows=2, cost=lambda size: 1.0 + 0.02 * (size - 2), tokens=800)
    assert Counter(good.longest[30:80]).most_common(1)[0][0] == 8
    _, bad = world(0.0, rows=3, cost=lambda size: 1.0 + 0.05 * (size - 3), tokens=800)
    assert sum(k > 0 for k in bad.longest[100:]) <= 0.05 * 700
    assert bad.seconds <= 1.02 * 800


def test_costs_that_are_known_need_no_first_look():
    _, played = world(1.0, c=0.05, tokens=400, given=dict(costs=curve(flat), c=0.05))
    assert played.longest[0] >= 4
    assert sum(k == 0 for k in played.longest[:-1]) <= 3


def test_what_was_learned_of_costs_and_drafter_serves_the_next_run():
    clock, texts = Clock(), [TEXT[:500]]
    drafter = Adaptive(Timed(Oracle(8, texts, lambda b, place: 0.0), clock, 0.1), clock=clock)
    first, second = play(drafter, texts, clock, flat), play(drafter, texts, clock, flat)
    assert sum(map(bool, second.longest)) < sum(map(bool, first.longest))
    other = play(drafter, texts, clock, flat, model=Model())  # another target: all is new
    assert other.longest == first.longest
    drafter.forget()
    assert play(drafter, texts, clock, flat).longest == first.longest


# --- why the text stays the target's ---


@pytest.mark.parametrize("c", [0.0, 0.2])
def test_a_choice_depends_on_the_past_only(c):
    """Two texts that part at a place: up to the round that meets it, the choices are the same."""
    parting = 300
    other = TEXT[:parting] + [token + 500 for token in TEXT[parting:600]]
    clocks, runs = (Clock(), Clock()), []
    for clock, text in zip(clocks, (TEXT[:600], other)):
        guesses = Oracle(8, [TEXT[:600]], lambda b, place: float(place % 7 > 1))
        runs.append(play(Adaptive(Timed(guesses, clock, c), clock=clock), [text], clock, flat))
    rounds = runs[0].rounds_from(0, parting)
    assert [runs[0].planned[i] for i in rounds] == [runs[1].planned[i] for i in rounds]
    assert runs[0].planned != runs[1].planned


def test_a_drawn_draft_is_as_long_as_was_planned_before_the_draw(llama):
    drafter = Adaptive(Paced(specnb.DraftModel(perturbed(llama), 4), 0.2))
    drafter.clock = drafter.drafter.clock
    out = specnb.generate(
        llama, prompt(), drafter, do_sample=True, seed=1, max_new_tokens=80, return_trace="probs", top_k=20
    )
    lengths = {r.planned for r in out.trace}
    assert len(lengths) > 2
    assert all(len(r.drafted) == (r.planned or 0) for r in out.trace)
    assert all(r.q is not None for r in out.trace if r.planned)


@pytest.mark.statistical
def test_an_adaptive_draft_model_follows_the_targets_law(llama):
    """2,000 rows at 1e-6; the law at another temperature must fail. (The lookup is among the loop's own tests.)"""
    options = dict(do_sample=True, top_k=0, temperature=0.5)
    model = tiny_model(vocab_size=7, num_hidden_layers=1, initializer_range=0.15, seed=2)
    drafter, ids = adaptive(specnb.DraftModel(perturbed(model, 1.0), 3), 0.1), torch.tensor([[1, 2, 3, 1, 2]])

    torch.manual_seed(0)
    specnb.generate(model, ids.expand(8, -1), drafter, max_new_tokens=12, **options)  # learns what drafts are worth
    out = specnb.generate(model, ids.expand(2000, -1), drafter, max_new_tokens=4, return_trace=True, **options)
    assert Counter(r.planned for r in out.trace)[3] >= 2000  # rows with room for them drafted three tokens
    laws = [specnb.exact_law(model, ids, 2, **{**options, "temperature": T}) for T in (0.5, 0.8)]
    right, wrong = (specnb.audit(lambda n, seed: out.sequences[:, 5:7], law, n=2000, level=1e-6) for law in laws)
    assert right.passed, right
    assert not wrong.passed


class FreeAndDrawn(specnb.Drafter):
    """Costs nothing and draws: it is asked for all it has, and none of it may be cut off after the draw."""

    def draft(self, rows, limits):
        draft = specnb.Draft.from_lists([[3] * n for n in limits])
        q = torch.zeros(*draft.tokens.shape, 1000)
        q[..., 3] = 1.0
        return specnb.Draft(draft.tokens, draft.lengths, q, kinds=[1] * len(limits))


def test_a_free_drawn_draft_is_not_cut():
    clock = Clock()
    drafter = Adaptive(FreeAndDrawn(6), c=0.0, costs=curve(steep), clock=clock)
    texts = [[3 if n % 5 else 4 for n in range(300)]]
    played = play(drafter, texts, clock, steep)
    assert all(sent == planned for sent, planned in zip(played.sent, played.planned) if planned is not None)


# --- in the loop ---


@pytest.mark.parametrize("inner", ["lookup", "copy", "perturbed"])
@pytest.mark.parametrize("options", [{}, {"pass_width": 8}], ids=["any width", "one width"])
def test_real_times_do_not_change_the_text(llama, inner, options):
    drafters = {
        "lookup": lambda: specnb.PromptLookup(),
        "copy": lambda: specnb.DraftModel(llama),
        "perturbed": lambda: specnb.DraftModel(perturbed(llama), 3),
    }
    ids = torch.cat([prompt(12), prompt(12, seed=4)])
    plain = specnb.generate(llama, ids, max_new_tokens=40, **options)
    out = specnb.generate(llama, ids, Adaptive(drafters[inner]()), max_new_tokens=40, return_trace=True, **options)
    assert out.sequences.tolist() == plain.sequences.tolist()
    assert any(r.planned is not None for r in out.trace)


def test_its_choices_are_in_the_trace(llama):
    drafter = adaptive(specnb.DraftModel(llama), 0.1)
    out = specnb.generate(llama, prompt(), drafter, max_new_tokens=60, return_trace=True)
    # a pass that also reads the prompt, a plain pass, a look at what drafting costs, a plain pass
    assert [r.planned for r in out.trace[:4]] == [0, 0, 1, 0]
    assert max(r.planned or 0 for r in out.trace) == 4
    assert all(len(r.drafted) <= (r.planned or 0) for r in out.trace)
    chosen = Counter(r.planned for r in out.trace if r.planned is not None)
    assert sum(drafter.summary().chosen.values()) == sum(chosen.values())
    fixed = specnb.generate(llama, prompt(), specnb.PromptLookup(), max_new_tokens=8, return_trace=True)
    assert {r.planned for r in fixed.trace} == {None}


def test_a_seed_and_a_clock_reproduce_a_batch(llama):
    ids = torch.cat([prompt(12), prompt(12, seed=4)])
    runs = [
        specnb.generate(llama, ids, adaptive(specnb.DraftModel(perturbed(llama), 3), 0.2), max_new_tokens=30,
                        do_sample=True, seed=3, return_trace=True)
        for _ in range(2)
    ]  # fmt: skip
    assert runs[0].sequences.tolist() == runs[1].sequences.tolist()
    assert [r.planned for r in runs[0].trace] == [r.planned for r in runs[1].trace]


def test_rows_of_a_batcher_join_and_leave(llama):
    prompts = [prompt(12, seed=seed)[0].tolist() for seed in range(4)]
    drafter = adaptive(specnb.PromptLookup(), 0.0)
    with specnb.Batcher(llama, drafter, max_batch=2, max_new_tokens=12) as batcher:
        jobs = [batcher.submit(ids) for ids in prompts]
        batcher.run()
    for ids, job in zip(prompts, jobs):
        alone = specnb.generate(llama, torch.tensor([ids]), max_new_tokens=12)
        assert job.result().tokens == alone.sequences[0, 12:].tolist()


def test_the_account_is_readable(llama):
    drafter = adaptive(specnb.PromptLookup(), 0.0)
    assert repr(drafter) == "Adaptive(Paced, up to 10 tokens; 0 rounds)"
    assert drafter.summary().costs is None
    specnb.generate(llama, prompt(30), drafter, max_new_tokens=60)
    summary = drafter.summary()
    assert summary.asks_first and sum(summary.chosen.values()) > 20
    assert summary.costs(1) >= 1000
    text = repr(summary)
    for words in ("chosen k: rounds", "acceptance, kind 1", "pass ", "drafting, passes"):
        assert words in text


class Garbage(specnb.Drafter):
    def __init__(self, answer):
        super().__init__(3)
        self.answer = answer

    def draft(self, rows, limits):
        return self.answer


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ([[1]], "must return a specnb.Draft"),
        (specnb.Draft(torch.tensor([[1], [1]]), torch.tensor([1, 1])), "must have 1 rows"),
        (specnb.Draft(torch.tensor([[1]]), torch.tensor([1.0])), "whole numbers"),
        (specnb.Draft(torch.tensor([[1]]), torch.tensor([-1])), "lengths from 0 to K"),
        (specnb.Draft(torch.tensor([[10**6]]), torch.tensor([1])), "vocabulary"),
        (specnb.Draft(torch.tensor([[1]]), torch.tensor([1]), kinds=[1, 2]), "kinds must be one number per row"),
    ],
)
def test_a_wrong_draft_is_told_as_without_it(llama, answer, error):
    with pytest.raises((ValueError, TypeError), match=error):
        specnb.generate(llama, prompt(), Adaptive(Garbage(answer)), max_new_tokens=20)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Adaptive(None), "wraps a drafter"),
        (lambda: Adaptive(Adaptive(specnb.PromptLookup())), "not adaptive itself"),
        (lambda: Adaptive("lookup"), "must be a specnb.Drafter"),
        (lambda: Adaptive(specnb.PromptLookup(), costs=[1, 2]), "must be a specnb.CostCurve"),
        (lambda: Adaptive(specnb.PromptLookup(), c=-0.1), "at least 0"),
        (lambda: Adaptive(specnb.PromptLookup(), clock=3.0), "clock must be a function"),
    ],
)
def test_nonsense_is_refused(make, error):
    with pytest.raises((ValueError, TypeError), match=error):
        make()


# --- the estimators ---


def test_a_single_slow_time_is_not_believed():
    times = Times([5.0])
    assert times.believed(2.0) == 2.0
    assert Times([1.0]).believed(2.0) == 1.0
    times.add(4.0)
    assert times.believed(2.0) == 4.0  # the lower of two
    for _ in range(20):
        times.add(3.0)
    assert times.median == 3.0 and len(times) == Times.LATEST


def test_sizes_between_and_beyond_those_seen():
    costs = RoundCosts()
    for size, ms in ((1, 10.0), (1, 10.0), (5, 12.0), (5, 12.0)):
        costs.add_pass(size, ms)
    assert costs.milliseconds([1, 3, 5]) == pytest.approx([10, 11, 12])
    assert costs.milliseconds([7])[0] == pytest.approx(12 + 2 * costs.SLOPE * 10)
    assert costs.relative([2, 4, 6]) == pytest.approx([1, costs.milliseconds([4])[0] / 10.5, 12.3 / 10.5])
    assert costs.curve().positions == (1, 5)


def test_a_drift_of_the_machine_is_not_taken_for_a_difference_of_sizes():
    costs = RoundCosts()
    for _ in range(5):
        costs.add_pass(1, 10.0)
        costs.add_pass(9, 15.0)
    for _ in range(40):
        costs.add_pass(1, 30.0)  # only plain passes while the machine is three times slower
    assert costs.relative(range(1, 10))[8] == pytest.approx(1.5)
    assert costs.drift == pytest.approx(3.0)


def test_a_size_thought_slow_is_tried_again_in_the_end():
    costs = RoundCosts()
    for size, ms in ((1, 10.0), (1, 10.0), (9, 90.0), (9, 90.0)):
        costs.add_pass(size, ms)
    assert costs.relative(range(1, 10))[8] == 9.0
    for _ in range(2 * costs.STALE):
        costs.add_pass(1, 10.0)
    assert costs.relative(range(1, 10))[8] < 1.5


def test_known_costs_stand_until_times_replace_them():
    costs = RoundCosts(CostCurve((1, 9), (10.0, 20.0)), c=0.2, longest=8)
    assert costs.relative(range(1, 10))[8] == 2.0
    assert costs.drafts_up_to(8) == pytest.approx([0.2 * k for k in range(9)])
    assert costs.drafting() == 0.2
    for _ in range(9):
        costs.add_pass(9, 30.0)
        costs.add_pass(1, 10.0)
        costs.add_draft(8, 40.0)
    assert costs.relative(range(1, 10))[8] == pytest.approx(3.0)
    assert costs.drafts_up_to(8)[8] == pytest.approx(4.0)


def test_clocks_that_stand_still_divide_nothing_by_0():
    costs = RoundCosts()
    for size in (1, 1, 4, 4):
        costs.add_pass(size, 0.0)
        costs.add_draft(3, 0.0)
    assert costs.relative(range(1, 5)) == [1.0] * 4
    assert costs.drafting() == 1.0


def test_chances_of_a_row_begin_with_those_of_all():
    acceptance = Acceptance(2)
    assert acceptance.of(0, None, 3) == [Acceptance.FIRST_GUESS] * 3
    for _ in range(200):
        acceptance.learn(0, None, 0, True)
        acceptance.learn(0, None, 1, False)
    first, second, third = acceptance.of(1, None, 3)
    assert first > 0.9 > 0.1 > second == third  # beyond what was reached: as the position before
    for _ in range(20):
        acceptance.learn(1, None, 0, False)
    assert acceptance.of(1, None, 1)[0] < 0.3 < 0.8 < acceptance.of(0, None, 1)[0]


def test_a_bad_start_of_a_position_nobody_tries_again_is_forgotten():
    acceptance = Acceptance(1)
    for _ in range(30):
        acceptance.learn(0, None, 0, True)
    acceptance.learn(0, None, 1, False)
    known = acceptance.of(0, None, 2)
    for _ in range(150):
        acceptance.missed(0, None, 1)
    first, second = acceptance.of(0, None, 2)
    assert first == known[0] > 0.9
    assert second > 0.9 > 0.7 > known[1]


def test_in_a_packed_pass_each_row_has_a_length_of_its_own():
    """Row 0 is guessed right, row 1 wrong, and every position costs: only guesses of row 0 are sent, all of them."""

    def by_size(size):
        return 1.0 + 0.2 * (size - 1)

    options = dict(rows=2, cost=by_size, tokens=600)
    _, packed = world(lambda b, place: float(b == 0), size_of=lambda n: n, **options)
    both = [sent for sent, grown in zip(packed.sent, packed.grown) if all(grown)][30:]
    assert sum(first == 8 for first, _ in both) >= 0.9 * len(both) > 20
    assert sum(second for _, second in both) <= 0.05 * len(both)
    _, wide = world(lambda b, place: float(b == 0), **options)
    assert packed.seconds <= 0.9 * wide.seconds
