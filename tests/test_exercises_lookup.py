"""The checks of notebook 09's exercises: right answers pass, each named slip gets its own message."""

import pytest

from specnb import exercises, exercises_lookup
from specnb.exercises import Exercise

EXERCISES = [value for value in vars(exercises_lookup).values() if isinstance(value, Exercise)]
SLIPS = [(exercise, slip) for exercise in EXERCISES for slip in exercise.slips]


# Answers as a learner would write them, apart from the solutions inside the checks.


def what_followed(tokens, n, k):
    for start in range(len(tokens) - n - 1, -1, -1):
        if tokens[start : start + n] == tokens[-n:]:
            return tokens[start + n : start + n + k]
    return []


def note_follower(index, tokens, n):
    before = tokens[:-1]
    if len(before) >= n:
        index[tuple(before[-n:])] = len(before)
    return index


def promise(alpha, k, price):
    total, passes = 0.0, 1.0
    for _ in range(k):
        passes *= alpha
        if passes <= price:
            break
        total += passes - price
    return total


RIGHT = {"what_followed": what_followed, "note_follower": note_follower, "promise": promise}

WRONG = [
    ("what_followed", lambda tokens, n, k: what_followed(tokens, n, 99), "cut the copy there"),
    ("what_followed", lambda tokens, n, k: [1, 2, 3], "not right yet"),
    ("note_follower", lambda index, tokens, n: {**index, tuple(tokens[-n - 1 : -1]): tokens[-1]}, "not right yet"),
    ("promise", lambda alpha, k, price: promise(alpha, k, 0.0), "the price is missing"),
]


def check_of(name):
    return getattr(exercises, f"check_{name}")


def test_every_exercise_is_reached_through_the_common_module_and_has_an_answer_here():
    assert {exercise.name for exercise in EXERCISES} == set(RIGHT)
    assert all(check_of(n) is getattr(exercises_lookup, f"check_{n}") and check_of(n).__doc__ for n in RIGHT)


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
