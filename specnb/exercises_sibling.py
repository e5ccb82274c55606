"""Checks for the exercises of notebook 10, a smaller sibling. Used as `specnb.exercises.check_…`, like the others.

The framework, and what a check tells, is in `specnb.exercises`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specnb.exercises import CheckResult, Exercise, Slip

# ------------------------------------------------------------------------------------------- what a draft step reads


def _weight_share(
    layers: int, head_rows: int, layer_weights: int, hidden: int, target_layers: int, vocab: int, lookups: int = 0
) -> float:
    mine = layers * layer_weights + head_rows * hidden + lookups * vocab * hidden
    return mine / (target_layers * layer_weights + vocab * hidden + lookups * vocab * hidden)


WEIGHT_SHARE = Exercise(
    "weight_share",
    ("layers", "head_rows", "layer_weights", "hidden", "target_layers", "vocab"),
    right=_weight_share,
    cases=(
        (1, 10, 100, 2, 2, 10),
        (2, 5, 100, 2, 4, 20),
        (20, 49_152, 3_540_096, 576, 30, 49_152),
        (1, 8_192, 3_540_096, 576, 30, 49_152),
        (0, 8_192, 3_540_096, 576, 30, 49_152),
    ),
    slips=(
        Slip(
            "the heads are left out: each token is scored against every row of one, and small models spend much there.",
            lambda layers, head_rows, layer_weights, hidden, target_layers, vocab: layers / target_layers,
        ),
        Slip(
            "the embedding is counted as well: of it a step reads one row, not the table.",
            lambda layers, rows, weights, hidden, all_layers, vocab: _weight_share(
                layers, rows, weights, hidden, all_layers, vocab, lookups=1
            ),
        ),
        Slip(
            "the draft's head has `head_rows` rows; only the target's has one for every word of the vocabulary.",
            lambda layers, rows, weights, hidden, all_layers, vocab: _weight_share(
                layers, vocab, weights, hidden, all_layers, vocab
            ),
        ),
        Slip(
            "a row of the head has `hidden` weights: multiply.",
            lambda layers, rows, weights, hidden, all_layers, vocab: _weight_share(
                layers, rows, weights, 1, all_layers, vocab
            ),
        ),
        Slip(
            "upside down: the draft's weights go on top.",
            lambda *sizes: 1.0 / _weight_share(*sizes),
        ),
        Slip(
            "the target's head is missing below: its passes score tokens, too.",
            lambda layers, rows, weights, hidden, all_layers, vocab: (
                (layers * weights + rows * hidden) / (all_layers * weights)
            ),
        ),
    ),
)


# -------------------------------------------------------------------------------------------------------- early exit


def _exit_guess(hidden: Tensor, layer: int, gain: Tensor, head: Tensor) -> int:
    x = hidden[layer]
    x = x / x.pow(2).mean().sqrt() * gain
    return int((head @ x).argmax())


def _states(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [5, 6], gain [6] and head [9, 6], such that the slips below lead to other guesses."""
    generator = torch.Generator().manual_seed(seed)
    hidden, head = torch.randn(5, 6, generator=generator), torch.randn(9, 6, generator=generator)
    return hidden, torch.rand(6, generator=generator).pow(2) * 3, head


def _exit_cases() -> tuple[tuple, ...]:
    cases = []
    for seed, layer in ((2, 1), (4, 1), (6, 2), (8, 3), (11, 3), (12, 2), (13, 1), (14, 3)):
        hidden, gain, head = _states(seed)
        cases.append((hidden, layer, gain, head))
    return tuple(cases)


EXIT_GUESS = Exercise(
    "exit_guess",
    ("hidden", "layer", "gain", "head"),
    right=_exit_guess,
    cases=_exit_cases(),
    slips=(
        Slip(
            "off by one: `hidden[0]` is the embedding, so after `layer` layers comes `hidden[layer]`.",
            lambda hidden, layer, gain, head: _exit_guess(hidden, layer - 1, gain, head),
        ),
        Slip(
            "this is one layer too late: `hidden[0]` is the embedding, `hidden[1]` comes after one layer.",
            lambda hidden, layer, gain, head: _exit_guess(hidden, layer + 1, gain, head),
        ),
        Slip(
            "the last norm is missing: the head expects what its gain has weighed.",
            lambda hidden, layer, gain, head: int((head @ hidden[layer]).argmax()),
        ),
        Slip(
            "these are the last hidden states, whatever `layer` says: that is the target itself, no draft.",
            lambda hidden, layer, gain, head: _exit_guess(hidden, -1, gain, head),
        ),
        Slip(
            "layers are counted from the embedding, not from the end.",
            lambda hidden, layer, gain, head: _exit_guess(hidden, -1 - layer, gain, head),
        ),
    ),
)


# ------------------------------------------------------------------------------------------------------ distillation


def _distillation_loss(p: Tensor, logits: Tensor) -> Tensor:
    return (torch.xlogy(p, p) - p * logits.log_softmax(-1)).sum(-1)


def _reversed(p: Tensor, logits: Tensor) -> Tensor:
    logq = logits.log_softmax(-1)
    return (logq.exp() * (logq - p.log())).sum(-1)


_EQUAL = torch.tensor([[0.5, 0.25, 0.25]])

DISTILLATION_LOSS = Exercise(
    "distillation_loss",
    ("p", "logits"),
    right=_distillation_loss,
    cases=(
        (_EQUAL, _EQUAL.log() + 1.0),
        (torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.8, 0.1, 0.1]]).log()),
        (torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]]), torch.tensor([[1.0, 0.0, -1.0], [0.5, 2.0, 1.0]])),
        (torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 0.0]])),
    ),
    slips=(
        Slip(
            "p and q are swapped: KL(q ‖ p). The weights in front of the logarithms are the target's.",
            _reversed,
        ),
        Slip(
            "this is the cross-entropy: the same gradient, but not 0 where q = p. Add Σ p log p.",
            lambda p, logits: -(p * logits.log_softmax(-1)).sum(-1),
        ),
        Slip(
            "only the target's favourite counts here. The whole row p is known: weigh every word by it.",
            lambda p, logits: -logits.log_softmax(-1).gather(-1, p.argmax(-1, keepdim=True)).squeeze(-1),
        ),
        Slip(
            "logits are no log-probabilities yet: `log_softmax` first.",
            lambda p, logits: (torch.xlogy(p, p) - p * logits).sum(-1),
        ),
        Slip(
            "a mean over the words: the sum over the vocabulary is the expectation already.",
            lambda p, logits: (torch.xlogy(p, p) - p * logits.log_softmax(-1)).mean(-1),
        ),
        Slip(
            "one number for all rows: return one for each, [N].",
            lambda p, logits: (torch.xlogy(p, p) - p * logits.log_softmax(-1)).sum(),
        ),
        Slip(
            "where p is 0, p log p is 0 and not NaN: `torch.xlogy(p, p)` knows that.",
            lambda p, logits: (p * (p.log() - logits.log_softmax(-1))).sum(-1),
        ),
    ),
)


# ------------------------------------------------------------------------------------------------------ vocabularies


def _draft_law(logits: Tensor, vocab_size: int, filler: float = float("-inf")) -> Tensor:
    missing = max(0, vocab_size - len(logits))
    return torch.nn.functional.pad(logits[:vocab_size], (0, missing), value=filler).softmax(-1)


DRAFT_LAW = Exercise(
    "draft_law",
    ("logits", "vocab_size"),
    right=_draft_law,
    cases=(
        (torch.tensor([0.0, 1.0]), 2),
        (torch.tensor([0.0, 1.0]), 3),
        (torch.tensor([0.0, 1.0, 2.0]), 2),
        (torch.tensor([-3.0, 0.5, 2.0, 2.0, 9.0]), 4),
        (torch.tensor([-3.0, 0.5, -2.0]), 6),
    ),
    slips=(
        Slip(
            "filled up with logits of 0, which are ordinary words: a word the draft does not have has logit −∞.",
            lambda logits, vocab_size: _draft_law(logits, vocab_size, 0.0),
        ),
        Slip(
            "cut after the softmax: what is left no longer sums to 1. Cut the logits.",
            lambda logits, vocab_size: torch.nn.functional.pad(
                logits.softmax(-1)[:vocab_size], (0, max(0, vocab_size - len(logits)))
            ),
        ),
        Slip(
            "the law must have `vocab_size` entries: a draft with fewer words gets zeros for the others.",
            lambda logits, vocab_size: logits[:vocab_size].softmax(-1),
        ),
        Slip(
            "words that only the draft has are still in it: the target could not even look them up.",
            lambda logits, vocab_size: _draft_law(logits, max(vocab_size, len(logits))),
        ),
        Slip(
            "these are logits, or their exponentials: a law sums to 1.",
            lambda logits, vocab_size: torch.nn.functional.pad(
                logits[:vocab_size], (0, max(0, vocab_size - len(logits))), value=float("-inf")
            ).exp(),
        ),
    ),
)


def check_weight_share(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 10. Wants `weight_share(layers, head_rows, layer_weights, hidden, target_layers, vocab) -> float`.

    Weights that a draft step reads, as a share of those that a target pass reads; all arguments are whole numbers.
    """
    return WEIGHT_SHARE.check(candidate)


def check_exit_guess(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 10. Wants `exit_guess(hidden: Tensor, layer: int, gain: Tensor, head: Tensor) -> int`.

    The favourite after `layer` layers: RMS norm with this gain [H], then the head [V, H]. `hidden` is [n + 1, H], and
    `hidden[0]` the embedding.
    """
    return EXIT_GUESS.check(candidate)


def check_distillation_loss(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 10. Wants `distillation_loss(p: Tensor[N, V], logits: Tensor[N, V]) -> Tensor[N]`.

    KL(p ‖ q) of each row in nats, q being the softmax of the draft's logits.
    """
    return DISTILLATION_LOSS.check(candidate)


def check_draft_law(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 10. Wants `draft_law(logits: Tensor[V'], vocab_size: int) -> Tensor[vocab_size]`.

    q over the target's vocabulary, from the logits of a draft that has more words, as many, or fewer.
    """
    return DRAFT_LAW.check(candidate)
