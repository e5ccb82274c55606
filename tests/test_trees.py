"""Trees of guesses: the verdict against a walk by hand, the sampling rule's law against full enumeration."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specnb
from specnb import trees
from specnb.decoding import decided_on_host, on_host
from specnb.scores import Scores
from specnb.stats import chi_square
from specnb.verification import judge_greedy

V = 4


@st.composite
def forests(draw, rows=3, nodes=8, depth=4):
    """Trees of mixed size, one per row: tokens, parents, lengths."""
    n = draw(st.integers(0, nodes))
    tokens, parents = [], []
    for _ in range(rows):
        above: list[int] = []
        for i in range(n):
            fits = [j for j in range(i) if depth_of(above, j) < depth]
            above.append(draw(st.sampled_from([-1, *fits])))
        parents.append(above)
        tokens.append(draw(st.lists(st.integers(0, V - 1), min_size=n, max_size=n)))
    lengths = draw(st.lists(st.integers(0, n), min_size=rows, max_size=rows))
    return as_tensor(tokens, rows), as_tensor(parents, rows), torch.tensor(lengths)


def as_tensor(lists, rows):
    return torch.tensor(lists, dtype=torch.long).reshape(rows, -1)


def depth_of(parents, i):
    return 1 if parents[i] < 0 else 1 + depth_of(parents, parents[i])


def walked(tokens, parents, count, choice):
    """The path of one row by hand: choice[0] is the target's word after the root, choice[i + 1] after node i."""
    path, node = [], -1
    while True:
        children = [i for i in range(count) if parents[i] == node and tokens[i] == choice[node + 1]]
        if not children:
            return path, choice[node + 1]
        node = children[0]
        path.append(node)


@settings(deadline=None, max_examples=300)
@given(forests(), st.integers(0, 10**6))
def test_greedy_goes_the_way_that_a_walk_by_hand_goes(forest, seed):
    tokens, parents, lengths = forest
    logits = torch.randn(len(tokens), tokens.shape[1] + 1, V, generator=torch.Generator().manual_seed(seed))
    verdict = specnb.verify_tree_greedy(tokens, parents, logits, lengths)
    for b in range(len(tokens)):
        expected = walked(tokens[b].tolist(), parents[b].tolist(), int(lengths[b]), logits[b].argmax(-1).tolist())
        path = verdict.path[b][verdict.path[b] >= 0].tolist()
        assert (path, int(verdict.next_token[b])) == expected
        assert int(verdict.num_accepted[b]) == len(path)


@settings(deadline=None, max_examples=200)
@given(forests(), st.integers(0, 10**6), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_the_verdict_in_plain_numbers_is_the_one_in_tensors(forest, seed, chain, dtype):
    """What the loop does on a CPU, and what it does elsewhere; the lines of a pass lie packed, in any order."""
    tokens, parents, lengths = forest
    draft = specnb.Draft(tokens, lengths, parents=None if chain else parents)
    rng = torch.Generator().manual_seed(seed)
    flat = torch.randn(len(tokens) * (tokens.shape[1] + 1), V, generator=rng).to(dtype)
    where = torch.randperm(len(flat), generator=rng).view(len(tokens), -1)
    p = Scores(flat, where)
    judge = judge_greedy(tokens, *p.favourites(), lengths)
    verdict = judge if chain else trees.judge_tree_greedy(tokens, parents, *p.favourites(), lengths)
    assert decided_on_host(draft, p) == on_host(draft, verdict)[0]
    flat[int(where[0, 0]), 1] = float("nan")
    assert decided_on_host(draft, p) is None


@settings(deadline=None, max_examples=100)
@given(forests())
def test_ancestors_and_depths_are_those_of_a_climb_by_hand(forest):
    _, parents, _ = forest
    seen, depths = trees.ancestors(parents), trees.depths(parents)
    for b, above in enumerate(parents.tolist()):
        for i in range(len(above)):
            line, node = set(), i
            while node >= 0:
                line.add(node)
                node = above[node]
            assert set(seen[b, i].nonzero().flatten().tolist()) == line
            assert int(depths[b, i]) == len(line)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 5), st.integers(0, 10**6), st.booleans())
def test_a_chain_is_a_tree_of_width_one(k, seed, with_q):
    rng = torch.Generator().manual_seed(seed)
    rows = 4
    tokens = torch.randint(V, (rows, k), generator=rng)
    lengths = torch.randint(k + 1, (rows,), generator=rng)
    p = torch.rand(rows, k + 1, V, generator=rng).softmax(-1)
    q = torch.rand(rows, k, V, generator=rng).softmax(-1) if with_q else None
    parents = trees.chain_parents(rows, k)
    for tree, chain in [
        (specnb.verify_tree_greedy(tokens, parents, p, lengths), specnb.verify_greedy(tokens, p, lengths)),
        (
            specnb.verify_tree_sample(tokens, parents, q, p, lengths, torch.Generator().manual_seed(7)),
            specnb.verify_sample(tokens, q, p, lengths, torch.Generator().manual_seed(7)),
        ),
    ]:
        assert tree.num_accepted.equal(chain.num_accepted) and tree.next_token.equal(chain.next_token)


# --------------------------------------------------------------------------------------- the law, enumerated


def residual(p, q):
    left = [max(0.0, a - b) for a, b in zip(p, q)]
    total = sum(left)
    return [x / total for x in left] if total > 0 else list(p)


def siblings(q, count):
    """All ordered draws without replacement: (tokens, their laws, probability)."""
    if count == 0:
        yield [], [], 1.0
        return
    for x, chance in enumerate(q):
        if chance > 0:
            rest = [0.0 if y == x else w for y, w in enumerate(q)]
            total = sum(rest)
            law = [w / total for w in rest] if total > 0 else rest
            for tokens, laws, more in siblings(law, count - 1):
                yield [x, *tokens], [list(q), *laws], chance * more


def law_of_pairs(p_root, p_after, q_root, q_after, widths):
    """Exact law of the first two tokens that a round over a tree writes, the rule as its docstring says it.

    A round that writes one token only goes on with plain decoding.
    """
    pairs = torch.zeros(V, V, dtype=torch.float64)
    for tokens, laws, chance in siblings(q_root, widths[0]):
        left = list(p_root)
        for x, q in zip(tokens, laws):
            accept = min(1.0, left[x] / q[x])
            pairs[x] += chance * accept * second_token(p_after[x], q_after[x], widths[1])
            chance *= 1 - accept
            if chance <= 0:
                break
            left = residual(left, q)
        for x in range(V):
            pairs[x] += chance * left[x] * torch.tensor(p_after[x], dtype=torch.float64)
    return pairs


def second_token(p, q, width):
    law = torch.zeros(V, dtype=torch.float64)
    for tokens, laws, chance in siblings(q, width):
        left = list(p)
        for x, q_of in zip(tokens, laws):
            accept = min(1.0, left[x] / q_of[x])
            law[x] += chance * accept
            chance *= 1 - accept
            left = residual(left, q_of)
        law += chance * torch.tensor(left, dtype=torch.float64)
    return law


def wheels(seed):
    rng = torch.Generator().manual_seed(seed)
    draws = torch.randn(4, V, V, generator=rng, dtype=torch.float64)
    p_root, q_root = draws[0, 0].mul(1.5).softmax(-1), draws[1, 0].mul(1.5).softmax(-1)
    return p_root.tolist(), draws[2].softmax(-1).tolist(), q_root.tolist(), draws[3].softmax(-1).tolist()


@pytest.mark.parametrize("widths", [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (4, 4)])
def test_the_rule_leaves_the_law_of_the_target(widths):
    for seed in range(5):
        p_root, p_after, q_root, q_after = wheels(seed)
        expected = torch.tensor(p_root, dtype=torch.float64)[:, None] * torch.tensor(p_after, dtype=torch.float64)
        law = law_of_pairs(p_root, p_after, q_root, q_after, widths)
        assert torch.allclose(law, expected, atol=1e-12)


def independent_law(p, q, width):
    """The planted fault: each sibling is held against the whole p, as if its elder ones had not been tried."""
    law = torch.zeros(V, dtype=torch.float64)
    for tokens, laws, chance in siblings(q, width):
        for x, q_of in zip(tokens, laws):
            accept = min(1.0, p[x] / q_of[x])
            law[x] += chance * accept
            chance *= 1 - accept
        law += chance * torch.tensor(residual(p, q), dtype=torch.float64)
    return law


def test_siblings_held_against_the_whole_law_are_not_lossless():
    p_root, _, q_root, _ = wheels(0)
    gap = (independent_law(p_root, q_root, 2) - torch.tensor(p_root, dtype=torch.float64)).abs().sum() / 2
    assert gap > 0.02


# ---------------------------------------------------------------------- the function, drawn 100,000 times


N = 100_000
SIGNIFICANCE = 1e-6  # a right rule fails one of a million such tests


def tree_of(widths, tables, generator, n=N, replace=False):
    """n trees with ``widths[d]`` children at each node of depth d; tokens, parents, q, p of each node."""
    p_root, p_after, q_root, q_after = (torch.tensor(table, dtype=torch.float64) for table in tables)
    tokens, laws = drawn(q_root.expand(n, V), widths[0], generator, replace)
    parents, all_tokens, all_laws = [-1] * widths[0], [tokens], [laws]
    for child in range(widths[0]):
        below, below_laws = drawn(q_after[tokens[:, child]], widths[1], generator, replace)
        parents += [child] * widths[1]
        all_tokens.append(below)
        all_laws.append(below_laws)
    tokens = torch.cat(all_tokens, 1)
    p = torch.cat([p_root.expand(n, 1, V), p_after[tokens]], dim=1)
    return tokens, torch.tensor(parents).expand(n, -1), torch.cat(all_laws, 1), p, p_after


def drawn(q, count, generator, replace):
    if not replace:
        return trees.draw_siblings(q, count, generator)
    tokens = torch.multinomial(q, count, replacement=True, generator=generator)
    return tokens, q[:, None].expand(-1, count, -1)


def written_pairs(verify, widths, tables, seed, replace=False, deterministic=False):
    """The first two tokens of n rounds; a round that wrote only one goes on with plain decoding."""
    generator = torch.Generator().manual_seed(seed)
    tokens, parents, q, p, p_after = tree_of(widths, tables, generator, replace=replace)
    verdict = verify(tokens, parents, None if deterministic else q, p, generator=generator)
    nodes = verdict.path[:, :2]
    on_path = tokens.gather(1, nodes.clamp(min=0))
    first = torch.where(nodes[:, 0] >= 0, on_path[:, 0], verdict.next_token)
    plain = torch.multinomial(p_after[first], 1, generator=generator).squeeze(1)
    second = torch.where(nodes[:, 1] >= 0, on_path[:, 1], torch.where(nodes[:, 0] >= 0, verdict.next_token, plain))
    return torch.bincount(first * V + second, minlength=V * V)


def law(tables):
    p_root, p_after = (torch.tensor(table, dtype=torch.float64) for table in tables[:2])
    return (p_root[:, None] * p_after).flatten()


@pytest.mark.statistical
@pytest.mark.parametrize("widths", [(1, 1), (3, 2), (2, 3), (4, 1)])
@pytest.mark.parametrize("how", ["without replacement", "with replacement"])
def test_what_is_written_follows_the_target(widths, how):
    tables = wheels(11)
    counts = written_pairs(specnb.verify_tree_sample, widths, tables, 5, replace=how == "with replacement")
    assert chi_square(counts, law(tables)).pvalue > SIGNIFICANCE


@pytest.mark.statistical
def test_deterministic_siblings_follow_the_target():
    tables = wheels(12)
    one_tree = tree_of((3, 2), tables, torch.Generator().manual_seed(1), n=1)
    tokens, parents, _, p, _ = (t.expand(N, *t.shape[1:]) if i < 4 else t for i, t in enumerate(one_tree))
    generator = torch.Generator().manual_seed(2)
    verdict = specnb.verify_tree_sample(tokens, parents, None, p, generator=generator)
    nodes = verdict.path[:, :1]
    first = torch.where(nodes[:, 0] >= 0, tokens.gather(1, nodes.clamp(min=0))[:, 0], verdict.next_token)
    assert chi_square(torch.bincount(first, minlength=V), torch.tensor(tables[0])).pvalue > SIGNIFICANCE


def siblings_against_the_whole_law(tokens, parents, q, p, generator):
    """As `verify_tree_sample`, but a rejected child leaves p as it is for the next one."""
    whole = specnb.verification.residual
    try:
        specnb.verification.residual = lambda left, q: left
        return specnb.verify_tree_sample(tokens, parents, q, p, generator=generator)
    finally:
        specnb.verification.residual = whole


def drawn_with_replacement_scored_without(tokens, parents, q, p, generator):
    """Siblings drawn independently, and scored as if they had been drawn without replacement."""
    n, nodes = tokens.shape
    q = q.clone()
    for i, j in itertools.combinations(range(nodes), 2):
        if int(parents[0, i]) == int(parents[0, j]):
            q[:, j].scatter_(1, tokens[:, i, None], 0.0)
    q = q / q.sum(-1, keepdim=True).clamp(min=1e-12)
    return specnb.trees.judge_tree_sample(tokens, parents, q, p, torch.full((n,), nodes), generator)


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("rule", "replace"),
    [(siblings_against_the_whole_law, False), (drawn_with_replacement_scored_without, True)],
)
def test_planted_faults_are_caught(rule, replace):
    tables = wheels(11)
    counts = written_pairs(rule, (3, 2), tables, 5, replace=replace)
    assert chi_square(counts, law(tables)).pvalue < SIGNIFICANCE


# --------------------------------------------------------------------------------------------- edges and errors


def test_a_token_without_probability_is_never_written():
    p = torch.tensor([[[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 1, 0]]]).expand(500, -1, -1)
    tokens, parents = torch.tensor([[1, 2]]).expand(500, -1), torch.tensor([[-1, -1]]).expand(500, -1)
    verdict = specnb.verify_tree_sample(tokens, parents, None, p, generator=torch.Generator().manual_seed(0))
    assert verdict.num_accepted.eq(0).all() and verdict.next_token.eq(0).all()


def test_siblings_that_use_up_the_law_leave_no_nan():
    p = torch.full((100, 5, V), 1 / V)
    tokens, parents = torch.arange(V).expand(100, -1), torch.full((100, V), -1)
    verdict = specnb.verify_tree_sample(tokens, parents, None, p, generator=torch.Generator().manual_seed(0))
    assert verdict.num_accepted.eq(1).all()  # one of all the words there are is the right one


@pytest.mark.parametrize("parents", [[[0, -1]], [[-1, 1]], [[-1, 2]], [[-2, 0]]])
def test_a_malformed_tree_is_refused(parents):
    with pytest.raises(ValueError, match="cannot have parent"):
        specnb.verify_tree_greedy(torch.zeros(1, 2, dtype=torch.long), torch.tensor(parents), torch.zeros(1, 3, V))


def test_parents_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="parents must be a LongTensor of the shape of tokens"):
        specnb.verify_tree_greedy(torch.zeros(1, 2, dtype=torch.long), torch.tensor([[-1]]), torch.zeros(1, 3, V))


def test_nan_names_row_and_place():
    logits = torch.zeros(2, 3, V)
    logits[1, 2, 0] = float("nan")
    tree = torch.zeros(2, 2, dtype=torch.long), torch.tensor([[-1, -1], [-1, 0]])
    with pytest.raises(ValueError, match="row 1 at position 2"):
        specnb.verify_tree_greedy(*tree, logits)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=6), st.integers(0, 12))
def test_merged_continuations_are_the_paths_of_the_tree(paths, limit):
    tokens, parents = trees.merged(paths, limit)
    assert len(tokens) == len(parents) <= limit
    assert all(parent < i for i, parent in enumerate(parents))
    assert len(set(zip(parents, tokens))) == len(tokens)  # no two equal siblings
    beginnings = {tuple(path[: i + 1]) for path in paths for i in range(len(path))}
    if len(beginnings) <= limit:
        assert len(tokens) == len(beginnings)
        for path in paths:
            assert len(trees.path_of(tokens, parents, path)) == len(path)
    for path in beginnings:
        found = [tokens[i] for i in trees.path_of(tokens, parents, path)]
        assert found == list(path[: len(found)])


# ----------------------------------------------------------------------------------------------- static shapes


def all_shapes(accuracies, size):
    """Every tree of a size, as sets of paths."""
    nodes = [
        path
        for depth in range(1, len(accuracies) + 1)
        for path in itertools.product(*[range(len(row)) for row in accuracies[:depth]])
    ]
    for shape in itertools.combinations(nodes, size):
        if all(path[:-1] in shape or len(path) == 1 for path in shape):
            yield shape


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.floats(0, 1), min_size=2, max_size=2), min_size=1, max_size=3), st.integers(1, 4))
def test_no_tree_of_the_size_is_better(accuracies, size):
    shape = trees.grow_shape(accuracies, size)
    found = trees.expected_tree_tokens(accuracies, shape)
    possible = [trees.expected_tree_tokens(accuracies, other) for other in all_shapes(accuracies, len(shape))]
    assert found == pytest.approx(max(possible))
    parents = trees.shape_parents(shape)
    assert all(parent < i for i, parent in enumerate(parents))


def test_expected_tokens_of_a_tree_by_hand():
    accuracies = [[0.5, 0.25], [0.4, 0.2]]
    assert trees.expected_tree_tokens(accuracies, [(0,), (1,), (0, 0)]) == pytest.approx(1 + 0.5 + 0.25 + 0.5 * 0.4)
    chain = [[0.8]] * 4
    assert trees.expected_tree_tokens(chain, trees.grow_shape(chain, 4)) == pytest.approx(
        specnb.expected_tokens(0.8, 4)
    )


def test_the_best_tree_depends_on_what_positions_cost():
    accuracies = [[0.5, 0.2, 0.1], [0.4, 0.2, 0.1], [0.3, 0.2, 0.1]]
    free = trees.best_shape(accuracies, lambda positions: 1.0, 20)
    dear = trees.best_shape(accuracies, lambda positions: 1.0 + 0.3 * (positions - 1), 20)
    assert len(free) == 20 and 1 <= len(dear) < 5
    assert trees.best_shape(accuracies, lambda positions: positions, 20) == []
    slow_draft = trees.best_shape(accuracies, lambda positions: 1.0, 20, drafting=9.0)
    assert slow_draft == []


@pytest.mark.parametrize(("shape", "message"), [([(0, 1)], "no parent"), ([(0,), (0,)], "twice"), ([()], "empty")])
def test_a_shape_with_a_hole_is_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        trees.shape_parents(shape)
