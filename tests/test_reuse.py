"""A cache handed on: the next call reads what is new, and writes what it would have written without."""

from __future__ import annotations

import pytest
import torch

import specnb
from specnb import kernels
from tests.tiny import FAMILIES, prompt, tiny_model

NEW = 20


def widths(model, monkeypatch):
    """The widths of the passes through the model from now on."""
    seen, forward = [], model.forward
    monkeypatch.setattr(model, "forward", lambda **kw: seen.append(kw["input_ids"].shape[1]) or forward(**kw))
    return seen


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, None), (torch.float32, 8), (torch.bfloat16, 8)], ids=str)
def test_the_second_turn_of_a_chat(make_drafter, dtype, width):
    """The prompt, the answer and a new question, twice; in bfloat16 bit for bit the text of a fresh call."""
    model = tiny_model("llama").to(dtype)
    options = dict(max_new_tokens=NEW, pass_width=width)
    out = specnb.generate(model, prompt(90), make_drafter(model), return_cache=True, **options)
    for turn in range(2):
        ids = torch.cat([out.sequences, prompt(15, seed=turn)], dim=1)
        fresh = specnb.generate(model, ids, **options)
        out = specnb.generate(model, ids, make_drafter(model), cache=out.cache, **options)
        assert out.sequences.tolist() == fresh.sequences.tolist()


def test_only_what_is_new_is_read(monkeypatch):
    model = tiny_model("llama")
    seen = widths(model, monkeypatch)
    out = specnb.generate(model, prompt(90), max_new_tokens=NEW, return_cache=True)
    ids = torch.cat([out.sequences, prompt(15)], dim=1)
    seen.clear()
    specnb.generate(model, ids, max_new_tokens=NEW, cache=out.cache)
    assert seen == [16] + [1] * (NEW - 1)  # the answer's last token and the question in the first round, then one each
    fixed = specnb.generate(model, prompt(90), max_new_tokens=NEW, return_cache=True, pass_width=8)
    seen.clear()
    specnb.generate(model, ids, max_new_tokens=NEW, cache=fixed.cache, pass_width=8)
    assert seen == [32, 32] + [8] * NEW  # two of the prompt's chunks are kept, 60 tokens of 124 are read


@pytest.mark.parametrize("common", [0, 1, 50, 89, 90, 100])
def test_a_prompt_that_turns_off_somewhere(llama, common):
    """From somewhere in the prompt, or in the answer, the second prompt says something else."""
    out = specnb.generate(llama, prompt(90), max_new_tokens=NEW, return_cache=True)
    ids = torch.cat([out.sequences[:, :common], prompt(15, seed=9)], dim=1)
    again = specnb.generate(llama, ids, specnb.PromptLookup(), max_new_tokens=NEW, cache=out.cache)
    assert again.sequences.tolist() == specnb.generate(llama, ids, max_new_tokens=NEW).sequences.tolist()
    assert again.cache is out.cache


def test_the_same_prompt_again(llama, monkeypatch):
    out = specnb.generate(llama, prompt(90), max_new_tokens=NEW, return_cache=True)
    seen = widths(llama, monkeypatch)
    again = specnb.generate(llama, prompt(90), max_new_tokens=NEW, cache=out.cache)
    assert again.sequences.tolist() == out.sequences.tolist()
    assert seen == [1] * NEW


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("width", [None, 8])
def test_ragged_rows_keep_what_is_theirs(family, width):
    """Rows of different lengths, each with an end of its own, one of which has ended early."""
    model = tiny_model(family)
    mask = (torch.arange(50) >= torch.tensor([0, 43, 12])[:, None]).long()
    ids = prompt(50, batch=3) * mask
    options = dict(max_new_tokens=NEW, pass_width=width)
    eos = int(specnb.generate(model, ids, attention_mask=mask, **options).sequences[1, 55])
    out = specnb.generate(model, ids, attention_mask=mask, return_cache=True, eos_token_id=eos, **options)
    longer = torch.cat([ids, prompt(9, batch=3, seed=4)], dim=1)
    longer_mask = torch.cat([mask, torch.ones(3, 9, dtype=torch.long)], dim=1)
    fresh = specnb.generate(model, longer, attention_mask=longer_mask, **options)
    again = specnb.generate(
        model, longer, specnb.PromptLookup(), attention_mask=longer_mask, cache=out.cache, **options
    )
    assert again.sequences.tolist() == fresh.sequences.tolist()


def test_a_cache_is_kept_only_on_request(llama):
    assert specnb.generate(llama, prompt(12), max_new_tokens=3).cache is None


def test_caches_that_cannot_be_continued_are_refused(llama):
    def cache_of(model=llama, rows=1):
        return specnb.generate(model, prompt(12, batch=rows), max_new_tokens=3, return_cache=True).cache

    def go_on(cache):
        return specnb.generate(llama, prompt(20), max_new_tokens=3, cache=cache)

    with pytest.raises(TypeError, match=r"out\.cache of an earlier"):
        go_on("cache")
    with pytest.raises(ValueError, match="from no finished"):
        go_on(specnb.RaggedCache(llama.config, 1, 8))
    with pytest.raises(ValueError, match="another model"):
        go_on(cache_of(tiny_model("llama")))
    with pytest.raises(ValueError, match="has 2 rows, the call has 1"):
        go_on(cache_of(rows=2))


def test_after_a_run_that_broke_off_a_cache_is_not_continued(llama):
    def broken(context):
        raise RuntimeError("no idea")

    cache = specnb.generate(llama, prompt(12), max_new_tokens=3, return_cache=True).cache
    with pytest.raises(RuntimeError, match="no idea"):
        specnb.generate(llama, prompt(20), specnb.Scripted(broken), max_new_tokens=9, cache=cache)
    with pytest.raises(ValueError, match="from no finished"):
        specnb.generate(llama, prompt(20), max_new_tokens=9, cache=cache)


@pytest.mark.skipif(kernels.compiler() is None, reason="no C++ compiler")
def test_compiled_and_uncompiled_passes_are_not_mixed_at_a_pass_width(llama):
    """Their bits differ: the prompt is read anew, and a warning says why."""
    first = specnb.generate(llama, prompt(70), compile=True, pass_width=4, max_new_tokens=5, return_cache=True)
    longer = torch.cat([first.sequences, prompt(5, seed=9)], dim=1)
    fresh = specnb.generate(llama, longer, pass_width=4, max_new_tokens=5, return_trace="probs")
    with pytest.warns(UserWarning, match="comes from compiled passes, and this call's are uncompiled"):
        out = specnb.generate(
            llama, longer, cache=first.cache, pass_width=4, max_new_tokens=5, return_trace="probs"
        )  # fmt: skip
    assert all(torch.equal(r.p, f.p) for r, f in zip(out.trace, fresh.trace, strict=True))
