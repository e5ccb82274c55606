"""A replay against the loop itself: the rounds it tells are those that `generate` makes."""

from __future__ import annotations

import pytest
import torch

import specnb
from specnb.drafters.small_model import small_model
from specnb.replay import Replay, replay
from tests.conftest import DRAFTERS
from tests.tiny import VOCAB, perturbed, prompt, tiny_model


def rounds_of_generate(model, ids, drafter, new):
    out = specnb.generate(model, ids, drafter=drafter, max_new_tokens=new, do_sample=False, return_trace=True)
    return [(len(r.drafted), r.num_accepted) for r in out.trace], out.sequences[0, ids.shape[1] :].tolist()


def text_of(model, ids, new):
    return specnb.generate(model, ids, max_new_tokens=new, do_sample=False).sequences[0, ids.shape[1] :].tolist()


@pytest.fixture(scope="module")
def written(llama):
    """A prompt and 40 tokens of the target's own, with stretches that repeat."""
    ids = prompt(30, seed=3)
    return ids, text_of(llama, ids, 40)


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("kind", ["lookup", "copy", "perturbed", "always wrong", "early exit", "now and then"])
def test_the_rounds_are_those_of_generate(llama, written, kind, k):
    ids, text = written
    drafter = DRAFTERS[kind](llama)
    drafter.num_draft_tokens = 8
    tried = replay(llama, drafter, ids[0].tolist(), text)
    drafter.num_draft_tokens = k
    expected, written_again = rounds_of_generate(llama, ids, drafter, len(text))
    assert written_again == text
    assert tried.rounds(k) == expected


def test_the_replays_above_are_not_all_alike(llama, written):
    ids, text = written
    drafters = (specnb.PromptLookup(8), specnb.DraftModel(llama, 8), specnb.DraftModel(perturbed(llama), 8))
    counts = {len(replay(llama, drafter, ids[0].tolist(), text).rounds(8)) for drafter in drafters}
    assert len(counts) == 3 and max(counts) < len(text)


@pytest.mark.parametrize("k", [0, 1, 4, 50])
def test_rounds_write_the_text_exactly(k):
    generator = torch.Generator().manual_seed(k)
    guessed = torch.randint(6, (80,), generator=generator)
    matched = (torch.rand(80, generator=generator) * (guessed + 1)).long()
    rounds = Replay(tuple(guessed.tolist()), tuple(matched.tolist())).rounds(k)
    assert sum(accepted + 1 for _, accepted in rounds) == 80
    assert all(accepted <= drafted <= min(k, 5) for drafted, accepted in rounds)


def test_drafting_time_is_by_round_or_by_token():
    by_round, by_token = Replay((), (), call_ms=2.0), Replay((), (), call_ms=2.0, per_token=True)
    assert [by_round.draft_ms(n) for n in (0, 1, 4)] == [0, 2.0, 2.0]
    assert [by_token.draft_ms(n) for n in (0, 1, 4)] == [0, 2.0, 8.0]


def test_times_are_of_the_drafter_alone(llama, written, monkeypatch):
    ids, text = written
    now = [0.0]
    monkeypatch.setattr("specnb.replay.perf_counter", lambda: now[0])

    class Slow(specnb.Drafter):
        def start(self, session):
            now[0] += 5.0

        def propose(self, context, limit):
            now[0] += 2.0
            return []

        def observe(self, rows, kept):
            now[0] += 100.0

    tried = replay(llama, Slow(3), ids[0].tolist(), text)
    assert (tried.start_ms, tried.call_ms, tried.per_token) == (5000.0, 2000.0, False)


def test_the_target_is_never_run(llama, written, monkeypatch):
    ids, text = written
    other = tiny_model()

    def no_pass(*args, **kwargs):
        raise AssertionError("the target was run")

    monkeypatch.setattr(llama, "forward", no_pass)
    assert len(replay(llama, specnb.DraftModel(other), ids[0].tolist(), text).matched) == len(text)


def test_a_draft_model_of_a_shorter_context_stops_where_generate_stops(llama, written):
    ids, text = written
    short = tiny_model(max_position_embeddings=len(ids[0]) + 15)
    short.load_state_dict(llama.state_dict())
    expected, _ = rounds_of_generate(llama, ids, specnb.DraftModel(short, 4), len(text))
    tried = replay(llama, specnb.DraftModel(short), ids[0].tolist(), text)
    assert tried.rounds(4) == expected
    assert expected[-1] == (0, 0) and expected[0] == (4, 4)


def test_a_draft_model_padded_to_other_sizes(written):
    """The target's vocabulary is a little larger than the draft's, as when both are padded differently."""
    ids, _ = written
    target, draft = tiny_model(vocab_size=64), tiny_model(vocab_size=61, seed=0)
    text = text_of(target, ids, 30)
    expected, _ = rounds_of_generate(target, ids, specnb.DraftModel(draft, 3), len(text))
    assert replay(target, specnb.DraftModel(draft), ids[0].tolist(), text).rounds(3) == expected


@pytest.mark.parametrize("length", [1, 2, 6, 7, 8])
def test_short_texts(llama, written, length):
    ids, text = written
    for drafter in (specnb.DraftModel(perturbed(llama), 4), specnb.PromptLookup(4)):
        expected, _ = rounds_of_generate(llama, ids, drafter, length)
        assert replay(llama, drafter, ids[0].tolist(), text[:length]).rounds(4) == expected


def test_a_draft_that_reads_hints(llama, written):
    """A small model made of the target's parts is told what followed the last tokens before; so it is in a replay."""
    ids, text = written
    small = small_model(llama, (0, 1), torch.arange(VOCAB))
    expected, _ = rounds_of_generate(llama, ids, specnb.DraftModel(small, 4), len(text))
    assert replay(llama, specnb.DraftModel(small), ids[0].tolist(), text).rounds(4) == expected
    assert sum(accepted for _, accepted in expected) > 0


def test_nothing_cannot_be_replayed(llama):
    with pytest.raises(ValueError, match="got 0 and 2 tokens"):
        replay(llama, specnb.PromptLookup(), [], [1, 2])
    with pytest.raises(ValueError, match="got 1 and 0 tokens"):
        replay(llama, specnb.PromptLookup(), [1], [])


def test_a_drafter_that_goes_by_the_clock_cannot_be_replayed(llama):
    with pytest.raises(ValueError, match=r"Adaptive chooses .* Replay the drafter inside it"):
        replay(llama, specnb.Adaptive(specnb.PromptLookup()), [1], [2, 3])


def test_a_drafter_of_another_vocabulary_is_refused(llama):
    with pytest.raises(ValueError, match="vocabulary"):
        replay(llama, specnb.DraftModel(tiny_model(vocab_size=7)), [1], [2, 3])
