"""Replayed graphs: the bits of the compiled ones, with other tensors, sizes and threads; and a way out."""

from __future__ import annotations

import functools
import gc
import re

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from specnb import kernels, replayed
from specnb.ahead import Ahead
from specnb.cache import RaggedCache, target_pass
from specnb.compiled import Twin, probe
from specnb.drafters.early_exit import first_layers
from specnb.replayed import Graph, Program
from tests.tiny import prompt, tiny_model

pytestmark = pytest.mark.skipif(kernels.compiler() is None, reason="no C++ compiler")


@functools.cache
def compiled_twin(family, dtype):
    twin = Twin(tiny_model(family).to(dtype))
    probe(twin.network, 4, compiled=True)
    assert all(graph.program for graph in twin.graphs.values()), [g.refusal for g in twin.graphs.values()]
    return twin


@pytest.fixture(params=["llama", "gpt2", "gemma3"])
def family(request):
    """Layers with joined products and grouped heads; with biases and strided queries; of two kinds, with a window."""
    return request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def twin(request, family):
    return compiled_twin(family, request.param)


def without_programs(twin, monkeypatch):
    for graph in twin.graphs.values():
        monkeypatch.setattr(graph, "program", None)


def passes(twin, capacity, lengths=(40, 3)):
    """Logits of packed passes over two rows and one row, and what the cache then holds."""
    cache = RaggedCache(twin.network.config, len(lengths), capacity)
    twin.widths.add(4)
    out = []
    for row, length in enumerate(lengths):
        target_pass(twin.network, cache, prompt(length, seed=row), rows=[row])
    for counts in ([3, 1], [1, 2], [0, 4]):
        rows, tokens = [row for row, n in enumerate(counts) if n], prompt(4, seed=sum(counts), batch=2)
        out.append(twin.packed_pass(cache, tokens[rows], rows, [n for n in counts if n], 4))
        cache.reserve(2 * capacity)
    return out + [buffer for layer in cache.layers for buffer in (layer.keys, layer.values)]


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_replayed_layer_gives_the_bits_of_the_compiled_one(threads, twin, monkeypatch):
    """Other rows, caches of other sizes that grow in between, and other numbers of threads than when recorded."""
    torch.set_num_threads(threads)
    found = passes(twin, 64)
    without_programs(twin, monkeypatch)
    assert all(map(replayed.same_bits, found, passes(twin, 64)))


def test_nothing_but_the_replay_runs(twin, monkeypatch):
    for graph in twin.graphs.values():
        monkeypatch.setattr(graph, "compiled", None)
    passes(twin, 50)


def test_a_result_is_the_callers_to_keep(twin):
    graph, given = twin_layer(twin)
    first = graph(*given)
    held = first.clone()
    assert torch.equal(graph(given[0] + 1, *given[1:]), first) is False
    assert torch.equal(first, held)


def twin_layer(twin):
    """One of the graphs and arguments for it."""
    seen = []
    case, graph = next(iter(twin.graphs.items()))
    twin.graphs[case] = lambda *given: seen.append(given) or graph(*given)
    probe(twin.network, 4, compiled=True)
    twin.graphs[case] = graph
    return graph, seen[0]


def test_inputs_with_other_strides_go_through_the_graph(twin, monkeypatch):
    graph, given = twin_layer(twin)
    expected, calls = graph(*given), []
    strided = torch.stack([given[0], -given[0]], dim=-1)[..., 0]
    assert graph.program([[strided, *given[1:]]]) is None
    monkeypatch.setattr(graph, "compiled", lambda *tensors: calls.append(tensors[0].contiguous()) or expected)
    assert graph(strided, *given[1:]) is expected and torch.equal(calls[0], given[0])


def test_many_passes_leave_nothing_behind():
    twin = compiled_twin("llama", torch.float32)

    def live():
        passes(twin, 64)
        gc.collect()
        return sum(isinstance(x, torch.Tensor) for x in gc.get_objects())

    live()
    assert live() == live()


def test_weights_are_looked_up_at_every_call():
    """A weight that gets new memory is read there: nobody may be left with the address of the old one."""
    twin = Twin(tiny_model("llama", num_hidden_layers=1))
    before = probe(twin.network, 4, compiled=True)
    for layer in twin.network.model.layers:
        layer.input_layernorm.weight.data = -layer.input_layernorm.weight.data
    after = probe(twin.network, 4, compiled=True)
    assert not torch.equal(before, after)
    assert torch.allclose(after, probe(twin.network, 4), atol=1e-4)


# ── several layers in one call ──────────────────────────────────────────────────────────────────────────────────────


def one_pass(twin, network=None):
    """Logits of a packed pass after a prompt, and the cache."""
    cache = RaggedCache(twin.network.config, 1, 40)
    target_pass(twin.network, cache, prompt(20))
    twin.widths.add(4)
    return twin.packed_pass(cache, prompt(4, seed=1), [0], [3], 4, network), cache


def native_calls(twin, monkeypatch):
    """How many layers each call of a pass runs."""
    seen = []
    for graph in {id(graph): graph for graph in twin.graphs.values()}.values():
        replay = graph.program.replay
        monkeypatch.setattr(graph.program, "replay", lambda *a, replay=replay: seen.append(a[4]) or replay(*a))
    one_pass(twin)
    seen.clear()
    one_pass(twin)
    return seen


def test_layers_of_one_kind_are_one_call(twin, family, monkeypatch):
    assert native_calls(twin, monkeypatch) == ([1, 1] if family == "gemma3" else [2])
    assert twin.ahead == {}


def test_kinds_of_layers_that_take_turns(monkeypatch):
    kinds = ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 3
    twin = Twin(tiny_model("gemma3", num_hidden_layers=6, layer_types=kinds))
    expected = probe(twin.network, 4, compiled=True)
    assert native_calls(twin, monkeypatch) == [2, 1, 3]
    cache = RaggedCache(twin.network.config, 1, 15)
    tokens = torch.arange(3, 3 + 7 * 15, 7)[None] % 61
    target_pass(twin.network, cache, tokens[:, :11])
    assert torch.equal(twin.packed_pass(cache, tokens[:, 11:], [0], [4], 4), expected[0])


@pytest.mark.parametrize(
    "between", [lambda layer, args, out: out * 2, lambda layer, args, out: out.mul_(2)], ids=["another", "in place"]
)
def test_what_a_model_does_between_two_layers_is_seen(between, monkeypatch):
    """The second layer has been computed from something else: it is computed again, then and not ahead."""
    twin = Twin(tiny_model("llama"))
    twin.unframed = "the model's own loop is what is tested"
    probe(twin.network, 4, compiled=True)
    plain, _ = one_pass(twin)
    twin.network.model.layers[0].register_forward_hook(between)
    first, second = one_pass(twin), one_pass(twin)
    assert twin.breaks_of(twin.network) == {1, 2}
    without_programs(twin, monkeypatch)
    expected = one_pass(twin)
    assert not torch.equal(expected[0], plain)
    for logits, cache in (first, second):
        assert torch.equal(logits, expected[0])
        assert torch.equal(cache.layers[1].keys, expected[1].layers[1].keys)


def test_the_first_layers_alone_are_not_followed_by_the_others():
    twin = compiled_twin("llama", torch.float32)
    logits, cache = one_pass(twin, first_layers(twin.network, 1))
    whole, full = one_pass(twin)
    assert logits.shape == whole.shape and not torch.equal(logits, whole)
    assert torch.equal(cache.layers[0].keys, full.layers[0].keys)
    assert not bool(cache.layers[1].keys[:, :, 20:].any()) and bool(full.layers[1].keys[:, :, 20:24].any())


def test_an_interrupted_pass_leaves_nothing_ahead(monkeypatch):
    twin = Twin(tiny_model("llama"))
    twin.unframed = "the model's own loop is what is tested"
    expected, _ = one_pass(twin)

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ahead, "take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one_pass(twin)
    assert twin.ahead == {}
    assert torch.equal(one_pass(twin)[0], expected)


# ── what is not replayed ────────────────────────────────────────────────────────────────────────────────────────────


def graph_of(function, *example):
    return Graph(len(example)).compile(make_fx(function)(*example), list(example))


def test_a_graph_of_small_kernels_is_replayed():
    graph = graph_of(lambda x, y: (torch.relu(x) + y, x.sum(-1)), torch.randn(3, 40), torch.randn(40))
    assert graph.refusal is None
    x, y = torch.randn(3, 40), torch.randn(40)
    torch.testing.assert_close(list(graph(x, y)), [torch.relu(x) + y, x.sum(-1)])


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: torch.relu(x @ x), "it calls"),
        (lambda x: (torch.relu(x) @ x).sum(0), "it calls"),
        (lambda x: x.t(), "a part of something|it calls"),
        (lambda x: torch.relu(x)[1:], "a part of something|it calls"),
        (lambda x: torch.relu(x + torch.arange(40.0)), "was not seen to be made|it calls|other"),
    ],
    ids=["library first", "library inside", "a view of the input", "a part", "a constant"],
)
def test_what_is_more_than_kernels_runs_as_it_was_compiled(function, why):
    graph = graph_of(function, torch.randn(40, 40))
    x = torch.randn(40, 40)
    torch.testing.assert_close(graph(x), function(x))
    assert graph.refusal is None or re.search(why, graph.refusal), graph.refusal


def test_a_replay_with_other_bits_is_not_used(monkeypatch):
    """Planted: one call is left out."""
    whole = Program._code

    def shorter(calls, places, bases):
        return whole(calls[:-1], places, bases)

    monkeypatch.setattr(Program, "_code", staticmethod(shorter))
    twin = Twin(tiny_model("llama"))
    got = probe(twin.network, 4, compiled=True)
    assert [graph.refusal for graph in twin.graphs.values()] == ["its replay gives other bits"]
    torch.testing.assert_close(got, probe(twin.network, 4))


def test_another_compiler_is_no_obstacle(monkeypatch):
    """Its internals are not as expected: the graph runs as it was compiled."""

    def other_names(call, recorder):
        raise AttributeError("no such function")

    monkeypatch.setattr(replayed, "listened", other_names)
    graph = graph_of(lambda x: torch.relu(x) + 1, torch.randn(9))
    assert graph.program is None and graph.refusal == "no such function"
    assert torch.equal(graph(torch.zeros(9)), torch.ones(9))
