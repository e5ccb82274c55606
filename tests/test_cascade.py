"""Cascade: which part drafts is chosen well, its parts stay sound, and rows may use different ones."""

from __future__ import annotations

import random

import pytest
import torch

import specnb
from specnb.drafters.base import Drafter
from tests.conftest import adaptive
from tests.tiny import fresh_logits, perturbed, plain, prompt, tiny_model
from tests.world import Clock, Oracle, play

IDS = prompt(12)
TEXT = [random.Random(7).randrange(1000) for _ in range(4000)]


# --- the choice, in a world where the chances are known ---


class Noted(Oracle):
    """Knows how often it was asked, and for how many guesses."""

    def start(self, session):
        super().start(session)
        self.asked = []

    def draft(self, rows, limits):
        self.asked.append(max(limits))
        return super().draft(rows, limits)


def world(first, second, *, c=0.1, tokens=1500, kind=None, rows=1, slope=0.0, told=None):
    """Write a text with a cascade of two parts that are right with these chances; passes cost 1 and the slope.

    ``told`` is what the cascade believes of it, if that is something else.
    """
    texts, clock = [TEXT[:tokens]] * rows, Clock()
    chances = [alpha if callable(alpha) else lambda b, place, alpha=alpha: alpha for alpha in (first, second)]
    parts = Noted(8, texts, chances[0], kind), Noted(4, texts, chances[1])
    cascade = specnb.Cascade(*parts, c=c, slope=slope if told is None else told)
    played = play(cascade, texts, clock, lambda size: 1.0 + slope * (size - rows))
    return parts, played.seconds + c * sum(parts[1].asked), played


def best_alone(alpha, k, c):
    """Tokens per pass' worth of time with one part alone, at its best number of guesses; 1 if that is none."""
    return specnb.speedup(alpha, specnb.best_draft_length(alpha, c, k), c)


@pytest.mark.parametrize("c", [0.05, 0.15])
@pytest.mark.parametrize("first", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("second", [0.0, 0.7, 1.0])
def test_it_is_as_good_as_the_better_of_its_parts_and_as_none(first, second, c):
    _, seconds, _ = world(first, second, c=c, tokens=1000)
    assert 1000 / seconds >= 0.93 * max(1.0, best_alone(first, 8, 0.0), best_alone(second, 4, c))


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
def test_of_a_free_part_as_many_guesses_are_sent_as_pay(alpha):
    """A pass over 9 positions takes 1.64 of one over a single one: the best number is 0, 3 or 8."""
    _, seconds, _ = world(alpha, 0.0, slope=0.08)
    best = max((1 - alpha ** (k + 1)) / (1 - alpha) / (1 + 0.08 * k) for k in range(9))
    assert 1500 / seconds >= 0.95 * best
    _, blind, _ = world(alpha, 0.0, slope=0.08, told=0.0)
    assert seconds <= (1.02 if alpha == 0.9 else 0.85) * blind


def test_kinds_of_guesses_are_trusted_apart():
    """Sevens are right, ones are wrong: where there are ones, the second part is asked."""

    def sevens(b, place):
        return place % 40 >= 20

    (first, second), seconds, _ = world(
        lambda b, place: float(sevens(b, place)), 0.9, kind=lambda b, place: 7 if sevens(b, place) else 1
    )
    assert len(second.asked) <= 0.72 * len(first.asked)
    _, blind, _ = world(lambda b, place: float(sevens(b, place)), 0.9)
    assert seconds <= 0.75 * blind


def test_a_second_part_that_is_always_wrong_is_hardly_ever_asked():
    (_, second), seconds, _ = world(0.0, 0.0, c=0.2)
    assert sum(second.asked[10:]) * 0.2 <= 0.03 * 1500
    assert seconds <= 1.04 * 1500


def test_a_part_that_becomes_useful_is_found():
    _, seconds, _ = world(0.0, lambda b, place: float(place >= 700), c=0.2)
    assert seconds <= 1.04 * 700 + 1.2 * (1.8 * 800 / 5) + 64


def test_more_guesses_are_asked_for_where_they_pass():
    short, long = (world(0.0, alpha, c=0.3)[0][1].asked for alpha in (0.5, 0.95))
    assert sum(long) / len(long) > 3.5 > 2 > sum(short) / len(short)


def test_rows_have_a_choice_each():
    """The first part is right in row 0 and wrong in row 1."""
    _, _, played = world(lambda b, place: 1.0 - b, 0.95, rows=2, tokens=400)
    assert sum(sent[0] == 8 for sent in played.sent[:40]) >= 38
    assert sum(sent[1] == 4 for sent in played.sent[10:40]) >= 28


# --- its parts ---


class Knowing(Drafter):
    """Knows the text, and says so only at places that ``speaks(place)`` allows."""

    def __init__(self, k, text, speaks):
        super().__init__(k)
        self.text, self.speaks = text, speaks

    def propose(self, context, limit):
        place = len(context)
        return self.text[place : place + limit] if self.speaks(place) else []


@pytest.mark.parametrize("silent", [range(20, 24), range(60, 75), range(100, 300)])
def test_the_second_parts_cache_is_sound_after_rounds_without_it(llama, silent):
    """A copy of the target as second part is always right, however long it has not been asked."""
    text = plain(llama, IDS, max_new_tokens=110)[0].tolist()
    first = Knowing(6, text, lambda place: place not in silent and place < 100)
    out = specnb.generate(
        llama, IDS, specnb.Cascade(first, specnb.DraftModel(llama, 3), c=0.0), max_new_tokens=110, return_trace=True
    )
    assert out.sequences[0].tolist() == text
    assert out.stats.alpha.tolist() == [1.0]
    assert {r.kind for r in out.trace if r.drafted} == {"Knowing", "DraftModel"}


class Reading(specnb.DraftModel):
    """Notes the width of its passes."""

    def start(self, session):
        super().start(session)
        self.widths, hook = [], lambda module, args, kwargs: self.widths.append(kwargs["input_ids"].shape[1])
        self.model.register_forward_pre_hook(hook, with_kwargs=True)


def test_a_part_that_sat_out_long_reads_up_without_scoring_every_token(llama):
    text = plain(llama, IDS, max_new_tokens=110)[0].tolist()
    draft = tiny_model("llama", seed=3)
    second = Reading(draft, 2)
    cascade = specnb.Cascade(Knowing(6, text, lambda place: place < 90), second, c=0.0)
    specnb.generate(llama, IDS, cascade, max_new_tokens=110)
    assert max(second.widths) >= 70  # in one pass, without its last token
    assert second.widths[second.widths.index(max(second.widths)) + 1] == 1


class Watched(specnb.DraftModel):
    """Notes where its first guess of a round is not what its model says after the text."""

    def start(self, session):
        super().start(session)
        self.asked, self.wrong = 0, []

    def draft(self, rows, limits):
        draft = super().draft(rows, limits)
        if int(draft.lengths[0]):
            self.asked += 1
            expected = fresh_logits(self.model, torch.tensor([rows.tokens(0)]))[0, -1].argmax()
            self.wrong += [rows.lengths[0]] if int(expected) != int(draft.tokens[0, 0]) else []
        return draft


def test_guesses_that_were_not_sent_leave_nothing_in_a_parts_cache(llama):
    """The first draft is often wrong, and then what a later one has guessed is written."""
    first, second = Watched(perturbed(llama, 0.15, seed=4), 4), specnb.DraftModel(perturbed(llama, 0.0), 4)
    specnb.generate(llama, prompt(20), specnb.Cascade(first, second, c=0.05), max_new_tokens=100)
    assert first.asked > 5 and first.wrong == []


@pytest.mark.parametrize("seed", [0, 1])
def test_while_a_prompt_is_read_its_row_sits_nothing_out(seed):
    """With a fixed width a long prompt takes ten rounds of its neighbour; then the row drafts as if it were alone."""
    model = tiny_model("llama").double()
    draft, ids = perturbed(model, 0.1).double(), prompt(330, seed=seed)
    options = dict(max_new_tokens=40, do_sample=True, seed=seed)
    cascade = specnb.Cascade(specnb.PromptLookup(5), specnb.DraftModel(draft, 4))
    alone = specnb.generate(model, ids, cascade, pass_width=8, **options).sequences[0, 330:].tolist()
    batcher = specnb.Batcher(model, cascade, max_batch=2, pass_width=8)
    batcher.submit(prompt(9), max_new_tokens=60, do_sample=False)
    job = batcher.submit(ids, **options)
    batcher.run()
    assert job.tokens == alone


def test_a_part_that_is_never_asked_reads_nothing(llama):
    text = plain(llama, IDS, max_new_tokens=30)[0].tolist()
    second = Reading(tiny_model("llama", seed=3), 2)
    specnb.generate(llama, IDS, specnb.Cascade(Knowing(6, text, lambda place: True), second), max_new_tokens=30)
    assert second.widths == [] and second.cache.lengths.tolist() == [0]


def test_three_parts_and_one_of_two_kinds(llama):
    parts = specnb.PromptLookup(4, min_ngram=3), specnb.PromptLookup(3), specnb.DraftModel(perturbed(llama), 2)
    ids = prompt(40)
    drafter = specnb.Cascade(*parts, c=(0.0, 0.1))
    out = specnb.generate(llama, ids, drafter, max_new_tokens=60, return_trace=True)
    assert out.sequences.tolist() == plain(llama, ids, max_new_tokens=60).tolist()
    kinds = {r.kind for r in out.trace if r.drafted}
    assert "DraftModel" in kinds and any(kind.startswith("PromptLookup (2) ") for kind in kinds)
    assert repr(drafter) == "Cascade(PromptLookup, PromptLookup (2), DraftModel)"
    assert drafter.num_draft_tokens == 4


# --- what is sent ---


class Kept(specnb.Cascade):
    """Keeps what it has drafted."""

    def draft(self, rows, limits):
        self.drafts.append(super().draft(rows, limits))
        return self.drafts[-1]


def mixed_run(model, **options):
    """Two rows: one that lookup knows by heart, and one in which it finds nothing."""
    drafter = Kept(specnb.PromptLookup(6, min_ngram=3), specnb.DraftModel(perturbed(model), 3), c=0.0)
    drafter.drafts = []
    ids = torch.tensor([[1, 2, 3, 4, 1, 2, 3], [5, 6, 7, 8, 9, 10, 11]])
    specnb.generate(model, ids, drafter, max_new_tokens=5, **options)
    return drafter.drafts[0]


def test_rows_of_one_round_may_use_different_parts(llama):
    draft = mixed_run(llama, do_sample=True, seed=0)
    assert draft.kinds == ["PromptLookup 3", "DraftModel"]
    assert draft.lengths.tolist() == [4, 3]
    assert draft.probs.shape == (2, 4, 61)
    assert draft.probs[0].argmax(-1).tolist() == [4, 1, 2, 3] == draft.tokens[0].tolist()
    assert draft.probs[0].max(-1).values.tolist() == [1.0] * 4  # one-hot
    torch.testing.assert_close(draft.probs.sum(-1)[1, :3], torch.ones(3))
    assert 0 < float(draft.probs[1, 0, draft.tokens[1, 0]]) < 1
    assert mixed_run(llama).probs is None  # greedy


def test_guesses_that_were_drawn_are_sent_as_they_are(llama):
    """A hopeless draft model as first part: once its guesses are drawn, they are not judged."""
    drafter = specnb.Cascade(specnb.DraftModel(tiny_model("llama", seed=9), 2), specnb.PromptLookup(), c=0.0)
    out = specnb.generate(llama, IDS, drafter, max_new_tokens=40, do_sample=True, seed=1, return_trace=True)
    assert {r.kind for r in out.trace if r.drafted} == {"DraftModel"}
    greedy = specnb.generate(llama, IDS, drafter, max_new_tokens=40, return_trace=True)
    assert any(str(r.kind).startswith("PromptLookup") for r in greedy.trace)


# --- around it, and what is refused ---


@pytest.mark.parametrize("options", [{}, {"pass_width": 8}])
def test_adaptive_goes_around_it(llama, options):
    ids = prompt(40)
    drafter = adaptive(specnb.Cascade(specnb.PromptLookup(), specnb.DraftModel(perturbed(llama), 3)), 0.0)
    out = specnb.generate(llama, ids, drafter, max_new_tokens=60, return_trace=True, **options)
    assert out.sequences.tolist() == specnb.generate(llama, ids, max_new_tokens=60, **options).sequences.tolist()
    assert {"DraftModel", "PromptLookup 3"} <= set(drafter.summary().acceptance)  # estimates by part and kind
    assert "DraftModel" in {r.kind for r in out.trace} and all(len(r.drafted) <= r.planned for r in out.trace[:-1])


def test_a_guess_that_adaptive_did_not_send_is_no_rejected_one():
    """All guesses are right, and half of each offer is cut away."""

    class Halved(specnb.Cascade):
        def draft(self, rows, limits):
            draft = super().draft(rows, limits)
            return specnb.Draft(draft.tokens, draft.lengths // 2)

    parts = Oracle(8, [TEXT[:300]], lambda b, place: 1.0), Oracle(4, [TEXT[:300]], lambda b, place: 1.0)
    cascade = Halved(*parts, slope=0.0)
    played = play(cascade, [TEXT[:300]], Clock(), lambda size: 1.0)
    assert set(played.longest[:-4]) == {4}
    assert cascade._rows[0].alpha(0, None, parts[0]) > 0.9


def test_each_run_starts_without_a_memory(llama):
    """What a row has shown is its own: the second run drafts as the first did."""
    drafter = specnb.Cascade(specnb.PromptLookup(), specnb.DraftModel(perturbed(llama), 3))
    options = dict(max_new_tokens=30, do_sample=True, seed=4, return_trace=True)
    runs = [specnb.generate(llama, IDS, drafter, **options) for _ in range(2)]
    assert runs[0].trace == runs[1].trace


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: specnb.Cascade(specnb.PromptLookup()), ValueError, "two or more parts"),
        (lambda: specnb.Cascade(*[specnb.PromptLookup()] * 2), ValueError, "each of them another"),
        (lambda: specnb.Cascade(specnb.PromptLookup(), None), TypeError, "must be a drafter, got None"),
        (lambda: specnb.Cascade(specnb.PromptLookup(), tiny_model()), TypeError, "Wrap a model"),
        (lambda: specnb.Cascade(specnb.Adaptive(specnb.PromptLookup()), specnb.Scripted([])), TypeError, "goes around"),
        (lambda: specnb.Cascade(specnb.PromptLookup(), specnb.Scripted([]), c=-1), ValueError, "at least 0"),
        (lambda: specnb.Cascade(specnb.PromptLookup(), specnb.Scripted([]), slope=-1), ValueError, "slope must"),
        (lambda: specnb.Cascade(specnb.PromptLookup(), specnb.Scripted([]), c=(0, 0)), ValueError, "each part after"),
    ],
)
def test_what_is_no_cascade_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_part_that_proposes_nonsense_is_named(llama):
    class Broken(Drafter):
        def draft(self, rows, limits):
            return specnb.Draft.from_lists([[99]])

    with pytest.raises(ValueError, match="proposed token 99"):
        specnb.generate(llama, IDS, specnb.Cascade(Broken(1), specnb.PromptLookup()), max_new_tokens=5)
