"""What a pass says, as the loop hands it on: one line of scores for every position, and where each row's are.

Rows of a batch have drafts of different lengths. A table [B, K + 1, V] would hold mostly filler, and be tens of
megabytes; here are only the positions that were computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specnb.verification import favourites


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of one round.

    Attributes:
        flat: [N, V], one line for every position of the pass.
        where: LongTensor [B, K + 1] on the same device: the line of each row's place. For places a row does not use,
            any line.
        hidden: [N, H], what went into the output head, if somebody wants to know.
    """

    flat: Tensor
    where: Tensor
    hidden: Tensor | None = None

    @classmethod
    def of_pass(cls, flat: Tensor, rows: list[int], counts: list[int], batch_size: int, places: int) -> Scores:
        """Lines that came row after row, ``counts[i]`` of row ``rows[i]``, of which ``places`` are looked at."""
        where, first = [[0] * places for _ in range(batch_size)], 0
        for b, n in zip(rows, counts):
            where[b] = [first + min(place, n - 1) for place in range(places)]
            first += n
        return cls(flat, torch.tensor(where, device=flat.device))

    def table(self) -> Tensor:
        """[B, K + 1, V]; at places a row does not use, any scores."""
        return self.flat[self.where]

    def at(self, b: int, places: Sequence[int]) -> Tensor:
        """Row b's scores at these places, [n, V]."""
        return self.flat[self.where[b, list(places)]]

    def of_row(self, b: int, places: int) -> Tensor:
        """Row b's scores at its first places, [places, V]."""
        return self.at(b, range(places))

    def favourites(self) -> tuple[Tensor, Tensor]:
        """The highest score at each place and the token that has it, [B, K + 1] each."""
        best, choice = favourites(self.flat)
        return best[self.where], choice[self.where]
