"""A drafter that says what it was told to say: for lessons, where the guess is the story, and for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specnb.drafters.base import Drafter, Session


class Scripted(Drafter):
    """Guesses by script.

    Args:
        script: either the drafts of the rounds in order, ``[[bell, will, soon], [again], …]`` (every row of a batch
            gets the same; once the script has run out, no guesses), or a function ``context -> guesses`` of the row's
            tokens so far.
        num_draft_tokens: cut to this many; default: the longest scripted round, or 4 for a function.
    """

    def __init__(
        self,
        script: Sequence[Sequence[int]] | Callable[[list[int]], Sequence[int]],
        num_draft_tokens: int | None = None,
    ) -> None:
        longest = 4 if callable(script) else max((len(guesses) for guesses in script), default=1)
        super().__init__(max(longest, 1) if num_draft_tokens is None else num_draft_tokens)
        self.script = script
        self._round = 0

    def start(self, session: Session) -> None:
        self._round = 0

    def propose(self, context: list[int], limit: int) -> list[int]:
        if callable(self.script):
            return list(self.script(context))[:limit]
        return list(self.script[self._round])[:limit] if self._round < len(self.script) else []

    def observe(self, rows, kept):
        self._round += 1
