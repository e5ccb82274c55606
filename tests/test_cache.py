"""RaggedCache against the oracle that has no cache at all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specnb import RaggedCache, target_pass
from specnb.cache import bucket_size, for_all_rows
from tests.tiny import CONTEXT, fresh_logits, prompt, tiny_model

MODEL = tiny_model("llama")


def filled(batch: int = 1, length: int = 6, capacity: int = 64) -> tuple[RaggedCache, torch.Tensor]:
    cache, tokens = RaggedCache(MODEL.config, batch, capacity), prompt(length, batch=batch)
    target_pass(MODEL, cache, tokens)
    return cache, tokens


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=8))
def test_any_sequence_of_passes_and_rollbacks_equals_a_fresh_prefill(steps):
    cache, known = RaggedCache(MODEL.config, 2, 8), [[], []]
    for i, (width, *drops) in enumerate(steps):
        tokens = prompt(width, seed=i, batch=2)
        cache.reserve(int(cache.lengths.max()) + width)
        logits = target_pass(MODEL, cache, tokens)
        known = [row + new for row, new in zip(known, tokens.tolist())]
        for row, scores in zip(known, logits):
            torch.testing.assert_close(scores, fresh_logits(MODEL, torch.tensor([row]))[0, -width:], atol=1e-4, rtol=0)
        drops = [min(drop, len(row)) for drop, row in zip(drops, known)]
        cache.rollback(drops)
        known = [row[: len(row) - drop] for row, drop in zip(known, drops)]
    assert cache.lengths.tolist() == [len(row) for row in known]


def test_a_forgotten_or_short_rollback_changes_the_scores():
    """The negative control: what the tests above compare does depend on the rollback."""
    next_token = torch.tensor([[5]])
    right = fresh_logits(MODEL, torch.cat([prompt(6), next_token], dim=1))[0, -1]
    for dropped, damaged in ((3, False), (2, True), (0, True)):
        cache, _ = filled()
        target_pass(MODEL, cache, torch.tensor([[9, 9, 9]]))
        cache.rollback(dropped)
        found = target_pass(MODEL, cache, next_token)[0, -1]
        assert bool((found - right).abs().max() > 1e-2) is damaged


def test_rollback_by_0_changes_nothing():
    cache, tokens = filled()
    cache.rollback(0)
    assert cache.lengths.tolist() == [6]
    after = target_pass(MODEL, cache, torch.tensor([[5]]))
    expected = fresh_logits(MODEL, torch.cat([tokens, torch.tensor([[5]])], dim=1))[:, -1:]
    torch.testing.assert_close(after, expected, atol=1e-4, rtol=0)


def test_rollback_copies_nothing():
    cache, _ = filled(batch=2)
    before = [(layer.keys.data_ptr(), layer.keys.clone()) for layer in cache.layers]
    cache.rollback([1, 6])
    assert cache.lengths.tolist() == [5, 0]
    for layer, (pointer, keys) in zip(cache.layers, before):
        assert layer.keys.data_ptr() == pointer
        assert torch.equal(layer.keys, keys)


@pytest.mark.parametrize("n", [7, -1, [0, 7], [-1, 0]])
def test_impossible_rollbacks_are_refused_and_change_nothing(n):
    cache, _ = filled(batch=2)
    with pytest.raises(ValueError, match="between 0 and the row's length"):
        cache.rollback(n)
    assert cache.lengths.tolist() == [6, 6]


def test_a_full_cache_says_so_and_loses_nothing():
    cache, tokens = filled(capacity=8)
    with pytest.raises(ValueError, match="3 more tokens do not fit: a row holds 6 of 8"):
        target_pass(MODEL, cache, torch.tensor([[1, 2, 3]]))
    cache.reserve(9)
    logits = target_pass(MODEL, cache, torch.tensor([[1, 2, 3]]))
    expected = fresh_logits(MODEL, torch.cat([tokens, torch.tensor([[1, 2, 3]])], dim=1))[:, -3:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_growing_is_rare():
    cache, copies = RaggedCache(MODEL.config, 1, 1), set()
    for capacity in range(1, 2000):
        cache.reserve(capacity)
        copies.add(cache.capacity)
    assert len(copies) <= 8


def test_an_interrupted_pass_leaves_the_cache_usable(monkeypatch):
    cache, tokens = filled()
    layer = MODEL.model.layers[1]
    monkeypatch.setattr(layer, "forward", lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        target_pass(MODEL, cache, torch.tensor([[8, 9]]))
    monkeypatch.undo()
    assert cache.lengths.tolist() == [6]
    expected = fresh_logits(MODEL, torch.cat([tokens, torch.tensor([[5]])], dim=1))[:, -1:]
    torch.testing.assert_close(target_pass(MODEL, cache, torch.tensor([[5]])), expected, atol=1e-4, rtol=0)


def test_a_row_does_not_see_its_neighbours():
    alone, together = RaggedCache(MODEL.config, 1, 32), RaggedCache(MODEL.config, 3, 32)
    tokens = prompt(9, batch=3)
    target_pass(MODEL, alone, tokens[1:2])
    target_pass(MODEL, together, tokens)
    together.rollback([4, 0, 8])
    torch.testing.assert_close(
        target_pass(MODEL, together, torch.full((3, 2), 5))[1], target_pass(MODEL, alone, torch.full((1, 2), 5))[0]
    )


@pytest.mark.parametrize("level", [True, False])
@pytest.mark.parametrize("rows", [[1], [0, 1], [1, 2], [0, 2], [2, 0], [2, 0, 1], [0, 1, 2]], ids=str)
def test_a_pass_over_some_rows_leaves_the_others_alone(rows, level):
    """Neighbouring or scattered, in any order, at one place or ragged."""
    cache, tokens = filled(batch=3)
    cache.rollback(0 if level else [3, 0, 1])
    known = [row[:n].tolist() for row, n in zip(tokens, cache.lengths.tolist())]
    before = [layer.keys.clone() for layer in cache.layers]
    new = prompt(4, seed=7, batch=3)
    logits = target_pass(MODEL, cache, new[rows], rows=rows)
    for scores, b in zip(logits, rows):
        expected = fresh_logits(MODEL, torch.tensor([known[b] + new[b].tolist()]))[0, -4:]
        torch.testing.assert_close(scores, expected, atol=1e-4, rtol=0)
    assert cache.lengths.tolist() == [len(row) + 4 * (b in rows) for b, row in enumerate(known)]
    for layer, keys in zip(cache.layers, before):
        others = [b for b in range(3) if b not in rows]
        assert torch.equal(layer.keys[others], keys[others])
    whole = for_all_rows(logits, rows, 3)
    assert all(torch.equal(whole[b], logits[rows.index(b)] if b in rows else 0 * whole[b]) for b in range(3))


def test_a_cleared_row_is_empty_and_no_nan_of_it_spreads():
    cache, _ = filled(batch=2)
    for layer in cache.layers:
        layer.keys[0], layer.values[0] = float("nan"), float("nan")
    cache.clear(0)
    assert cache.lengths.tolist() == [0, 6]
    logits = target_pass(MODEL, cache, torch.tensor([[5, 6]]), rows=[0])
    torch.testing.assert_close(logits, fresh_logits(MODEL, torch.tensor([[5, 6]])), atol=1e-4, rtol=0)


def test_positions_beyond_the_context_are_filler_not_an_index_error():
    model = tiny_model("gpt2")  # a learned table of positions
    cache = RaggedCache(model.config, 1, CONTEXT + 4)
    target_pass(model, cache, prompt(CONTEXT - 1))
    wide = target_pass(model, cache, torch.tensor([[5, 0, 0, 0]]))
    cache.rollback(4)
    torch.testing.assert_close(wide[:, :1], target_pass(model, cache, torch.tensor([[5]])), atol=1e-4, rtol=0)


def pass_over_rows(rows: list[int]) -> torch.Tensor:
    return target_pass(MODEL, RaggedCache(MODEL.config, 2, 8), torch.ones(len(rows), 1, dtype=torch.long), rows=rows)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RaggedCache(MODEL.config, 0, 8), "at least 1"),
        (lambda: RaggedCache(MODEL.config, 1, 0), "at least 1"),
        (lambda: target_pass(MODEL, RaggedCache(MODEL.config, 2, 8), torch.tensor([[1]])), r"\[2, T\]"),
        (lambda: target_pass(MODEL, RaggedCache(MODEL.config, 1, 8), torch.tensor([1])), r"\[1, T\]"),
        (lambda: pass_over_rows([-1]), r"from 0 to 1, got \[-1\]"),
        (lambda: pass_over_rows([2]), r"from 0 to 1, got \[2\]"),
        (lambda: pass_over_rows([1, 1]), r"different numbers .* got \[1, 1\]"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_model_called_without_target_pass_is_told_what_to_do():
    from specnb.compat import cache_argument

    with pytest.raises(RuntimeError, match="target_pass"):
        MODEL(input_ids=prompt(3), **{cache_argument(MODEL): RaggedCache(MODEL.config, 1, 8)})


def test_buckets_are_a_function_of_the_position_and_hold_it():
    sizes = [bucket_size(position) for position in range(3000)]
    assert all(size > position for position, size in enumerate(sizes))
    assert sorted(set(sizes)) == [256, 512, 1024, 2048, 4096]
    assert sizes == sorted(sizes)
