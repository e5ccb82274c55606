"""The first round's pass reads the prompts, too: one pass less until the first token, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

import specnb
from specnb.drafters.base import Draft
from specnb.prefill import CHUNK
from tests.forest import Forest
from tests.tiny import FAMILIES, padded, perturbed, plain, prompt, tiny_model

NEW = 12


def widths_of_passes(model, run):
    """[rows, positions] of every pass of the loop over this model while ``run`` runs, and what it returns."""
    seen = []

    def note(_, args, kwargs):
        if any(isinstance(value, specnb.RaggedCache) for value in kwargs.values()):
            seen.append(list(kwargs["input_ids"].shape))

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        return run(), seen
    finally:
        hook.remove()


@pytest.mark.parametrize("family", FAMILIES)
def test_no_pass_but_those_of_the_rounds(family):
    model, ids = tiny_model(family), prompt(20)
    copy = tiny_model(family)
    out, seen = widths_of_passes(
        model, lambda: specnb.generate(model, ids, specnb.DraftModel(copy, 3), max_new_tokens=8)
    )
    assert out.sequences.tolist() == plain(model, ids, max_new_tokens=8).tolist()
    assert seen == [[1, 20 + 3], [1, 4]]
    assert out.stats.target_passes.tolist() == [2]


def test_rows_of_several_lengths_share_the_end(llama):
    """What longer prompts have more is read before."""
    ids, mask = padded((20, 5, 9), "left")
    out, seen = widths_of_passes(llama, lambda: specnb.generate(llama, ids, attention_mask=mask, max_new_tokens=NEW))
    assert seen[:2] == [[2, 15], [3, 5]] and {width for _, width in seen[2:]} == {1}
    for b, n in enumerate((20, 5, 9)):
        assert out.sequences[b, 20:].tolist() == plain(llama, prompt(n, seed=n), max_new_tokens=NEW)[0, n:].tolist()


def test_only_the_last_positions_are_scored(llama):
    """A head over all of a prompt's positions would take more memory than the model."""
    scored = []
    hook = llama.lm_head.register_forward_hook(lambda module, args, out: scored.append(out.shape[1]))
    specnb.generate(llama, prompt(40), specnb.PromptLookup(4), max_new_tokens=NEW)
    hook.remove()
    assert max(scored) <= 5


def test_a_long_prompt_is_read_in_chunks_before():
    model = tiny_model("llama", max_position_embeddings=2048)
    ids = prompt(CHUNK + 90)
    out, seen = widths_of_passes(model, lambda: specnb.generate(model, ids, max_new_tokens=3))
    assert seen == [[1, 90], [1, CHUNK], [1, 1], [1, 1]]
    assert out.sequences.tolist() == plain(model, ids, max_new_tokens=3).tolist()


def test_a_kept_cache_is_continued(llama):
    first = specnb.generate(llama, prompt(30), max_new_tokens=NEW, return_cache=True)
    longer = torch.cat([first.sequences, prompt(7, seed=9)], dim=1)
    out, seen = widths_of_passes(llama, lambda: specnb.generate(llama, longer, cache=first.cache, max_new_tokens=3))
    assert seen == [[1, 8], [1, 1], [1, 1]]  # the last token of the first answer has not been read
    assert out.sequences.tolist() == plain(llama, longer, max_new_tokens=3).tolist()


def test_trees_find_the_prompt_read(llama):
    ids = prompt(20)
    drafter = Forest(llama, nodes=6)
    out, seen = widths_of_passes(llama, lambda: specnb.generate(llama, ids, drafter, max_new_tokens=NEW))
    assert [1, 19] in seen and out.sequences.tolist() == plain(llama, ids, max_new_tokens=NEW).tolist()


class Reader(specnb.Drafter):
    """Notes how many tokens of its row the target's cache holds when it drafts; None if it is told of no cache."""

    def __init__(self, wants):
        super().__init__(2)
        self.needs_cache, self.held = wants, []

    def start(self, session):
        self.cache = session.cache

    def draft(self, rows, limits):
        self.held.append(None if self.cache is None else rows.lengths[0] - int(self.cache.lengths[0]))
        return Draft.empty(len(rows))


@pytest.mark.parametrize("wrapped", [lambda d: d, specnb.Adaptive, lambda d: specnb.Cascade(specnb.PromptLookup(1), d)])
@pytest.mark.parametrize("wants", [True, False])
def test_who_drafts_from_the_cache_finds_all_but_the_newest_token(llama, wants, wrapped):
    reader = Reader(wants)
    specnb.generate(llama, prompt(20), wrapped(reader), max_new_tokens=NEW)
    assert reader.held and set(reader.held) == ({1} if wants else {None})


def test_an_adaptive_drafter_learns_nothing_from_the_time_of_the_first_round(llama):
    """Planted: a first pass that takes a hundred times as long."""
    now = [0.0]

    def forward(_, args, kwargs):
        now[0] += 1.0 if kwargs["input_ids"].shape[1] < 20 else 100.0

    hook = llama.register_forward_pre_hook(forward, with_kwargs=True)
    drafter = specnb.Adaptive(specnb.PromptLookup(3), clock=lambda: now[0])
    specnb.generate(llama, prompt(30), drafter, max_new_tokens=30)
    hook.remove()
    assert max(drafter.summary().costs.milliseconds) == pytest.approx(1000.0)


def test_interrupted_in_the_first_round_the_next_run_is_whole(llama):
    def interrupt(*_):
        raise KeyboardInterrupt

    drafter = specnb.DraftModel(perturbed(llama), 3)
    hook = llama.lm_head.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        specnb.generate(llama, prompt(20), drafter, max_new_tokens=NEW)
    hook.remove()
    out = specnb.generate(llama, prompt(20), drafter, max_new_tokens=NEW)
    assert out.sequences.tolist() == plain(llama, prompt(20), max_new_tokens=NEW).tolist()
