"""The checks of notebook 10's exercises: right answers pass, each named slip gets its own message."""

import pytest
import torch

from specnb import exercises, exercises_sibling
from specnb.exercises import Exercise

EXERCISES = [value for value in vars(exercises_sibling).values() if isinstance(value, Exercise)]
SLIPS = [(exercise, slip) for exercise in EXERCISES for slip in exercise.slips]


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


def check_of(name):
    return getattr(exercises, f"check_{name}")


def test_every_exercise_is_reached_through_the_common_module_and_has_an_answer_here():
    assert {exercise.name for exercise in EXERCISES} == set(RIGHT)
    assert all(
        check_of(name) is getattr(exercises_sibling, f"check_{name}") and check_of(name).__doc__ for name in RIGHT
    )


@pytest.mark.parametrize("name", RIGHT)
def test_right_answer_passes_and_a_stub_is_not_started(name):
    def stub(*args):
        raise NotImplementedError

    assert check_of(name)(RIGHT[name]), check_of(name)(RIGHT[name])
    assert check_of(name)(stub).status == "not started"


@pytest.mark.parametrize(("exercise", "slip"), SLIPS, ids=lambda v: getattr(v, "name", None) or v.message[:40])
def test_each_slip_gets_its_own_message(exercise, slip):
    result = check_of(exercise.name)(slip.wrong)
    assert not result
    assert slip.message in result.message and "Smallest failing case" in result.message
    assert not any(other.message in result.message for other in exercise.slips if other is not slip)


@pytest.mark.parametrize(("name", "answer", "said"), WRONG)
def test_learners_slip_is_recognised(name, answer, said):
    result = check_of(name)(answer)
    assert not result
    assert said in result.message
