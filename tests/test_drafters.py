"""Each source of drafts by itself: what it guesses, and what it keeps between rounds."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

import specnb
from tests.tiny import VOCAB, perturbed, plain, prompt, tiny_model

IDS = prompt(12)


# --- scripted and home-made ---


def test_a_script_is_said_round_by_round_and_then_nothing(llama):
    text = plain(llama, IDS, max_new_tokens=9)[0, 12:].tolist()
    out = specnb.generate(llama, IDS, specnb.Scripted([text[:4], text[5:6]]), max_new_tokens=9, return_trace=True)
    assert [(r.drafted, r.num_accepted, r.is_bonus) for r in out.trace[:2]] == [
        (text[:4], 4, True),
        (text[5:6], 1, True),
    ]
    assert [r.drafted for r in out.trace[2:]] == [[], []]


def test_a_drafter_of_ones_own_is_a_class_with_one_method(llama):
    class Echo(specnb.Drafter):
        def propose(self, context, limit):
            return [context[-1]] * limit

    out = specnb.generate(llama, IDS, Echo(3), max_new_tokens=10, return_trace=True)
    assert out.sequences.tolist() == plain(llama, IDS, max_new_tokens=10).tolist()
    assert out.trace[0].drafted == [int(IDS[0, -1])] * 3


def test_more_guesses_than_asked_for_are_cut(llama):
    class Eager(specnb.Drafter):
        def draft(self, rows, limits):
            return specnb.Draft.from_lists([[1, 2, 3, 4, 5, 6, 7, 8]])

    out = specnb.generate(llama, IDS, Eager(3), max_new_tokens=6, return_trace=True)
    assert max(len(r.drafted) for r in out.trace) == 3
    assert out.sequences.tolist() == plain(llama, IDS, max_new_tokens=6).tolist()


# --- draft model ---


class Watched(specnb.DraftModel):
    """Notes, after every round, what its cache holds and what the rows are."""

    def observe(self, rows, kept):
        super().observe(rows, kept)
        self.seen.append((self.cache.lengths.tolist(), rows.lengths, kept))


def watched(model, k):
    drafter = Watched(model, k)
    drafter.seen = []
    return drafter


def test_the_draft_cache_holds_the_committed_tokens_but_the_last(llama):
    """Ten rounds rejected at the first place: a draft that never agrees."""
    other = tiny_model("llama", seed=11)
    drafter = watched(other, 4)
    out = specnb.generate(llama, IDS, drafter, max_new_tokens=14, return_trace=True)
    rejected_at_once = [i for i, r in enumerate(out.trace) if r.drafted and r.num_accepted == 0]
    assert len(rejected_at_once) >= 10
    for i in rejected_at_once:
        cached, rows, _ = drafter.seen[i]
        assert cached == [rows[0] - 1]


def test_the_draft_cache_after_full_acceptance_lacks_only_the_last_guess(llama):
    drafter = watched(llama, 4)
    specnb.generate(llama, IDS, drafter, max_new_tokens=26)
    for cached, rows, kept in drafter.seen[:4]:
        assert kept == [5]
        assert cached == [rows[0] - 2]


def test_the_draft_model_guesses_what_it_would_write_itself(llama):
    """The oracle for its cache: the draft's own greedy continuation of the row, computed without any cache."""
    draft_model, drafted = perturbed(llama), []

    class Compared(specnb.DraftModel):
        def draft(self, rows, limits):
            draft = super().draft(rows, limits)
            for b, n in enumerate(draft.lengths.tolist()):
                if n:
                    own = plain(draft_model, torch.tensor([rows.tokens(b)]), max_new_tokens=n, use_cache=False)
                    drafted.append(draft.tokens[b, :n].tolist() == own[0, -n:].tolist())
            return draft

    ids, mask = torch.tensor([[0] * 5 + IDS[0, :7].tolist(), IDS[0].tolist()]), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    specnb.generate(llama, ids, Compared(draft_model, 3), attention_mask=mask, max_new_tokens=20)
    assert len(drafted) >= 12
    assert all(drafted)


def test_the_draft_sees_the_processors_of_the_target(llama):
    """A copy of the target is always right only if both apply the same repetition penalty to the same context."""
    for options in (dict(repetition_penalty=1.8), dict(no_repeat_ngram_size=2), dict(suppress_tokens=[3, 4, 5])):
        out = specnb.generate(llama, IDS, specnb.DraftModel(llama, 4), max_new_tokens=25, **options)
        assert out.stats.tokens_per_pass.tolist() == [5]


def test_a_draft_of_another_dtype_and_family(llama):
    draft_model = tiny_model("gpt2").to(torch.bfloat16)
    out = specnb.generate(llama, IDS, specnb.DraftModel(draft_model), max_new_tokens=20)
    assert out.sequences.tolist() == plain(llama, IDS, max_new_tokens=20).tolist()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("size", [8, 12, 16])
def test_a_draft_with_a_shorter_context_stops_drafting(llama, family, size):
    small = tiny_model(family, **{"n_positions" if family == "gpt2" else "max_position_embeddings": size})
    out = specnb.generate(llama, IDS, specnb.DraftModel(small, 4), max_new_tokens=20, return_trace=True)
    assert out.sequences.tolist() == plain(llama, IDS, max_new_tokens=20).tolist()
    assert out.trace[-1].drafted == []
    assert bool(out.stats.drafted > 0) is (size > 11)


def test_padded_vocabularies_are_one_vocabulary(llama):
    for vocab in (VOCAB - 3, VOCAB + 3):
        draft_model = tiny_model("llama", vocab_size=vocab)
        out = specnb.generate(llama, IDS % (VOCAB - 3), specnb.DraftModel(draft_model), max_new_tokens=20)
        assert out.sequences.tolist() == plain(llama, IDS % (VOCAB - 3), max_new_tokens=20).tolist()


def test_really_different_vocabularies_are_refused_and_both_named(llama):
    drafter = specnb.DraftModel(tiny_model("llama", vocab_size=2 * VOCAB))
    with pytest.raises(ValueError, match=r"LlamaForCausalLM' \(61 tokens\).*\(122 tokens\).*share a vocabulary"):
        specnb.generate(llama, IDS, drafter)


def test_tokenizers_tell_vocabularies_of_one_size_apart(llama):
    class Words:
        def __init__(self, *words):
            self.words = words

        def get_vocab(self):
            return {word: i for i, word in enumerate(self.words)}

    drafter = specnb.DraftModel(tiny_model(), tokenizer=Words("b", "a"))
    with pytest.raises(ValueError, match="their tokenizers assign different ids"):
        specnb.generate(llama, IDS, drafter, tokenizer=Words("a", "b"))


def test_a_model_from_disk_drafts(llama, tmp_path):
    """The way any Hub model takes: saved, loaded, used as draft and as target."""
    llama.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    out = specnb.generate(loaded, IDS, specnb.DraftModel(llama, 4), max_new_tokens=25)
    assert out.stats.tokens_per_pass.tolist() == [5]


def test_a_row_that_sits_a_round_out_keeps_a_sound_cache():
    """At a bucket's edge a row takes no draft while its neighbour does; a copy of the target must stay always right."""
    model = tiny_model("llama")
    ids = torch.cat([prompt(256, seed=1), torch.cat([torch.zeros(1, 196, dtype=torch.long), prompt(60)], dim=1)])
    mask = (torch.arange(256) >= torch.tensor([0, 196])[:, None]).long()
    out = specnb.generate(model, ids, specnb.DraftModel(model, 4), attention_mask=mask, max_new_tokens=24, pass_width=8)
    assert out.stats.alpha.tolist() == [1, 1]


def test_prompts_with_ids_that_a_smaller_draft_lacks(llama):
    small = tiny_model(vocab_size=VOCAB - 5)
    ids = torch.tensor([[1, VOCAB - 1, 3, VOCAB - 2, 5]])
    out = specnb.generate(llama, ids, specnb.DraftModel(small), max_new_tokens=8)
    assert out.sequences.tolist() == plain(llama, ids, max_new_tokens=8).tolist()


def test_a_draft_that_the_processors_leave_nothing_guesses_blindly(llama):
    """Only ids the smaller draft does not have are allowed: q is uniform, and the run goes on."""
    small = tiny_model(vocab_size=VOCAB - 5)
    options = dict(do_sample=True, suppress_tokens=list(range(VOCAB - 5)), max_new_tokens=12, seed=0)
    out = specnb.generate(llama, IDS, specnb.DraftModel(small), **options)
    assert (out.sequences[0, 12:] >= VOCAB - 5).all()


def test_nan_in_the_draft_is_named_as_the_drafts(llama):
    broken = tiny_model("llama", seed=5)
    with torch.no_grad():
        broken.lm_head.weight[3] = float("nan")
    with pytest.raises(ValueError, match="The draft's scores hold NaN in row 0 at position 0"):
        specnb.generate(llama, IDS, specnb.DraftModel(broken), do_sample=True, max_new_tokens=8)
