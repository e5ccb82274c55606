"""A loop without a model: the text is known beforehand, the clock is set by hand, and guesses are right by chance.

Adaptive drafters are tested in it, where what is best can be worked out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

from specnb.drafters.base import Draft, Drafter, Session
from specnb.processing import Processors
from specnb.report import Round
from specnb.rows import Rows


class Clock:
    """Seconds that pass when somebody says so."""

    def __init__(self) -> None:
        self.now, self.slowness = 0.0, 1.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        """So much work; it takes longer on a busy machine."""
        self.now += seconds * self.slowness


class Timed(Drafter):
    """A drafter that takes c seconds for each token it is asked for."""

    def __init__(self, drafter: Drafter, clock: Clock, c: float) -> None:
        super().__init__(drafter.num_draft_tokens)
        self.drafter, self.clock, self.c, self.asked = drafter, clock, c, 0

    def start(self, session: Session) -> None:
        self.drafter.start(session)

    def draft(self, rows: Rows, limits: list[int]) -> Draft:
        self.clock.work(self.c * max(limits))
        self.asked += 1
        return self.drafter.draft(rows, limits)

    def observe(self, rows: Rows, kept: list[int]) -> None:
        self.drafter.observe(rows, kept)

    def join(self, row: int) -> None:
        self.drafter.join(row)

    def prefill(self, row: int, count: int) -> None:
        self.drafter.prefill(row, count)

    def leave(self, row: int) -> None:
        self.drafter.leave(row)


class Oracle(Drafter):
    """Knows the texts; each of its guesses is right with the chance ``alpha(row, place)``, by its own coins.

    ``kind(row, place)`` is what it says of the kind of its proposal there.
    """

    def __init__(self, k: int, texts: Sequence[Sequence[int]], alpha: Callable, kind: Callable | None = None) -> None:
        super().__init__(k)
        self.texts, self.alpha, self.kind, self.coins = texts, alpha, kind, random.Random(1)

    def start(self, session: Session) -> None:
        self.prompts = list(session.rows.prompt_lengths)

    def draft(self, rows: Rows, limits: list[int]) -> Draft:
        places = [length - prompt for length, prompt in zip(rows.lengths, self.prompts)]
        draft = Draft.from_lists([self._guesses(b, place, n) for b, (place, n) in enumerate(zip(places, limits))])
        return replace(draft, kinds=self.kind and [self.kind(b, place) for b, place in enumerate(places)])

    def _guesses(self, b: int, place: int, limit: int) -> list[int]:
        coins = [self.coins.random() for _ in range(limit)]
        right = list(self.texts[b][place : place + limit])
        return [
            token if coin < self.alpha(b, place + j) else token + 1 for j, (token, coin) in enumerate(zip(right, coins))
        ]


@dataclass
class Played:
    """What happened: the rounds of all rows, and the seconds."""

    seconds: float = 0.0
    planned: list[list[int] | None] = field(default_factory=list)  # by round and row
    sent: list[list[int]] = field(default_factory=list)
    grown: list[list[int]] = field(default_factory=list)

    @property
    def longest(self) -> list[int]:
        """The length of the longest draft of each round."""
        return [max(sent) for sent in self.sent]

    def rounds_from(self, place: int, to: int) -> list[int]:
        """The rounds that began at these places of the first row's text."""
        at, found = 0, []
        for i, grown in enumerate(self.grown):
            found += [i] if place <= at < to else []
            at += grown[0]
        return found


class Model:
    """Stands for the target, which nobody asks anything."""


MODEL = Model()


def play(
    drafter: Drafter,
    texts: Sequence[Sequence[int]],
    clock: Clock,
    cost: Callable[[int], float],
    *,
    hiccup: Callable[[int], float] = lambda i: 1.0,
    busy: Callable[[int], float] = lambda i: 1.0,
    limit: int | None = None,
    model: object = MODEL,
    size_of: Callable[[int], int] | None = None,
) -> Played:
    """Write the texts, as the loop would for a target that writes just them.

    Args:
        cost: seconds of a pass by its size, the positions of all rows that still grow.
        hiccup: how many times longer round i's pass takes.
        busy: how many times slower the machine is in round i, drafting included.
        limit: the loop's own limit on drafts, such as a fixed width's.
        size_of: passes are packed, without filler, and of these sizes: as compiled ones are.
    """
    rows = Rows([[0]] * len(texts), [len(text) for text in texts], [[] for _ in texts])
    twin = None if size_of is None else SimpleNamespace(size_of=size_of)
    drafter.start(Session(model, rows, Processors([[]]), vocab_size=10**9, twin=twin))
    played, began = Played(), clock()
    while rows.active:
        limits = [max(0, min(drafter.num_draft_tokens, room - 1, limit or room)) for room in rows.room]
        clock.slowness = busy(len(played.sent))
        draft = drafter.draft(rows, limits) if any(limits) else Draft.empty(len(texts))
        guesses = [tokens[:n] for tokens, n in zip(draft.tokens.tolist(), draft.lengths.tolist())]
        active = len(rows.active)
        positions = active * (1 + max(map(len, guesses)))
        clock.work(cost(size_of(active + sum(map(len, guesses))) if size_of else positions) * hiccup(len(played.sent)))
        grown = commit(rows, texts, guesses)
        played.planned.append(draft.planned and list(draft.planned))
        played.sent.append([len(g) for g in guesses])
        played.grown.append(grown)
        drafter.observe(rows, grown)
    assert [rows.new_tokens(b) for b in range(len(texts))] == [list(text) for text in texts]
    played.seconds = clock() - began
    return played


def commit(rows: Rows, texts: Sequence[Sequence[int]], guesses: list[list[int]]) -> list[int]:
    """Write the right guesses and the token after them."""
    before = rows.lengths
    rest = [text[n - 1 :] for text, n in zip(texts, before)]
    accepted = [
        next((j for j, (guess, token) in enumerate(zip(g, text)) if guess != token), len(g))
        for g, text in zip(guesses, rest)
    ]
    following = [text[n] if n < len(text) else 0 for text, n in zip(rest, accepted)]
    decided = zip(guesses, accepted, following)
    rows.commit([Round(b, g, n, token, is_bonus=n == len(g)) for b, (g, n, token) in enumerate(decided)])
    return [after - n for after, n in zip(rows.lengths, before)]


class TextClock(Clock):
    """For real runs: a pass takes about a second and is over when the rows have grown; the same in every run."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: Rows | None = None
        self.tokens = self.passes = 0

    def __call__(self) -> float:
        tokens = sum(self.rows.lengths) if self.rows is not None else 0
        if tokens != self.tokens:
            self.tokens, self.passes = tokens, self.passes + 1
            self.now += 1.0 + 0.1 * (7 * self.passes % 5)
        return self.now


class Paced(Timed):
    """A drafter of a real run with a `TextClock`."""

    def __init__(self, drafter: Drafter, c: float) -> None:
        super().__init__(drafter, TextClock(), c)

    def start(self, session: Session) -> None:
        self.clock.rows, self.clock.tokens = session.rows, sum(session.rows.lengths)
        super().start(session)
