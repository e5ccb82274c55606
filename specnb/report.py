"""What a run tells about itself: rounds (the trace), counts (the statistics), and the object `generate` returns.

These listen to commits and own nothing of the loop. All counts are of committed tokens, cut where the row ended;
only ``drafted`` counts every proposal.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput


@dataclass(frozen=True)
class Round:
    """One row's part of one round, as committed.

    Attributes:
        row: the row of the batch.
        drafted: the token ids proposed.
        num_accepted: how many of them were accepted and written.
        next_token: the correction or bonus token written after them; None if the row ended before it.
        is_bonus: True if all proposals passed (of a tree, down to a leaf), so that ``next_token`` came for free.
        planned: the draft length the drafter chose for this round, if it is one that chooses (`specnb.Adaptive`).
        kind: what sort of guess it was, if the drafter tells (`Draft.kinds`): the length of the suffix that prompt
            lookup has found, say, or which part of a cascade has drafted.
        p: target distribution [k+1, V] at the round's places, with ``return_trace="probs"``.
        q: draft distribution [k, V], with ``return_trace="probs"``, if the drafter has one.
        parents: for a tree of proposals, of each node the number of its parent, -1 for the root; None for a chain.
        path: for a tree the numbers of the accepted nodes; None for a chain, where they are the first ones.
    """

    row: int
    drafted: list[int]
    num_accepted: int
    next_token: int | None
    is_bonus: bool
    planned: int | None = None
    kind: Hashable = field(default=None, compare=False)
    p: Tensor | None = field(default=None, repr=False, compare=False)
    q: Tensor | None = field(default=None, repr=False, compare=False)
    parents: list[int] | None = None
    path: list[int] | None = None

    @property
    def accepted(self) -> list[int]:
        """The proposals that were written, by number: the first ones, or a tree's path."""
        return list(range(self.num_accepted)) if self.path is None else self.path

    @property
    def places(self) -> list[int]:
        """Of each token this round wrote the place it was decided at: 0, then one more than the proposal before it."""
        return [0, *(node + 1 for node in self.accepted)][: len(self.emitted)]

    @property
    def emitted(self) -> list[int]:
        """The tokens this round wrote."""
        tail = [] if self.next_token is None else [self.next_token]
        return [self.drafted[node] for node in self.accepted] + tail

    @property
    def rejected(self) -> bool:
        """Whether a proposal was turned down and its correction written."""
        return self.next_token is not None and not self.is_bonus


_COUNTS = ("target_passes", "drafted", "accepted", "rejected", "emitted")


class Stats:
    """Counts per row, and the ratios made of them.

    Attributes:
        target_passes: LongTensor [B], target passes in which the row took part; the prompt's prefill is not counted.
        drafted, accepted, rejected, emitted: LongTensor [B], tokens. ``accepted`` leaves out corrections and bonus
            tokens; ``rejected`` counts rounds that ended in a correction.
        seconds: wall time of the whole run, prefill included.
    """

    def __init__(self, batch_size: int) -> None:
        # plain numbers: a tensor for each count would be most of what a served request leaves behind
        self._counts = {name: [0] * batch_size for name in _COUNTS}
        self.seconds = 0.0
        self._reached: list[list[int]] = [[] for _ in range(batch_size)]  # per row and draft position
        self._passed: list[list[int]] = [[] for _ in range(batch_size)]

    def on_commit(self, rounds: list[Round]) -> None:
        for r in rounds:
            rejected = int(r.rejected)
            for name, count in zip(_COUNTS, (1, len(r.drafted), r.num_accepted, rejected, len(r.emitted))):
                self._counts[name][r.row] += count
            _count_up(self._passed[r.row], r.num_accepted)
            _count_up(self._reached[r.row], r.num_accepted + rejected)

    @property
    def target_passes(self) -> Tensor:
        return torch.tensor(self._counts["target_passes"])

    @property
    def drafted(self) -> Tensor:
        return torch.tensor(self._counts["drafted"])

    @property
    def accepted(self) -> Tensor:
        return torch.tensor(self._counts["accepted"])

    @property
    def rejected(self) -> Tensor:
        return torch.tensor(self._counts["rejected"])

    @property
    def emitted(self) -> Tensor:
        return torch.tensor(self._counts["emitted"])

    @property
    def tokens_per_pass(self) -> Tensor:
        """Emitted tokens per target pass [B]; 1 is plain decoding."""
        return self.emitted / self.target_passes

    @property
    def acceptance_rate(self) -> Tensor:
        """Accepted share of all proposals [B]; NaN where nothing was drafted."""
        return self.accepted / self.drafted

    @property
    def alpha(self) -> Tensor:
        """α [B]: accepted share of the proposals that were reached; NaN where nothing was drafted."""
        return self.accepted / (self.accepted + self.rejected)

    @property
    def acceptance_by_position(self) -> Tensor:
        """α by draft position [K], over all rows: accepted share among the rounds that reached the position."""
        longest = max(len(row) for row in self._reached)
        passed, reached = (_column_sums(rows, longest) for rows in (self._passed, self._reached))
        return passed / reached

    def row(self, b: int) -> Stats:
        """The statistics of one row alone."""
        return self._select([b])

    def total(self) -> Stats:
        """All rows added up into one."""
        whole = Stats(1)
        whole._counts, whole.seconds = {name: [sum(counts)] for name, counts in self._counts.items()}, self.seconds
        longest = max(len(row) for row in self._reached)
        whole._reached = [_column_sums(self._reached, longest).long().tolist()]
        whole._passed = [_column_sums(self._passed, longest).long().tolist()]
        return whole

    def _select(self, rows: Any) -> Stats:
        part = Stats(len(rows))
        part._counts = {name: [counts[b] for b in rows] for name, counts in self._counts.items()}
        part._reached, part._passed = [self._reached[b] for b in rows], [self._passed[b] for b in rows]
        part.seconds = self.seconds
        return part

    def __repr__(self) -> str:
        emitted, passes = int(self.emitted.sum()), int(self.target_passes.sum())
        per_pass = f"{emitted / passes:.2f} tokens per pass" if passes else "no pass"
        draft = f"{int(self.accepted.sum())} of {int(self.drafted.sum())} drafted tokens accepted"
        return f"Stats({emitted} tokens in {passes} target passes, {per_pass}; {draft}; {self.seconds:.2f} s)"


def _count_up(counts: list[int], first: int) -> None:
    """Add one to each of the first ``first`` positions."""
    counts.extend([0] * (first - len(counts)))
    for position in range(first):
        counts[position] += 1


def _column_sums(rows: list[list[int]], longest: int) -> Tensor:
    padded = [row + [0] * (longest - len(row)) for row in rows]
    return torch.tensor(padded).reshape(len(rows), longest).sum(0).float()


class Trace(list):
    """Listener that keeps every round."""

    def on_commit(self, rounds: list[Round]) -> None:
        self.extend(rounds)


class StreamerListener:
    """Hands committed tokens to a transformers streamer: in order, each once."""

    def __init__(self, streamer: Any) -> None:
        self.streamer = streamer

    def on_commit(self, rounds: list[Round]) -> None:
        for token in (token for r in rounds for token in r.emitted):
            self.streamer.put(torch.tensor([token]))


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns; transformers' own output with the account of the run added.

    Attributes:
        sequences: LongTensor [B, prompt + new], right-padded after the end of each row.
        num_new_tokens: LongTensor [B].
        stats: `Stats`.
        trace: list of `Round`, in order of rounds, then rows; None unless asked for.
        scores: with ``output_scores``: one tensor [B, V] per new token, the processed scores it was chosen from.
        logits: with ``output_logits``: the same before the processors.
        cache: with ``return_cache``: the `RaggedCache`, for the ``cache=`` of the next call.
    """

    num_new_tokens: Tensor | None = None
    stats: Stats | None = None
    trace: list[Round] | None = None
    cache: Any = None
