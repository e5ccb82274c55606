"""What every module of exercise checks must hold: right answers pass, each named slip gets its own message."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest

from specnb import exercises
from specnb.exercises import Exercise


def check_of(name: str) -> Callable[..., Any]:
    return getattr(exercises, f"check_{name}")


def exercise_tests(
    module: ModuleType, right: Mapping[str, Callable[..., Any]], wrong: Sequence[tuple[str, Callable[..., Any], str]]
) -> dict[str, Callable[..., None]]:
    """The tests of a module of checks, by name, for the globals of its test file.

    Args:
        module: one of ``specnb.exercises_…``.
        right: an answer to each exercise.
        wrong: (exercise, answer, a part of what is said to it).
    """
    found = [value for value in vars(module).values() if isinstance(value, Exercise)]
    slips = [(exercise, slip) for exercise in found for slip in exercise.slips]

    def test_every_exercise_is_reached_through_the_common_module_and_has_an_answer_here():
        assert {exercise.name for exercise in found} == set(right)
        assert all(check_of(name) is getattr(module, f"check_{name}") and check_of(name).__doc__ for name in right)
        with pytest.raises(AttributeError, match="check_nothing"):
            exercises.check_nothing  # noqa: B018
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            exercises.nothing  # noqa: B018

    @pytest.mark.parametrize("name", right)
    def test_right_answer_passes_and_a_stub_is_not_started(name):
        def stub(*args):
            raise NotImplementedError

        assert check_of(name)(right[name]), check_of(name)(right[name])
        assert check_of(name)(stub).status == "not started"

    @pytest.mark.parametrize(("exercise", "slip"), slips, ids=lambda v: getattr(v, "name", None) or v.message[:40])
    def test_each_slip_gets_its_own_message(exercise, slip):
        result = check_of(exercise.name)(slip.wrong)
        assert not result
        assert slip.message in result.message and "Smallest failing case" in result.message
        assert not any(other.message in result.message for other in exercise.slips if other is not slip)

    @pytest.mark.parametrize(("name", "answer", "said"), wrong)
    def test_learners_slip_is_recognised(name, answer, said):
        result = check_of(name)(answer)
        assert not result
        assert said in result.message

    return {name: value for name, value in locals().items() if name.startswith("test_")}
