"""Prompt lookup: the text so far is the draft. Where its last few tokens occurred before, copy what followed them.

No second model and no weights; it pays where the answer repeats the question, or an earlier answer: summaries, edits,
quotations. What followed is found in an index that reads each token once (`specnb.drafters.suffixes`), so a draft
takes as long after a hundred thousand tokens as after ten.

Source: Saxena 2023, "Prompt Lookup Decoding". Built in notebook 09.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from specnb.drafters.base import Draft, Drafter, Session
from specnb.drafters.suffixes import LONGEST, POLICIES, Automaton, NGrams
from specnb.rows import ending_tokens
from specnb.trees import merged

if TYPE_CHECKING:
    from specnb.rows import Rows

LAST_KIND = 32  # suffixes of this length and longer are of one kind


@dataclass(frozen=True)
class Candidate:
    """One way the text may go on.

    Attributes:
        tokens: the tokens copied.
        size: the length of the suffix after which they were found.
        count: how often the first of them followed that suffix, in the text it is copied from; 1 if nobody counted.
    """

    tokens: list[int]
    size: int
    count: int


class PromptLookup(Drafter):
    """Copies what followed the last few tokens where they occurred before: in the row's own text, or in a corpus.

    The longest suffix that has been followed by something decides, tried from ``max_ngram`` tokens down to
    ``min_ngram``. A suffix of the same length found in the row itself goes before one found in the corpus. If it was
    followed more than once, the policy decides which time to copy:

    * ``"latest"``: the last. After [1, 2, 3, 1, 2, 4, 1, 2] it guesses 4.
    * ``"earliest"``: the first; here 3.
    * ``"most_frequent"``: the token that followed it most often (of equals the one seen last), and what came after it
      the last time.
    * ``"longest"``: the suffix may have any length, ``max_ngram`` is no bound. Of several places that agree with the
      text equally far back, the first.

    A copy ends where the text, or the text of the corpus, ends, and after an end-of-sequence token, so it may have
    fewer than k tokens. The guesses are deterministic: q is one-hot.

    Args:
        num_draft_tokens: k, the most tokens copied per round.
        max_ngram, min_ngram: longest and shortest suffix looked up.
        policy: "latest", "earliest", "longest" or "most_frequent".
        corpus: further texts to copy from, each a list of token ids; see `remember`.
        branches: several copies at once, as a tree (`candidates`): the policy's first choice as long as there is room,
            and the beginnings of the others. k then counts all nodes of the tree.
        cyclic: a copy that reaches the end of the text goes on from its own beginning, as if the text repeated itself
            for ever: [1, 2, 3, 1, 2] goes on with 3, 1, 2, 3, 1, 2, … instead of 3, 1, 2.

    Raises:
        ValueError, TypeError: for bounds, a policy or a corpus that cannot be used.
    """

    def __init__(
        self,
        num_draft_tokens: int = 10,
        *,
        max_ngram: int = 3,
        min_ngram: int = 1,
        policy: str = "latest",
        corpus: Iterable[Sequence[int]] = (),
        cyclic: bool = False,
        branches: int = 1,
    ) -> None:
        super().__init__(num_draft_tokens)
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"need 1 ≤ min_ngram ≤ max_ngram, got {min_ngram} and {max_ngram}.")
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(map(repr, POLICIES))}, got {policy!r}.")
        self.max_ngram, self.min_ngram, self.policy, self.cyclic = max_ngram, min_ngram, policy, cyclic
        if isinstance(branches, bool) or not isinstance(branches, int) or branches < 1:
            raise ValueError(f"branches must be a whole number of at least 1, got {branches!r}.")
        self.branches, self.trees = branches, branches > 1
        self.corpus = _Corpus(min_ngram, max_ngram, policy == LONGEST)
        self._texts: list[_Text] = []
        self._rows: Rows | None = None
        if isinstance(corpus, str):
            raise TypeError("corpus is a list of texts, each a list of token ids: tokenize it first.")
        for tokens in corpus:
            self.remember(tokens)

    def remember(self, tokens: Sequence[int]) -> None:
        """Add a text to the corpus, such as an answer that has been given, for this run and all later ones.

        Args:
            tokens: its token ids, a list or a tensor [n].

        Raises:
            TypeError, ValueError: if they are no token ids.
        """
        self.corpus.add(_token_ids(tokens))

    def forget(self) -> None:
        """Empty the corpus."""
        self.corpus = _Corpus(self.min_ngram, self.max_ngram, self.policy == LONGEST)

    def start(self, session: Session) -> None:
        if self.corpus.highest >= session.vocab_size:
            raise ValueError(
                f"The corpus holds token {self.corpus.highest}, but the target's vocabulary is 0…"
                f"{session.vocab_size - 1}: its texts were made with another tokenizer."
            )
        self._rows = rows = session.rows
        self._texts = [_Text(self, rows.criteria[b]) for b in range(len(rows))]
        for b, text in enumerate(self._texts):
            text.read(rows.view(b))

    def join(self, row: int) -> None:
        assert self._rows is not None
        self._texts[row] = _Text(self, self._rows.criteria[row])

    def prefill(self, row: int, count: int) -> None:
        """Index a long prompt piece by piece, not all of it before the first draft."""
        assert self._rows is not None
        self._texts[row].read(self._rows.view(row), count)

    def leave(self, row: int) -> None:
        self._texts[row] = _Text(self)

    def draft(self, rows: Rows, limits: list[int]) -> Draft:
        """Each row's copy; its kind is the length of the suffix that was found, since longer ones are better guides."""
        if self.trees:
            return self._trees(rows, limits)
        found = [
            text.proposal(rows.view(b), n) if n else NOTHING for b, (text, n) in enumerate(zip(self._texts, limits))
        ]
        kinds = [_kind(candidate.size) for candidate in found]
        return replace(Draft.from_lists([candidate.tokens for candidate in found]), kinds=kinds)

    def _trees(self, rows: Rows, limits: list[int]) -> Draft:
        """Of each row the first choice, and as much of the others as leaves it half of the nodes."""
        trees, kinds = [], []
        for text, b, n in zip(self._texts, range(len(rows)), limits):
            found = text.several(rows.view(b), self.branches, n) if n else []
            others = [candidate.tokens[: max(1, n // (2 * self.branches))] for candidate in found[1:]]
            first = [candidate.tokens[: max(1, n - sum(map(len, others)))] for candidate in found[:1]]
            trees.append(merged([*first, *others], n))
            kinds.append(_kind(found[0].size) if found else 0)
        return replace(Draft.from_trees(trees), kinds=kinds)

    def propose(self, context: list[int], limit: int) -> list[int]:
        """The guess for any list of tokens, outside a run."""
        return _Text(self).proposal(context, limit).tokens

    def expected_alpha(self, kind: Hashable) -> float:
        """By the length of the suffix, as measured over the suite with the default model."""
        return (0.4, 0.4, 0.7, 0.9)[min(kind, 3)] if isinstance(kind, int) else 0.6

    def candidates(self, row: int, most: int, limit: int | None = None) -> list[Candidate]:
        """Several ways in which a row of the run may go on, for a tree: they differ in their first token.

        The first is the draft. Then come the other tokens that followed the same suffix, as the policy prefers them,
        then those that followed shorter ones.

        Args:
            row: the row of the run that was started last.
            most: how many candidates, at most.
            limit: tokens of each, at most; None means ``num_draft_tokens``.
        """
        if self._rows is None:
            raise ValueError("candidates() tells of a row of a run; outside of one use alternatives(context, most).")
        return self._texts[row].several(self._rows.view(row), most, limit or self.num_draft_tokens)

    def alternatives(self, context: list[int], most: int, limit: int | None = None) -> list[Candidate]:
        """`candidates` for any list of tokens, outside a run."""
        return _Text(self).several(context, most, limit or self.num_draft_tokens)


class _Place(NamedTuple):
    """Where to copy from: the suffix that was found there, the place of the token after it, and in which text."""

    size: int
    place: int
    corpus: _Corpus | None  # None: the row's own text


class _Text:
    """A row's own text with its index, and how far it agrees with the corpus.

    Args:
        lookup: whose settings and corpus hold.
        criteria: the row's stopping criteria: a copy ends with the tokens that end the text.
    """

    def __init__(self, lookup: PromptLookup, criteria: Iterable[Any] = ()) -> None:
        self.lookup, self.ends = lookup, ending_tokens(criteria)
        self.ngrams = NGrams(lookup.min_ngram, lookup.max_ngram)
        self.automaton = Automaton() if lookup.policy == LONGEST else None
        self._agreed: tuple[_Corpus | None, int, int, int, int] = (None, 0, 0, 0, 0)

    def read(self, tokens: Sequence[int], end: int | None = None) -> None:
        """Index the tokens before ``end`` that are new."""
        if self.automaton is None:
            self.ngrams.extend(tokens, end=end)
        else:  # its n-grams are for `several` alone, and wait for it
            self.automaton.extend(tokens, end)

    def proposal(self, tokens: Sequence[int], limit: int) -> Candidate:
        """The copy of at most ``limit`` tokens that the policy makes after these tokens."""
        self.read(tokens)
        found = self._chosen(tokens) if self.automaton is None else self._longest(tokens, self.automaton)
        return NOTHING if found is None else Candidate(self._copy(tokens, found, limit), found.size, 1)

    def several(self, tokens: Sequence[int], most: int, limit: int) -> list[Candidate]:
        """At most ``most`` copies that differ in their first token, best first."""
        self.ngrams.extend(tokens)
        found: dict[int, Candidate] = {}
        if self.automaton is not None and (first := self.proposal(tokens, limit)).tokens:
            found[first.tokens[0]] = first
        for gram in self._suffixes(tokens):
            for corpus, ngrams in self._sources():
                for place, count in ngrams.all_after(gram, self.lookup.policy):
                    token = (tokens if corpus is None else corpus.tokens)[place]
                    if token not in found and len(found) < most:
                        copied = self._copy(tokens, _Place(len(gram), place, corpus), limit)
                        found[token] = Candidate(copied, len(gram), count)
        return list(found.values())

    def _chosen(self, tokens: Sequence[int]) -> _Place | None:
        """The place that the policy copies from, after the longest suffix of bounded length."""
        for gram in self._suffixes(tokens):
            for corpus, ngrams in self._sources():
                place = ngrams.after(gram, self.lookup.policy)
                if place is not None:
                    return _Place(len(gram), place, corpus)
        return None

    def _longest(self, tokens: Sequence[int], automaton: Automaton) -> _Place | None:
        """The first place after the longest suffix of any length."""
        own = _Place(*automaton.longest_repeat(), None)
        corpus = self._agreement(tokens, self.lookup.corpus)
        longer = corpus if corpus.size > own.size else own
        return longer if longer.size >= self.lookup.min_ngram else None

    def _agreement(self, tokens: Sequence[int], corpus: _Corpus) -> _Place:
        """The longest suffix that occurs in the corpus, and the first place after it there."""
        if corpus.automaton is None:
            return _Place(0, 0, corpus)
        known, texts, read, state, size = self._agreed
        if known is not corpus or texts != len(corpus.ends):  # another corpus, or more of it: from the beginning
            read = state = size = 0
        for token in tokens[read:]:
            state, size = corpus.automaton.follow(state, size, token)
        self._agreed = corpus, len(corpus.ends), len(tokens), state, size
        return _Place(size, corpus.automaton.end[state], corpus)

    def _suffixes(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        return (tuple(tokens[-size:]) for size in self.ngrams.sizes if size <= len(tokens))

    def _sources(self) -> list[tuple[_Corpus | None, NGrams]]:
        corpus = self.lookup.corpus
        return [(None, self.ngrams), (corpus, corpus.ngrams)] if corpus.ends else [(None, self.ngrams)]

    def _copy(self, tokens: Sequence[int], found: _Place, limit: int) -> list[int]:
        """The tokens from a place on, up to the end of its text, or up to one that ends the row."""
        if found.corpus is not None:
            copied = found.corpus.copy(found.place, limit)
        else:
            copied = list(tokens[found.place : found.place + limit])
            while self.lookup.cyclic and len(copied) < limit:
                copied += copied[: limit - len(copied)]
        end = next((i for i, token in enumerate(copied) if token in self.ends), limit)
        return copied[: end + 1]


class _Corpus:
    """Texts to copy from, one after the other in one list, with their index. No suffix reaches over two of them."""

    BREAK = -1  # no token

    def __init__(self, min_ngram: int, max_ngram: int, longest: bool) -> None:
        self.ngrams = NGrams(min_ngram, max_ngram)
        self.automaton = Automaton() if longest else None
        self.tokens: list[int] = []
        self.ends: list[int] = []  # where the texts end
        self.highest = -1  # token id

    def add(self, ids: list[int]) -> None:
        if not ids:
            return
        begin = len(self.tokens)
        self.tokens += ids
        self.ends.append(len(self.tokens))
        self.highest = max(self.highest, *ids)
        self.ngrams.extend(self.tokens, begin)
        if self.automaton is not None:
            # the last token is followed by nothing, so that nothing can be copied after it: a break in its place
            for token in [*ids[:-1], self.BREAK]:
                self.automaton.append(token)

    def copy(self, place: int, limit: int) -> list[int]:
        """At most ``limit`` tokens from a place on, up to the end of its text."""
        end = self.ends[bisect_right(self.ends, place)]
        return self.tokens[place : min(place + limit, end)]


NOTHING = Candidate([], 0, 0)


def _kind(size: int) -> int:
    """The kind of a guess: the length of the suffix, from 4 on rounded down to a power of two."""
    return size if size < 4 else min(1 << (size.bit_length() - 1), LAST_KIND)


def _token_ids(tokens: Any) -> list[int]:
    listed = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    try:
        ids = [operator.index(token) for token in listed]
    except TypeError:
        raise TypeError(f"A text of the corpus is one list of token ids (whole numbers), got {tokens!r:.60}.") from None
    if min(ids, default=0) < 0:
        raise ValueError(f"Token ids are not negative, got {min(ids)}.")
    return ids
