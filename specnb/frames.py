"""What a pass does before its layers and behind them, compiled as the layers are.

A compiled pass spends its time in the layers and in the output head, and between them runs the model's own forward:
Python that looks an embedding up, turns positions into angles, and calls one layer after the other. Of a small model's
pass that is a tenth, of a draft's it is half. So the forward is run once under a tracer in which all layers together
stand for a single operation; what comes before that is one graph, what comes behind it another, and a pass is three
native calls.

A model whose forward cannot be cut like that, because its layers are of several kinds, say, keeps its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph as Operations
from torch.fx import GraphModule, Node
from transformers import PreTrainedModel

from specnb.cache import RaggedCache
from specnb.layers import LayerView, compile_graph, disassemble, trace, with_view
from specnb.replayed import Graph

_operators = torch.library.Library("specnb", "FRAGMENT")
_operators.define("layers(Tensor hidden) -> Tensor")
for _key in ("CPU", "Meta"):
    _operators.impl("layers", torch.empty_like, _key)

_tracing = threading.local()
KEYS, VALUES, PLACES = (torch.empty(0) for _ in range(3))  # stand for those of a layer's cache and of a pass


class Uncuttable(RuntimeError):
    """The forward cannot be cut; the message says why."""


class Layers:
    """Stands in for all layers while a forward is traced, and notes how they are called."""

    def __init__(self) -> None:
        self.count = 0
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """What the layer returns: all of them return the one thing that stands for their work.

        Raises:
            Uncuttable: if it is called with something else than the result before it and what the first one got.
        """
        self.count += 1
        if self.count == 1:
            self.args, self.kwargs = args, kwargs
            self.hidden = torch.ops.specnb.layers(args[0])
            return self.hidden
        same = args[0] is self.hidden and len(args) == len(self.args) and kwargs.keys() == self.kwargs.keys()
        same = same and all(mine is first for mine, first in zip(args[1:], self.args[1:]))
        if not (same and all(value is self.kwargs[name] for name, value in kwargs.items())):
            raise Uncuttable("its layers are not all called with the same")
        return self.hidden

    def called(self) -> tuple[Any, list[Tensor]]:
        """What the layers were called with: its form, and its tensors, hidden states first."""
        tensors: list[Tensor] = []
        form = disassemble(with_view(self.args, self.kwargs, LayerView.of(KEYS, VALUES, PLACES)), tensors)
        return form, tensors

    def forget(self) -> None:
        """Let go of what they were called with: a cache is among it."""
        self.args, self.kwargs, self.hidden = (), {}, torch.empty(0)

    @staticmethod
    def standing_in() -> Layers | None:
        """The object that a layer must call in place of its own forward, if this thread is tracing."""
        return getattr(_tracing, "layers", None)


@dataclass(frozen=True)
class Piece:
    """One of the two graphs. Its inputs are what is given in a pass, and constants of the model."""

    graph: Graph
    constants: list[Tensor]

    def __call__(self, *given: Tensor) -> list[Tensor]:
        return list(self.graph(*given, *self.constants))


@dataclass(frozen=True)
class Cut:
    """A forward in two parts.

    Attributes:
        before: (what is given) → ``made`` of what the layers are called with, hidden states first; then what the other
            part needs.
        behind: (hidden states after the layers, what it needs) → what was wanted.
        layers: how they were called.
        given, made: the tensors that may be in that call, as they were while it was traced.
    """

    before: Piece
    behind: Piece
    layers: Layers
    given: list[Tensor]
    made: list[Tensor]


def cut(forward: Callable[..., Sequence[Tensor]], given: list[Tensor]) -> Cut:
    """Trace ``forward(*given)`` and compile what it does before the layers and behind them.

    Args:
        forward: runs the model on tensors that differ from pass to pass, and returns those that are wanted.
        given: examples of them.

    Raises:
        Uncuttable: or whatever the tracer and the compiler trip over.
    """
    layers, seen, made = Layers(), list[Tensor](), list[Tensor]()

    def traced(*tensors: Tensor) -> tuple[Tensor, ...]:
        _tracing.layers = layers
        try:
            wanted = forward(*tensors)
        finally:
            _tracing.layers = None
        seen[:] = tensors
        for tensor in layers.called()[1]:
            if not any(tensor is other for other in (KEYS, VALUES, PLACES, *seen, *made)):
                made.append(tensor)
        return (*made, *wanted)

    whole = trace(traced, given)
    middle = [node for node in whole.graph.nodes if node.target is torch.ops.specnb.layers.default]
    if len(middle) != 1:
        raise Uncuttable("its layers were not seen")
    results: list[Node] = list(whole.graph.output_node().args[0])  # type: ignore[arg-type]
    late = _depending_on(middle[0], whole.graph)
    needed = _inputs_from_before(late, middle[0])
    before = _piece(whole, [*given], [], [*results[: len(made)], *needed])
    example = before(*given)
    behind = _piece(whole, [example[0], *example[len(made) :]], [middle[0], *needed], results[len(made) :])
    return Cut(before, behind, layers, seen, made)


def compiled(function: Callable[..., tuple[Tensor, ...]], given: list[Tensor]) -> Piece:
    """A function of tensors as one graph, for others of the same sizes. Whatever else it reads is constant."""
    whole = trace(function, given)
    return _piece(whole, given, [], list(whole.graph.output_node().args[0]))  # type: ignore[arg-type]


def _depending_on(middle: Node, graph: Operations) -> set[Node]:
    """What comes behind a node."""
    late: set[Node] = set()
    for node in graph.nodes:
        if node.op != "output" and any(other is middle or other in late for other in node.all_input_nodes):
            late.add(node)
    return late


def _inputs_from_before(late: set[Node], middle: Node) -> list[Node]:
    """What was computed before the layers and is used behind them."""
    used = dict.fromkeys(other for node in late for other in node.all_input_nodes)  # in order
    return [node for node in used if node not in late and node is not middle and node.op != "get_attr"]


def _piece(whole: GraphModule, examples: list[Tensor], inputs: list[Node], outputs: list[Node]) -> Piece:
    """The operations between these inputs (none: those of the whole) and outputs, as a graph of their own."""
    graph, known, constants = Operations(), {}, {}
    for node in inputs or [node for node in whole.graph.nodes if node.op == "placeholder"]:
        known[node] = graph.placeholder(node.name)
    wanted = _needed_for(outputs, set(known))
    for node in whole.graph.nodes:
        if node in wanted and node.op == "get_attr":
            known[node], constants[node] = graph.placeholder(node.name), getattr(whole, str(node.target))
    for node in whole.graph.nodes:
        if node in wanted and node not in known:
            known[node] = graph.node_copy(node, known.__getitem__)
    if any(known[node].op == "placeholder" for node in outputs):
        raise Uncuttable("something passes through unchanged")
    graph.output(tuple(known[node] for node in outputs))
    tensors = list(constants.values())
    module = GraphModule(torch.nn.Module(), graph)
    return Piece(compile_graph(module, [*examples, *tensors], len(examples)), tensors)


def _needed_for(outputs: Iterable[Node], known: set[Node]) -> set[Node]:
    """All nodes that must be computed for these, where some are known."""
    found: set[Node] = set()
    queue = [node for node in outputs if node not in known]
    while queue:
        node = queue.pop()
        if node not in found:
            found.add(node)
            queue += [other for other in node.all_input_nodes if other not in known]
    return found


# --- a pass ---

GIVEN = ("input_ids", "position_ids", "attention_mask")  # what differs from pass to pass; the last are its places


class Frame:
    """A network's forward over one number of positions, cut around its layers.

    Args:
        network: a causal LM whose layers ask `Layers.standing_in` first.
        forward: its own forward.
        call: keyword arguments of such a pass.

    Attributes:
        form: what a layer is called with, as `disassemble` tells it.

    Raises:
        Uncuttable: or whatever the tracer and the compiler trip over.
    """

    def __init__(self, network: PreTrainedModel, forward: Callable[..., Any], call: dict[str, Any]) -> None:
        if missing := [name for name in GIVEN if not isinstance(call.get(name), Tensor)]:
            raise Uncuttable(f"it takes no {missing[0]}")
        self.head: Any = network.get_output_embeddings()
        places: Tensor = call["attention_mask"]
        positions = torch.arange(call["input_ids"].numel()).view_as(call["input_ids"])
        others = [torch.zeros_like(call["input_ids"]), positions, torch.zeros_like(places)]  # than those of the call

        def scored(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            with self._heard() as heard:
                out = forward(network, **{**call, **dict(zip(GIVEN, tensors))})
            return heard[0], out.logits

        self.cut = cut(scored, others)
        self.form, tensors = self.cut.layers.called()
        known = [KEYS, VALUES, PLACES, *self.cut.given, *self.cut.made]
        self.sources = [next(i for i, other in enumerate(known) if other is tensor) for tensor in tensors]
        self.cut.layers.forget()

    @contextmanager
    def _heard(self) -> Iterator[list[Tensor]]:
        """What goes into the head. Whoever else listens to it hears nothing of this."""
        hooks, heard = dict(self.head._forward_pre_hooks), list[Tensor]()
        self.head._forward_pre_hooks.clear()
        try:
            with self.head.register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0])):
                yield heard
        finally:
            self.head._forward_pre_hooks.update(hooks)

    def before(self, call: dict[str, Any], cache: RaggedCache) -> tuple[list[list[Tensor]], list[Tensor]]:
        """What each layer is called with, hidden states of the first one first; and what is carried over."""
        given = [call[name] for name in GIVEN]
        made = self.cut.before(*given)
        count, places = len(self.cut.made), given[-1]
        inputs = []
        for layer in cache.layers:
            known = [layer.keys, layer.values, places, *given, *made[:count]]
            inputs.append([known[i] for i in self.sources])
        return inputs, made[count:]

    def behind(self, hidden: Tensor, carried: list[Tensor]) -> Tensor:
        """Logits from the hidden states after the layers; who listens to the head is told what goes into it."""
        heard, logits = self.cut.behind(hidden, *carried)
        for hook in self.head._forward_pre_hooks.values():
            hook(self.head, (heard,))
        return logits
