"""A smaller language model of the same vocabulary as the drafter; its own cache is rolled back like the target's.

Sources: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318). Notebook 04 follows its cache.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb import checks, vocabularies
from specnb.cache import RaggedCache, context_size, for_all_rows, target_pass
from specnb.drafters import small_model
from specnb.drafters.base import Session
from specnb.drafters.stepwise import StepwiseDrafter
from specnb.prefill import prefill, read

if TYPE_CHECKING:
    from specnb.rows import Rows


class DraftModel(StepwiseDrafter):
    """Drafts with any causal LM that shares the target's vocabulary.

    Between rounds its cache holds a row's committed tokens but the newest (after a fully accepted draft, one less:
    the last guess was never fed back; it goes in with the next round's first pass).

    Args:
        model: the draft model, in eval mode, on the target's device; its dtype may differ.
        num_draft_tokens: k, tokens drafted per round. Fewer near the end of the run or of the draft's context.
        tokenizer: the draft's tokenizer, if at hand. With the target's, given to `generate`, it tells a really
            different vocabulary from a padded one; without, the sizes must do.

    Raises:
        ValueError: for a model that cannot draft (not causal, in training mode, a cache that cannot roll back).
    """

    def __init__(self, model: PreTrainedModel, num_draft_tokens: int = 4, *, tokenizer: Any = None) -> None:
        super().__init__(num_draft_tokens)
        checks.check_model(model, role="draft model")
        vocabularies.check_tokenizer(tokenizer)
        self.model, self.tokenizer = model, tokenizer

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        target: PreTrainedModel | None = None,
        num_draft_tokens: int = 4,
        *,
        dtype: torch.dtype | str | None = None,
        **options: Any,
    ) -> DraftModel:
        """Load a draft as one loads a model.

        Args:
            name: a draft that ships with specnb ("smollm2-135m-draft", for the default model), a folder that
                `specnb.Distilled.save` has written, or any causal LM: a folder or Hub id, as for `load_model`.
            target: the model whose text is to be guessed. A distilled draft uses its embedding and head.
            num_draft_tokens: k.
            dtype: of the draft's weights; default: the target's, or `load_model`'s without a target.
            **options: for `load_model`.

        Raises:
            ValueError: if the draft does not fit the target, with both sides' sizes, or cannot be loaded.
            TypeError: if it needs a target and there is none.
        """
        folder = small_model.small_model_folder(name)
        if folder is None:
            return cls._whole_model(name, target, num_draft_tokens, dtype, options)
        if not isinstance(target, PreTrainedModel):
            raise TypeError(
                f"The draft {os.fspath(name)!r} uses its target's embedding and head: from_pretrained(name, "
                f"target=model), with a model as from specnb.load_model(); got {target!r:.60}."
            )
        return cls(small_model.load_small_model(folder, target, small_model.as_dtype(dtype)), num_draft_tokens)

    @classmethod
    def _whole_model(
        cls, name: Any, target: PreTrainedModel | None, k: int, dtype: Any, options: dict[str, Any]
    ) -> DraftModel:
        from specnb.models import load_model

        if target is not None:
            options = {"device": target.device, **options}
        model, tokenizer = load_model(name, dtype=dtype or (target.dtype if target is not None else None), **options)
        if target is not None:
            vocabularies.check_same_vocabulary(target, model, None, tokenizer)
        return cls(model, k, tokenizer=tokenizer)

    def start(self, session: Session) -> None:
        vocabularies.check_same_vocabulary(session.model, self.model, session.tokenizer, self.tokenizer)
        super().start(session)
        rows = session.rows
        self.cache = RaggedCache(self.model.config, len(rows), max(rows.lengths) + self.num_draft_tokens)
        prefill(self.model, self.cache, [self._readable(rows.view(b)[:-1]) for b in range(len(rows))])

    def prefill(self, row: int, count: int) -> None:
        known = int(self.cache.lengths[row])
        if piece := self._readable(self._session.rows.view(row)[known:count], known):
            read(self.model, self.cache, {row: piece})

    def leave(self, row: int) -> None:
        self.cache.clear(row)

    def observe(self, rows: Rows, kept: list[int]) -> None:
        """Forget what the target did not keep: each row's cache is cut to the committed tokens but the newest."""
        self.cache.rollback((self.cache.lengths - torch.tensor(rows.lengths) + 1).clamp(min=0))

    def _readable(self, tokens: list[int], before: int = 0) -> list[int]:
        """What it can read of tokens that follow ``before`` others: its context and vocabulary may be smaller."""
        return [min(token, self._last_id) for token in tokens[: max(0, context_size(self.model.config) - before)]]

    def _within_reach(self, rows: Rows, limits: list[int]) -> list[int]:
        """A draft with a shorter context than the target's stops drafting where its positions end."""
        size = context_size(self.model.config)
        return [max(0, min(limit, size - n + 1)) for limit, n in zip(limits, rows.lengths)]

    def _logits(self, rows: Rows, wanted: Tensor, guesses: Tensor) -> Tensor:
        return self._pass(wanted, guesses[:, -1:]) if guesses.shape[1] else self._catch_up(rows, wanted)

    def _catch_up(self, rows: Rows, wanted: Tensor) -> Tensor:
        """Feed what the cache has not seen: the newest token, and the last guess if all of them were accepted.

        Returns:
            logits [B, V] after each wanted row's newest token.
        """
        seen = self.cache.lengths.tolist()
        missing = [rows.view(b)[n:] if wanted[b] else [] for b, n in enumerate(seen)]
        counts = torch.tensor([len(tokens) for tokens in missing])
        width = int(counts.max())
        tokens = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in missing])
        return self._pass(wanted, tokens, counts)

    @property
    def _last_id(self) -> int:
        """The last token id the draft has an embedding for; a target padded to more ids may write later ones."""
        return self.model.get_input_embeddings().num_embeddings - 1

    def _pass(self, wanted: Tensor, tokens: Tensor, counts: Tensor | None = None) -> Tensor:
        """Feed the wanted rows' tokens [B, T], or only the first ``counts[b]``; logits [B, V] after the last."""
        chosen = wanted.nonzero().flatten().tolist()
        self.cache.reserve(max(self.cache.lengths[chosen].tolist()) + tokens.shape[1])
        tokens = tokens[chosen].clamp(max=self._last_id)
        logits = target_pass(self.model, self.cache, tokens, rows=chosen)
        last = torch.full((len(chosen),), tokens.shape[1] - 1)
        if counts is not None:
            self.cache.rollback(torch.where(wanted, tokens.shape[1] - counts, 0))
            last = counts[chosen] - 1
        newest = logits[torch.arange(len(chosen), device=logits.device), last.to(logits.device)]
        return for_all_rows(newest, chosen, len(wanted))
