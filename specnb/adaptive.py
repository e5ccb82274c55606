"""Adaptive: a drafter around a drafter, that chooses in every round how many tokens are worth drafting; 0 included.

What is weighed. A round with k drafts commits E(k) = 1 + Σ_j Π_{i≤j} α_i tokens on average and takes
v(k+1) + d(k): the target pass over k + 1 positions and the drafting. Rounds follow each other, so what counts is tokens
per second in the long run, not the ratio of one round: lookup, for one, finds something in some rounds only. Renewal
theory gives the rule: with λ the best rate there is, take the k that maximises E(k) − λ · time(k) (Dinkelbach 1967).
λ is estimated by the rate at which the run has lately been going, and is never below that of plain decoding.

What is measured. α by position, row and kind of guess, with a prior shared by all rows and with forgetting, for texts
change; v by the wall time between the return of `draft` and the call of `observe`, d by the time the inner drafter
takes. Of times, medians over the latest few; a slow one that nothing confirms is not believed.

What is free, and what costs. If drafting takes next to no time (lookup), the drafter is always asked for all it has,
the choice is made after looking at what came, and proposals that were not sent still teach: they are compared with the
text as it appears. If drafting costs (a model), k is chosen first, and a drafter that was switched off is tried again
now and then, ever more rarely, for at most 1 % of the time.

Why the text stays the target's own. Verification is exact for any draft that was fixed without a look at the random
numbers of the verdict. A drawn draft (with q) is as long here as was decided before its tokens were drawn, from the
past alone; cutting it after a look at its tokens would be lossy, and is not done. A deterministic proposal (q one-hot)
is exact whatever it is, so it may be cut by its kind and length. Times enter the choice and differ from run to run: so
do the drafts, but not the law of the text. Greedy text in float32 stays equal to plain decoding's, and bit for bit at
one ``pass_width``. When sampling, a seed fixes the random numbers but not how many of them a round uses, so a seeded
run repeats only with a ``clock`` that does; and a row's text may then depend on its neighbours, with whom it shares a
pass.

In a batch one k holds for all rows, since a pass is as wide as its longest draft. Compiled passes (``compile=True``)
have no such filler: there each row's length is chosen for itself, out of what the pass as a whole costs.

Sources: Leviathan et al. 2023 (arXiv 2211.17192), sections 3.3 and 3.5. Explained in notebook 07.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

import torch

from specnb import checks
from specnb.drafters.base import Draft, Drafter, Session
from specnb.estimates import Acceptance, Kind, Pace, RoundCosts
from specnb.theory import CostCurve, round_cost

if TYPE_CHECKING:
    from specnb.rows import Rows

FREE = 0.01  # drafting that takes less than this share of a pass is not worth saving
STALE = 0.97  # what a row's outcomes still count after a round without a new one, while the drafter is switched off


class Adaptive(Drafter):
    """Drafts as many tokens as pay, by what it has measured; none where speculation does not pay.

        specnb.generate(model, input_ids, drafter=specnb.Adaptive(specnb.PromptLookup()))

    Args:
        drafter: any other `Drafter`. Its ``num_draft_tokens`` is the most that is drafted.
        costs: v(T) to start from, as `specnb.forward_cost` measures it; else it is learned in the first rounds.
        c: the cost of one draft step in target passes, to start from.
        clock: a function that returns seconds.

    What it learns of costs and of the drafter in general serves its next runs with the same model and batch size too;
    what it learns of a text does not. `summary` and the trace's ``planned`` show what it chose.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        costs: CostCurve | None = None,
        c: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        checks.check_drafter(drafter)
        if drafter is None or isinstance(drafter, Adaptive):
            raise TypeError(f"Adaptive wraps a drafter that is not adaptive itself, got {drafter!r}.")
        checks.check_chains(drafter, "Adaptive chooses the length of a chain")
        if costs is not None and not isinstance(costs, CostCurve):
            raise TypeError(f"costs must be a specnb.CostCurve or None, got {type(costs).__name__}.")
        if not callable(clock):
            raise TypeError(f"clock must be a function that returns seconds, got {clock!r}.")
        super().__init__(drafter.num_draft_tokens)
        round_cost(1, 0.0 if c is None else c)  # refuses a c that is none
        self.drafter, self.clock, self.needs_cache = drafter, clock, drafter.needs_cache
        self._given = (costs, c)
        self._model: Callable[[], object] = lambda: None
        self._asks_first = False
        self.forget()

    def forget(self) -> None:
        """Unlearn everything, also what serves later runs."""
        self.acceptance = Acceptance(0)
        self.chosen: Counter[int] = Counter()
        self.costs = RoundCosts(*self._given, longest=self.num_draft_tokens)
        self.retry, self.plain = Retry(), Checkup(known=self._given[0] is not None)

    def start(self, session: Session) -> None:
        if session.model is not self._model():
            self.forget()
            self._model = weakref.ref(session.model)
        self.acceptance = Acceptance(len(session.rows), self.acceptance.shared)
        self.pace = Pace()
        self._shadows: list[_Shadow | None] = [None] * len(session.rows)
        self._round: _Round | None = None
        self._idle = 0  # rounds since the inner drafter was last asked
        self._draws = False
        self._vocab_size, self._first_reads = session.vocab_size, session.first_reads
        # rows of a compiled pass have drafts of their own lengths; its size is a function of all positions together
        self._size_of = None if session.twin is None else session.twin.size_of
        self.drafter.start(session)

    def join(self, row: int) -> None:
        self._shadows[row] = None
        self.acceptance.rows[row].clear()
        self.drafter.join(row)

    def prefill(self, row: int, count: int) -> None:
        self.drafter.prefill(row, count)

    def leave(self, row: int) -> None:
        self.drafter.leave(row)

    def draft(self, rows: Rows, limits: list[int]) -> Draft:
        """The inner drafter's guesses, as many as are expected to pay."""
        nothing = [0] * len(rows)
        self._round = now = _Round(rows.lengths, max(1, len(rows.active)), [None] * len(rows), nothing, nothing)
        self._asks_first = self._asking_is_free(now.active)
        if self._asks_first:
            offer = self._ask(rows, limits, now)
            now.sent = self._choose(offer, now)
            planned = now.sent if self._size_of else [min(max(now.sent), n) for n in limits]
        else:
            k = self._plan(limits, now)
            planned = [min(k, n) for n in limits]
            offer = self._ask(rows, planned, now)
            now.sent = now.offered
        k = max(now.sent)
        self.chosen[max(planned)] += 1
        now.offer = offer
        draft = Draft(
            offer.tokens[:, :k], torch.tensor(now.sent), None if offer.probs is None else offer.probs[:, :k],
            planned=planned, kinds=offer.kinds,
        )  # fmt: skip
        now.handed_over = self.clock()
        return draft

    def _asking_is_free(self, rows: int) -> bool:
        """Whether to ask first and choose then: nothing is lost, and what is not sent still teaches."""
        share = self.costs.drafting(rows)
        return share is not None and share <= FREE and not self._draws

    def _ask(self, rows: Rows, limits: list[int], now: _Round) -> Draft:
        """The inner drafter's offer and, noted, the time it took."""
        if not any(limits):
            return Draft.empty(len(rows))
        started = self.clock()
        offer = self.drafter.draft(rows, limits)
        now.asked, now.drafting = True, self.clock() - started
        lengths = torch.as_tensor(offer.lengths) if isinstance(offer, Draft) else torch.empty(0)
        if lengths.dtype != torch.long or lengths.shape != (len(limits),):
            checks.checked_draft(offer, limits, self._vocab_size)  # says what is wrong with it
        now.offered = [min(n, limit) for n, limit in zip(lengths.tolist(), limits)]
        self._draws |= offer.probs is not None
        return offer

    # --- the choice ---

    def _choose(self, offer: Draft, now: _Round) -> list[int]:
        """How much of each row's offer to send."""
        if offer.probs is not None:  # a drawn draft is not cut after the draw
            return now.offered
        now.kinds = list(offer.kinds) if offer.kinds is not None else now.kinds
        if self._needs_plain_pass() or not any(now.offered):
            return [0] * len(now.offered)
        if self._size_of is not None:
            return self._choose_for_each(now, self._size_of)
        gains = self._gains(now.offered, now.kinds)
        k = self._best(gains, self.costs.relative(self._sizes(now.offered, now.active)), now)
        return [min(k, n) for n in now.offered]

    def _choose_for_each(self, now: _Round, size_of: Callable[[int], int]) -> list[int]:
        """Of all rows' guesses the likeliest to pass, as many as pay.

        A row's come in order, for none is likelier than the one before it.
        """
        chances = [
            (chance, b)
            for b, n in enumerate(now.offered)
            for chance in accumulate(self.acceptance.of(b, now.kinds[b], n), mul)
        ]
        chances.sort(key=lambda guess: -guess[0])
        gains = [0.0, *accumulate(chance for chance, _ in chances)]
        costs = self.costs.relative([size_of(now.active + n) for n in range(len(gains))])
        taken = Counter(b for _, b in chances[: self._best(gains, costs, now)])
        return [taken[b] for b in range(len(now.offered))]

    def _sizes(self, lengths: Sequence[int], active: int) -> list[int]:
        """The size of the pass, all rows together, if at most k guesses of each are sent: for k = 0 … the longest."""
        drafts = range(1 + max(lengths))
        if self._size_of is not None:
            return [self._size_of(active + sum(min(k, n) for n in lengths)) for k in drafts]
        return [active * (1 + k) for k in drafts]

    def _plan(self, limits: list[int], now: _Round) -> int:
        """How much to ask for, by the past alone."""
        if self._needs_plain_pass():
            return 0
        if self.costs.drafting(now.active) is None:
            return 1  # what does drafting cost? One token tells
        passes = self.costs.relative(self._sizes(limits, now.active))
        costs = [v + d for v, d in zip(passes, self.costs.drafts_up_to(max(limits), now.active))]
        k = self._best(self._gains(limits, now.kinds), costs, now)
        return k or self._try_again(limits, costs, now)

    def _needs_plain_pass(self) -> bool:
        """Whether v(1) has to be seen: first of all, soon again (first passes are often slow), then now and then."""
        early = self.plain.known == 1 and self.costs.drafts and not self._asks_first
        return self.plain.known == 0 or bool(early) or self.plain.is_due()

    def _gains(self, lengths: Sequence[int], kinds: Sequence[Kind]) -> list[float]:
        """Tokens that k drafts are expected to add to the round, over all rows, for k = 0 … the longest."""
        gains = [0.0] * (1 + max(lengths))
        for b, n in enumerate(lengths):
            passes = 1.0  # the chance that all guesses so far pass
            for k, alpha in enumerate(self.acceptance.of(b, kinds[b], n), 1):
                passes *= alpha
                gains[k] += passes  # for now: what the k-th guess adds
        for k in range(1, len(gains)):
            gains[k] += gains[k - 1]
        return gains

    def _best(self, gains: list[float], costs: list[float], now: _Round) -> int:
        """The k with the highest gain − λ · cost, of equals the smallest; with caution where waiting still teaches."""
        price = self.pace.rate * now.active * (self.pace.caution if self._asks_first else 1.0)
        k = max(range(len(gains)), key=lambda k: gains[k] - price * costs[k])
        now.cost = costs[k]
        return k

    def _try_again(self, limits: list[int], costs: list[float], now: _Round) -> int:
        """0; or now and then the cheapest draft, if drafting could pay were all guesses right."""
        hopes = [
            sum(min(k, n) for n in limits) - self.pace.rate * now.active * (cost - costs[0])
            for k, cost in enumerate(costs)
        ]
        if max(hopes) <= 0:
            return 0
        k = min(range(1, len(costs)), key=costs.__getitem__)
        if not self.retry.is_due(costs[k] - costs[0]):
            return 0
        self.acceptance.weaken(STALE**self.retry.rounds)
        now.cost, now.price = costs[k], costs[k] - costs[0]
        return k

    # --- the lessons ---

    def observe(self, rows: Rows, kept: list[int]) -> None:
        """The round is decided: learn what it took and what passed."""
        arrived = self.clock()
        self.drafter.observe(rows, kept)
        now, self._round = self._round, None
        if now is None or now.offer is None or not any(kept):  # the loop had no use for guesses, or the round broke off
            return
        self._learn_times(now, arrived, self.clock())
        for b, grown in enumerate(kept):
            if grown:
                self._learn_acceptance(b, grown, rows, now)
        tokens = sum(kept) / now.active
        self.pace.add(tokens, now.cost)
        self.retry.add(now.cost, None if now.price is None else now.price - (tokens - 1.0))

    def _learn_times(self, now: _Round, arrived: float, ended: float) -> None:
        if self._first_reads:  # what the round took says nothing about others
            self._first_reads = False
            return
        longest = max(now.sent)
        size = self._size_of(now.active + sum(now.sent)) if self._size_of else now.active * (1 + longest)
        self.costs.add_pass(size, 1000.0 * (arrived - now.handed_over))
        self.plain.add(longest == 0)
        if now.asked:
            milliseconds = 1000.0 * (now.drafting + ended - arrived)
            # after a pause a draft model reads up on the text first
            self.costs.add_draft(max(1, *now.offered), milliseconds, at_most=self._idle > 0)
        self._idle = 0 if now.asked else self._idle + 1

    def _learn_acceptance(self, b: int, grown: int, rows: Rows, now: _Round) -> None:
        """What row b's verdict says of its guesses, and what its new tokens say of those that were not sent."""
        sent, kind = now.sent[b], now.kinds[b]
        for position in range(min(sent, grown - 1)):
            self.acceptance.learn(b, kind, position, True)
        if grown <= sent and not rows.finished[b]:  # a row that ended may have ended on a guess that passed
            self.acceptance.learn(b, kind, grown - 1, False)
        if 0 < sent < grown:
            self.acceptance.missed(b, kind, sent)
        withheld = now.withheld(b)
        if sent:  # a round that was played takes the place of one that was only watched
            self._shadows[b] = withheld if grown > sent else None
        elif self._shadows[b] is None:
            self._shadows[b] = withheld
        self._watch(b, rows.view(b))

    def _watch(self, b: int, tokens: list[int]) -> None:
        """Compare the proposal that row b is watching with what was written since."""
        shadow, self._shadows[b] = self._shadows[b], None
        if shadow is None:
            return
        while shadow.position < len(shadow.guesses) and shadow.place < len(tokens):
            passed = shadow.guesses[shadow.position] == tokens[shadow.place]
            self.acceptance.learn(b, shadow.kind, shadow.position, passed)
            if not passed:
                return
            shadow.position += 1
        if shadow.position < len(shadow.guesses):
            self._shadows[b] = shadow

    # --- the account ---

    def summary(self) -> AdaptiveSummary:
        """What it has measured and chosen so far, over all runs since it was made (or `forget`)."""
        return AdaptiveSummary(
            drafter=type(self.drafter).__name__,
            chosen=dict(sorted(self.chosen.items())),
            acceptance={
                kind: self.acceptance.everywhere(kind, len(chances)) for kind, chances in self.acceptance.shared.items()
            },
            costs=self.costs.curve(),
            drafting=self.costs.drafts_up_to(self.num_draft_tokens) if self.costs.passes else None,
            asks_first=self._asks_first,
            retries=self.retry.count,
        )

    def __repr__(self) -> str:
        rounds = sum(self.chosen.values())
        return f"Adaptive({type(self.drafter).__name__}, up to {self.num_draft_tokens} tokens; {rounds} rounds)"


@dataclass(frozen=True)
class AdaptiveSummary:
    """What an `Adaptive` drafter has measured and chosen.

    Attributes:
        drafter: the inner drafter.
        chosen: k → rounds for which it was chosen.
        acceptance: kind of guess → α by position, over all rows and runs, recent ones counting more; None is the kind
            of guesses that have none.
        costs: ms of a pass by its size, the positions of all rows together; None before the first round.
        drafting: d(k) / v(1) for k = 0 … num_draft_tokens, the time of drafting in passes; None before the first round.
        asks_first: whether drafting is so cheap that the choice is made after looking at the proposal.
        retries: drafts made to see whether a drafter that did not pay does by now.
    """

    drafter: str
    chosen: dict[int, int]
    acceptance: dict[Kind, list[float]]
    costs: CostCurve | None
    drafting: list[float] | None
    asks_first: bool
    retries: int

    def __repr__(self) -> str:
        rounds = sum(self.chosen.values())
        lines = [f"Adaptive({self.drafter}) after {rounds} rounds"]
        lines += ["  chosen k: rounds   " + ", ".join(f"{k}: {n}" for k, n in self.chosen.items())]
        for kind, alphas in sorted(self.acceptance.items(), key=str):
            name = "acceptance" if kind is None else f"acceptance, kind {kind}"
            lines.append(f"  {name:18} {' '.join(f'{alpha:.2f}' for alpha in alphas)}")
        if self.costs is not None and self.drafting is not None:
            lines.append(f"  pass               {self.costs!r}")
            lines.append(f"  drafting, passes   {' '.join(f'{d:.3f}' for d in self.drafting[1:])}")
        return "\n".join(lines)


@dataclass
class _Round:
    """What `draft` leaves for `observe`."""

    starts: list[int]  # tokens of each row before the round
    active: int
    kinds: list[Kind]
    offered: list[int]  # guesses of each row that the inner drafter gave
    sent: list[int]  # … and how many of them went to the target
    offer: Draft | None = None
    asked: bool = False  # or was the inner drafter left alone?
    drafting: float = 0.0  # seconds
    handed_over: float = 0.0  # when
    cost: float = 1.0  # expected, in one-position passes
    price: float | None = None  # of a retry: what it costs more than no draft

    def withheld(self, b: int) -> _Shadow | None:
        """Row b's whole proposal, if there is more of it than was sent, and if tokens can be compared with it."""
        offer, length, sent = self.offer, self.offered[b], self.sent[b]
        if offer is None or length == sent or offer.probs is not None or offer.tokens.device.type != "cpu":
            return None
        return _Shadow(self.starts[b], offer.tokens[b, :length].tolist(), self.kinds[b], sent)


@dataclass
class _Shadow:
    """A proposal that is only watched: how would it have fared?"""

    start: int  # the row's length when it was made
    guesses: list[int]
    kind: Kind
    position: int  # of the next guess to compare

    @property
    def place(self) -> int:
        return self.start + self.position


class Retry:
    """When to try again what did not pay: ever more rarely while it fails, and within a share of all time.

    Times are in one-position passes.
    """

    SHARE, LONGEST_WAIT = 0.01, 64

    def __init__(self) -> None:
        self.spent = self.elapsed = 0.0
        self.count = self.rounds = 0  # tries; rounds since the last one
        self.wait = 1

    def is_due(self, price: float) -> bool:
        return self.rounds >= self.wait and self.spent + price <= self.SHARE * self.elapsed

    def add(self, cost: float, loss: float | None) -> None:
        """A round took ``cost``; if it was a try, it lost so much against plain decoding (a gain is negative)."""
        self.elapsed += cost
        self.rounds += 1
        if loss is not None:
            self.spent = max(0.0, self.spent + loss)
            self.wait = 1 if loss <= 0 else min(2 * self.wait, self.LONGEST_WAIT)
            self.count, self.rounds = self.count + 1, 0


class Checkup:
    """When to decode plainly for one round, to know what that takes: often at first, then rarely."""

    FIRST_WAIT, LONGEST_WAIT = 16, 128

    def __init__(self, known: bool = False) -> None:
        self.known = 2 if known else 0  # plain rounds seen; two are enough to go by
        self.wait, self.rounds = self.FIRST_WAIT, 0

    def is_due(self) -> bool:
        return self.rounds >= self.wait

    def add(self, plain: bool) -> None:
        if plain and self.is_due():
            self.wait = min(2 * self.wait, self.LONGEST_WAIT)
        self.rounds = 0 if plain else self.rounds + 1
        self.known += plain
