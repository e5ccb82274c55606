"""A smaller language model of the same vocabulary as the drafter; its own cache is rolled back like the target's.

Sources: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318). Notebook 04 follows its cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb import checks
from specnb.cache import RaggedCache, context_size, target_pass
from specnb.drafters.base import Draft, Drafter, Session
from specnb.prefill import prefill

if TYPE_CHECKING:
    from specnb.rows import Rows


class DraftModel(Drafter):
    """Drafts with any causal LM that shares the target's vocabulary.

    Between rounds its cache holds a row's committed tokens but the newest (after a fully accepted draft, one less:
    the last guess was never fed back; it goes in with the next round's first pass).

    Args:
        model: the draft model, in eval mode, on the target's device; its dtype may differ.
        num_draft_tokens: k, tokens drafted per round. Fewer near the end of the run or of the draft's context.
        tokenizer: the draft's tokenizer, if at hand: lets a really different vocabulary be told from a padded one.

    Raises:
        ValueError: for a model that cannot draft (not causal, in training mode, a cache that cannot roll back).
    """

    def __init__(self, model: PreTrainedModel, num_draft_tokens: int = 4, *, tokenizer: Any = None) -> None:
        super().__init__(num_draft_tokens)
        checks.check_model(model, role="draft model")
        self.model, self.tokenizer = model, tokenizer

    def start(self, session: Session) -> None:
        checks.check_same_vocabulary(session.model, self.model, session.tokenizer, self.tokenizer)
        self._session = session
        rows = session.rows
        self.cache = RaggedCache(self.model.config, len(rows), max(rows.lengths) + self.num_draft_tokens)
        known = [[min(token, self._last_id) for token in rows.view(b)] for b in range(len(rows))]
        prefill(self.model, self.cache, [tokens[:-1][: context_size(self.model.config)] for tokens in known])
        self._trusted = self.cache.lengths

    def draft(self, rows: Rows, limits: list[int]) -> Draft:
        lengths = torch.tensor(self._within_context(rows, limits))
        # a row that sits this round out rides along on filler, which must not stay in its cache
        self._trusted = torch.where(lengths > 0, torch.iinfo(torch.long).max, self.cache.lengths)
        k = int(lengths.max())
        guesses = torch.zeros(len(rows), 0, dtype=torch.long, device=self.model.device)
        if k == 0:
            return Draft(guesses, lengths)
        logits = self._catch_up(rows, lengths)
        laws: list[Tensor] = []
        for step in range(k):
            if step:
                logits = self._pass(guesses[:, -1:])[:, -1]
            guess, q = self._session.choose(self._process(rows, guesses, logits), lengths > step)
            guesses = torch.cat([guesses, guess[:, None]], dim=1)
            laws += [] if q is None else [q]
        return Draft(guesses, lengths, torch.stack(laws, dim=1) if laws else None)

    def observe(self, rows: Rows, kept: list[int]) -> None:
        """Forget what the target did not keep: each row's cache is cut to the committed tokens but the newest."""
        known = torch.minimum(torch.tensor(rows.lengths) - 1, self._trusted)
        self.cache.rollback((self.cache.lengths - known).clamp(min=0))

    def _within_context(self, rows: Rows, limits: list[int]) -> list[int]:
        """A draft with a shorter context than the target's stops drafting where its positions end."""
        size = context_size(self.model.config)
        return [max(0, min(limit, size - n + 1)) for limit, n in zip(limits, rows.lengths)]

    def _catch_up(self, rows: Rows, lengths: Tensor) -> Tensor:
        """Feed what the cache has not seen: the newest token, and the last guess if all of them were accepted.

        Returns:
            logits [B, V] after each row's newest token.
        """
        seen = self.cache.lengths.tolist()
        missing = [rows.view(b)[n:] if lengths[b] else [] for b, n in enumerate(seen)]
        counts = torch.tensor([len(tokens) for tokens in missing])
        width = int(counts.max())
        logits = self._pass(torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in missing]))
        self.cache.rollback(width - counts)
        last = (counts - 1).clamp(min=0).to(logits.device)
        return logits[torch.arange(len(last), device=logits.device), last]

    @property
    def _last_id(self) -> int:
        """The last token id the draft has an embedding for; a target padded to more ids may write later ones."""
        return self.model.get_input_embeddings().num_embeddings - 1

    def _pass(self, tokens: Tensor) -> Tensor:
        self.cache.reserve(int(self.cache.lengths.max()) + tokens.shape[1])
        return target_pass(self.model, self.cache, tokens.clamp(max=self._last_id))[..., : self._session.vocab_size]

    def _process(self, rows: Rows, guesses: Tensor, logits: Tensor) -> Tensor:
        """The draft's scores [B, V] at its next place, after the processors it shares with the target."""
        missing = self._session.vocab_size - logits.shape[-1]
        if missing > 0:  # a target padded to more ids: the draft never guesses those
            logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return self._session.processors.next_scores(rows, guesses, logits)
