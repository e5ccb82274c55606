"""Logits processors at every position of a round: what turns the model's logits into p (and the draft's into q).

transformers builds the processors and applies them to one position of one row after the other. A round has several
positions at once, and a processor such as the repetition penalty must see, at each of them, exactly the context that
plain decoding would show it: the row so far plus the guesses before that place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from specnb.scores import Scores
from specnb.trees import paths_of

if TYPE_CHECKING:
    from specnb.preparation import Request
    from specnb.rows import Rows

# these look at the scores only, never at the context: all rows and positions go through in one call
_CONTEXT_FREE = {
    hf.TemperatureLogitsWarper, hf.TopKLogitsWarper, hf.TopPLogitsWarper, hf.MinPLogitsWarper, hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper, hf.EtaLogitsWarper, hf.SuppressTokensLogitsProcessor, hf.InfNanRemoveLogitsProcessor,
    hf.LogitNormalization,
}  # fmt: skip


class Processors:
    """The logits processors of a run, one list per row (rows of a batch may have been prepared apart)."""

    def __init__(self, per_row: list[LogitsProcessorList]) -> None:
        self.per_row = per_row
        self.look_at(per_row)

    def look_at(self, lists: Sequence[LogitsProcessorList]) -> None:
        """See what these lists, those of the rows that count, have in common."""
        self.context_free = all(type(p) in _CONTEXT_FREE for processors in lists for p in processors)
        # one list for all rows, which looks at no context: every row and position can go through it at once
        self.one_call = self.context_free and all(processors is lists[0] for processors in lists)
        self.first = lists[0]

    def __call__(
        self, rows: Rows, drafted: Tensor, lengths: Tensor, logits: Scores, parents: Tensor | None = None
    ) -> Scores:
        """The target's p at every place of the round, as scores.

        Args:
            drafted: LongTensor [B, K], the guesses; ``lengths`` [B], on the CPU, of them count.
            logits: place t of a row follows its context and its first t guesses; with ``parents`` [B, K], on the CPU,
                its context and node t - 1 of its tree with that node's ancestors.

        Returns:
            the scores, float32 where a processor ran.
        """
        if not any(self.per_row):
            return logits
        scores = logits.flat.to(torch.float32, copy=True)
        if self.one_call:
            return replace(logits, flat=self._all_at_once(scores))
        for b in rows.active:
            places = int(lengths[b]) + 1
            here = logits.where[b, :places]
            guesses = drafted[b, : places - 1]
            if parents is None:
                scores[here] = self.score(rows, b, guesses, scores[here])
            else:
                scores[here] = self.score_tree(rows, b, guesses, scores[here], parents[b, : places - 1].tolist())
        return replace(logits, flat=scores)

    def score_tree(self, rows: Rows, b: int, guesses: Tensor, scores: Tensor, parents: list[int]) -> Tensor:
        """Process scores [N + 1, V] of row b, each after the path that leads to its node."""
        if self.context_free:
            return self.score(rows, b, guesses, scores)
        processed, paths = [], paths_of(parents)
        for t in range(len(scores)):
            path = guesses[paths[t]]
            processed.append(self.score(rows, b, path, scores[t, None], first=len(path)))
        return torch.cat(processed)

    def _all_at_once(self, scores: Tensor) -> Tensor:
        """Scores [N, V] through context-free processors; the tokens they are shown do not matter."""
        return self.first(torch.zeros(len(scores), 1, dtype=torch.long, device=scores.device), scores)

    def next_scores(self, rows: Rows, guesses: Tensor, logits: Tensor) -> Tensor:
        """A draft's scores [B, V] at its next place, after its guesses [B, n] so far."""
        if not any(self.per_row):
            return logits
        scores = logits.to(torch.float32, copy=True)
        if self.one_call:
            return self._all_at_once(scores)
        for b in rows.active:
            scores[b] = self.score(rows, b, guesses[b], scores[b, None], first=guesses.shape[1])[0]
        return scores

    def score(self, rows: Rows, b: int, guesses: Tensor, scores: Tensor, first: int = 0) -> Tensor:
        """Process scores [T, V] of row b, where place t follows the context and its first ``first + t`` guesses."""
        if self.context_free:
            return self.per_row[b](guesses[None], scores)
        context = torch.cat([rows.context(b).to(scores.device), guesses])
        start = len(context) - len(guesses) + first
        processed = []  # no comprehension: if a processor raises, its closure would keep the scores with the error
        for t in range(len(scores)):
            processed.append(self.per_row[b](context[None, : start + t], scores[t, None]))
        return torch.cat(processed)


def same_rules(one: LogitsProcessorList, other: LogitsProcessorList) -> bool:
    """Whether two lists look at no context and do the same to all scores, though prepared apart."""
    if any(type(p) not in _CONTEXT_FREE for p in (*one, *other)) or len(one) != len(other):
        return False
    return all(type(p) is type(o) and _settings(p) == _settings(o) for p, o in zip(one, other))


def _settings(processor: object) -> dict[str, object]:
    return {k: v.tolist() if isinstance(v, Tensor) else v for k, v in vars(processor).items()}


def share_context_free(requests: Sequence[Request]) -> None:
    """Rows prepared apart from the same options get one list of processors, if no processor looks at the context."""
    lists = [request.processors for request in requests]
    if all(type(p) in _CONTEXT_FREE for processors in lists for p in processors):
        for request in requests:
            request.processors = lists[0]
