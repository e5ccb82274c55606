"""The rule of speculative sampling: proved by enumeration, then drawn by the hundred thousand, then pushed to extremes.

Tests marked statistical use fixed seeds; their false-alarm rate is stated, and a wrong rule is shown to fail them.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specnb
from specnb import bugs, emitted_distribution, residual, verification, verify_sample
from specnb.bugs import ZOO, processed, random_tables

# --- distributions of every kind: with zeros, ties, near-equal, peaked ---

WEIGHTS = st.one_of(st.just(0.0), st.sampled_from([1.0, 1.0, 2.0, 1e-9, 1e-3, 1e6]), st.floats(1e-12, 1.0))


def normalised(weights):
    p = torch.tensor(weights, dtype=torch.float64)
    return p / p.sum()


def laws(vocab):
    return st.lists(WEIGHTS, min_size=vocab, max_size=vocab).filter(any).map(normalised)


@st.composite
def pairs(draw, size=None):
    """p and q [V]; one pair in three is equal up to a few units in the last place."""
    size = size or draw(st.integers(1, 8))
    p = draw(laws(size))
    if draw(st.integers(0, 2)):
        return p, draw(laws(size))
    noise = torch.tensor(draw(st.lists(st.integers(-3, 3), min_size=size, max_size=size)))
    q = p * (1 + noise * 2.0**-52)
    return p, q / q.sum()


# --- one token ---


@settings(deadline=None, max_examples=500)
@given(pairs())
def test_one_round_writes_p_whatever_q(pair):
    p, q = pair
    torch.testing.assert_close(emitted_distribution(p, q), p, atol=1e-12, rtol=0)


@settings(deadline=None, max_examples=200)
@given(pairs())
def test_the_residual_is_a_law_inside_the_support_of_p(pair):
    p, q = pair
    left = residual(p, q)
    assert bool((left >= 0).all())
    assert float(left.sum()) == pytest.approx(1)
    assert bool((left[p == 0] == 0).all())


@settings(deadline=None, max_examples=200)
@given(pairs())
def test_over_bet_equals_under_bet_equals_one_minus_alpha(pair):
    p, q = pair
    alpha = float(torch.minimum(p, q).sum())
    assert float((q - p).clamp(min=0).sum()) == pytest.approx(1 - alpha, abs=1e-12)
    assert float((p - q).clamp(min=0).sum()) == pytest.approx(1 - alpha, abs=1e-12)


def test_the_worked_example():
    p, q = (torch.tensor(x, dtype=torch.float64) for x in ([0.5, 0.3, 0.2], [0.8, 0.1, 0.1]))
    torch.testing.assert_close(residual(p, q), torch.tensor([0, 2 / 3, 1 / 3], dtype=torch.float64))
    torch.testing.assert_close(emitted_distribution(p, q), p, atol=1e-15, rtol=0)


def test_emitted_distribution_of_a_batch_is_that_of_its_rows():
    p, q = torch.rand(2, 3, 4, 5, dtype=torch.float64).softmax(-1)
    whole = emitted_distribution(p, q)
    assert whole.shape == p.shape
    torch.testing.assert_close(whole[2, 1], emitted_distribution(p[2, 1], q[2, 1]))


# --- a whole round, by writing out every draft ---


def acceptance(p, q):
    """min(1, p/q), and 1 where q never guesses."""
    return torch.where(q > 0, (p / q.where(q > 0, 1)).clamp(max=1), 1.0)


def written_after(draft, p, q):
    """What one round can write for this draft, as (text, probability); p and q are functions of the text so far."""
    reached = 1.0
    for i in range(len(draft)):
        before, guess = draft[:i], draft[i]
        passes = float(acceptance(p[before], q[before])[guess])
        correction = residual(p[before], q[before])
        yield from (((*before, x), reached * (1 - passes) * float(r)) for x, r in enumerate(correction))
        reached *= passes
    yield from (((*draft, x), reached * float(bonus)) for x, bonus in enumerate(p[draft]))


def texts(vocab, length):
    return itertools.product(range(vocab), repeat=length)


def joint(p, text):
    """Plain decoding's probability of the text."""
    return math.prod(float(p[text[:i]][token]) for i, token in enumerate(text))


def law_of_one_round(p, q, vocab, k):
    """The law of k + 1 tokens: one round of k guesses, then plain decoding for what is missing."""
    law = torch.zeros([vocab] * (k + 1), dtype=torch.float64)
    for draft in texts(vocab, k):
        for text, probability in written_after(draft, p, q):
            for rest in texts(vocab, k + 1 - len(text)):
                tail = math.prod(float(p[(*text, *rest[:i])][x]) for i, x in enumerate(rest))
                law[(*text, *rest)] += joint(q, draft) * probability * tail
    return law


@st.composite
def rounds(draw):
    """k, V, and for every text of up to k tokens a p and a q of its own."""
    k = draw(st.integers(0, 4))
    vocab = draw(st.integers(2, 3 if k < 4 else 2))
    contexts = [text for n in range(k + 1) for text in texts(vocab, n)]
    drawn = [draw(pairs(vocab)) for _ in contexts]
    return k, vocab, {c: p for c, (p, _) in zip(contexts, drawn)}, {c: q for c, (_, q) in zip(contexts, drawn)}


@settings(deadline=None, max_examples=40)
@given(rounds())
def test_a_whole_round_writes_the_targets_joint_law(game):
    k, vocab, p, q = game
    expected = torch.tensor([joint(p, text) for text in texts(vocab, k + 1)], dtype=torch.float64)
    torch.testing.assert_close(law_of_one_round(p, q, vocab, k).flatten(), expected, atol=1e-12, rtol=0)


def law_of_rounds(p, drawn, q, vocab, k, m, total):
    """The law of the first m tokens, over as many rounds as it takes, of drafts from ``drawn`` that are scored as q.

    A run of ``total`` new tokens, whose last rounds draft less: a round that starts after n tokens has room for
    total − n − 1 guesses. All three are functions of the text so far. With drawn = q this is the rule; else a bug.
    """
    law = torch.zeros([vocab] * m, dtype=torch.float64)

    def write(text, start, mass):
        if len(text) == m:
            law[text] += mass
        elif len(text) - start == min(k, total - start - 1):
            for x in range(vocab):
                write((*text, x), len(text) + 1, mass * float(p[text][x]))
        else:
            passes, correction = acceptance(p[text], q[text]), residual(p[text], q[text])
            rejected = float((drawn[text] * (1 - passes)).sum())
            for x in range(vocab):
                write((*text, x), start, mass * float(drawn[text][x] * passes[x]))
                write((*text, x), len(text) + 1, mass * rejected * float(correction[x]))

    write((), 0, 1.0)
    return law


@settings(deadline=None, max_examples=40)
@given(rounds(), st.integers(1, 3))
def test_rounds_after_rounds_write_the_targets_joint_law(game, draft_length):
    k, vocab, p, q = game
    m = k + 1
    expected = torch.tensor([joint(p, text) for text in texts(vocab, m)], dtype=torch.float64)
    found = law_of_rounds(p, q, q, vocab, draft_length, m, m)
    torch.testing.assert_close(found.flatten(), expected, atol=1e-12, rtol=0)


def test_the_enumeration_tells_a_wrong_score_from_a_right_one():
    p, drawn, scored = ({(): torch.tensor(x, dtype=torch.float64)} for x in ([0.6, 0.4], [1.0, 0.0], [0.8, 0.2]))
    law = law_of_rounds(p, drawn, scored, 2, 1, 1, 2)
    torch.testing.assert_close(law, torch.tensor([0.75, 0.25], dtype=torch.float64))


# --- the function decides as the rule says: with the random numbers in hand ---


@pytest.fixture
def forced(monkeypatch):
    """Set every random number of the acceptance test to one value."""

    def force(value):
        monkeypatch.setattr(
            verification, "uniform", lambda shape, like, *rest: torch.full(tuple(shape), value, dtype=like.dtype)
        )

    return force


def one_place(p, q, guess):
    """One row with one guess: target [1, 2, V] (the second place uniform), draft [1, 1, V]."""
    p, q = (torch.tensor(x, dtype=torch.float64) for x in (p, q))
    return torch.tensor([[guess]]), q[None, None], torch.stack([p, torch.full_like(p, 1 / len(p))])[None]


@pytest.mark.parametrize(("r", "accepted"), [(0.0, 1), (0.624999, 1), (0.625001, 0), (0.999999, 0)])
def test_a_guess_stands_while_r_is_below_p_over_q(forced, r, accepted):
    forced(r)
    assert int(verify_sample(*one_place([0.5, 0.3, 0.2], [0.8, 0.1, 0.1], 0)).num_accepted) == accepted


def test_a_token_the_target_never_writes_is_rejected_even_at_r_0(forced):
    forced(0.0)
    draft = one_place([0.0, 0.7, 0.3], [0.9, 0.1, 0.0], 0)
    for seed in range(50):
        verdict = verify_sample(*draft, generator=torch.Generator().manual_seed(seed))
        assert int(verdict.num_accepted) == 0
        assert int(verdict.next_token) in (1, 2)
    assert int(ZOO["r at most the ratio"].function(*draft).num_accepted) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_rejection_where_p_equals_q_falls_back_to_p(forced, dtype):
    forced(1.0)  # never drawn, but rounding can make p/q a little less than 1
    p = torch.tensor([0.25, 0.75, 0.0, 0.0], dtype=dtype)
    torch.testing.assert_close(residual(p, p), p.float() if dtype != torch.float64 else p)
    n = 2000
    target = p.expand(n, 2, 4)
    verdict = verify_sample(torch.ones(n, 1, dtype=torch.long), target[:, :1], target, generator=seeded())
    assert verdict.num_accepted.tolist() == [0] * n
    assert specnb.chi_square(verdict.next_token.bincount(minlength=4), [0.25, 0.75, 0, 0]).pvalue > 1e-6


def test_all_guesses_after_the_first_rejection_are_dropped(forced):
    forced(0.5)
    p = torch.tensor([[[0.9, 0.1], [0.1, 0.9], [0.9, 0.1], [0.5, 0.5]]])
    verdict = verify_sample(torch.tensor([[0, 0, 0]]), torch.tensor([[[0.9, 0.1]] * 3]), p)
    assert (int(verdict.num_accepted), int(verdict.next_token)) == (1, 1)


def test_the_subtraction_goes_by_token_not_by_place_in_a_sorted_list():
    p, q = torch.tensor([0.1, 0.6, 0.3]), torch.tensor([0.5, 0.3, 0.2])
    torch.testing.assert_close(residual(p, q), torch.tensor([0.0, 0.75, 0.25]))
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(residual(p[order], q[order]), residual(p, q)[order])


def test_a_seed_decides_the_verdict():
    game = random_rows(500, "drawn")
    first, again, other = (verify_sample(*game, generator=seeded(s)) for s in (1, 1, 2))
    assert torch.equal(first.num_accepted, again.num_accepted)
    assert torch.equal(first.next_token, again.next_token)
    assert not torch.equal(first.next_token, other.next_token)


def test_a_generator_per_row_makes_rows_independent_of_their_neighbours():
    guesses, q, p = random_rows(6, "drawn")
    whole = verify_sample(guesses, q, p, generator=[seeded(b) for b in range(6)])
    alone = [verify_sample(guesses[b, None], q[b, None], p[b, None], generator=[seeded(b)]) for b in range(6)]
    assert whole.next_token.tolist() == [int(v.next_token) for v in alone]
    assert whole.num_accepted.tolist() == [int(v.num_accepted) for v in alone]


def test_lengths_of_zero_are_plain_sampling():
    guesses, q, p = random_rows(4, "drawn")
    p[:, 0] = torch.eye(6)[[3, 1, 0, 5]]
    verdict = verify_sample(guesses, q, p, torch.zeros(4, dtype=torch.long))
    assert verdict.num_accepted.tolist() == [0] * 4
    assert verdict.next_token.tolist() == [3, 1, 0, 5]


def test_token_id_0_is_an_ordinary_token():
    one_hot = torch.tensor([1.0, 0.0, 0.0]).expand(1, 3, 3)
    verdict = verify_sample(torch.tensor([[0, 0]]), None, one_hot)
    assert (int(verdict.num_accepted), int(verdict.next_token)) == (2, 0)


# --- what cannot be judged ---


@pytest.mark.parametrize("whose", ["target", "draft"])
def test_nan_names_row_and_position(whose):
    guesses, q, p = random_rows(3, "drawn")
    (p if whose == "target" else q)[2, 1, 4] = float("nan")
    with pytest.raises(ValueError, match=f"{whose}'s scores hold NaN in row 2 at position 1"):
        verify_sample(guesses, q, p)


def test_nan_in_a_place_the_row_does_not_use_is_no_error():
    guesses, q, p = random_rows(2, "drawn")
    p[1, 2:], q[1, 1:] = float("nan"), float("nan")
    verdict = verify_sample(guesses, q, p, torch.tensor([3, 1]))
    assert int(verdict.next_token.max()) < 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g, q, p: (g, q, p * 2), "target_probs.* is no distribution: it sums to 2"),
        (lambda g, q, p: (g, q.log(), p), "draft_probs.* is no distribution"),
        (lambda g, q, p: (g, q[:, :2], p), r"draft_probs must be \[B, K, V\]"),
        (lambda g, q, p: (g, q[..., :5], p), r"draft_probs must be \[B, K, V\]"),
        (lambda g, q, p: (g + 6, q, p), "vocabulary 0…5"),
        (lambda g, q, p: (g, q, p[:, :3]), r"K \+ 1 places"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        verify_sample(*change(*random_rows(2, "drawn")))


# --- extremes ---

EXTREME = st.sampled_from([-math.inf, -3e38, -6e4, -100.0, -1e-30, 0.0, 1e-8, 1.0, 88.8, 6e4, 3e38])
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@st.composite
def extreme_rows(draw):
    """Guesses, q and p of a few rows, made by softmax of extreme logits (each row keeps a finite one) in any dtype."""
    rows, k, vocab = draw(st.integers(1, 3)), draw(st.integers(0, 3)), draw(st.integers(1, 5))
    dtype = draw(st.sampled_from(DTYPES))
    limit = torch.finfo(dtype).max
    count = rows * (2 * k + 1) * vocab
    logits = torch.tensor(draw(st.lists(EXTREME, min_size=count, max_size=count)), dtype=torch.float64)
    logits = torch.where(logits.isinf(), logits, logits.clamp(-limit, limit)).reshape(rows, 2 * k + 1, vocab)
    logits[logits.isinf().all(-1)] = 0.0
    probs = logits.to(dtype).softmax(-1)
    guesses = torch.tensor(draw(st.lists(st.integers(0, vocab - 1), min_size=rows * k, max_size=rows * k)))
    return guesses.long().reshape(rows, k), probs[:, k + 1 :], probs[:, : k + 1]


@settings(deadline=None, max_examples=400)
@given(extreme_rows(), st.booleans(), st.sampled_from([None, 0.0, 1 - 2**-24]))
def test_no_finite_logits_break_the_rule(game, deterministic, r):
    guesses, q, p = game
    with pytest.MonkeyPatch.context() as patch:
        if r is not None:
            patch.setattr(verification, "uniform", lambda s, like, *rest: torch.full(tuple(s), r, dtype=like.dtype))
        verdict = verify_sample(guesses, None if deterministic else q, p)
    rows = torch.arange(len(p))
    assert bool((p[rows, verdict.num_accepted, verdict.next_token] > 0).all())
    for b, n in enumerate(verdict.num_accepted.tolist()):
        assert all(p[b, i, guesses[b, i]] > 0 for i in range(n))


@settings(deadline=None, max_examples=300)
@given(extreme_rows())
def test_no_finite_logits_give_a_nan_or_a_negative_probability(game):
    _, q, p = game
    for law in (residual(p[:, :-1], q), emitted_distribution(p[:, :-1], q)):
        assert bool(law.isfinite().all())
        assert bool((law >= 0).all())
        torch.testing.assert_close(law.sum(-1), torch.ones_like(law[..., 0]), atol=1e-2, rtol=0)


def test_minus_infinity_in_one_row_does_not_reach_another():
    logits = torch.zeros(2, 3, 4)
    logits[0, :, 1:] = float("-inf")
    p = logits.softmax(-1)
    game = (torch.tensor([[0, 0], [2, 3]]), p[:, :2], p)
    nexts = torch.stack([verify_sample(*game, generator=seeded(s)).next_token for s in range(200)])
    assert nexts[:, 0].tolist() == [0] * 200
    assert sorted(set(nexts[:, 1].tolist())) == [0, 1, 2, 3]


@pytest.mark.parametrize("temperature", [1e-8, 1e-4])
def test_a_temperature_near_0_writes_the_favourite_always(temperature):
    logits = torch.randn(50, 3, 6, generator=torch.Generator().manual_seed(0))
    p = processed(logits, temperature)
    guesses = torch.randint(0, 6, (50, 2), generator=torch.Generator().manual_seed(1))
    for q in (None, torch.full((50, 2, 6), 1 / 6)):
        verdict = verify_sample(guesses, q, p)
        favourite = logits.argmax(-1)
        assert verdict.next_token.tolist() == favourite[torch.arange(50), verdict.num_accepted].tolist()
        agreed = verification.accepted_prefix(guesses == favourite[:, :2], torch.full((50,), 2))
        assert verdict.num_accepted.tolist() == agreed.tolist()


# --- by the hundred thousand ---

DRAWS, M = 100_000, 3
TABLES = {
    "plain": random_tables(6, seed=3, temperature=1.0, top_k=6),
    "T = 0.7": random_tables(6, seed=3, temperature=0.7, top_k=6),
    "top-k": random_tables(6, seed=3, temperature=1.0, top_k=3),
}
KINDS = ["drawn", "copy", "one-hot", "one-hot as q", "ragged"]
LEVEL = 1e-6 / (len(TABLES) * len(KINDS) * 3)  # together 1e-6


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def draft_rows(tables, n, k, kind, generator):
    """k guesses for each of n rows after token 0, LongTensor [n, k], and the q they are scored with, [n, k, V]."""
    table = tables.p if kind == "copy" else processed(tables.draft, tables.temperature, tables.top_k)
    if kind.startswith("one-hot"):
        table = torch.eye(6)[tables.draft.argmax(-1)]
    tokens, laws = [torch.zeros(n, dtype=torch.long)], []
    for _ in range(k):
        laws.append(table[tokens[-1]])
        tokens.append(torch.multinomial(laws[-1], 1, generator=generator).squeeze(1))
    return torch.stack(tokens[1:], dim=1), None if kind == "one-hot" else torch.stack(laws, dim=1)


def random_rows(n, kind, k=3):
    """Arguments of `verify_sample` for n rows of one table, all after token 0."""
    tables = TABLES["plain"]
    guesses, q = draft_rows(tables, n, k, kind, seeded())
    return guesses, q, tables.p[torch.cat([torch.zeros(n, 1, dtype=torch.long), guesses], dim=1)]


def one_round(tables, n, k, kind, rule=verify_sample, seed=0):
    """n texts of M tokens: one round of k guesses in one call, and plain draws from p for what is missing."""
    generator = seeded(seed)
    guesses, q = draft_rows(tables, n, k, kind, generator)
    p = tables.p[torch.cat([torch.zeros(n, 1, dtype=torch.long), guesses], dim=1)]
    lengths = torch.randint(0, k + 1, (n,), generator=generator) if kind == "ragged" else None
    verdict = rule(guesses, q, p, lengths, generator=generator)
    text = torch.zeros(n, 1 + M + k + 1, dtype=torch.long)
    text, length = bugs._write(text, torch.ones(n, dtype=torch.long), guesses, verdict, M + k)
    for place in range(2, M + 1):
        plain = torch.multinomial(tables.p[text[:, place - 1]], 1, generator=generator).squeeze(1)
        text[:, place] = torch.where(length <= place, plain, text[:, place])
    return text[:, 1 : M + 1]


@pytest.mark.statistical
@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("processors", TABLES)
def test_a_round_follows_the_target(processors, kind, k):
    """False alarms: 1e-6 for all of these together. The test below shows that the same audit fails wrong rules."""
    tables = TABLES[processors]
    result = specnb.audit(lambda n, seed: one_round(tables, n, k, kind), tables.law(M), n=DRAWS, level=LEVEL)
    assert result.passed, result
    assert result.power > 0.99


@pytest.mark.statistical
@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("kind", ["drawn", "one-hot", "ragged"])
@pytest.mark.parametrize("processors", TABLES)
def test_a_correction_from_p_does_not(processors, kind, k):
    rule = ZOO["resample from p"].function
    tables = TABLES[processors]
    law = tables.law(M)
    assert not specnb.audit(lambda n, seed: one_round(tables, n, k, kind, rule), law, n=DRAWS, level=LEVEL).passed


@pytest.mark.statistical
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_every_row_of_a_batch_follows_its_own_target(batch):
    """2,500 calls of a small batch whose rows have laws of their own; level 1e-6 in all. Swapped rows must fail."""
    tables, calls = TABLES["plain"], 2500
    generator, first = seeded(batch), torch.arange(batch)
    p = tables.p[first][:, None].expand(batch, 2, 6)
    q = processed(tables.draft)[first][:, None]
    texts = []
    for _ in range(calls):
        guesses = torch.multinomial(q[:, 0], 1, generator=generator)
        verdict = verify_sample(guesses, q, p, generator=generator)
        texts.append(torch.where(verdict.num_accepted > 0, guesses[:, 0], verdict.next_token))
    drawn = torch.stack(texts)  # [calls, B]
    pvalues = [
        [specnb.chi_square(drawn[:, b].bincount(minlength=6), tables.p[c]).pvalue for c in range(4)] for b in first
    ]
    assert all(row[b] > 1e-6 / 7 for b, row in enumerate(pvalues))
    assert all(row[(b + 1) % 4] < 1e-6 / 7 for b, row in enumerate(pvalues))


@pytest.mark.statistical
def test_a_deterministic_guess_is_one_hot():
    """100,000 draws at 1e-6: token 0 comes with probability 0.6. Scored with the draft's softmax it comes with 0.75."""
    p = torch.tensor([0.6, 0.4]).expand(DRAWS, 2, 2)
    q = torch.tensor([0.8, 0.2]).expand(DRAWS, 1, 2)
    guesses = q.argmax(-1)

    def written(q):
        verdict = verify_sample(guesses, q, p, generator=seeded())
        return torch.where(verdict.num_accepted > 0, guesses[:, 0], verdict.next_token).bincount(minlength=2)

    assert specnb.chi_square(written(None), [0.6, 0.4]).pvalue > 1e-6
    assert specnb.chi_square(written(q), [0.6, 0.4]).pvalue < 1e-6
    assert specnb.chi_square(written(q), [0.75, 0.25]).pvalue > 1e-6


@pytest.mark.statistical
def test_q_is_what_was_drawn_from():
    """100,000 draws at 1e-6 of guesses drawn after top-k: right if scored so, wrong if scored by the raw logits."""
    p, raw = torch.tensor([0.3, 0.3, 0.2, 0.2]), torch.tensor([0.4, 0.3, 0.2, 0.1])
    top = torch.tensor([4 / 7, 3 / 7, 0.0, 0.0])
    guesses = torch.multinomial(top, DRAWS, replacement=True, generator=seeded())[:, None]

    def pvalue(q):
        verdict = verify_sample(guesses, q.expand(DRAWS, 1, 4), p.expand(DRAWS, 2, 4), generator=seeded(1))
        written = torch.where(verdict.num_accepted > 0, guesses[:, 0], verdict.next_token)
        return specnb.chi_square(written.bincount(minlength=4), p).pvalue

    assert pvalue(top) > 1e-6
    assert pvalue(raw) < 1e-6
