"""A tree that grows by joint probability: what a draft model finds likely, several ways at once, within a budget.

Level by level the likeliest nodes are read by the draft in one pass, and each offers its likeliest tokens as children.
In the end those nodes stay whose whole path is likeliest; no child is likelier than its parent, so that is a tree.

Sources: Li et al. 2024 (EAGLE-2, arXiv 2406.16858), Chen et al. 2024 (Sequoia, arXiv 2402.12374). Notebook 11.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from specnb.trees import ROOT

WIDTH = 4  # nodes read per level, and children that each of them offers


@dataclass
class Growth:
    """One row's tree while it grows.

    Attributes:
        tokens, parents, scores: of each node; a score is the log of the joint probability of the path.
        read: the nodes that the draft has read, parents first; their places in its pass, after the root.
        level: those of them that it reads next.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    level: list[int] = field(default_factory=lambda: [ROOT])

    def spread(self, logp: Tensor, width: int) -> None:
        """Give each node of the level its children, from the log-probabilities [n, V] after it."""
        best, ids = logp.float().topk(min(width, logp.shape[-1]), dim=-1)
        first = len(self.tokens)
        for node, some, tokens in zip(self.level, best.tolist(), ids.tolist()):
            above = self.scores[node] if node != ROOT else 0.0
            for score, token in zip(some, tokens):
                if score > float("-inf"):
                    self.tokens.append(token)
                    self.parents.append(node)
                    self.scores.append(above + score)
        fresh = range(first, len(self.tokens))
        self.level = sorted(sorted(fresh, key=lambda i: -self.scores[i])[:width])
        self.read += self.level

    def path(self, node: int) -> list[int]:
        """The tokens that lead to a node, its own the last."""
        return [] if node == ROOT else [*self.path(self.parents[node]), self.tokens[node]]

    def places(self) -> list[int]:
        """The parents of the nodes read, by their places in the pass."""
        number = {ROOT: ROOT} | {node: i for i, node in enumerate(self.read)}
        return [number[self.parents[node]] for node in self.read]

    def best(self, count: int) -> tuple[list[int], list[int]]:
        """Tokens and parents of the so many likeliest nodes."""
        kept = sorted(range(len(self.tokens)), key=lambda i: (-self.scores[i], i))[:count]
        number = {ROOT: ROOT} | {node: i for i, node in enumerate(kept)}
        return [self.tokens[node] for node in kept], [number[self.parents[node]] for node in kept]


def grow(rows: int, depth: int, width: int, scored: Callable[[Sequence[Growth]], list[Tensor]]) -> list[Growth]:
    """Trees of so many levels for so many rows.

    Args:
        scored: of each row the log-probabilities [n, V] after the nodes of its level; at first that is the root alone.
    """
    growths = [Growth() for _ in range(rows)]
    for _ in range(depth):
        for growth, logp in zip(growths, scored(growths)):
            growth.spread(logp, width)
    return growths
