"""One pass width: the same tokens bit for bit with any drafter or none, also in bfloat16 and across buckets."""

from __future__ import annotations

import functools

import pytest
import torch

import specnb
from specnb.cache import bucket_size
from tests.tiny import FAMILIES, plain, prompt, tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_width_same_logits_bit_for_bit(family, dtype, make_drafter):
    model = tiny_model(family).to(dtype)
    ids = prompt(40)
    reference = specnb.generate(model, ids, max_new_tokens=24, pass_width=8, return_trace="probs")
    drafter = make_drafter(model)
    out = specnb.generate(model, ids, drafter, max_new_tokens=24, pass_width=8, return_trace="probs")
    assert out.sequences.tolist() == reference.sequences.tolist()
    p_reference, p = (torch.cat([r.p[r.places] for r in o.trace]) for o in (reference, out))
    if getattr(drafter, "trees", False) and dtype == torch.float32:  # slots in between change the order of the sums
        torch.testing.assert_close(p, p_reference, atol=1e-5, rtol=1e-4)
    else:
        assert torch.equal(p, p_reference)


def test_in_float32_the_text_is_also_that_of_plain_generate(llama, make_drafter):
    out = specnb.generate(llama, prompt(40), make_drafter(llama), max_new_tokens=24, pass_width=8)
    assert out.sequences.tolist() == plain(llama, prompt(40)).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_runs_that_cross_a_bucket_at_different_rounds_agree(dtype, make_drafter):
    model = tiny_model("llama").to(dtype)
    ids = prompt(245)
    assert bucket_size(245) < bucket_size(245 + 24)
    reference = specnb.generate(model, ids, max_new_tokens=24, pass_width=8)
    out = specnb.generate(model, ids, make_drafter(model), max_new_tokens=24, pass_width=8)
    assert out.sequences.tolist() == reference.sequences.tolist()


def test_a_draft_is_cut_at_the_width_and_at_a_buckets_edge(llama):
    """Every pass must lie inside one bucket, as far as its real tokens go."""
    out = specnb.generate(
        llama, prompt(250), specnb.DraftModel(llama, 6), max_new_tokens=20, pass_width=4, return_trace=True
    )
    position = 249  # of the newest token at each round
    for r in out.trace:
        assert len(r.drafted) <= 3
        assert bucket_size(position) == bucket_size(position + len(r.drafted))
        position += len(r.emitted)
    assert len(out.trace[1].drafted) == 2  # from 253 up to the edge at 255


def test_every_pass_has_the_width(llama, monkeypatch):
    widths, forward = [], llama.forward
    monkeypatch.setattr(llama, "forward", lambda **kw: widths.append(kw["input_ids"].shape[1]) or forward(**kw))
    specnb.generate(llama, prompt(40), specnb.PromptLookup(), max_new_tokens=12, pass_width=8)
    prefill_passes = 2  # 39 tokens in chunks of 32
    assert set(widths[:prefill_passes]) == {32}
    assert set(widths[prefill_passes:]) == {8}


BATCHES = [(40, 3), (250, 3, 300), (250, 3, 300, 33, 1, 255, 120, 491)]  # the last two lie in two buckets


@functools.cache
def alone(length, dtype):
    model = tiny_model("llama").to(dtype)
    ids = prompt(length, seed=length)
    return specnb.generate(model, ids, max_new_tokens=20, pass_width=8).sequences[0, length:].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", BATCHES, ids=lambda lengths: f"B = {len(lengths)}")
def test_a_row_of_a_batch_equals_the_prompt_alone_bit_for_bit(lengths, dtype, make_drafter):
    """Neighbours in other buckets included; some rows change theirs at different rounds."""
    model, longest = tiny_model("llama").to(dtype), max(lengths)
    rows = [prompt(n, seed=n)[0] for n in lengths]
    padded = torch.stack([torch.cat([torch.zeros(longest - len(row), dtype=torch.long), row]) for row in rows])
    mask = torch.stack([(torch.arange(longest) >= longest - len(row)).long() for row in rows])
    out = specnb.generate(model, padded, make_drafter(model), attention_mask=mask, max_new_tokens=20, pass_width=8)
    for b, n in enumerate(lengths):
        assert out.sequences[b, longest:].tolist() == alone(n, dtype)
