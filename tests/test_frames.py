"""A forward cut around its layers: the logits of the network's own, and a way out where it cannot be cut."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

import specnb
from specnb import frames
from specnb.cache import RaggedCache, hearing, target_pass
from specnb.compiled import Twin, compare, probe, twin_for
from specnb.drafters.small_model import small_model
from tests.tiny import FAMILIES, plain, prompt, tiny_model

pytestmark = pytest.mark.slow
WHOLE = {  # forwards that keep their own
    "opt": "value out of a tracing tensor",  # places its positions by a sum over the mask
    "gemma3": "several kinds",
}


def passes(twin, tokens=10, size=4):
    """Logits [1, size, V] of a compiled pass after so many tokens, and the cache."""
    cache = RaggedCache(twin.network.config, 1, tokens + size)
    twin.widths.add(size)
    target_pass(twin.network, cache, prompt(tokens))
    return twin.packed_pass(cache, prompt(size, seed=1), [0], [size], size), cache


@pytest.fixture(scope="module")
def twin():
    twin = Twin(tiny_model("llama"))
    passes(twin)
    return twin


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_networks_own_forward(family, dtype):
    """Also at other places than those that were traced."""
    twin = Twin(tiny_model(family).to(dtype))
    for tokens in (10, 33, 1):
        framed, _ = passes(twin, tokens)
        cache = RaggedCache(twin.network.config, 1, tokens + 4)
        target_pass(twin.network, cache, prompt(tokens))
        compare(target_pass(twin.network, cache, prompt(4, seed=1))[0], framed, dtype)
    if family in WHOLE:
        assert WHOLE[family] in twin.unframed and not twin.frames
    else:
        assert twin.unframed is None and len(twin.frames) == 1


def test_both_parts_are_replayed(twin):
    (frame,) = twin.frames.values()
    assert frame.cut.before.graph.program and frame.cut.behind.graph.program


def test_a_pass_calls_no_python_of_the_model(twin, monkeypatch):
    expected, _ = passes(twin)
    monkeypatch.setattr(type(twin.network.model), "forward", None)
    for module in (twin.network.lm_head, twin.network.model.norm, twin.network.model.embed_tokens):
        monkeypatch.setattr(type(module), "forward", None)
    cache = RaggedCache(twin.network.config, 1, 14)
    twin.packed_pass(cache, prompt(4), [0], [4], 4, scored=False)
    assert cache.lengths.tolist() == [4]
    monkeypatch.undo()
    assert torch.equal(passes(twin)[0], expected)


def test_a_distilled_draft_is_framed_hints_and_all():
    """What its embedding has heard its head must know, on the other side of the layers."""
    model = tiny_model("llama")
    draft = small_model(model, [0, 1], torch.arange(40))
    own = Twin(draft)
    framed, whole = probe(own.network, 4, compiled=True), probe(own.network, 4)
    compare(whole, framed, torch.float32)
    assert own.unframed is None and not bool(framed[..., 40:].isfinite().any())
    codes = torch.tensor([[5, 50 << 20 | 2 << 40 | 6, 7, 8]])  # token 6 comes with a hint at token 50
    heard = []
    for compiled in (True, False):
        cache = RaggedCache(own.network.config, 1, 20)
        target_pass(own.network, cache, prompt(10))
        cache.compiled = compiled
        heard.append(target_pass(own.network, cache, codes))
    compare(heard[1], heard[0], torch.float32)
    assert heard[0][0, 1, 50].isfinite() and not bool(heard[0][0, 2, 50].isfinite())


def test_who_listens_to_the_head_is_told(twin):
    heard = {}
    for compiled in (True, False):
        cache, notes = RaggedCache(twin.network.config, 1, 20), []
        target_pass(twin.network, cache, prompt(10))
        with hearing(twin.network, cache, notes):
            if compiled:
                twin.packed_pass(cache, prompt(4, seed=1), [0], [3], 4)
            else:
                target_pass(twin.network, cache, prompt(4, seed=1)[:, :3])
        heard[compiled] = notes[0]
    assert heard[True].shape == heard[False].shape == (3, 32)
    torch.testing.assert_close(heard[True], heard[False], atol=1e-4, rtol=1e-4)


def test_while_it_is_traced_nobody_hears_of_it():
    twin, notes = Twin(tiny_model("llama")), []
    hook = twin.network.lm_head.register_forward_pre_hook(lambda _, inputs: notes.append(inputs[0]))
    passes(twin)
    assert len(notes) == 2  # the prompt's pass and the compiled one
    hook.remove()
    assert not twin.network.lm_head._forward_pre_hooks


def test_a_prompt_that_is_read_is_not_scored(twin, monkeypatch):
    monkeypatch.setattr(frames.Frame, "behind", None)
    cache = RaggedCache(twin.network.config, 1, 20)
    assert twin.packed_pass(cache, prompt(4), [0], [4], 4, scored=False).numel() == 0
    assert cache.lengths.tolist() == [4]


@pytest.mark.parametrize("between", [lambda layer, args, out: out * 2, lambda layer, args, out: out.clone()])
def test_a_model_that_works_between_its_layers_keeps_its_forward(between):
    twin = Twin(tiny_model("llama"))
    twin.network.model.layers[0].register_forward_hook(between)
    found = probe(twin.network, 4, compiled=True)
    assert "not all called with the same" in twin.unframed
    compare(probe(twin.network, 4), found, torch.float32)


def test_a_frame_that_forgets_what_differs_is_found_out(monkeypatch):
    """Planted: positions as they were while it was traced."""
    before = frames.Frame.before

    def stale(self, call, cache):
        return before(self, {**call, "position_ids": torch.arange(call["input_ids"].shape[1])[None]}, cache)

    monkeypatch.setattr(frames.Frame, "before", stale)
    model, ids = tiny_model("llama"), prompt(20)
    out = specnb.generate(model, ids, specnb.PromptLookup(3), compile=True, max_new_tokens=12)
    assert "gives other logits" in twin_for(model, 4).unframed
    assert out.sequences.tolist() == plain(model, ids, max_new_tokens=12).tolist()


def test_a_cache_is_not_held(twin):
    """By what a frame remembers of the call that it was traced with."""
    other = Twin(tiny_model("llama"))
    _, cache = passes(other)
    known = weakref.ref(cache)
    del cache
    gc.collect()
    assert other.frames and known() is None


def test_after_an_interrupted_pass_the_next_one_is_whole(twin, monkeypatch):
    expected, _ = passes(twin)
    with monkeypatch.context() as patch:
        patch.setattr(frames.Frame, "behind", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        cache = RaggedCache(twin.network.config, 1, 14)
        target_pass(twin.network, cache, prompt(10))
        with pytest.raises(KeyboardInterrupt):
            twin.packed_pass(cache, prompt(4, seed=1), [0], [4], 4)
        assert cache.lengths.tolist() == [10]
    assert torch.equal(twin.packed_pass(cache, prompt(4, seed=1), [0], [4], 4), expected)


def test_threads_take_turns():
    model = tiny_model("llama", seed=3)
    ids = [prompt(n, seed=n) for n in (9, 12, 20, 31)]
    expected, found = [plain(model, one).tolist() for one in ids], [None] * 4

    def write(i):
        out = specnb.generate(model, ids[i], specnb.PromptLookup(3), compile=True, max_new_tokens=24, do_sample=False)
        found[i] = out.sequences.tolist()

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected
