"""The checks of notebook 10's exercises: right answers pass, each named slip gets its own message."""

import torch

from specnb import exercises_sibling
from tests.exercise_checks import exercise_tests

# Answers as a learner would write them, apart from the solutions inside the checks.


def weight_share(layers, head_rows, layer_weights, hidden, target_layers, vocab):
    draft = layers * layer_weights + head_rows * hidden
    target = target_layers * layer_weights + vocab * hidden
    return draft / target


def exit_guess(hidden, layer, gain, head):
    x = torch.nn.functional.rms_norm(hidden[layer], gain.shape, gain)
    return torch.nn.functional.linear(x, head).argmax().item()


def distillation_loss(p, logits):
    return torch.nn.functional.kl_div(logits.log_softmax(-1), p, reduction="none").sum(-1)


def draft_law(logits, vocab_size):
    law = torch.zeros(vocab_size)
    known = logits[:vocab_size]
    law[: len(known)] = known.exp() / known.exp().sum()
    return law


RIGHT = {f.__name__: f for f in (weight_share, exit_guess, distillation_loss, draft_law)}

WRONG = [
    ("weight_share", lambda layers, r, w, h, n, v: layers / n, "heads are left out"),
    ("weight_share", lambda *sizes: 1 / weight_share(*sizes), "upside down"),
    ("exit_guess", lambda h, layer, gain, head: exit_guess(h[1:], layer, gain, head), "one layer too late"),
    ("exit_guess", lambda h, layer, gain, head: exit_guess(h, layer, torch.ones_like(gain), head), "norm is missing"),
    ("distillation_loss", lambda p, x: torch.nn.functional.cross_entropy(x, p, reduction="none"), "cross-entropy"),
    ("distillation_loss", lambda p, x: (p * (p.log() - x.log_softmax(-1))).sum(-1), "p log p is 0"),
    ("draft_law", lambda x, v: torch.cat([x[:v], torch.zeros(max(0, v - len(x)))]).softmax(-1), "logits of 0"),
    ("draft_law", lambda x, v: x, "not right yet"),
]

globals().update(exercise_tests(exercises_sibling, RIGHT, WRONG))
