"""Hints for a small draft: what followed the last few tokens where they occurred before, told along with each token.

To continue a repetition a transformer needs two layers that work together and billions of tokens to learn it (Olsson et
al. 2022, arXiv 2209.11895). A draft of one or two layers gets it for free: every token it reads comes with the token
that prompt lookup would guess next, and with the length of the suffix that the guess rests on. It learns when to
believe it. Both are functions of the text so far, so the draft is a causal model like any other.

A token and its hint travel as one number, so that nothing between the drafter and the embedding has to know.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LONGEST = 4  # tokens of the longest suffix looked for
BITS = 20  # of a token id: more than any vocabulary has
MASK = (1 << BITS) - 1


def encoded(token: int, hint: int, size: int) -> int:
    """One number for a token, its hint and the length of the suffix; without a hint (size 0) the token itself."""
    return (size << 2 * BITS) | (hint << BITS) | token


def decoded(codes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, hints and sizes of encoded numbers, each of the same shape."""
    return codes & MASK, (codes >> BITS) & MASK, codes >> 2 * BITS


class Hints:
    """The hints along one growing text.

    Attributes:
        tokens: what has been read.
        codes: each token with its hint, encoded.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.codes: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}  # what followed a suffix the last time

    def extend(self, tokens: Sequence[int]) -> list[int]:
        """Read what is new of the text ``tokens``; returns the codes of all of it."""
        for token in tokens[len(self.tokens) :]:
            self._next |= self._followed(self.tokens[-LONGEST:], token)
            self.tokens.append(token)
            self.codes.append(encoded(token, *self._hint(self.tokens[-LONGEST:], {})))
        return self.codes

    def after(self, guesses: Sequence[int]) -> int:
        """The code of the last of some guesses that may follow the text; the text stays as it is."""
        end, fresh = self.tokens[-LONGEST:], dict[tuple[int, ...], int]()
        for guess in guesses:
            fresh |= self._followed(end, guess)
            end = [*end, guess][-LONGEST:]
        return encoded(end[-1], *self._hint(end, fresh))

    def _followed(self, end: list[int], token: int) -> dict[tuple[int, ...], int]:
        return {tuple(end[-size:]): token for size in range(1, len(end) + 1)}

    def _hint(self, end: list[int], fresh: dict[tuple[int, ...], int]) -> tuple[int, int]:
        """What followed the longest suffix that has occurred before, and its length; (0, 0) if none has."""
        for size in range(len(end), 0, -1):
            suffix = tuple(end[-size:])
            token = fresh.get(suffix, self._next.get(suffix))
            if token is not None:
                return token, size
        return 0, 0


def hinted(tokens: Tensor) -> Tensor:
    """A whole text [n] with its hints, encoded."""
    return torch.tensor(Hints().extend(tokens.tolist()), dtype=torch.long)
