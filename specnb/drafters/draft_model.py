"""A smaller language model of the same vocabulary as the drafter; its own cache is rolled back like the target's.

Sources: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318). Notebook 04 follows its cache.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb import checks, vocabularies
from specnb.cache import RaggedCache, context_size, for_all_rows, target_pass
from specnb.compiled import STEP, twin_for
from specnb.drafters import small_model
from specnb.drafters.base import Draft, Session
from specnb.drafters.growing import WIDTH, Growth, grow
from specnb.drafters.hints import Hints
from specnb.drafters.stepwise import StepwiseDrafter
from specnb.prefill import FIXED_CHUNK, prefill
from specnb.reuse import common_prefix
from specnb.trees import ROOT

if TYPE_CHECKING:
    from specnb.rows import Rows

SCORED = 32  # tokens for which a pass that does not score them would cost more than it spares


class DraftModel(StepwiseDrafter):
    """Drafts with any causal LM that shares the target's vocabulary.

    Where the target's passes are compiled (``compile=True``), its own are too.

    Between rounds its cache holds a row's committed tokens but the newest (after a fully accepted draft, one less:
    the last guess was never fed back; it goes in with the next round's first pass).

    Args:
        model: the draft model, in eval mode, on the target's device; its dtype may differ.
        num_draft_tokens: k, tokens drafted per round. Fewer near the end of the run or of the draft's context.
        tree_nodes: N: drafts are trees of N guesses, k levels deep, those that the draft finds likeliest
            (`specnb.drafters.growing`). They are not drawn, q is one-hot. None: chains of k guesses.
        tokenizer: the draft's tokenizer, if at hand. With the target's, given to `generate`, it tells a really
            different vocabulary from a padded one; without, the sizes must do.

    Raises:
        ValueError: for a model that cannot draft (not causal, in training mode, a cache that cannot roll back).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_draft_tokens: int = 4,
        *,
        tokenizer: Any = None,
        tree_nodes: int | None = None,
    ) -> None:
        super().__init__(num_draft_tokens)
        self.depth, self.trees = num_draft_tokens, tree_nodes is not None
        if tree_nodes is not None:
            super().__init__(tree_nodes)
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
        tree_nodes: int | None = None,
        **options: Any,
    ) -> DraftModel:
        """Load a draft as one loads a model.

        Args:
            name: a draft that ships with specnb ("smollm2-135m-draft", for the default model), a folder that
                `specnb.Distilled.save` has written, or any causal LM: a folder or Hub id, as for `load_model`.
            target: the model whose text is to be guessed. A distilled draft uses its embedding and head.
            num_draft_tokens: k.
            tree_nodes: N, for trees.
            dtype: of the draft's weights; default: the target's, or `load_model`'s without a target.
            **options: for `load_model`.

        Raises:
            ValueError: if the draft does not fit the target, with both sides' sizes, or cannot be loaded.
            TypeError: if it needs a target and there is none.
        """
        folder = small_model.small_model_folder(name)
        if folder is None:
            return cls._whole_model(name, target, num_draft_tokens, dtype, tree_nodes, options)
        if not isinstance(target, PreTrainedModel):
            raise TypeError(
                f"The draft {os.fspath(name)!r} uses its target's embedding and head: from_pretrained(name, "
                f"target=model), with a model as from specnb.load_model(); got {target!r:.60}."
            )
        model = small_model.load_small_model(folder, target, small_model.as_dtype(dtype))
        return cls(model, num_draft_tokens, tree_nodes=tree_nodes)

    @classmethod
    def _whole_model(
        cls, name: Any, target: PreTrainedModel | None, k: int, dtype: Any, nodes: int | None, options: dict[str, Any]
    ) -> DraftModel:
        from specnb.models import load_model

        if target is not None:
            options = {"device": target.device, **options}
        model, tokenizer = load_model(name, dtype=dtype or (target.dtype if target is not None else None), **options)
        if target is not None:
            vocabularies.check_same_vocabulary(target, model, None, tokenizer)
        return cls(model, k, tokenizer=tokenizer, tree_nodes=nodes)

    def start(self, session: Session) -> None:
        vocabularies.check_same_vocabulary(session.model, self.model, session.tokenizer, self.tokenizer)
        super().start(session)
        rows = session.rows
        self._twin = None if session.twin is None else twin_for(self.model, STEP)
        self._network = self.model if self._twin is None else self._twin.network
        self.cache = RaggedCache(self.model.config, len(rows), max(rows.lengths) + self.num_draft_tokens)
        wants_hints = isinstance(self.model.get_input_embeddings(), small_model.HintedEmbedding)
        self._hints = [Hints() for _ in rows.lengths] if wants_hints else None
        self._fed: tuple[list[int], Tensor] | None = None  # since the round began: lengths then, and guesses read
        if not session.shared:
            self._read([n - 1 for n in rows.lengths])
        elif self._twin is not None:
            self._twin.serves(FIXED_CHUNK)  # compiled now, rather than in the middle of a text

    def prefill(self, row: int, count: int) -> None:
        self._read([count if b == row else 0 for b in range(len(self._session.rows))])

    def _read(self, counts: list[int]) -> None:
        """Have the first ``counts[b]`` tokens of each row in the cache."""
        held = self.cache.lengths.tolist()
        unread = [self._readable(b, held[b], n) if n > held[b] else [] for b, n in enumerate(counts)]
        prefill(self._network, self.cache, unread, twin=self._twin)

    def join(self, row: int) -> None:
        if self._hints is not None:
            self._hints[row] = Hints()

    def leave(self, row: int) -> None:
        self.cache.clear(row)

    def observe(self, rows: Rows, kept: list[int]) -> None:
        """Forget what the target did not keep: each row's cache is cut to the committed tokens but the newest.

        If another drafter's guesses were written, also own ones that stand where others were written.
        """
        kept = [n - 1 for n in rows.lengths]
        if self._fed is not None and self._session.shared:
            starts, guesses = self._fed
            for b, (start, fed) in enumerate(zip(starts, guesses.tolist())):
                kept[b] = min(kept[b], start + common_prefix(fed, rows.view(b)[start:]))
        self._fed = None
        self.cache.rollback((self.cache.lengths - torch.tensor(kept)).clamp(min=0))

    def as_read(self, row: int, tokens: list[int]) -> list[int]:
        """The row's text ``tokens`` as the model reads it: with hints, or with the last of its ids for those beyond it.

        (A target padded to more ids may write later ones than the draft has an embedding for.)
        """
        if self._hints is not None:
            return self._hints[row].extend(tokens)
        return [min(token, self._last_id) for token in tokens]

    def _readable(self, row: int, begin: int, end: int) -> list[int]:
        """The row's tokens at these places as the model reads them; its context may be smaller."""
        tokens, end = self._session.rows.view(row), min(end, context_size(self.model.config))
        return self.as_read(row, tokens)[begin:end] if self._hints is not None else self.as_read(row, tokens[begin:end])

    def _within_reach(self, rows: Rows, limits: list[int]) -> list[int]:
        """A draft with a shorter context than the target's stops drafting where its positions end."""
        size = context_size(self.model.config)
        return [max(0, min(limit, size - n + 1)) for limit, n in zip(limits, rows.lengths)]

    def draft(self, rows: Rows, limits: list[int]) -> Draft:
        return self._grown(rows, limits) if self.trees else super().draft(rows, limits)

    def _grown(self, rows: Rows, limits: list[int]) -> Draft:
        """A tree for each row: the draft reads it from the root on at each level, and forgets it."""
        reach = self._within_reach(rows, [self.depth if limit else 0 for limit in limits])
        chosen = [b for b, depth in enumerate(reach) if depth == self.depth]  # none near the end of its context
        if not chosen:
            return Draft.empty(len(rows))
        wanted = torch.tensor([b in chosen for b in range(len(rows))])
        first = [self._catch_up(rows, wanted)[chosen].log_softmax(-1)]
        self.cache.rollback(wanted.long())  # the newest token, the root of what comes

        def scored(growths: Sequence[Growth]) -> list[Tensor]:
            if first:
                return list(first.pop()[:, None, : self._session.vocab_size])
            return self._read_trees(rows, chosen, growths)

        grown = dict(zip(chosen, grow(len(chosen), self.depth, WIDTH, scored)))
        trees = [grown[b].best(limits[b]) if b in grown else ([], []) for b in range(len(rows))]
        return Draft.from_trees(trees)

    def _read_trees(self, rows: Rows, chosen: list[int], growths: Sequence[Growth]) -> list[Tensor]:
        """Log-probabilities after the nodes of each row's level, from one pass over all that it has read."""
        texts = [self._tree_as_read(rows, b, growth) for b, growth in zip(chosen, growths)]
        counts = [len(text) for text in texts]
        width = max(counts)
        tokens = torch.tensor([text + text[-1:] * (width - len(text)) for text in texts])
        parents = [growth.places() + [ROOT] * (width - n) for growth, n in zip(growths, counts)]
        self.cache.reserve(max(self.cache.lengths[chosen].tolist()) + width)
        before = self.cache.lengths
        if self._twin is None:
            logits = target_pass(self._network, self.cache, tokens, rows=chosen, parents=parents)
        else:
            flat = self._twin.packed_pass(self.cache, tokens, chosen, [width] * len(chosen), width, parents=parents)
            logits = flat.view(len(chosen), width, -1)
        self.cache.rollback(self.cache.lengths - before)
        laws = logits[..., : self._session.vocab_size].log_softmax(-1)
        return [law[n - len(growth.level) : n] for law, n, growth in zip(laws, counts, growths)]

    def _tree_as_read(self, rows: Rows, b: int, growth: Growth) -> list[int]:
        """The root and the nodes read of row b, as the model reads them."""
        n = rows.lengths[b]
        root = self._readable(b, n - 1, n)
        if self._hints is None:
            return root + [min(growth.tokens[node], self._last_id) for node in growth.read]
        return root + [self._hints[b].after(growth.path(node)) for node in growth.read]

    def _logits(self, rows: Rows, wanted: Tensor, guesses: Tensor) -> Tensor:
        self._fed = rows.lengths, guesses
        return self._pass(wanted, self._newest(guesses)) if guesses.shape[1] else self._catch_up(rows, wanted)

    def _newest(self, guesses: Tensor) -> Tensor:
        """The last of each row's guesses [B, n] as the model reads it, [B, 1]."""
        if self._hints is None:
            return guesses[:, -1:].clamp(max=self._last_id)
        return torch.tensor([[hints.after(row)] for hints, row in zip(self._hints, guesses.tolist())])

    def _catch_up(self, rows: Rows, wanted: Tensor) -> Tensor:
        """Feed what the cache has not seen: the newest token, and the last guess if all of them were accepted.

        It is more where others have drafted in the meantime (`Cascade`); of much only the newest token is scored.

        Returns:
            logits [B, V] after each wanted row's newest token.
        """
        seen = self.cache.lengths.tolist()
        behind = [wanted[b] and rows.lengths[b] - n > self._at_once for b, n in enumerate(seen)]
        if any(behind):
            self._read([n - 1 if far else 0 for n, far in zip(rows.lengths, behind)])
            seen = self.cache.lengths.tolist()
        missing = [self._readable(b, n, rows.lengths[b]) if wanted[b] else [] for b, n in enumerate(seen)]
        counts = torch.tensor([len(tokens) for tokens in missing])
        width = int(counts.max())
        tokens = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in missing])
        return self._pass(wanted, tokens, counts)

    @property
    def _at_once(self) -> int:
        """So many tokens go through one pass with the newest, rather than through one before it."""
        return SCORED if self._twin is None else STEP

    @property
    def _last_id(self) -> int:
        """The last token id the draft has an embedding for."""
        return self.model.get_input_embeddings().num_embeddings - 1

    def _pass(self, wanted: Tensor, tokens: Tensor, counts: Tensor | None = None) -> Tensor:
        """Feed the wanted rows' tokens [B, T], or only the first ``counts[b]``; logits [B, V] after the last."""
        chosen = wanted.nonzero().flatten().tolist()
        lengths = [tokens.shape[1]] * len(chosen) if counts is None else counts[chosen].tolist()
        self.cache.reserve(max(self.cache.lengths[chosen].tolist()) + tokens.shape[1])
        through = self._plain_pass if self._twin is None or max(lengths) > STEP else self._compiled_pass
        return for_all_rows(through(tokens[chosen], chosen, lengths), chosen, len(wanted))

    def _compiled_pass(self, tokens: Tensor, chosen: list[int], lengths: list[int]) -> Tensor:
        """The pass side by side, without filler; logits [R, V] after each row's last token."""
        assert self._twin is not None
        logits = self._twin.packed_pass(self.cache, tokens, chosen, lengths, STEP)
        return logits[torch.tensor(lengths).cumsum(0) - 1]

    def _plain_pass(self, tokens: Tensor, chosen: list[int], lengths: list[int]) -> Tensor:
        """The same with rows filled up to one length; the filler is rolled back."""
        logits = target_pass(self._network, self.cache, tokens, rows=chosen)
        filler = torch.zeros_like(self.cache.lengths)
        filler[chosen] = tokens.shape[1] - torch.tensor(lengths)
        self.cache.rollback(filler)
        last = torch.tensor(lengths, device=logits.device) - 1
        return logits[torch.arange(len(chosen), device=logits.device), last]
