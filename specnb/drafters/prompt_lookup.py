"""Prompt lookup: the context itself is the draft. Where the last few tokens occurred before, copy what followed.

No second model and no weights; it pays where the answer repeats the question: summaries, edits, quotations.
Source: Saxena 2023, "Prompt Lookup Decoding". First version; notebook 09 builds it in full.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from specnb.drafters.base import Draft, Drafter, Session

if TYPE_CHECKING:
    from specnb.rows import Rows


class PromptLookup(Drafter):
    """Longest-suffix lookup in the row's own tokens.

    The longest suffix of at most ``max_ngram`` tokens that occurred before decides; of its occurrences the *latest*
    is taken: [1, 2, 3, 1, 2, 4, 1, 2] guesses 4. Fewer than k tokens may follow it, then the draft is shorter.

    Args:
        num_draft_tokens: k, the most tokens copied per round.
        max_ngram, min_ngram: longest and shortest suffix looked up.
    """

    def __init__(self, num_draft_tokens: int = 10, *, max_ngram: int = 3, min_ngram: int = 1) -> None:
        super().__init__(num_draft_tokens)
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"need 1 ≤ min_ngram ≤ max_ngram, got {min_ngram} and {max_ngram}.")
        self.max_ngram, self.min_ngram = max_ngram, min_ngram
        self._indices: list[_Index] = []

    def start(self, session: Session) -> None:
        self._indices = [_Index(self.min_ngram, self.max_ngram) for _ in range(len(session.rows))]

    def join(self, row: int) -> None:
        self._indices[row] = _Index(self.min_ngram, self.max_ngram)

    def draft(self, rows: Rows, limits: list[int]) -> Draft:
        """Each row's copy; its kind is the length of the suffix that was found, since longer ones are better guides."""
        found = [
            index.follow(rows.view(b), n) if n else (0, []) for b, (index, n) in enumerate(zip(self._indices, limits))
        ]
        return replace(Draft.from_lists([guesses for _, guesses in found]), kinds=[size for size, _ in found])

    def propose(self, context: list[int], limit: int) -> list[int]:
        """The guess for any list of tokens, outside a run."""
        return _Index(self.min_ngram, self.max_ngram).follow(context, limit)[1]


class _Index:
    """Where each n-gram of a growing list was last followed by something. Each token is indexed once."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        self.last: dict[tuple[int, ...], int] = {}  # n-gram → index of the token that followed it
        self.indexed = 0

    def follow(self, tokens: list[int], limit: int) -> tuple[int, list[int]]:
        """The longest known suffix's length, and up to ``limit`` tokens that followed it; (0, []) if none is known."""
        self._extend(tokens)
        for size in self.sizes:
            start = self.last.get(tuple(tokens[-size:])) if size < len(tokens) else None
            if start is not None:
                return size, tokens[start : start + limit]
        return 0, []

    def _extend(self, tokens: list[int]) -> None:
        for place in range(self.indexed, len(tokens)):
            for size in self.sizes:
                if size <= place:
                    self.last[tuple(tokens[place - size : place])] = place
        self.indexed = len(tokens)
