"""The checks of notebook 09's exercises: right answers pass, each named slip gets its own message."""

from specnb import exercises_lookup
from tests.exercise_checks import exercise_tests

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

globals().update(exercise_tests(exercises_lookup, RIGHT, WRONG))
