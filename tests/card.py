"""A card that is not there: tensors that count as being on a GPU, and a record of who waits for it.

Rounds of the loop run under `Card` on a CPU. Whatever the model says is marked, and so is everything computed from it
or made "on the device". A marked tensor that is looked at from the host (``int(x)``, ``x.tolist()``, a boolean mask, …)
has the host wait for the device; one that meets an unmarked tensor would be an error on a real card. Both are noted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

CARD, HOST = torch.device("cuda", 0), torch.device("cpu")
WAITS = {
    "item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__contains__", "equal",
    "allclose", "unique", "masked_select", "__len__of_nonzero",
}  # fmt: skip
INDEXING = {"__getitem__", "__setitem__"}  # indices may lie on the host


class OnCard(Tensor):
    """Marks a tensor as being on the card."""


def unmarked(x: Any) -> Any:
    return x.as_subclass(Tensor) if isinstance(x, OnCard) else HOST if isinstance(x, torch.device) else x


def marked(x: Any) -> Any:
    return x.as_subclass(OnCard) if isinstance(x, Tensor) else x


class Card(TorchFunctionMode):
    """Inside, ``device="cuda"`` can be used.

    Attributes:
        copies: how often something was copied to the host.
        waits: other ways in which the host waited for the card.
        mixed: operations on tensors of both.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies, self.waits, self.mixed = 0, list[str](), list[str]()
        self.in_model = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, name = tree_leaves((args, kwargs or {})), getattr(func, "__name__", "")
        on_card = any(isinstance(x, OnCard) for x in leaves)
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return CARD if on_card else HOST
        plain_args, plain_kwargs = tree_map(unmarked, (args, kwargs or {}), is_leaf=lambda x: isinstance(x, OnCard))
        with torch._C.DisableTorchFunction():
            result = func(*plain_args, **plain_kwargs)
        if self.in_model:
            return result
        if name == "cpu" or (name == "to" and HOST in leaves):
            self.copies += on_card
            return result
        if on_card:
            self.note(name, args, leaves)
        return tree_map(marked, result) if on_card or CARD in leaves else result

    def note(self, name: str, args: Any, leaves: list[Any]) -> None:
        """What this operation on a tensor of the card means."""
        masks = [x for x in tree_leaves(args[1:2]) if isinstance(x, OnCard) and x.dtype == torch.bool]
        into_host = name == "__setitem__" and not isinstance(args[0], OnCard)
        if name in WAITS or (name in INDEXING and masks) or into_host:
            self.waits.append(name)
        others = [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, OnCard) and x.ndim > 0]
        if others and name not in INDEXING | {"to"}:
            self.mixed.append(name)
