"""Layers of a pass that are computed before the model's own loop asks for them, so that one native call does them all.

Between two layers nothing happens but Python, and after a layer's weights have streamed through the caches that Python
is no longer in any of them: it takes four times as long as it would if the layers were run in one go.
"""

from __future__ import annotations

import operator
from itertools import pairwise
from typing import Any

from torch import Tensor


class Ahead:
    """Layers of a pass that have been computed before the model's loop asks for them: all in one call.

    The loop is the model's own, and may do what it likes between two layers. So a result is only handed out if the
    layer is called with nothing but the result before it and what the first of these layers was called with; if not,
    the layer is computed then, and is not computed ahead again.

    Args:
        breaks: layers for which nothing is computed ahead; learns.
    """

    def __init__(self, breaks: set[int]) -> None:
        self.breaks = breaks
        self.results: dict[int, tuple[Tensor, int, Any]] = {}  # of a layer: its input, with its version, and its result
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def keep(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> Any:
        """Results of the layer that has been called like this, and of those behind it; returns the first."""
        self.args, self.kwargs = args, kwargs
        for i, (before, after) in enumerate(pairwise(results), index + 1):
            hidden = before if isinstance(before, Tensor) else before[0]
            self.results[i] = hidden, _version(hidden), after
        return results[0]

    def take(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's result, if there is one for this call."""
        if index not in self.results:
            return None
        hidden, version, result = self.results.pop(index)
        same = len(args) == len(self.args) and kwargs.keys() == self.kwargs.keys()
        same = same and args[0] is hidden and _version(hidden) == version
        same = same and all(map(operator.is_, args[1:], self.args[1:]))
        if same and all(value is self.kwargs[name] for name, value in kwargs.items()):
            return result
        self.results.clear()
        self.breaks.add(index)
        return None


def _version(tensor: Tensor) -> int:
    """Counts what has been written to a tensor in place, where that is counted."""
    return 0 if tensor.is_inference() else tensor._version
