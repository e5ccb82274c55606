"""The protocol between the loop and whatever guesses: `Drafter`, the `Draft` it returns, the `Session` it is told.

A drafter of your own is a subclass with one method:

    class Echo(specnb.Drafter):
        def propose(self, context, limit):     # context: list[int], the row's tokens so far
            return [context[-1]] * limit       # up to `limit` guesses; fewer, or none, is fine
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specnb.verification import draw, drawable, favourites

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specnb.cache import RaggedCache
    from specnb.compiled import Twin
    from specnb.processing import Processors
    from specnb.rows import Rows


@dataclass(frozen=True, eq=False)
class Draft:
    """The guesses of one round.

    Attributes:
        tokens: LongTensor [B, K]; row b holds guesses in its first ``lengths[b]`` columns, anything after them.
        lengths: LongTensor [B] on the CPU, the guesses of each row.
        probs: q [B, K, V], the law each guess was drawn from; None for a deterministic guess (q is one-hot).
        planned: the limit the drafter set itself for each row, for the trace; None if it did not choose one.
        kinds: for each row what sort of guess it is, such as the length of a matched n-gram, or a short name: guesses
            of one kind should be about equally good. None if the drafter cannot tell them apart.
        parents: LongTensor [B, K] on the CPU for a tree of guesses: of each node the number of its parent, an earlier
            node, or -1 where it follows the row's newest token. None: a chain, each guess follows the one before.
    """

    tokens: Tensor
    lengths: Tensor
    probs: Tensor | None = None
    planned: Sequence[int] | None = None
    kinds: Sequence[Hashable] | None = None
    parents: Tensor | None = None

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]]) -> Draft:
        """A deterministic draft from one list of token ids per row; lists may differ in length and be empty."""
        lengths = [len(row) for row in rows]
        padded = [list(row) + [0] * (max(lengths) - len(row)) for row in rows]
        tokens = torch.tensor(padded, dtype=torch.long).reshape(len(rows), max(lengths))
        return cls(tokens, torch.tensor(lengths))

    @classmethod
    def from_trees(cls, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Draft:
        """A deterministic draft from tokens and parents of each row's tree; both empty for a row without a guess."""
        chains = cls.from_lists([tokens for tokens, _ in rows])
        parents = cls.from_lists([above for _, above in rows]).tokens
        if parents.shape != chains.tokens.shape or any(len(tokens) != len(above) for tokens, above in rows):
            raise ValueError("Each node of a tree has a token and a parent: the two lists of a row differ in length.")
        return replace(chains, parents=parents)

    def to(self, device: torch.device) -> Draft:
        """The same draft with its tensors on the device; lengths and parents stay on the CPU."""
        if self.tokens.device == device and (self.probs is None or self.probs.device == device):
            return self
        probs = None if self.probs is None else self.probs.to(device)
        return replace(self, tokens=self.tokens.to(device), probs=probs)

    @classmethod
    @functools.cache  # a plain run asks for it in every round
    def empty(cls, batch_size: int) -> Draft:
        """No guess for any row: the round is one step of plain decoding."""
        return cls.from_lists([[]] * batch_size)


@dataclass(frozen=True)
class Session:
    """What a drafter is told when a run starts.

    Attributes:
        model: the target.
        rows: the sequences as they grow; a live view, the same one that `Drafter.draft` is handed.
        processors: the logits processors a draft must share with the target, applied at every position.
        vocab_size: V, the number of tokens the target scores.
        tokenizer: the target's, if the caller gave it.
        do_sample: whether the run samples; then a guess must be drawn from the q it is scored with.
        generators: the rows' random number generators when sampling; None for torch's global one.
        sampling: where rows differ (in a `Batcher`), which of them sample; a live view. None: all do as ``do_sample``.
        cache: the target's, if `Drafter.needs_cache`. It holds each row's tokens but the newest; whoever writes to it
            rolls back before the target's pass. None where there is no target pass, in a replay.
        twin: the target's compiled twin, if the passes go through one.
        first_reads: whether the first round's pass also reads the prompts, and so takes longer than its guesses tell.
        shared: whether other drafters guess for these rows, too (`Cascade`). Then the first question may come late or
            never, so prompts can stay unread until then, and what is written need not be what was guessed here.
    """

    model: PreTrainedModel
    rows: Rows
    processors: Processors
    vocab_size: int
    tokenizer: Any = None
    do_sample: bool = False
    generators: Sequence[torch.Generator] | None = None
    sampling: Sequence[bool] | None = None
    cache: RaggedCache | None = None
    twin: Twin | None = None
    first_reads: bool = False
    shared: bool = False

    def choose(self, scores: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor | None]:
        """A guess per row from processed scores [B, V]: the favourite, or when sampling a draw and its q [B, V].

        ``wanted`` [B] on the CPU: rows that have all their guesses draw nothing more, so that a row's random numbers
        do not depend on its neighbours. Where the processors left the draft nothing, it guesses blindly: q is uniform.
        """
        sampling = [self.do_sample] * len(scores) if self.sampling is None else self.sampling
        favourite = favourites(scores)[1]
        if not any(sampling):
            return favourite, None
        scores = scores.float()
        nothing = (scores == float("-inf")).all(dim=-1, keepdim=True)
        q = scores.masked_fill(nothing, 0.0).softmax(dim=-1)
        drawn = draw(drawable(q), self.generators, [s and w for s, w in zip(sampling, wanted.tolist())])
        return drawn if all(sampling) else drawn.where(torch.tensor(sampling, device=drawn.device), favourite), q


class Drafter:
    """A source of guesses. Subclasses override `propose` (one row at a time) or `draft` (all rows at once).

    One object serves any number of runs, one after the other: `start` forgets the run before.

    In a `Batcher` rows are slots: a run starts without any text, and then texts come (`join`) and go (`leave`). A
    drafter that only has `propose` needs to know nothing of it; one that keeps something for each row overrides these.

    Args:
        num_draft_tokens: k, the most tokens guessed per row and round, of a tree all nodes; at least 1.

    Attributes:
        trees: whether drafts may be trees. Then a limit counts nodes, and is not cut where a row has less room left
            than k: a tree is wider than it is deep.
        needs_hidden: whether `look` wants to be told the target's hidden states.
        needs_cache: whether it drafts from the target's own cache, ``session.cache``. If not, the prompts may still be
            unread in the first round.
    """

    trees = False
    needs_hidden = False
    needs_cache = False

    def __init__(self, num_draft_tokens: int) -> None:
        if isinstance(num_draft_tokens, bool) or not isinstance(num_draft_tokens, int) or num_draft_tokens < 1:
            raise ValueError(
                f"num_draft_tokens must be a whole number of at least 1, got {num_draft_tokens!r}. "
                "For plain decoding pass drafter=None."
            )
        self.num_draft_tokens = num_draft_tokens

    def start(self, session: Session) -> None:
        """A new run begins. Called once, before the first `draft`, when the rows hold their prompts, if any yet."""

    def join(self, row: int) -> None:
        """A new prompt is in this row, whatever was there before; `session.rows` shows it. Not called by `generate`."""

    def prefill(self, row: int, count: int) -> None:
        """The target has read the first ``count`` tokens of the row, between two rounds: read them too, if you have to.

        After `join` the count grows in steps up to all of the prompt but its last token. Not called by `generate`,
        where `start` finds the prompts in place.
        """

    def leave(self, row: int) -> None:
        """The text in this row has ended, been cancelled or failed; until the next `join` the row wants no guesses."""

    def draft(self, rows: Rows, limits: list[int]) -> Draft:
        """Guess the next tokens of every row, at most ``limits[b]`` for row b (0: the row wants none)."""
        return Draft.from_lists([self._proposal(rows.tokens(b), n) if n else [] for b, n in enumerate(limits)])

    def _proposal(self, context: list[int], limit: int) -> list[int]:
        """What `propose` says, as plain numbers; None counts as no guess."""
        answer = self.propose(context, limit)
        try:
            return [operator.index(token) for token in ([] if answer is None else answer)][:limit]
        except TypeError:
            raise TypeError(
                f"{type(self).__name__}.propose must return a list of token ids (whole numbers), got {answer!r}."
            ) from None

    def propose(self, context: list[int], limit: int) -> list[int]:
        """Guess up to ``limit`` tokens that follow ``context``."""
        raise NotImplementedError(f"{type(self).__name__} must define propose(context, limit) or draft(rows, limits).")

    def look(self, hidden: Tensor, rows: Sequence[int]) -> None:
        """What went into the target's output head, [R, H], where it predicted the newest token of each of these rows.

        Called after each round and before `observe`, for the rows that still grow, if ``needs_hidden``.
        """

    def observe(self, rows: Rows, kept: list[int]) -> None:
        """The round is decided: row b has grown by ``kept[b]`` tokens. Roll back what was guessed in vain."""

    def expected_alpha(self, kind: Hashable) -> float:
        """The α to expect of guesses of this kind before any has been seen; `Cascade` asks for it."""
        return 0.6
