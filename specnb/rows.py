"""The sequences of a batch as they grow: what is known of each row, and when it ends.

Everything here lives on the host and holds unpadded rows, so that a row of a batch sees exactly what it would see
alone. A commit goes token by token: each one is appended, then the stop rules are asked, so that end-of-sequence,
stop strings, custom criteria and ``max_new_tokens`` all cut at the same place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, StoppingCriteriaList

from specnb.report import Round

if TYPE_CHECKING:
    from specnb.drafters.base import Draft


class Rows:
    """B growing sequences.

    Args:
        prompts: the token ids of each row, unpadded, at least one.
        budgets: new tokens each row may get.
        criteria: transformers' stopping criteria of each row.
    """

    def __init__(self, prompts: list[list[int]], budgets: list[int], criteria: list[StoppingCriteriaList]) -> None:
        self._tokens = [list(prompt) for prompt in prompts]
        self.prompt_lengths = [len(prompt) for prompt in prompts]
        self.budgets, self.criteria = budgets, criteria
        self._ends = [only_ending_tokens(some) for some in criteria]
        self.finished = [budget <= 0 for budget in budgets]
        self._ids = [torch.tensor(prompt, dtype=torch.long) for prompt in prompts]  # grown buffers, see `context`
        self._known = [len(prompt) for prompt in prompts]  # tokens that are in these
        self.chosen_from: list[list[Tensor]] = [[] for _ in prompts]  # scores of each new token, if they are kept

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def active(self) -> list[int]:
        """The rows that still grow."""
        return [b for b, finished in enumerate(self.finished) if not finished]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row so far, prompt included. The last one has not been through the model yet."""
        return [len(tokens) for tokens in self._tokens]

    @property
    def room(self) -> list[int]:
        """New tokens each row may still get; 0 once it has ended."""
        used = zip(self.budgets, self.prompt_lengths, self._tokens, self.finished)
        return [0 if done else budget - (len(tokens) - prompt) for budget, prompt, tokens, done in used]

    def tokens(self, b: int) -> list[int]:
        """Row b's token ids so far (a copy)."""
        return list(self._tokens[b])

    def view(self, b: int) -> list[int]:
        """Row b's token ids so far, not copied: read only."""
        return self._tokens[b]

    def new_tokens(self, b: int) -> list[int]:
        """What row b has got since its prompt."""
        return self._tokens[b][self.prompt_lengths[b] :]

    def context(self, b: int) -> Tensor:
        """Row b's token ids as a LongTensor [n] on the CPU; a token costs no copy of the row."""
        tokens, ids, known = self._tokens[b], self._ids[b], self._known[b]
        n = len(tokens)
        if n > len(ids):
            ids = self._ids[b] = torch.cat([ids, torch.zeros(n + 64, dtype=torch.long)])
        if n > known:
            ids[known:n] = torch.tensor(tokens[known:])
            self._known[b] = n
        return ids[:n]

    def pass_tokens(self, draft: Draft, width: int) -> Tensor:
        """The input of one pass, LongTensor [B, width]: each row's newest token, its guesses, then filler."""
        newest, k = [tokens[-1] for tokens in self._tokens], draft.tokens.shape[1]
        if draft.tokens.device.type == "cpu":
            guesses = [row[:n] for row, n in zip(draft.tokens.tolist(), draft.lengths.tolist())]
            return torch.tensor([[x, *row, *[0] * (width - 1 - len(row))] for x, row in zip(newest, guesses)])
        filled = torch.zeros(len(self), width, dtype=torch.long, device=draft.tokens.device)
        filled[:, 0] = torch.tensor(newest, device=filled.device)
        in_use = torch.arange(k) < draft.lengths[:, None]
        filled[:, 1 : k + 1] = draft.tokens * in_use.to(filled.device)
        return filled

    def before_newest(self, n: int) -> Tensor:
        """The n tokens before each row's newest, LongTensor [B, n] on the CPU."""
        return torch.tensor([tokens[-1 - n : -1] for tokens in self._tokens], dtype=torch.long)

    def commit(self, verdicts: Sequence[Round], scores: Tensor | None = None) -> list[Round]:
        """Write each active row's accepted guesses and the token after them, up to where the row ends.

        Args:
            verdicts: what was decided for each row, ended ones too.
            scores: [B, K+1, V], kept for every committed token if given (custom stop rules may look at them).

        Returns:
            of each active row what was written of it.
        """
        growing = [(verdicts[b], None if scores is None else scores[b]) for b in self.active]
        return [self._commit_row(verdict, row_scores) for verdict, row_scores in growing]

    def _commit_row(self, verdict: Round, scores: Tensor | None) -> Round:
        """Write what the verdict lets stand; returns it as far as the row went."""
        b, kept = verdict.row, 0
        for place, token in zip(verdict.places, verdict.emitted):
            self._tokens[b].append(token)
            if scores is not None:
                self.chosen_from[b].append(scores[place].float())
            kept += 1
            if self._has_ended(b):
                self.finished[b] = True
                break
        if kept == verdict.num_accepted + 1:
            return verdict
        path = None if verdict.path is None else verdict.path[:kept]
        return replace(verdict, num_accepted=kept, next_token=None, is_bonus=False, path=path)

    def _has_ended(self, b: int) -> bool:
        stopped = bool(self.criteria[b]) and self._is_stopped(b)
        return stopped or len(self._tokens[b]) - self.prompt_lengths[b] >= self.budgets[b]

    def _is_stopped(self, b: int) -> bool:
        if (ends := self._ends[b]) is not None:
            return self._tokens[b][-1] in ends
        scores = tuple(step[None] for step in self.chosen_from[b]) or None  # [1, V] each, as transformers has them
        return bool(self.criteria[b](self.context(b)[None], scores).all())

    def padded(self, pad_token_id: int) -> Tensor:
        """The new tokens of all rows, LongTensor [B, longest], right-padded."""
        new = [self.new_tokens(b) for b in range(len(self))]
        longest = max(len(tokens) for tokens in new)
        filled = [tokens + [pad_token_id] * (longest - len(tokens)) for tokens in new]
        return torch.tensor(filled, dtype=torch.long).reshape(len(self), longest)


def ending_tokens(criteria: Iterable[Any]) -> frozenset[int]:
    """The end-of-sequence tokens among a row's stopping criteria."""
    ids = (getattr(criterion, "eos_token_id", None) for criterion in criteria)
    return frozenset(token for found in ids if found is not None for token in torch.as_tensor(found).flatten().tolist())


def only_ending_tokens(criteria: Iterable[Any]) -> frozenset[int] | None:
    """The same where the criteria look at nothing else: then there is no need to call them."""
    return ending_tokens(criteria) if all(type(criterion) is EosTokenCriteria for criterion in criteria) else None
