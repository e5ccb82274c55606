"""The checks of notebook 07's exercises: right answers pass, each named slip gets its own message."""

import pytest

from specnb import exercises, exercises_buys
from specnb.exercises import Exercise

EXERCISES = [value for value in vars(exercises_buys).values() if isinstance(value, Exercise)]
SLIPS = [(exercise, slip) for exercise in EXERCISES for slip in exercise.slips]


# Answers as a learner would write them, apart from the solutions inside the checks.


def tokens_by_position(alphas):
    tokens = passes = 1.0
    for alpha in alphas:
        passes *= alpha
        tokens += passes
    return tokens


def worth_sending(alphas, costs, rate):
    best, best_value = 0, 0.0
    for k in range(1, len(costs)):
        value = tokens_by_position(alphas[:k]) - 1 - rate * (costs[k] - costs[0])
        if value > best_value + 1e-12:
            best, best_value = k, value
    return best


RIGHT = {
    "tokens_by_position": tokens_by_position,
    "measured_speedup": lambda tokens, k, c, ms: tokens * ms[0] / (ms[k] + k * c * ms[0]),
    "worth_sending": worth_sending,
}

WRONG = [
    ("tokens_by_position", lambda a: tokens_by_position(a) - 1, "own token is missing"),
    ("tokens_by_position", lambda a: 1 + sum(a), "all before it"),
    ("tokens_by_position", lambda a: 7.0, "not right yet"),
    ("measured_speedup", lambda t, k, c, ms: t / (ms[max(k - 1, 0)] / ms[0] + k * c), "k + 1 positions"),
    ("measured_speedup", lambda t, k, c, ms: t * ms[0] / ms[k], "drafting is not in the sum"),
    ("worth_sending", lambda a, costs, rate: len(a), "longest draft"),
    ("worth_sending", lambda a, costs, rate: worth_sending(a, costs, 1.0), "`rate` is not used"),
]


def check_of(name):
    return getattr(exercises, f"check_{name}")


def test_every_exercise_is_reached_through_the_common_module_and_has_an_answer_here():
    assert {exercise.name for exercise in EXERCISES} == set(RIGHT)
    assert all(check_of(name) is getattr(exercises_buys, f"check_{name}") and check_of(name).__doc__ for name in RIGHT)
    with pytest.raises(AttributeError, match="check_nothing"):
        exercises.check_nothing  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        exercises.nothing  # noqa: B018


@pytest.mark.parametrize("name", RIGHT)
def test_right_answer_passes_and_a_stub_is_not_started(name):
    def stub(*args):
        raise NotImplementedError

    assert check_of(name)(RIGHT[name])
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
