"""Cascade: a cheap drafter first, and a better one where the first has nothing, or nothing that can be trusted.

Prompt lookup costs nothing and is right for long stretches, but only where the text repeats itself; a draft model
always has a guess, at a price. Row by row and round by round, the first part's guesses are sent if they promise at
least as much as those of the parts after it:

    (α − price) + (α² − price) + … + (αⁿ − price)  ≥  (α' − price') + (α'² − price') + … + (α'ᵏ − price')

α is how often guesses of this part and kind have lately passed in this row (the kind is the length of the suffix that
lookup has found, for one), α' the same for the later part. The price of a guess is what else would have been written
in its time: pace · slope for one that is there, pace · (c + slope) for one that has yet to be made. c is the time to
make it and the slope the time that it makes the target's pass longer, both in target passes; the pace is how many
tokens the row has lately written per pass' worth of time. Of each part as many guesses are sent as are worth their
price, n and k, and none if none is; a part that costs something is asked for no more than these. What sits out is
tried again, ever more rarely. Every part's guesses are compared with the text, sent or not. This is the rule by which
`specnb.Adaptive` chooses k (notebook 07), applied to the choice of the drafter.

Why the text stays the target's own. Which part drafts is decided from the past, and from guesses that are
deterministic (q is one-hot); guesses that were drawn from a q are sent as they are. Nothing here looks at a clock or at
other rows: a row's drafts are the same alone, in a batch, and in every run.

Derived in notebook 09.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specnb import checks
from specnb.drafters.base import Draft, Drafter, Session
from specnb.estimates import Chance, Kind, Pace, RoundCosts
from specnb.verification import one_hot

if TYPE_CHECKING:
    from specnb.rows import Rows

ANY = None  # all kinds of guesses of a part together, and the kind of a part that tells none


class Cascade(Drafter):
    """Asks its parts in order, and sends of each row the first guesses worth sending.

        drafter = specnb.Cascade(specnb.PromptLookup(), specnb.DraftModel(small))

    Each part drafts at most its own ``num_draft_tokens``. ``kind`` in the trace tells the part and its own kind of
    guess: "PromptLookup 3", "DraftModel".

    Args:
        *parts: two or more drafters, cheapest first.
        c: what one guess of the parts after the first takes, in target passes: one number, or one for each of them.
        slope: how much longer a pass takes for each guess that it checks, in passes without one; what passes of several
            widths cost is told by `specnb doctor`.

    Raises:
        TypeError, ValueError: for parts that are no drafters, or a negative c or slope. `Adaptive` goes around a
            cascade, not into it.
    """

    def __init__(self, *parts: Drafter, c: float | Sequence[float] = 0.1, slope: float = RoundCosts.SLOPE) -> None:
        _check_parts(parts)
        super().__init__(max(part.num_draft_tokens for part in parts))
        later = len(parts) - 1
        costs = [c] * later if isinstance(c, (int, float)) else list(c)
        if len(costs) != later or not all(0 <= one < float("inf") for one in costs):
            raise ValueError(f"c must be a cost of at least 0, or one for each part after the first, got {c!r}.")
        if not 0 <= slope < float("inf"):
            raise ValueError(f"slope must be a cost of at least 0, got {slope!r}.")
        self.parts, self.costs, self.slope = parts, [0.0, *costs], slope
        self.names = _names(parts)
        self.needs_cache = any(part.needs_cache for part in parts)

    def start(self, session: Session) -> None:
        self._session = session
        self._rows = [_Row() for _ in range(len(session.rows))]
        self._offers: list[_Offer] = []
        for part in self.parts:
            part.start(replace(session, shared=True))

    def join(self, row: int) -> None:
        self._rows[row] = _Row()
        for part in self.parts:
            part.join(row)

    def prefill(self, row: int, count: int) -> None:
        for part in self.parts:
            part.prefill(row, count)

    def leave(self, row: int) -> None:
        for part in self.parts:
            part.leave(row)

    def draft(self, rows: Rows, limits: list[int]) -> Draft:
        self._offers, wanted = [], list(limits)
        for i in range(len(self.parts)):
            asked = [self._asked(row, i, n) for row, n in zip(self._rows, wanted)]
            for row, n, limit in zip(self._rows, asked, limits):
                if limit:
                    row.asks(i, n)
            if any(asked):
                offer = self._offer(i, rows, asked, wanted)
                self._offers.append(offer)
                wanted = [0 if b in offer.sent else n for b, n in enumerate(wanted)]
        return self._joined(len(rows))

    def _asked(self, row: _Row, i: int, limit: int) -> int:
        """How many guesses part i is asked for: as many as are worth their price, and all that it has if it is free."""
        k = min(limit, self.parts[i].num_draft_tokens)
        return len(self._expected(row, i, k)) if self.costs[i] else k

    def _expected(self, row: _Row, i: int, limit: int) -> list[float]:
        """What guesses of part i promise that have yet to be made, whatever kind they will be.

        A part that has not been asked for a while is given the benefit of the doubt, so that it can show what it is.
        """
        alpha, k = row.alpha(i, ANY, self.parts[i]), min(limit, self.parts[i].num_draft_tokens)
        alpha = (1.0 + alpha) / 2 if row.is_due(i) else alpha
        return _gains(alpha, row.pace.rate * (self.costs[i] + self.slope), k)

    def _offer(self, i: int, rows: Rows, asked: list[int], wanted: list[int]) -> _Offer:
        """What part i proposes, and for which rows it is sent. What was drawn is not judged after the draw."""
        draft = checks.checked_draft(self.parts[i].draft(rows, asked), asked, self._session.vocab_size)
        lengths = draft.lengths.tolist()
        kinds: list[Kind] = [ANY] * len(rows) if draft.kinds is None else list(draft.kinds)
        sent = {
            b: n if draft.probs is not None else self._trusted(self._rows[b], i, kinds[b], n, wanted[b])
            for b, n in enumerate(lengths)
        }
        return _Offer(i, draft, lengths, kinds, {b: n for b, n in sent.items() if n})

    def _trusted(self, row: _Row, i: int, kind: Kind, n: int, limit: int) -> int:
        """How many of a row's n guesses of part i to send; none if a later part promises more."""
        gains = _gains(row.alpha(i, kind, self.parts[i]), row.pace.rate * self.slope, n)
        later = (sum(self._expected(row, j, limit)) for j in range(i + 1, len(self.parts)))
        return len(gains) if sum(gains) >= max(later, default=0.0) else 0

    def _joined(self, size: int) -> Draft:
        """One draft out of the rows that each offer is sent for."""
        lengths = torch.zeros(size, dtype=torch.long)
        kinds: list[str | None] = [None] * size
        for offer in self._offers:
            for b, n in offer.sent.items():
                lengths[b], kinds[b] = n, self._named(offer.part, offer.kinds[b])
        drafts = [offer.draft for offer in self._offers]
        device = next((draft.tokens.device for draft in drafts if draft.tokens.device.type != "cpu"), None)
        tokens = torch.zeros(size, int(lengths.max()), dtype=torch.long, device=device)
        for offer in self._offers:
            _put(tokens, offer.draft.tokens, offer.sent)
        return Draft(tokens, lengths, self._joined_probs(tokens), kinds=kinds)

    def _joined_probs(self, tokens: Tensor) -> Tensor | None:
        """q [B, K, V]: as the guesses were drawn; one-hot in rows whose guesses are deterministic. None if all are."""
        drawn = [(offer.draft.probs, offer.sent) for offer in self._offers if offer.sent]
        if all(probs is None for probs, _ in drawn):
            return None
        q = one_hot(tokens, torch.empty(0, self._session.vocab_size, device=tokens.device))
        for probs, sent in drawn:
            if probs is not None:
                _put(q, probs, sent)
        return q

    def _named(self, i: int, kind: Kind) -> str:
        return self.names[i] if kind is ANY else f"{self.names[i]} {kind}"

    def observe(self, rows: Rows, kept: list[int]) -> None:
        """Every part hears of the round, and every offer is compared with what was written, sent or not."""
        for part in self.parts:
            part.observe(rows, kept)
        spent = [1.0] * len(rows)  # in target passes
        for offer in self._offers:
            for b, guesses in enumerate(offer.draft.tokens.tolist()):
                n = offer.lengths[b]
                spent[b] += self.costs[offer.part] * n + self.slope * offer.sent.get(b, 0)
                if n and kept[b]:
                    self._rows[b].learn(offer.part, offer.kinds[b], guesses[:n], rows.view(b)[-kept[b] :])
        for row, grown, time in zip(self._rows, kept, spent):
            if grown:
                row.pace.add(grown, time)
        self._offers = []

    def __repr__(self) -> str:
        return f"Cascade({', '.join(self.names)})"


@dataclass(frozen=True)
class _Offer:
    """What one part has proposed in a round."""

    part: int
    draft: Draft
    lengths: list[int]
    kinds: list[Kind]
    sent: dict[int, int]  # row → how many of them go to the target


class _Chance(Chance):
    """A row is short, so what is known beforehand counts for more than in a long run."""

    __slots__ = ()
    PRIOR_WEIGHT = 6.0


class _Row:
    """What one row has shown: how often guesses of each part and kind pass, and the pace at which it is written.

    A part that sits out shows nothing. So it is tried again after a few rounds, ever more rarely while that changes
    nothing. If then all its guesses pass, the text has turned, and what was known of the part is forgotten.
    """

    FADE = 0.985  # what an outcome still counts after one more
    FIRST_WAIT, LONGEST_WAIT = 8, 64  # rounds

    def __init__(self) -> None:
        self.pace = Pace()
        self._chances: dict[tuple[int, Kind], _Chance] = {}
        self._out: Counter[int] = Counter()  # part → rounds for which it has sat out
        self._wait: dict[int, int] = {}
        self._tried: set[int] = set()  # parts that are tried again in this round

    def alpha(self, part: int, kind: Kind, drafter: Drafter) -> float:
        """The chance that a guess passes; what the drafter itself expects, before the first."""
        chance, expected = self._chances.get((part, kind)), drafter.expected_alpha(kind)
        return expected if chance is None else chance.given(expected)

    def is_due(self, part: int) -> bool:
        """Whether a part that sits out should be tried again."""
        return self._out[part] >= self._wait.get(part, self.FIRST_WAIT)

    def asks(self, part: int, n: int) -> None:
        """The part is asked for n guesses; 0: it sits out."""
        self._tried = self._tried - {part}
        if n == 0:
            self._out[part] += 1
            return
        due = self.is_due(part)
        wait = min(2 * self._wait.get(part, self.FIRST_WAIT), self.LONGEST_WAIT)
        self._wait[part] = wait if due else self.FIRST_WAIT
        self._tried |= {part} if due else set()
        self._out[part] = 0

    def learn(self, part: int, kind: Kind, guesses: Sequence[int], written: Sequence[int]) -> None:
        """Guesses were made where these tokens were written: up to the first that differs, each of them passed."""
        if part in self._tried and all(guess == token for guess, token in zip(guesses, written)):
            self._chances = {known: chance for known, chance in self._chances.items() if known[0] != part}
        for known in {kind, ANY}:
            chance = self._chances.setdefault((part, known), _Chance(self.FADE, 1.0))
            for guess, token in zip(guesses, written):
                chance.learn(guess == token)
                if guess != token:
                    break


def _gains(alpha: float, price: float, k: int) -> list[float]:
    """What each of at most k guesses that is worth its price promises beyond it, in tokens."""
    return [alpha**j - price for j in range(1, k + 1) if alpha**j > price]


def _put(whole: Tensor, part: Tensor, sent: Iterable[int]) -> None:
    """Write these rows of [B, k, …] over the first k places of a tensor [B, K, …]."""
    if rows := list(sent):
        k = min(whole.shape[1], part.shape[1])
        whole[rows, :k] = part[rows, :k].to(whole.device, whole.dtype)


def _check_parts(parts: Sequence[object]) -> None:
    from specnb.adaptive import Adaptive  # it knows drafters, not the other way round

    if len(parts) < 2 or len({id(part) for part in parts}) < len(parts):
        raise ValueError(f"A cascade has two or more parts, each of them another drafter; got {len(parts)}.")
    for part in parts:
        checks.check_drafter(part)
        if not isinstance(part, Drafter) or isinstance(part, Adaptive):
            raise TypeError(f"A part of a cascade must be a drafter, got {part!r}. Adaptive goes around the cascade.")
        checks.check_chains(part, "A cascade compares chains")


def _names(parts: Sequence[Drafter]) -> list[str]:
    """The classes' names, numbered from the second of a class on."""
    classes = [type(part).__name__ for part in parts]
    counts = [classes[: i + 1].count(name) for i, name in enumerate(classes)]
    return [name if n == 1 else f"{name} ({n})" for name, n in zip(classes, counts)]
