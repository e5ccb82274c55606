"""Checks for the exercises of notebook 11, Medusa and trees. Used as `specnb.exercises.check_…`, like the others.

The framework, and what a check tells, is in `specnb.exercises`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specnb.exercises import CheckResult, Exercise, Slip

# ------------------------------------------------------------------------------------------------- what a tree writes

Ranks = tuple[int, ...]


def _chance(accuracies: Sequence[Sequence[float]], path: Ranks) -> float:
    return math.prod(accuracies[depth][rank] for depth, rank in enumerate(path))


def _tree_tokens(accuracies: Sequence[Sequence[float]], shape: Sequence[Ranks]) -> float:
    return 1.0 + sum(_chance(accuracies, path) for path in shape)


def _leaves(shape: Sequence[Ranks]) -> list[Ranks]:
    return [path for path in shape if not any(other[:-1] == path for other in shape)]


_TWO_LEVELS = [[0.5, 0.25], [0.4, 0.2]]

TREE_TOKENS = Exercise(
    "tree_tokens",
    ("accuracies", "shape"),
    right=_tree_tokens,
    cases=(
        (_TWO_LEVELS, [(0,)]),
        (_TWO_LEVELS, [(1,)]),
        (_TWO_LEVELS, [(0,), (0, 0)]),
        (_TWO_LEVELS, [(0,), (1,), (0, 0), (1, 0)]),
        (_TWO_LEVELS, []),
        (
            [[0.6, 0.1, 0.1], [0.5, 0.2, 0.1], [0.4, 0.2, 0.0]],
            [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 2), (0, 1, 1)],
        ),
    ),
    slips=(
        Slip(
            "the target's own token is missing: every round writes one, whatever the tree holds.",
            lambda accuracies, shape: _tree_tokens(accuracies, shape) - 1,
        ),
        Slip(
            "a node counts only if its whole path is right: multiply the accuracies along it.",
            lambda accuracies, shape: 1.0 + sum(accuracies[len(path) - 1][path[-1]] for path in shape),
        ),
        Slip(
            "only the leaves are counted: each node on an accepted path is a token.",
            lambda accuracies, shape: 1.0 + sum(_chance(accuracies, path) for path in _leaves(shape)),
        ),
        Slip(
            "every node is taken for a favourite: the numbers in a path are ranks, and each rank has its own accuracy.",
            lambda accuracies, shape: 1.0 + sum(_chance(accuracies, (0,) * len(path)) for path in shape),
        ),
        Slip(
            "nodes are not weighed by their depth: a node adds one token, the ones above it are counted already.",
            lambda accuracies, shape: 1.0 + sum(len(path) * _chance(accuracies, path) for path in shape),
        ),
    ),
)


# ----------------------------------------------------------------------------------------------------- who sees whom


def _ancestor_mask(parents: list[int], far: bool = True, own: bool = True, root: bool = True) -> Tensor:
    seen = torch.zeros(len(parents) + 1, len(parents) + 1, dtype=torch.bool)
    seen[0, 0] = own
    for node, parent in enumerate(parents):
        if far:
            seen[node + 1] = seen[parent + 1]
        seen[node + 1, parent + 1] = True
        seen[node + 1, node + 1] = own
    if not root:
        seen[1:, 0] = False
    return seen


ANCESTOR_MASK = Exercise(
    "ancestor_mask",
    ("parents",),
    right=_ancestor_mask,
    cases=(([-1],), ([-1, -1],), ([-1, 0],), ([-1, 0, 1],), ([-1, -1, 0, 1],), ([-1, 0, -1, 1, 2, 2, 4],), ([],)),
    slips=(
        Slip(
            "this is the chain's mask, everything that stands before: siblings must not see each other.",
            lambda parents: torch.ones(len(parents) + 1, len(parents) + 1, dtype=torch.bool).tril(),
        ),
        Slip(
            "each node sees its parent and no further: grandparents belong to its text, too.",
            lambda parents: _ancestor_mask(parents, far=False),
        ),
        Slip(
            "a node must see itself.",
            lambda parents: _ancestor_mask(parents, own=False),
        ),
        Slip(
            "nobody sees the root, the newest token of the text: it is row and column 0, and an ancestor of all.",
            lambda parents: _ancestor_mask(parents, root=False),
        ),
        Slip(
            "rows and columns are exchanged: row i is who looks, column j who is looked at.",
            lambda parents: _ancestor_mask(parents).T.clone(),
        ),
        Slip(
            "the root is missing: the pass has N + 1 places, and place 0 is the newest token of the text.",
            lambda parents: _ancestor_mask(parents)[1:, 1:],
        ),
    ),
)


# -------------------------------------------------------------------------------------------------- what heads learn

NO_TOKEN = -1


def _head_labels(answer: Tensor, heads: int, ahead: int = 1, filler: int = NO_TOKEN) -> Tensor:
    labels = torch.full((len(answer), heads), filler)
    for i in range(heads):
        rest = answer[i + ahead :]
        labels[: len(rest), i] = rest
    return labels


HEAD_LABELS = Exercise(
    "head_labels",
    ("answer", "heads"),
    right=_head_labels,
    cases=(
        (torch.tensor([7, 8]), 1),
        (torch.tensor([7, 8, 9]), 2),
        (torch.tensor([3, 1, 4, 1, 5, 9]), 3),
        (torch.tensor([4]), 2),
        (torch.tensor([2, 7, 1, 8, 2]), 4),
    ),
    slips=(
        Slip(
            "one place too early: row j's own token is what the target has just said. The first head looks further.",
            lambda answer, heads: _head_labels(answer, heads, ahead=0),
        ),
        Slip(
            "one place too late: in row j, which has chosen token j, the first head guesses token j + 1.",
            lambda answer, heads: _head_labels(answer, heads, ahead=2),
        ),
        Slip(
            "the answer's beginning comes back at its end: behind the last token there is nothing to learn, −1.",
            lambda answer, heads: torch.stack([answer.roll(-1 - i) for i in range(heads)], dim=1),
        ),
        Slip(
            "places behind the end are told by −1: token 0 is a token.",
            lambda answer, heads: _head_labels(answer, heads, filler=0),
        ),
        Slip(
            "all heads learn the same token: head i looks i places further than head 0.",
            lambda answer, heads: _head_labels(answer, 1).expand(-1, heads).clone(),
        ),
        Slip(
            "rows and columns are exchanged: a row for each place, a column for each head.",
            lambda answer, heads: _head_labels(answer, heads).T.clone(),
        ),
    ),
)


# ------------------------------------------------------------------------------------------- what siblings leave over


def _rest(p: Tensor, q: Tensor) -> Tensor:
    left = (p - q).clamp(min=0)
    return left / left.sum()


def _without(q: Tensor, x: int) -> Tensor:
    left = q.clone()
    left[x] = 0
    return left / left.sum()


def _left_over(
    p: Tensor,
    q: Tensor,
    rejected: list[int],
    *,
    rest: Callable[[Tensor, Tensor], Tensor] = _rest,
    replace: bool = False,
) -> Tensor:
    for x in rejected:
        p = rest(p, q)
        q = q if replace else _without(q, x)
    return p


def _each_alone(p: Tensor, q: Tensor, rejected: list[int]) -> Tensor:
    """The residual of the last sibling, as if it had been the only one."""
    for x in rejected[:-1]:
        q = _without(q, x)
    return _rest(p, q) if rejected else p


def _crossed_out(p: Tensor, q: Tensor, rejected: list[int]) -> Tensor:
    for x in rejected:
        p = _without(p, x)
    return p


_MOON = (torch.tensor([0.50, 0.30, 0.20]), torch.tensor([0.80, 0.10, 0.10]))
_FOUR = (torch.tensor([0.10, 0.20, 0.30, 0.40]), torch.tensor([0.40, 0.30, 0.20, 0.10]))
_FIVE = (torch.tensor([0.05, 0.05, 0.20, 0.30, 0.40]), torch.tensor([0.30, 0.25, 0.20, 0.15, 0.10]))

LEFT_OVER = Exercise(
    "left_over",
    ("p", "q", "rejected"),
    right=_left_over,
    cases=((*_MOON, [0]), (*_MOON, []), (*_MOON, [0, 2]), (*_FOUR, [0, 1]), (*_FOUR, [1, 0]), (*_FIVE, [0, 1, 2])),
    slips=(
        Slip(
            "each sibling is held against p itself: after a rejection, what is left over takes p's place.",
            _each_alone,
        ),
        Slip(
            "q stays as it was: a sibling is never drawn twice, so the ones before it have probability 0 for the next.",
            lambda p, q, rejected: _left_over(p, q, rejected, replace=True),
        ),
        Slip(
            "rejected words are crossed out of p. Right for guesses that are not drawn; here q counts, max(0, p − q).",
            _crossed_out,
        ),
        Slip(
            "what is left over must sum to 1 again before the next sibling is tried.",
            lambda p, q, rejected: _left_over(p, q, rejected, rest=lambda p, q: (p - q).clamp(min=0)),
        ),
        Slip(
            "only the first rejection is in it: the others take their part, too.",
            lambda p, q, rejected: _left_over(p, q, rejected[:1]),
        ),
    ),
)


def check_tree_tokens(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 11. Wants `tree_tokens(accuracies: list[list[float]], shape: list[tuple[int, ...]]) -> float`.

    Tokens a round over a tree writes on average. `accuracies[d][r]`: how often the candidate of rank r is right at
    depth d; a path such as (0, 2) is the third candidate after the first one.
    """
    return TREE_TOKENS.check(candidate)


def check_ancestor_mask(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 11. Wants `ancestor_mask(parents: list[int]) -> Tensor[N + 1, N + 1] of bool`.

    Who sees whom in a pass over a tree: row and column 0 are the root, i + 1 is node i; a parent of -1 is the root.
    """
    return ANCESTOR_MASK.check(candidate)


def check_head_labels(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 11. Wants `head_labels(answer: Tensor[m], heads: int) -> Tensor[m, heads]`.

    Row j stands where token j of the answer has just been chosen. Head i has to guess the token i + 1 places after it;
    -1 where the answer has ended.
    """
    return HEAD_LABELS.check(candidate)


def check_left_over(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 11. Wants `left_over(p: Tensor[V], q: Tensor[V], rejected: list[int]) -> Tensor[V]`.

    The law that takes p's place once these siblings, drawn from q one after another without replacement, have been
    rejected.
    """
    return LEFT_OVER.check(candidate)
