"""The checks of notebook 07's exercises: right answers pass, each named slip gets its own message."""

from specnb import exercises_buys
from tests.exercise_checks import exercise_tests

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

globals().update(exercise_tests(exercises_buys, RIGHT, WRONG))
