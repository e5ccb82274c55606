"""Several guesses at once: a tree of them, judged in one pass. Pure tensor maths; no model, no loop, no cache.

A tree's nodes are numbered so that a parent comes before its children; ``parents[b, i]`` is the number of node i's
parent, or -1 where it follows the newest token of the row, the *root*. A chain is the tree with parents -1, 0, 1, …
The target has scored N + 1 places of each row: place 0 follows the root, place i + 1 follows node i.

Sources: Miao et al. 2023 (SpecInfer, arXiv 2305.09781), Cai et al. 2024 (Medusa, arXiv 2401.10774). Drawing siblings
without replacement and rejecting them one after another: Jeon et al. 2024 (arXiv 2402.14160), Yang et al. 2024.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specnb import verification
from specnb.verification import BAD_DRAFT, BAD_TARGET, Generators, Verdict

ROOT = -1


def chain_parents(batch_size: int, k: int) -> Tensor:
    """The parents of chains of k guesses, LongTensor [B, k]."""
    return torch.arange(-1, k - 1).expand(batch_size, k)


def ancestors(parents: Tensor) -> Tensor:
    """Who comes before whom: [B, N, N] of bool, true at [b, i, j] if node j is node i or one of its ancestors."""
    rows, nodes = parents.shape
    seen = torch.eye(nodes, dtype=torch.bool, device=parents.device).repeat(rows, 1, 1)
    for i in range(nodes):
        has_parent = parents[:, i, None] >= 0
        above = seen[torch.arange(rows, device=parents.device), parents[:, i].clamp(min=0)]
        seen[:, i] |= above & has_parent
    return seen


def depths(parents: Tensor) -> Tensor:
    """How many guesses lead to each node, itself included: LongTensor [B, N]; 1 for children of the root."""
    return ancestors(parents).sum(dim=-1)


def check_parents(parents: Tensor, tokens: Tensor) -> None:
    """Raise a ValueError unless every parent comes before its child."""
    if parents.shape != tokens.shape or parents.dtype != torch.long:
        raise ValueError(
            f"parents must be a LongTensor of the shape of tokens, {list(tokens.shape)}: the number of each node's "
            f"parent, or -1 for the root. Got {parents.dtype} {list(parents.shape)}."
        )
    numbers = torch.arange(parents.shape[1], device=parents.device)
    wrong = (parents < ROOT) | (parents >= numbers)
    if bool(wrong.any()):
        row, node = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"Node {node} of row {row} cannot have parent {int(parents[row, node])}: a parent is an earlier node, "
            f"0…{node - 1}, or -1 for the root. Number the nodes so that parents come first."
        )


def verify_tree_greedy(
    tokens: Tensor, parents: Tensor, target_logits: Tensor, lengths: Tensor | None = None
) -> Verdict:
    """Greedy verification of trees: from the root down, as long as a child is what the target would have written.

    Args:
        tokens: LongTensor [B, N], the guesses (N may be 0).
        parents: LongTensor [B, N].
        target_logits: [B, N+1, V]; place 0 scores the root's children, place i + 1 those of node i.
        lengths: LongTensor [B] in 0…N, how many nodes each row has; default N.

    Returns:
        Verdict with `path`. Of equal siblings the first counts; ties of logits go to the lowest token id.

    Raises:
        ValueError: if shapes, lengths or parents do not fit, or if a place the row uses holds NaN.

    Derived in notebook 11.
    """
    lengths = verification._checked_lengths(tokens, target_logits, lengths)
    check_parents(parents, tokens)
    found = verification.favourites(target_logits.flatten(0, 1))
    best, choice = (part.view(target_logits.shape[:2]) for part in found)
    verdict = judge_tree_greedy(tokens, parents, best, choice, lengths)
    verification.raise_for_nan(verdict.invalid)
    return verdict


def judge_tree_greedy(tokens: Tensor, parents: Tensor, best: Tensor, choice: Tensor, lengths: Tensor) -> Verdict:
    """`verify_tree_greedy` without its checks, and so without waiting for the device: what the loop calls.

    Args:
        best, choice: [B, N+1], the highest score of each place (NaN if one is) and the token that has it.
    """
    walk = _Walk(tokens, parents, lengths)
    for i in range(tokens.shape[1]):
        here = choice.gather(1, walk.place[:, None]).squeeze(1)
        walk.take(i, walk.is_child(i) & (tokens[:, i] == here))
    next_token = choice.gather(1, walk.place[:, None]).squeeze(1)
    return walk.verdict(next_token, BAD_TARGET * (best.isnan() & verification._in_use(choice, lengths)))


def verify_tree_sample(
    tokens: Tensor,
    parents: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    lengths: Tensor | None = None,
    generator: Generators = None,
) -> Verdict:
    """Speculative sampling over trees: whatever was drafted, what a round writes follows the target's law exactly.

    At a node with law p its children are tried in order. Child x, drawn from q given that its earlier siblings were
    drawn, is accepted with probability min(1, p(x)/q(x)). If not, what is left of p is the residual, max(0, p − q)
    normalised, and that is the p for the next child. If no child is accepted, the next token is drawn from what is
    left; below a leaf, from p itself. With one child at each node this is `verify_sample`.

    Why it is lossless: one trial writes x or leaves a residual, and together they have the law p (notebook 05). The
    next trial does the same with the residual as its target, so the siblings together leave p unchanged, by induction.
    All it takes is that each child's q is the law it was drawn from *given its earlier siblings*.

    Args:
        tokens: LongTensor [B, N]; siblings stand in the order in which they were drawn.
        parents: LongTensor [B, N].
        draft_probs: q [B, N, V]: for each node the law it was drawn from, given its earlier siblings; None for
            deterministic guesses, each one-hot.
        target_probs: p [B, N+1, V]; place 0 for the root's children, place i + 1 for those of node i.
        lengths: LongTensor [B] in 0…N; default N.
        generator: one ``torch.Generator``, or one per row; default: torch's global one.

    Returns:
        Verdict with `path`. A token with p = 0 is never emitted.

    Raises:
        ValueError: if shapes, lengths or parents do not fit, or a place in use holds NaN or is no distribution.

    Derived in notebook 11.
    """
    lengths = verification._checked_lengths(tokens, target_probs, lengths)
    check_parents(parents, tokens)
    in_use = verification._in_use(target_probs, lengths)
    if draft_probs is not None:
        verification._check_draft_probs(draft_probs, tokens, target_probs)
        verification._check_distributions("draft_probs", draft_probs, in_use[:, 1:])
    verification._check_distributions("target_probs", target_probs, in_use)
    return judge_tree_sample(tokens, parents, draft_probs, target_probs, lengths, generator)


def judge_tree_sample(
    tokens: Tensor,
    parents: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    lengths: Tensor,
    generator: Generators,
    counts: Sequence[int] | None = None,
) -> Verdict:
    """`verify_tree_sample` without its checks, and so without waiting for the device: what the loop calls.

    Args:
        counts: the lengths once more, on the host, where there is one generator per row.
    """
    p = verification._exact(target_probs)
    used = verification._in_use(p, lengths)[:, 1:]  # [B, N]
    tokens = tokens.where(used, 0)
    walk = _Walk(tokens, parents, lengths)
    r = verification.uniform(tokens.shape, p, generator, lengths if counts is None else counts)
    left = p[:, 0]  # of the law at the row's place, after the children tried so far
    for i in range(tokens.shape[1]):
        x = tokens[:, i, None]
        q = verification.one_hot(x, p).squeeze(1) if draft_probs is None else draft_probs[:, i].to(p.dtype)
        tried = walk.is_child(i)
        accepted = tried & (r[:, i] * q.gather(1, x).squeeze(1) < left.gather(1, x).squeeze(1))
        left = torch.where((tried & ~accepted)[:, None], verification.residual(left, q), left)
        left = torch.where(accepted[:, None], p[:, i + 1], left)
        walk.take(i, accepted)
    next_token = verification.draw(verification.drawable(left), generator)
    invalid = BAD_TARGET * (p.isnan().any(-1) & verification._in_use(p, lengths)).long()
    if draft_probs is not None:
        invalid[:, :-1] += BAD_DRAFT * (draft_probs.isnan().any(-1) & used & (invalid[:, :-1] == 0))
    return walk.verdict(next_token, invalid)


def numbers_of(taken: Tensor) -> Tensor:
    """The nodes taken, bool [B, N], by their numbers in order, which is a path's; then -1: LongTensor [B, N]."""
    nodes = torch.arange(taken.shape[1], device=taken.device)
    order = torch.where(taken, nodes, len(nodes)).sort(dim=1).values
    return torch.where(order < len(nodes), order, ROOT)


class _Walk:
    """Where each row stands in its tree. Parents come first, so one look at every node, in order, is enough."""

    def __init__(self, tokens: Tensor, parents: Tensor, lengths: Tensor) -> None:
        self.parents, self.lengths = parents.to(tokens.device), lengths
        self.place = torch.zeros(len(tokens), dtype=torch.long, device=tokens.device)  # 0: the root; i + 1: node i
        self.taken = torch.zeros_like(tokens, dtype=torch.bool)  # [B, N]

    def is_child(self, i: int) -> Tensor:
        """The rows [B] in which node i follows the place."""
        return (self.parents[:, i] + 1 == self.place) & (i < self.lengths)

    def take(self, i: int, accepted: Tensor) -> None:
        self.place = torch.where(accepted, i + 1, self.place)
        self.taken[:, i] = accepted

    def verdict(self, next_token: Tensor, invalid: Tensor) -> Verdict:
        return Verdict(self.taken.sum(dim=1), next_token, invalid, numbers_of(self.taken))


def draw_siblings(q: Tensor, count: int, generator: Generators = None) -> tuple[Tensor, Tensor]:
    """Children of one node, drawn one after another without replacement.

    Args:
        q: the law of the first, [B, V].
        count: how many; at most as many as each row of q has tokens of positive probability.

    Returns:
        tokens [B, count], and for each the law it was drawn from, [B, count, V]: q without its earlier siblings.
    """
    tokens, laws = [], []
    for _ in range(count):
        x = verification.draw(q, generator)
        tokens.append(x)
        laws.append(q)
        rest = q.scatter(1, x[:, None], 0.0)
        q = rest / rest.sum(dim=-1, keepdim=True)
    return torch.stack(tokens, dim=1), torch.stack(laws, dim=1)


def merged(paths: Sequence[Sequence[int]], limit: int) -> tuple[list[int], list[int]]:
    """Continuations with common beginnings as one tree: tokens and parents of at most ``limit`` nodes.

    Earlier continuations come first, whole, so that the best one should be named first.
    """
    tokens: list[int] = []
    parents: list[int] = []
    known: dict[tuple[int, int], int] = {}  # (parent, token) → node
    for path in paths:
        node = ROOT
        for token in path:
            if (node, token) not in known:
                if len(tokens) == limit:
                    break
                known[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
            node = known[node, token]
    return tokens, parents


def paths_of(parents: Sequence[int]) -> list[list[int]]:
    """The nodes that lead to each place of a tree: to the root none, to node i its ancestors and itself."""
    paths: list[list[int]] = [[]]
    for node, parent in enumerate(parents):
        paths.append([*paths[parent + 1], node])
    return paths


def path_of(tokens: Sequence[int], parents: Sequence[int], text: Sequence[int]) -> list[int]:
    """The nodes along which a tree goes with a text, from the root down, as far as it does."""
    path, node = [], ROOT
    for token in text:
        for i in range(node + 1, len(tokens)):
            if parents[i] == node and tokens[i] == token:
                path.append(i)
                node = i
                break
        else:
            break
    return path


# ------------------------------------------------------------------------------------------------- static shapes

Path = tuple[int, ...]  # the ranks that lead to a node: (0, 2) is the third candidate after the first one


def shape_parents(shape: Sequence[Path]) -> list[int]:
    """The parents of a shape's nodes; every beginning of a path must come before it.

    Raises:
        ValueError: if one is missing, or a path is empty or comes twice.
    """
    number: dict[Path, int] = {(): ROOT}
    for i, path in enumerate(shape):
        if not path or path in number:
            raise ValueError(f"Node {i} of the tree, {path}, is {'there twice' if path else 'empty'}.")
        if path[:-1] not in number:
            raise ValueError(f"Node {i} of the tree, {path}, has no parent: put {path[:-1]} before it.")
        number[path] = i
    return [number[path[:-1]] for path in shape]


def grow_shape(accuracies: Sequence[Sequence[float]], num_nodes: int) -> list[Path]:
    """The tree of so many nodes that writes the most tokens a round, if guesses at different depths are independent.

    Args:
        accuracies: at depth d (from 0), of each rank the chance that this candidate is the right one.
        num_nodes: at most; fewer if the accuracies name no more.

    Returns:
        paths, in an order in which parents come first: node by node the one with the best chance that all of its path
        is right. A chance grows neither with depth nor with rank, so no other tree of a size is better.
    """
    ranks = [[r for _, r in sorted((-chance, r) for r, chance in enumerate(row))] for row in accuracies]
    open_nodes: list[tuple[float, Path, Path]] = []  # (−chance, places in the order of chances, ranks)

    def offer(above: float, places: Path, path: Path, place: int) -> None:
        depth = len(path)
        if depth < len(ranks) and place < len(ranks[depth]):
            rank = ranks[depth][place]
            heapq.heappush(open_nodes, (-above * accuracies[depth][rank], (*places, place), (*path, rank)))

    offer(1.0, (), (), 0)
    shape: list[Path] = []
    while open_nodes and len(shape) < num_nodes:
        chance, places, path = heapq.heappop(open_nodes)
        shape.append(path)
        own = accuracies[len(path) - 1][path[-1]]
        offer(-chance, places, path, 0)
        offer(-chance / own if own else 0.0, places[:-1], path[:-1], places[-1] + 1)
    return shape


def expected_tree_tokens(accuracies: Sequence[Sequence[float]], shape: Sequence[Path]) -> float:
    """Tokens that a round over the tree writes on average: one, and of each node the chance that its path is right."""
    return 1.0 + sum(math.prod(accuracies[d][rank] for d, rank in enumerate(path)) for path in shape)


def best_shape(
    accuracies: Sequence[Sequence[float]], cost: Callable[[int], float], max_nodes: int, drafting: float = 0.0
) -> list[Path]:
    """The tree that writes the most tokens per second on a machine; empty if drafting does not pay.

    Args:
        accuracies: as for `grow_shape`.
        cost: the time of a pass by its number of positions, such as a `CostCurve`; a tree of N nodes has N + 1.
        max_nodes: the largest tree looked at.
        drafting: time of a round's drafting, in the unit of ``cost``.
    """
    whole = grow_shape(accuracies, max_nodes)
    best, best_rate = 0, 1 / cost(1)
    for n in range(1, len(whole) + 1):
        rate = expected_tree_tokens(accuracies, whole[:n]) / (cost(n + 1) + drafting)
        if rate > best_rate:
            best, best_rate = n, rate
    return whole[:best]
