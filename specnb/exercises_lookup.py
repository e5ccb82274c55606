"""Checks for the exercises of notebook 09, prompt lookup. Used as `specnb.exercises.check_…`, like the others.

The framework, and what a check tells, is in `specnb.exercises`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specnb.exercises import CheckResult, Exercise, Slip


def _places(tokens: list[int], n: int, *, apart: bool = False) -> list[int]:
    """Where the last n tokens begin elsewhere; ``apart``: where that does not overlap them."""
    end = len(tokens) - 2 * n + 1 if apart else len(tokens) - n
    return [start for start in range(end) if tokens[start : start + n] == tokens[len(tokens) - n :]]


def _what_followed(tokens: list[int], n: int, k: int) -> list[int]:
    places = _places(tokens, n)
    return tokens[places[-1] + n :][:k] if places else []


def _copied_from(tokens: list[int], n: int, k: int, shift: int) -> list[int]:
    places = _places(tokens, n)
    return tokens[places[-1] + shift :][:k] if places else []


def _filled_up(tokens: list[int], n: int, k: int) -> list[int]:
    copied = _what_followed(tokens, n, k)
    return (copied * k)[:k] if copied else []


def _without_the_suffix(tokens: list[int], n: int, k: int) -> list[int]:
    places = _places(tokens, n)
    return tokens[places[-1] + n : max(len(tokens) - n, 0)][:k] if places else []


def _earliest(tokens: list[int], n: int, k: int) -> list[int]:
    places = _places(tokens, n)
    return tokens[places[0] + n :][:k] if places else []


def _not_overlapping(tokens: list[int], n: int, k: int) -> list[int]:
    places = _places(tokens, n, apart=True)
    return tokens[places[-1] + n :][:k] if places else []


_TEXT = [1, 2, 3, 1, 2, 4, 1, 2]

WHAT_FOLLOWED = Exercise(
    "what_followed",
    ("tokens", "n", "k"),
    right=_what_followed,
    cases=(
        ([5], 1, 3),
        ([5, 5], 1, 3),
        ([5, 6], 1, 3),
        ([5, 6], 3, 2),
        (_TEXT, 2, 1),
        (_TEXT, 2, 10),
        (_TEXT, 3, 10),
        ([7, 7, 7, 7], 2, 10),
        ([3, 0, 0, 4, 3], 1, 2),
    ),
    slips=(
        Slip(
            "the last n tokens were found at the very end, where they are themselves, and nothing follows there. "
            "Begin one place further left.",
            lambda tokens, n, k: [],
        ),
        Slip("this is the earliest occurrence; the latest is wanted. Search from the right.", _earliest),
        Slip(
            "the copy begins with the n tokens that were looked for; what *followed* them begins n places later.",
            lambda tokens, n, k: _copied_from(tokens, n, k, 0),
        ),
        Slip(
            "the first token that followed is left out: it is at `start + n`.",
            lambda tokens, n, k: _copied_from(tokens, n, k, n + 1),
        ),
        Slip(
            "k is the most that may be copied: cut the copy there.",
            lambda tokens, n, k: _what_followed(tokens, n, len(tokens)),
        ),
        Slip("fewer than k tokens may follow. Then the draft is shorter; nothing has to be filled up.", _filled_up),
        Slip(
            "the copy stops before the last n tokens of the text. They are text like any other: copy on to the end.",
            _without_the_suffix,
        ),
        Slip(
            "the two occurrences may overlap: in 7 7 7 the pair 7 7 begins at 0 and at 1.",
            _not_overlapping,
        ),
    ),
)


def _note(index: dict, tokens: list[int], n: int, *, shift: int = 0, guard: bool = True) -> dict:
    if len(tokens) > n or not guard:
        index[tuple(tokens[max(len(tokens) - n - 1, 0) : -1])] = len(tokens) - 1 + shift
    return index


def _with_the_new_token(index: dict, tokens: list[int], n: int) -> dict:
    if len(tokens) > n:
        index[tuple(tokens[len(tokens) - n :])] = len(tokens) - 1
    return index


def _the_token_itself(index: dict, tokens: list[int], n: int) -> dict:
    if len(tokens) > n:
        index[tuple(tokens[len(tokens) - n - 1 : -1])] = tokens[-1]
    return index


def _the_first_stays(index: dict, tokens: list[int], n: int) -> dict:
    if len(tokens) > n:
        index.setdefault(tuple(tokens[len(tokens) - n - 1 : -1]), len(tokens) - 1)
    return index


NOTE_FOLLOWER = Exercise(
    "note_follower",
    ("index", "tokens", "n"),
    right=_note,
    cases=(
        ({}, [5], 1),
        ({}, [5, 6], 1),
        ({(5,): 1}, [5, 6, 5, 9], 1),
        ({}, [5, 6], 2),
        ({(8, 9): 2}, [8, 9, 4, 8, 9, 4], 2),
        ({(1, 2): 2, (2, 3): 3}, [1, 2, 3, 1], 2),
    ),
    slips=(
        Slip(
            "the n-gram that is noted ends with the new token. It should be the n tokens *before* it: nothing has "
            "followed the newest ones yet.",
            _with_the_new_token,
        ),
        Slip("note the *place* of the token, not the token: what came after it is wanted, too.", _the_token_itself),
        Slip("an n-gram that is known already gets the new place: the latest one counts.", _the_first_stays),
        Slip(
            "the place is one too far: the newest token stands at `len(tokens) - 1`.",
            lambda index, tokens, n: _note(index, tokens, n, shift=1),
        ),
        Slip(
            "the place is that of the n-gram itself; note where the token after it stands.",
            lambda index, tokens, n: _note(index, tokens, n, shift=-n),
        ),
        Slip(
            "where there are not n tokens before the new one, there is nothing to note.",
            lambda index, tokens, n: _note(index, tokens, n, guard=False),
        ),
    ),
)


def _promise(alpha: float, k: int, price: float) -> float:
    return sum(max(0.0, alpha**j - price) for j in range(1, k + 1))


PROMISE = Exercise(
    "promise",
    ("alpha", "k", "price"),
    right=_promise,
    cases=(
        (0.5, 0, 0.1),
        (0.5, 1, 0.0),
        (0.5, 2, 0.125),
        (0.9, 4, 0.25),
        (0.5, 4, 0.25),
        (0.0, 3, 0.125),
        (1.0, 3, 0.25),
        (0.75, 2, 1.5),
    ),
    slips=(
        Slip(
            "a guess that is worth less than its price is not made: it adds 0, not a loss.",
            lambda alpha, k, price: sum(alpha**j - price for j in range(1, k + 1)),
        ),
        Slip(
            "every guess has its price, not only the first.",
            lambda alpha, k, price: max(0.0, sum(alpha**j for j in range(1, k + 1)) - price),
        ),
        Slip(
            "the price is missing.",
            lambda alpha, k, price: float(sum(alpha**j for j in range(1, k + 1))),
        ),
        Slip(
            "the j-th guess counts only if all before it passed: α to the power j, not α each time.",
            lambda alpha, k, price: k * max(0.0, alpha - price),
        ),
        Slip(
            "the sum begins at j = 1: the target's own token is written in any case, and is nobody's promise.",
            lambda alpha, k, price: sum(max(0.0, alpha**j - price) for j in range(k)),
        ),
        Slip(
            "all k guesses are summed before the loss is cut off; cut at each guess, for a later one can be left out.",
            lambda alpha, k, price: max(0.0, sum(alpha**j - price for j in range(1, k + 1))),
        ),
    ),
)


def check_what_followed(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 09. Wants `what_followed(tokens: list[int], n: int, k: int) -> list[int]`.

    At most k tokens that followed the last n tokens where these occurred before, the latest time; [] if they did not.
    """
    return WHAT_FOLLOWED.check(candidate)


def check_note_follower(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 09. Wants `note_follower(index: dict, tokens: list[int], n: int) -> dict`.

    The text has just grown by its last token: note at which place it stands, under the tuple of the n tokens before it,
    and return the index.
    """
    return NOTE_FOLLOWER.check(candidate)


def check_promise(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 09. Wants `promise(alpha: float, k: int, price: float) -> float`.

    The tokens that at most k guesses promise beyond their price, when each passes with probability alpha if all before
    it did, and each costs `price` tokens; guesses that are not worth it are not made.
    """
    return PROMISE.check(candidate)
