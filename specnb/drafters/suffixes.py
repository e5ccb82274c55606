"""Where did the last few tokens occur before, and what followed them? Indices of a text that grows at its end.

`NGrams` knows suffixes up to a fixed length and counts what followed; `Automaton` knows suffixes of any length. Both
read each token once, in time that does not depend on how much they have read, and so do their answers. Plain
numbers in and out: no model, no loop.

Sources: suffix automaton: Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text". Built up
in notebook 09.
"""

from __future__ import annotations

from collections.abc import Sequence

LATEST, EARLIEST, LONGEST, MOST_FREQUENT = POLICIES = ("latest", "earliest", "longest", "most_frequent")


class Followers:
    """What followed an n-gram that has occurred more than once. Who leads is kept up to date, so that asking is free.

    Attributes:
        first, last: places of the first and the last token that followed.
        places: token → [how often it followed, its first place, its last].
        favourite: the token that followed most often; of equals the one seen last.
    """

    __slots__ = ("favourite", "first", "last", "places")

    def __init__(self, token: int, place: int) -> None:
        self.first = self.last = place
        self.places = {token: [1, place, place]}
        self.favourite = token

    def add(self, token: int, place: int) -> None:
        seen = self.places.setdefault(token, [0, place, place])
        seen[0] += 1
        seen[2] = self.last = place
        if seen[0] >= self.places[self.favourite][0]:
            self.favourite = token

    def chosen(self, policy: str) -> int:
        """The place to copy from."""
        if policy == LATEST:
            return self.last
        return self.places[self.favourite][2] if policy == MOST_FREQUENT else self.first

    def ranked(self, policy: str) -> list[tuple[int, int]]:
        """For each token that followed, the place to copy from, and how often it did; the chosen one is the first."""
        found = self.places.values()
        if policy not in (LATEST, MOST_FREQUENT):
            return [(first, count) for count, first, _ in found]
        order = sorted(found, key=lambda seen: (seen[0] if policy == MOST_FREQUENT else 0, seen[2]), reverse=True)
        return [(last, count) for count, _, last in order]


class NGrams:
    """For each n-gram of a growing list of tokens, what followed it.

    Args:
        min_ngram, max_ngram: shortest and longest n-gram.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        self.read = 0  # tokens indexed so far
        self._seen: dict[tuple[int, ...], int | Followers] = {}  # most n-grams occur once: then only the place

    def extend(self, tokens: Sequence[int], begin: int = 0, end: int | None = None) -> None:
        """Index the tokens before ``end`` that are new; no n-gram reaches back to before ``begin``."""
        end = len(tokens) if end is None else end
        for place in range(self.read, end):
            for size in self.sizes:
                if size <= place - begin:
                    self._add(tuple(tokens[place - size : place]), tokens, place)
        self.read = max(self.read, end)

    def _add(self, gram: tuple[int, ...], tokens: Sequence[int], place: int) -> None:
        seen = self._seen.get(gram)
        if seen is None:
            self._seen[gram] = place
            return
        if isinstance(seen, int):
            seen = self._seen[gram] = Followers(tokens[seen], seen)
        seen.add(tokens[place], place)

    def after(self, gram: tuple[int, ...], policy: str) -> int | None:
        """The place from which the policy copies after this n-gram; None if nothing has followed it yet."""
        seen = self._seen.get(gram)
        return seen.chosen(policy) if isinstance(seen, Followers) else seen

    def all_after(self, gram: tuple[int, ...], policy: str) -> list[tuple[int, int]]:
        """(place, count) for each different token that followed it, in time proportional to their number."""
        seen = self._seen.get(gram)
        if isinstance(seen, Followers):
            return seen.ranked(policy)
        return [] if seen is None else [(seen, 1)]


class Automaton:
    """The suffix automaton of a growing list of tokens.

    A state stands for all stretches of the text that end at the same places. Its longest one has ``length[s]`` tokens,
    and ``end[s]`` is where its first occurrence ends: the place of the token that followed. ``link[s]`` is the state
    of the longest suffix of these that also ends elsewhere; ``step[s]`` leads on, token by token.
    """

    ROOT = 0

    def __init__(self) -> None:
        self.step: list[dict[int, int]] = [{}]
        self.link, self.length, self.end = [-1], [0], [0]
        self.whole = self.ROOT  # the state of the text so far
        self.read = 0  # tokens

    def extend(self, tokens: Sequence[int], end: int | None = None) -> None:
        """Read the tokens before ``end`` that are new."""
        for token in tokens[self.read : end]:
            self.append(token)

    def append(self, token: int) -> None:
        """Read one token more; amortised O(1)."""
        self.read += 1
        state, at = self._new_state({}, self.read, self.read), self.whole
        while at >= 0 and token not in self.step[at]:
            self.step[at][token] = state
            at = self.link[at]
        self.link[state] = self.ROOT if at < 0 else self._target(at, token)
        self.whole = state

    def _target(self, at: int, token: int) -> int:
        """The state of at's longest stretch and the token; split off from a state that also holds longer ones."""
        old = self.step[at][token]
        if self.length[old] == self.length[at] + 1:
            return old
        split = self._new_state(dict(self.step[old]), self.length[at] + 1, self.end[old])
        self.link[split], self.link[old] = self.link[old], split
        while at >= 0 and self.step[at].get(token) == old:
            self.step[at][token] = split
            at = self.link[at]
        return split

    def _new_state(self, step: dict[int, int], length: int, end: int) -> int:
        self.step.append(step)
        self.length.append(length)
        self.end.append(end)
        self.link.append(-1)
        return len(self.step) - 1

    def longest_repeat(self) -> tuple[int, int]:
        """The longest suffix of the text that occurred before: its length, and where its first occurrence ends."""
        repeat = max(self.link[self.whole], self.ROOT)
        return self.length[repeat], self.end[repeat]

    def follow(self, state: int, size: int, token: int) -> tuple[int, int]:
        """One token more of another text, whose longest suffix found in here has ``size`` tokens, in this state.

        Returns:
            the same for the longer text; amortised O(1) along it.
        """
        while state != self.ROOT and token not in self.step[state]:
            state = self.link[state]
            size = self.length[state]
        if token not in self.step[state]:
            return self.ROOT, 0
        return self.step[state][token], size + 1
