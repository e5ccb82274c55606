"""The checks of notebook 11's exercises: right answers pass, each named slip gets its own message."""

import torch

from specnb import exercises_trees
from tests.exercise_checks import exercise_tests

# Answers as a learner would write them, apart from the solutions inside the checks.


def tree_tokens(accuracies, shape):
    total = 1.0
    for path in shape:
        chance = 1.0
        for level, rank in zip(accuracies, path):
            chance *= level[rank]
        total += chance
    return total


def ancestor_mask(parents):
    mask = torch.eye(len(parents) + 1).bool()
    for node in range(len(parents)):
        above = node
        while above >= 0:
            above = parents[above]
            mask[node + 1, above + 1] = True
    return mask


def head_labels(answer, heads):
    padded = torch.cat([answer, torch.full((heads,), -1)])
    return torch.stack([padded[1 + i : 1 + i + len(answer)] for i in range(heads)], dim=1)


def left_over(p, q, rejected):
    for x in rejected:
        p = torch.relu(p - q) / torch.relu(p - q).sum()
        q = q.scatter(0, torch.tensor(x), 0.0)
        q = q / q.sum()
    return p


RIGHT = {f.__name__: f for f in (tree_tokens, ancestor_mask, head_labels, left_over)}

WRONG = [
    ("tree_tokens", lambda a, shape: tree_tokens(a, shape) - 1, "own token is missing"),
    ("tree_tokens", lambda a, shape: float(1 + len(shape)), "not right yet"),
    ("ancestor_mask", lambda parents: ancestor_mask(parents)[1:, 1:], "root is missing"),
    ("ancestor_mask", lambda parents: torch.ones_like(ancestor_mask(parents)).tril(), "siblings must not"),
    ("head_labels", lambda answer, heads: head_labels(answer, heads + 1)[:, 1:], "too late"),
    ("head_labels", lambda answer, heads: head_labels(answer, heads).T, "exchanged"),
    ("left_over", lambda p, q, rejected: left_over(p, q, rejected[:1]), "only the first"),
    ("left_over", lambda p, q, rejected: torch.relu(p - q), "not right yet"),
]

globals().update(exercise_tests(exercises_trees, RIGHT, WRONG))
