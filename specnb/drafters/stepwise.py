"""Drafting with a network, one token after another: what a model of its own and the target's first layers share.

Every guess is chosen from scores that went through the target's own logits processors, at the context it stands in;
when sampling it is drawn from the q it is scored with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specnb.drafters.base import Draft, Drafter, Session

if TYPE_CHECKING:
    from specnb.rows import Rows


class StepwiseDrafter(Drafter):
    """k passes for k guesses. Subclasses say how a pass is made (`_logits`), and how far a row may draft."""

    _session: Session

    def start(self, session: Session) -> None:
        self._session = session

    def draft(self, rows: Rows, limits: list[int]) -> Draft:
        lengths = torch.tensor(self._within_reach(rows, limits))
        guesses = torch.zeros(len(rows), 0, dtype=torch.long, device=self._session.model.device)
        laws: list[Tensor] = []
        for step in range(int(lengths.max())):
            wanted = lengths > step
            guess, q = self._session.choose(self._process(rows, guesses, self._logits(rows, wanted, guesses)), wanted)
            guesses = torch.cat([guesses, guess[:, None]], dim=1)
            laws += [] if q is None else [q]
        return Draft(guesses, lengths, torch.stack(laws, dim=1) if laws else None)

    def _within_reach(self, rows: Rows, limits: list[int]) -> list[int]:
        """How many tokens each row can be guessed, of those it can use."""
        return limits

    def _logits(self, rows: Rows, wanted: Tensor, guesses: Tensor) -> Tensor:
        """Logits [B, V'] after each wanted row's text and its guesses [B, n] so far; V' need not be the target's V."""
        raise NotImplementedError

    def _process(self, rows: Rows, guesses: Tensor, logits: Tensor) -> Tensor:
        """The draft's scores [B, V] at its next place, after the processors it shares with the target.

        Ids that only the draft has are cut off, and ids that only the target has count as q = 0.
        """
        logits = logits[..., : self._session.vocab_size]
        missing = self._session.vocab_size - logits.shape[-1]
        if missing > 0:
            logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return self._session.processors.next_scores(rows, guesses, logits)
