"""A model's linear layers over packed weights: those of `specnb.kernels`, which read them once and straight through."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from specnb import kernels

ModuleT = TypeVar("ModuleT", bound=nn.Module)
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers of one module that read the same input


class PackedLinear(nn.Module):
    """``nn.Linear`` (or transformers' ``Conv1D``) over packed weights, for inference.

    Args:
        weight: [N, K], float32 or bfloat16, on the CPU.
        bias: [N] or None.
    """

    packed: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("packed", kernels.pack(weight), persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] → [..., N]."""
        return torch.ops.specnb.packed_linear(x, self.packed, self.bias, self.out_features)


class Joined(nn.Module):
    """The packed weights of layers that read the same input, one after another: [P, K, …]."""

    packed: Tensor
    bias: Tensor | None

    def __init__(self, layers: list[PackedLinear]) -> None:
        super().__init__()
        self.out_features = sum(layer.out_features for layer in layers)
        self.register_buffer("packed", torch.cat([layer.packed for layer in layers]), persistent=False)
        biases = [layer.bias if layer.bias is not None else torch.zeros(layer.out_features) for layer in layers]
        some = any(layer.bias is not None for layer in layers)
        self.register_buffer("bias", torch.cat(biases) if some else None, persistent=False)


class Part(nn.Module):
    """One of the joined layers. In a graph all parts call the same product, and the compiler keeps one of the calls."""

    def __init__(self, joined: Joined, first: int, out_features: int) -> None:
        super().__init__()
        self.__dict__["joined"] = joined  # a module of the parent, not of its parts
        self.first, self.out_features = first, out_features

    def forward(self, x: Tensor) -> Tensor:
        joined: Any = self.joined
        end = self.first + self.out_features
        if _tracing:
            y = torch.ops.specnb.packed_linear(x, joined.packed, joined.bias, joined.out_features)
            return y[..., self.first : end]
        packed = joined.packed[self.first // kernels.PANEL : end // kernels.PANEL]
        bias = None if joined.bias is None else joined.bias[self.first : end]
        return torch.ops.specnb.packed_linear(x, packed, bias, self.out_features)


_tracing = False  # whether a layer is being turned into a graph


@contextmanager
def joined_in_a_graph() -> Iterator[None]:
    """While a layer is traced: joined layers are one product, of which each takes its part."""
    global _tracing
    _tracing = True
    try:
        yield
    finally:
        _tracing = False


def packed_copy(model: ModuleT) -> ModuleT:
    """The same model, or part of one, with its linear layers packed.

    Parameters are shared, and the original is not touched. Layers of other types, dtypes or devices stay as they are.

    Raises:
        kernels.NoCompiler: where the kernel cannot be built.
    """
    kernels.library()
    shared = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    twin = copy.deepcopy(model, shared)
    for module in list(twin.modules()):
        for name, child in list(module.named_children()):
            if (weight := _matrix(child)) is not None:
                bias: Any = child.bias
                setattr(module, name, PackedLinear(weight, bias))
        for names in TOGETHER:
            join(module, names)
    packed = [module for module in twin.modules() if isinstance(module, (PackedLinear, Joined))]
    stretch = kernels.Stretch(sum(layer.packed.nbytes + 64 for layer in packed))
    for layer in packed:
        layer.packed = stretch.take_in(layer.packed)
    return twin.eval()


def join(module: nn.Module, names: tuple[str, ...]) -> None:
    """Make these children parts of one product, if all are there, packed, and end where a panel ends."""
    layers: list[Any] = [getattr(module, name, None) for name in names]
    if not all(isinstance(layer, PackedLinear) and layer.out_features % kernels.PANEL == 0 for layer in layers):
        return
    joined = Joined(layers)
    module.add_module("joined_" + "_".join(names), joined)
    first = 0
    for name, layer in zip(names, layers):
        setattr(module, name, Part(joined, first, layer.out_features))
        first += layer.out_features


def _matrix(module: nn.Module) -> Tensor | None:
    """The module's weights [N, K] if the kernel can take its place."""
    if type(module) not in (nn.Linear, Conv1D):
        return None
    weight = module.weight if isinstance(module, nn.Linear) else module.weight.T
    return weight if weight.dtype in kernels.DTYPES and weight.device.type == "cpu" else None
