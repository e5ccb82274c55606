"""Plain greedy by transformers = specnb without drafter = specnb with every drafter, for every family."""

from __future__ import annotations

import functools

import pytest
import torch

import specnb
from tests.tiny import FAMILIES, plain, prompt, tiny_model

both = pytest.mark.parametrize("attention", ["eager", "sdpa"])


@both
@pytest.mark.parametrize("family", FAMILIES)
def test_every_drafter_gives_the_text_of_plain_generate(family, attention, make_drafter):
    model = tiny_model(family, attention)
    ids = prompt(12)  # longer than the sliding windows of 8
    expected = plain(model, ids)
    out = specnb.generate(model, ids, make_drafter(model), max_new_tokens=24)
    assert out.sequences.tolist() == expected.tolist()


@functools.cache
def alone(family, attention, length):
    """What the prompt of this length becomes by itself."""
    return plain(tiny_model(family, attention), prompt(length, seed=length), max_new_tokens=16)[0, length:].tolist()


BATCHES = [("eager", (12, 1, 7)), ("sdpa", (12, 1, 7)), ("sdpa", (300, 1)), ("sdpa", (40, 1, 300, 7, 80, 250, 120, 9))]


@pytest.mark.parametrize(("attention", "lengths"), BATCHES, ids=lambda x: x if isinstance(x, str) else f"B = {len(x)}")
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_rows_give_the_text_of_each_prompt_alone(family, attention, lengths, make_drafter):
    model, longest = tiny_model(family, attention), max(lengths)
    rows = [prompt(n, seed=n)[0] for n in lengths]
    padded = torch.stack([torch.cat([torch.zeros(longest - len(row), dtype=torch.long), row]) for row in rows])
    mask = torch.stack([(torch.arange(longest) >= longest - len(row)).long() for row in rows])
    out = specnb.generate(model, padded, make_drafter(model), attention_mask=mask, max_new_tokens=16)
    for b, n in enumerate(lengths):
        assert out.sequences[b, longest:].tolist() == alone(family, attention, n), f"row {b}"


@both
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_sliding_window_of_8_with_a_prompt_of_12(family, attention):
    model = tiny_model(family, attention)
    ids = prompt(12, seed=3)
    for k in (2, 5):
        out = specnb.generate(model, ids, specnb.DraftModel(model, k), max_new_tokens=30)
        assert out.sequences.tolist() == plain(model, ids, max_new_tokens=30).tolist()
        assert float(out.stats.alpha) == 1


@both
@pytest.mark.parametrize("family", FAMILIES)
def test_ten_rejected_drafts_leave_the_cache_as_a_fresh_prefill(family, attention):
    model = tiny_model(family, attention)
    tokens = prompt(10, batch=2)
    cache = specnb.RaggedCache(model.config, 2, 64)
    specnb.target_pass(model, cache, tokens)
    known = [row.tolist() for row in tokens]
    for i in range(10):
        right = [(7 * i + 3) % 61, (5 * i + 2) % 61]
        wrong = torch.tensor([[token, 9, 9, 9] for token in right])
        specnb.target_pass(model, cache, wrong)
        cache.rollback([3, 3] if i % 2 else [3, 4])  # every other round, row 1 drops its right token as well
        known = [row + [token] * (1 if b == 0 or i % 2 else 0) for b, (row, token) in enumerate(zip(known, right))]
    assert cache.lengths.tolist() == [len(row) for row in known]
    after = specnb.target_pass(model, cache, torch.tensor([[11, 12], [11, 12]]))
    for b, row in enumerate(known):
        fresh = model(input_ids=torch.tensor([row + [11, 12]]), use_cache=False).logits[0, -2:]
        torch.testing.assert_close(after[b], fresh, atol=1e-4, rtol=1e-4)
