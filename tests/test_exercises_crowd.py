"""The checks of notebook 08's exercises: right answers pass, each named slip gets its own message."""

import pytest

from specnb import exercises, exercises_crowd
from specnb.exercises import Exercise

EXERCISES = [value for value in vars(exercises_crowd).values() if isinstance(value, Exercise)]
SLIPS = [(exercise, slip) for exercise in EXERCISES for slip in exercise.slips]


# Answers as a learner would write them, apart from the solutions inside the checks.


def thrown_away(rounds):
    return sum(sum(row) - len(row) * min(row) for row in rounds)


def passes_with_refill(lengths, slots):
    queue, running, passes = list(lengths), [], 0
    while queue or running:
        while queue and len(running) < slots:
            running.append(queue.pop(0))
        running = [left - 1 for left in running if left > 1]
        passes += 1
    return passes


def cost(positions, knee):
    return 1.0 if positions < knee else positions / knee


RIGHT = {
    "thrown_away": thrown_away,
    "passes_with_refill": passes_with_refill,
    "crowd_speedup": lambda m, T, B, knee: m * cost(B, knee) / cost(B * T, knee),
}

WRONG = [
    ("thrown_away", lambda rounds: sum(max(row) * len(row) - sum(row) for row in rounds), "min, not max"),
    ("thrown_away", lambda rounds: 7, "not right yet"),
    ("passes_with_refill", lambda lengths, slots: -(-sum(lengths) // slots), "perfect packing"),
    ("passes_with_refill", lambda lengths, slots: sum(lengths), "single slot"),
    ("crowd_speedup", lambda m, T, B, knee: m / max(1, B * T / knee), "v(B) on top"),
    ("crowd_speedup", lambda m, T, B, knee: m / T, "end of the story"),
]


def check_of(name):
    return getattr(exercises, f"check_{name}")


def test_every_exercise_is_reached_through_the_common_module_and_has_an_answer_here():
    assert {exercise.name for exercise in EXERCISES} == set(RIGHT)
    assert all(check_of(name) is getattr(exercises_crowd, f"check_{name}") and check_of(name).__doc__ for name in RIGHT)
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
