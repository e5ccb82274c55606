"""The checks of notebook 08's exercises: right answers pass, each named slip gets its own message."""

from specnb import exercises_crowd
from tests.exercise_checks import exercise_tests

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

globals().update(exercise_tests(exercises_crowd, RIGHT, WRONG))
