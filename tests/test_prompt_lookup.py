"""Prompt lookup: every policy, bound and source of copies against a slow scan; and no longer on long texts."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specnb
from specnb.drafters import suffixes
from specnb.drafters.suffixes import POLICIES, Automaton
from specnb.rows import Rows
from tests.tiny import plain, prompt

# --- the oracle: look at every place of every text ---


def slow_places(tokens, corpus, policy, sizes):
    """For each size of suffix that has been followed by something: (size, (text, place)s), own text first."""
    sizes = range(len(tokens), sizes[1] - 1, -1) if policy == "longest" else range(sizes[0], sizes[1] - 1, -1)
    for size in (size for size in sizes if size <= len(tokens)):
        suffix = tokens[len(tokens) - size :]
        for texts in ([tokens], corpus):
            found = [(text, i) for text in texts for i in range(size, len(text)) if text[i - size : i] == suffix]
            if found:
                yield size, found


def slow_choice(found, policy):
    if policy in ("earliest", "longest"):
        return found[0]
    if policy == "most_frequent":
        followers = [text[i] for text, i in found]
        most = max(map(followers.count, followers))
        found = [(text, i) for text, i in found if followers.count(text[i]) == most]
    return found[-1]


def slow_copy(tokens, text, place, limit, cyclic=False, ends=()):
    source = text[place:] * (limit if cyclic and text is tokens else 1)
    for i, token in enumerate(source[:limit]):
        if token in ends:
            return source[: i + 1]
    return source[:limit]


def slow_lookup(tokens, limit, corpus=(), policy="latest", sizes=(3, 1), cyclic=False, ends=()):
    """(size, guesses)."""
    for size, found in slow_places(tokens, corpus, policy, sizes):
        return size, slow_copy(tokens, *slow_choice(found, policy), limit, cyclic, ends)
    return 0, []


def slow_candidates(tokens, limit, corpus, policy, sizes):
    """All of them as (guesses, size, count), in the order of preference."""
    candidates = []
    if policy == "longest":
        size, guesses = slow_lookup(tokens, limit, corpus, policy, sizes)
        candidates += [(guesses, size, 1)] if guesses else []
    bounded = "earliest" if policy == "longest" else policy
    for size, found in slow_places(tokens, corpus, bounded, sizes):
        while found:
            text, place = slow_choice(found, bounded)
            same = [(other, i) for other, i in found if other[i] == text[place]]
            found = [one for one in found if one not in same]
            if all(guesses[0] != text[place] for guesses, _, _ in candidates):
                candidates.append((slow_copy(tokens, text, place, limit), size, len(same)))
    return candidates


TEXT = st.lists(st.integers(0, 3), max_size=24)
SIZES = st.tuples(st.integers(1, 5), st.integers(1, 5)).map(lambda pair: (max(pair), min(pair)))


def lookup(sizes, **options):
    return specnb.PromptLookup(max_ngram=sizes[0], min_ngram=sizes[1], **options)


@settings(deadline=None, max_examples=200)
@given(TEXT, st.lists(TEXT, max_size=3), st.sampled_from(POLICIES), SIZES, st.integers(1, 12), st.booleans())
def test_lookup_finds_what_a_scan_finds(tokens, corpus, policy, sizes, limit, cyclic):
    drafter = lookup(sizes, policy=policy, corpus=corpus, cyclic=cyclic)
    assert drafter.propose(tokens, limit) == slow_lookup(tokens, limit, corpus, policy, sizes, cyclic)[1]


@settings(deadline=None, max_examples=150)
@given(TEXT, st.lists(TEXT, max_size=3), st.sampled_from(POLICIES), SIZES, st.integers(1, 6))
def test_candidates_are_all_different_continuations_with_their_counts(tokens, corpus, policy, sizes, most):
    drafter = lookup(sizes, policy=policy, corpus=corpus)
    found = [(one.tokens, one.size, one.count) for one in drafter.alternatives(tokens, most, 5)]
    assert found == slow_candidates(tokens, 5, corpus, policy, sizes)[:most]
    assert [one[0] for one in found[:1]] == ([drafter.propose(tokens, 5)] if found else [])


# --- in a run: texts that grow, come and go; a corpus that grows meanwhile ---


class Run:
    """Rows that grow as they are told, and a drafter that is asked about them."""

    def __init__(self, drafter, prompts, criteria=()):
        self.drafter = drafter
        self.rows = Rows(prompts, [10**6] * len(prompts), [list(criteria) for _ in prompts])
        drafter.start(SimpleNamespace(rows=self.rows, vocab_size=10**6))

    def grow(self, b, tokens):
        self.rows._tokens[b] += tokens

    def guesses(self, limits):
        draft = self.drafter.draft(self.rows, limits)
        return [(kind, row[:n]) for kind, row, n in zip(draft.kinds, draft.tokens.tolist(), draft.lengths.tolist())]


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), st.integers(0, 1), st.lists(st.integers(0, 2), min_size=1, max_size=4)),
        st.tuples(st.just("remember"), st.just(0), st.lists(st.integers(0, 2), max_size=6)),
        st.tuples(st.just("join"), st.integers(0, 1), st.lists(st.integers(0, 2), min_size=1, max_size=6)),
    ),
    max_size=10,
)


@settings(deadline=None, max_examples=150)
@given(EVENTS, st.sampled_from(POLICIES), SIZES)
def test_growing_rows_are_looked_up_as_if_seen_whole(events, policy, sizes):
    drafter, corpus = lookup(sizes, policy=policy), []
    run = Run(drafter, [[1, 2], [0]])
    for event, b, tokens in events:
        if event == "grow":
            run.grow(b, tokens)
        elif event == "remember":
            drafter.remember(tokens)
            corpus.append(tokens)
        else:
            run.rows._tokens[b] = list(tokens)
            drafter.leave(b)
            drafter.join(b)
            drafter.prefill(b, len(tokens) - 1)
        slow = [slow_lookup(run.rows.tokens(b), 5, corpus, policy, sizes) for b in (0, 1)]
        found = run.guesses([5, 5])
        assert [guesses for _, guesses in found] == [guesses for _, guesses in slow]
        assert [kind for kind, _ in found] == [size if size < 4 else 4 if size < 8 else 8 for size, _ in slow]
        assert [one.tokens for one in drafter.candidates(b, 1, 5)] == [g for _, g in slow[b : b + 1] if g]


def test_a_row_that_wants_nothing_gets_nothing():
    run = Run(specnb.PromptLookup(), [[1, 2, 1], [1, 2, 1]])
    assert run.guesses([0, 2]) == [(0, []), (1, [2, 1])]


def test_a_long_suffix_and_a_longer_one_are_of_one_kind():
    text = list(range(100))
    run = Run(specnb.PromptLookup(policy="longest"), [text + text[:n] for n in (1, 3, 5, 8, 15, 16, 33, 99)])
    assert [kind for kind, _ in run.guesses([1] * 8)] == [1, 3, 4, 8, 8, 16, 32, 32]


# --- what a reader may want to look up ---


LONG = [1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2]


@pytest.mark.parametrize(
    ("context", "latest", "earliest", "longest", "most_frequent"),
    [
        ([], [], [], [], []),
        ([5], [], [], [], []),
        ([5, 6], [], [], [], []),
        ([5, 5], [5], [5], [5], [5]),
        ([7, 7, 7, 7], [7], [7], [7], [7]),  # a partial draft
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2], [3, 1, 2, 4, 1, 2], [3, 1, 2, 4, 1, 2], [4, 1, 2]),
        (LONG, [4, 1, 2], LONG[2:], LONG[2:], [3, 1, 2, 4, 1, 2]),
        ([0, 1, 2, 9, 1, 2, 8, 0, 1, 2], *[[9, 1, 2, 8, 0, 1, 2]] * 4),  # the longer match goes before the later one
        ([3, 0, 0, 4, 3], *[[0, 0, 4, 3]] * 4),  # token 0 is an ordinary token
        ([9, 5, 1, 2, 3, 4, 6, 8, 1, 2, 3, 4, 7, 5, 1, 2, 3, 4], [7], [6], [6], [7]),
    ],
)
def test_what_each_policy_copies(context, latest, earliest, longest, most_frequent):
    expected = dict(latest=latest, earliest=earliest, longest=longest, most_frequent=most_frequent)
    for policy, guess in expected.items():
        assert specnb.PromptLookup(10, policy=policy).propose(context, max(1, len(guess))) == guess, policy


def test_no_bound_of_the_suffix_for_the_longest():
    """Three tokens back the two places agree, four back only the first of them does."""
    context = [8, 1, 2, 3, 5, 9, 1, 2, 3, 6, 8, 1, 2, 3]
    assert specnb.PromptLookup(2).propose(context, 1) == [6]
    assert specnb.PromptLookup(2, policy="longest").propose(context, 1) == [5]
    assert specnb.PromptLookup(2, max_ngram=4).propose(context, 1) == [5]


def test_ngram_bounds():
    context = [1, 2, 3, 9, 3, 8, 1, 2, 3]
    assert specnb.PromptLookup(max_ngram=1).propose(context, 2) == [8, 1]
    assert specnb.PromptLookup(max_ngram=3).propose(context, 2) == [9, 3]
    assert specnb.PromptLookup(min_ngram=3).propose([1, 9, 1], 2) == []
    assert specnb.PromptLookup(min_ngram=2, policy="longest").propose([1, 9, 1], 2) == []


def test_a_copy_that_goes_round():
    assert specnb.PromptLookup(cyclic=True).propose([7, 7, 7, 7], 5) == [7] * 5
    assert specnb.PromptLookup(cyclic=True).propose([1, 2, 3, 1, 2], 7) == [3, 1, 2, 3, 1, 2, 3]
    assert specnb.PromptLookup(cyclic=True, corpus=[[1, 2, 3]]).propose([1, 2], 7) == [3]  # a corpus ends


def test_the_corpus_comes_after_the_text_itself_and_its_texts_are_kept_apart():
    drafter = specnb.PromptLookup(corpus=[[1, 2, 3], torch.tensor([4, 5])])
    assert drafter.propose([1, 2], 5) == [3]
    assert drafter.propose([1, 2, 9, 1, 2], 1) == [9]
    assert drafter.propose([3], 5) == []
    assert drafter.propose([8, 2, 9, 1, 2], 1) == [3]  # two tokens in the corpus before one in the text
    drafter.remember([3, 6])
    assert drafter.propose([3], 5) == [6]
    drafter.forget()
    assert drafter.propose([1, 2], 5) == []


def test_candidates_of_a_row():
    drafter = specnb.PromptLookup(3)
    run = Run(drafter, [[5], LONG])
    found = [(one.tokens, one.size, one.count) for one in drafter.candidates(1, 5)]
    assert found == [([4, 1, 2], 2, 1), ([3, 1, 2], 2, 2)]
    assert [one.tokens for one in drafter.candidates(1, 1, 2)] == [[4, 1]]
    assert drafter.candidates(0, 5) == []
    run.grow(0, [6, 5])
    assert [one.tokens for one in drafter.candidates(0, 5)] == [[6, 5]]


def test_a_draft_ends_with_the_end_of_the_text():
    """Criteria tell which tokens those are; guesses after them would never be asked for."""
    ends = SimpleNamespace(eos_token_id=torch.tensor([9, 8]))
    for policy in POLICIES:
        run = Run(specnb.PromptLookup(policy=policy), [[1, 2, 9, 4, 5, 1]], [SimpleNamespace(), ends])
        assert run.guesses([5]) == [(1, [2, 9])]
        assert [one.tokens for one in run.drafter.candidates(0, 3)] == [[2, 9]]
        assert run.drafter.propose([1, 2, 9, 4, 5, 1], 5) == [2, 9, 4, 5, 1]


def test_no_guess_after_an_end_of_sequence_in_the_loop(llama):
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 5, 6]])
    out = specnb.generate(llama, ids, specnb.PromptLookup(), max_new_tokens=12, eos_token_id=9, return_trace=True)
    assert out.trace[0].drafted == [7, 8, 9]
    assert out.sequences.tolist() == plain(llama, ids, max_new_tokens=12, eos_token_id=9).tolist()


def test_an_earlier_answer_is_copied(llama):
    """Asked again, the model says the same; what it said is in the corpus, and all of it is guessed."""
    ids = prompt(12)
    drafter = specnb.PromptLookup(8, policy="longest")
    first = specnb.generate(llama, ids, drafter, max_new_tokens=24)
    drafter.remember(first.sequences[0])
    again = specnb.generate(llama, ids, drafter, max_new_tokens=24, return_trace=True)
    assert again.sequences.tolist() == first.sequences.tolist()
    assert again.stats.alpha.tolist() == [1.0]
    assert [r.kind for r in again.trace[:3]] == [8, 16, 16]  # the suffix is all that there is: 12, 21 and 30 tokens


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(min_ngram=0), ValueError, "min_ngram ≤ max_ngram"),
        (dict(min_ngram=3, max_ngram=2), ValueError, "min_ngram ≤ max_ngram"),
        (dict(policy="newest"), ValueError, "policy must be one of 'latest', 'earliest', .* got 'newest'"),
        (dict(corpus="some text"), TypeError, "tokenize it first"),
        (dict(corpus=[["some", "words"]]), TypeError, "list of token ids"),
        (dict(corpus=[3, 4]), TypeError, "list of token ids"),
        (dict(corpus=[[3, -4]]), ValueError, "not negative, got -4"),
    ],
)
def test_what_cannot_be_looked_up_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        specnb.PromptLookup(**options)


def test_a_corpus_of_another_vocabulary_is_refused(llama):
    with pytest.raises(ValueError, match=r"holds token 61, but the target's vocabulary is 0…60.*another tokenizer"):
        specnb.generate(llama, prompt(12), specnb.PromptLookup(corpus=[[1, 61]]), max_new_tokens=4)
    with pytest.raises(ValueError, match=r"alternatives\(context, most\)"):
        specnb.PromptLookup().candidates(0, 3)


# --- how much work it is ---


class Watched(list):
    """A list that counts the elements that are read from it."""

    read = 0

    def __getitem__(self, which):
        found = super().__getitem__(which)
        self.read += len(found) if isinstance(which, slice) else 1
        return found

    def __iter__(self):
        self.read += len(self)
        return super().__iter__()


class Work:
    """Counts the lines that are executed in the lookup's own files, a measure of time that no other work disturbs."""

    FILES = (suffixes.__file__, specnb.drafters.prompt_lookup.__file__)

    def __init__(self):
        self.lines = 0

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *exception):
        sys.settrace(self._before)

    def _call(self, frame, event, argument):
        return self._line if frame.f_code.co_filename in self.FILES else None

    def _line(self, frame, event, argument):
        self.lines += event == "line"
        return self._line


def random_text(n):
    rng = random.Random(5)
    return [rng.randrange(30) for _ in range(n)]


def fibonacci_text(n):
    """Full of repetitions of every length."""
    a, b = [0], [0, 1]
    while len(b) < n:
        a, b = b, b + a
    return b[:n]


TEXTS = {"random": random_text, "all equal": lambda n: [7] * n, "Fibonacci": fibonacci_text}


def work(policy, make, n):
    """Lines to index a text of n tokens, and for a draft and the token after it at its end, at most of ten."""
    run = Run(specnb.PromptLookup(policy=policy, corpus=[make(50)]), [[7]])
    run.rows._tokens[0] = tokens = Watched(make(n)[:1])
    text = make(n + 10)
    with Work() as reading:
        for end in range(1, n, 97):
            list.extend(tokens, text[end : min(end + 97, n)])
            run.guesses([10])
    drafts = []
    for token in text[n:]:
        list.append(tokens, token)
        tokens.read = 0
        with Work() as drafting:
            run.guesses([10])
        drafts.append(drafting.lines + tokens.read)
    return reading.lines, drafts


@pytest.mark.parametrize("make", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_work_for_a_draft_does_not_grow_with_the_context(policy, make):
    (early, short), (late, long) = (work(policy, make, n) for n in (500, 4000))
    assert sum(long) <= 1.25 * sum(short) + 100
    assert late / 4000 <= 1.25 * early / 500


@pytest.mark.parametrize("policy", ["most_frequent", "longest"])
def test_a_hundred_thousand_tokens(policy):
    """A stretch that occurs nowhere else is found wherever it is."""
    text = random_text(100_000)
    text[40_000:40_005] = [90, 91, 92, 93, 94]
    assert specnb.PromptLookup(policy=policy).propose([*text, 90, 91, 92], 2) == [93, 94]


@pytest.mark.parametrize("policy", ["earliest", "most_frequent", "longest"])
def test_a_hundred_thousand_equal_tokens(policy):
    drafter = specnb.PromptLookup(policy=policy)
    assert drafter.propose([3] * 100_000, 4) == [3] * (4 if policy == "earliest" else 1)


# --- the automaton by itself ---


@settings(deadline=None, max_examples=150)
@given(TEXT, TEXT)
def test_the_automaton_finds_the_longest_repeat_and_the_longest_agreement(text, other):
    automaton = Automaton()
    for n, token in enumerate(text, 1):
        automaton.append(token)
        assert automaton.longest_repeat() == slow_agreement(text[:n], text[:n], n - 1)
    state = size = 0
    for n, token in enumerate(other, 1):
        state, size = automaton.follow(state, size, token)
        assert (size, automaton.end[state] if size else 0) == slow_agreement(other[:n], text, len(text))


def slow_agreement(tokens, text, last):
    """The longest suffix of the tokens that ends in the text at ``last`` or before, and where it first does."""
    for size in range(len(tokens), 0, -1):
        for end in range(size, last + 1):
            if text[end - size : end] == tokens[len(tokens) - size :]:
                return size, end
    return 0, 0
