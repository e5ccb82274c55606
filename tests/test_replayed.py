"""Replayed graphs: the bits of the compiled ones, with other tensors, sizes and threads; and a way out."""

from __future__ import annotations

import functools
import gc
import re

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from specnb import kernels, replayed
from specnb.cache import RaggedCache, target_pass
from specnb.compiled import Twin, probe
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
    assert graph.program([strided, *given[1:]]) is None
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
