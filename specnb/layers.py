"""A decoder layer as a graph over tensors alone, so that all layers of a kind can share it.

What a layer is called with is taken apart into its tensors and the form that holds them; the cache it writes to is a
view that has no number of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.utils.stateless import _reparametrize_module as stateless

from specnb.cache import RaggedCache, RaggedLayer
from specnb.packed import joined_in_a_graph
from specnb.replayed import Graph

OPTIONS = {
    "cpp.threads": 1,  # what is left are a few thousand numbers a kernel: a second thread costs more than it brings
    "size_asserts": False,  # a graph serves caches of any capacity: only the kernels look at the buffers
}


class LayerView:
    """One layer of a `RaggedCache` as a layer of the twin sees it: tensors, and no number that differs by layer."""

    def __init__(self, layer: RaggedLayer, places: Tensor) -> None:
        self.layer, self.places = layer, places
        self.keys, self.values = layer.keys, layer.values  # None before the cache's first pass

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, places: Tensor) -> LayerView:
        """The same, from tensors alone."""
        view = cls.__new__(cls)
        view.keys, view.values, view.places = keys, values, places
        return view

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the new keys and values; hand the whole buffers to `attention`."""
        if self.keys is None:
            self.layer.lazy_initialization(key, value)
            self.keys, self.values = self.layer.keys, self.layer.values
        torch.ops.specnb.ragged_store(self.keys, self.values, key, value, self.places)
        return self.keys, self.values


def with_view(args: tuple[Any, ...], kwargs: dict[str, Any], view: LayerView) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a layer is called with, with its view in the place of the cache."""
    seen = tuple(view if isinstance(value, RaggedCache) else value for value in args)
    return seen, {name: view if isinstance(value, RaggedCache) else value for name, value in kwargs.items()}


PLAIN = {type(None), bool, int, float, str}


def disassemble(value: Any, tensors: list[Tensor]) -> Any:
    """Take the tensors out of nested arguments; returns their form, which is equal for equal constants."""
    kind = type(value)
    if kind in PLAIN:  # first, and by type: to ask whether something else is a tensor takes as long as all the rest
        return value
    if kind is Tensor or isinstance(value, Tensor):
        tensors.append(value)
        return Tensor
    if kind is LayerView:
        tensors += (value.keys, value.values, value.places)
        return LayerView
    if isinstance(value, (list, tuple)):
        return tuple([disassemble(item, tensors) for item in value])
    if isinstance(value, dict):
        return (dict, *[(name, disassemble(item, tensors)) for name, item in value.items()])
    return value


def assemble(form: Any, tensors: Iterator[Tensor]) -> Any:
    """The inverse of `disassemble`."""
    if form is Tensor:
        return next(tensors)
    if form is LayerView:
        return LayerView.of(next(tensors), next(tensors), next(tensors))
    if isinstance(form, tuple) and form and form[0] is dict:
        return {name: assemble(item, tensors) for name, item in form[1:]}
    if isinstance(form, tuple):
        return tuple(assemble(item, tensors) for item in form)
    return form


def compile_layer(layer: nn.Module, names: list[str], form: Any, inputs: list[Tensor]) -> Graph:
    """A layer's forward as one graph over tensors only, so that the layers of a kind can share it.

    Traced here and not by ``torch.compile``, whose check of the arguments costs 0.1 ms a layer and pass.
    """

    def forward(*tensors: Tensor) -> Any:
        own = dict(zip(names, tensors[-len(names) :]))
        args, kwargs = assemble(form, iter(tensors))
        with stateless(layer, own):
            return type(layer).forward(layer, *args, **kwargs)

    with joined_in_a_graph():
        graph = trace(forward, inputs)
    return compile_graph(graph, inputs, len(inputs) - len(names))


def trace(function: Callable[..., Any], examples: list[Tensor]) -> GraphModule:
    """The operations of a function of tensors."""
    # here and not above: the compiler takes more than a second to import
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    table = {**select_decomp_table(), torch.ops.aten.bmm.default: _outer}
    return make_fx(function, decomposition_table=table)(*examples)


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """A batched product over one number is no product of matrices: angles are made so, and a kernel can be fused."""
    return a * b if a.shape[-1] == 1 else NotImplemented


def compile_graph(graph: GraphModule, examples: list[Tensor], varying: int) -> Graph:
    """Traced operations, compiled. Of the inputs the first ``varying`` differ from pass to pass."""
    from torch._functorch.compile_utils import fx_graph_cse
    from torch._inductor import config as inductor_config

    graph = GraphModule(graph, fx_graph_cse(graph.graph))
    with inductor_config.patch(OPTIONS):
        return Graph(varying).compile(graph, examples)
