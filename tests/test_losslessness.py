"""The whole loop against the exact law: every drafter, every kind of processor, several draft lengths.

All laws are written out by `specnb.exact_law`, which is itself checked against transformers first. The number of draws
is what catches, with power 0.99, a draft that is scored at the wrong temperature; that fault's law is enumerated too,
and planted.

Marked statistical; seeds are fixed, false-alarm rates stated.
"""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import specnb
from specnb.bugs import ZOO
from specnb.decoding import decode_requests
from specnb.drafters import Draft
from specnb.oracle import conditional_law, exact_law, loop_sampler
from specnb.preparation import prepare
from tests.conftest import DRAFTERS
from tests.test_sampling import law_of_rounds, texts
from tests.tiny import perturbed, tiny_model

VOCAB = 7
PROMPT = torch.tensor([[1, 2, 3, 1, 2, 4, 1, 2]])
PROCESSORS = {
    "plain": {},
    "T = 0.7": {"temperature": 0.7},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.1},
    "repetition penalty": {"repetition_penalty": 1.3},
}
LENGTHS = {1: 2, 3: 3, 5: 2}  # k → tokens tested
LOOPS = {**DRAFTERS, "far": lambda model: specnb.DraftModel(far_draft())}
LEVEL = 1e-6 / (len(LOOPS) * len(PROCESSORS) * len(LENGTHS))  # together 1e-6


def sampling(processors):
    """Options of a run: transformers' own default of top_k = 50 switched off."""
    return {"do_sample": True, "top_k": 0, **processors}


@functools.cache
def target():
    return tiny_model("llama", vocab_size=VOCAB, initializer_range=0.15, seed=2)


@functools.cache
def far_draft():
    """A draft that agrees with the target less than half of the time."""
    return perturbed(target(), 1.0)


@functools.cache
def law(processors, m):
    return exact_law(target(), PROMPT, m, **sampling(PROCESSORS[processors]))


# --- the oracle itself ---


class Ban(LogitsProcessor):
    """A custom processor that depends on the context: the last token may not come again."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -1:], float("-inf"))


ALL_OPTIONS = {
    **PROCESSORS,
    "typical-p": {"typical_p": 0.8},
    "custom": {"logits_processor": LogitsProcessorList([Ban()])},
    "all at once": {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize("option", ALL_OPTIONS)
def test_the_oracle_holds_what_transformers_samples_from(option):
    """Along texts that transformers draws itself, its scores at every step are the oracle's conditional laws."""
    options = sampling(ALL_OPTIONS[option])
    joint = exact_law(target(), PROMPT, 3, **options)
    torch.manual_seed(0)
    for _ in range(5):
        mask = torch.ones_like(PROMPT)
        out = target().generate(
            PROMPT, attention_mask=mask, max_new_tokens=3, output_scores=True, return_dict_in_generate=True, **options
        )
        new = out.sequences[0, PROMPT.shape[1] :].tolist()
        for i, scores in enumerate(out.scores):
            conditional = joint.reshape(*[VOCAB] * (i + 1), -1).sum(-1)[tuple(new[:i])]
            torch.testing.assert_close(
                conditional / conditional.sum(), scores[0].double().softmax(-1), atol=1e-5, rtol=1e-4
            )


def test_the_oracle_sums_to_one_and_knows_greedy_search():
    assert float(law("top-k", 3).sum()) == pytest.approx(1, abs=1e-12)
    assert int((law("top-k", 3) > 0).sum()) == 4**3
    greedy = exact_law(target(), PROMPT, 2, do_sample=False)
    expected = target().generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=2, do_sample=False)
    assert greedy[tuple(expected[0, -2:].tolist())] == 1


@pytest.mark.parametrize(
    ("prompt", "m", "options", "message"),
    [
        (PROMPT.repeat(2, 1), 2, {}, "one prompt"),
        (PROMPT, 9, {}, "too many"),
        (PROMPT, 2, {"eos_token_id": 3}, "eos_token_id=None"),
    ],
)
def test_what_the_oracle_cannot_write_out_is_refused(prompt, m, options, message):
    with pytest.raises(ValueError, match=message):
        exact_law(target(), prompt, m, do_sample=True, **options)


# --- a draft scored at the wrong temperature: enumerated, then planted ---


class WrongTemperature(specnb.DraftModel):
    """Draws as it should, and reports q as if the temperature had been 0.4 times what it was."""

    def draft(self, rows, limits):
        draft = super().draft(rows, limits)
        return draft if draft.probs is None else Draft(draft.tokens, draft.lengths, sharpened(draft.probs))


def sharpened(q):
    return (q.log() / 0.4).softmax(-1)


def tables(model, options, m):
    """The model's law after every text of fewer than m tokens, under the run's processors: {text: [V]}."""
    request = prepare(target(), PROMPT[0].tolist(), None, {**options, "max_new_tokens": m})[0]
    contexts = {text: None for n in range(m) for text in texts(VOCAB, n)}
    return {
        text: conditional_law(model, torch.tensor([PROMPT[0].tolist() + list(text)]), request)[0].detach()
        for text in contexts
    }


@functools.cache
def wrong_law(processors, k):
    """What the far draft, scored at the wrong temperature, makes of the first tokens."""
    options, m = sampling(PROCESSORS[processors]), LENGTHS[k]
    p, q = tables(target(), options, m), tables(far_draft(), options, m)
    return law_of_rounds(p, q, {text: sharpened(x) for text, x in q.items()}, VOCAB, k, m, k + 1)


def audited(drafter, processors, k):
    """The audit of the loop, with the draws that the wrong temperature needs."""
    m = LENGTHS[k]
    draws = loop_sampler(target(), PROMPT, drafter, m, **{"max_new_tokens": k + 1, **sampling(PROCESSORS[processors])})
    return specnb.audit(draws, law(processors, m), level=LEVEL, alternative=wrong_law(processors, k))


@pytest.mark.statistical
@pytest.mark.parametrize("k", LENGTHS)
@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("name", LOOPS)
def test_the_loop_follows_the_target(name, processors, k):
    """False alarms: 1e-6 for all drafters, processors and k together. Power 0.99 against the wrong temperature."""
    drafter = LOOPS[name](target())
    if drafter is not None:
        drafter.num_draft_tokens = k
    result = audited(drafter, processors, k)
    assert result.passed, result
    assert result.power >= 0.99


@pytest.mark.statistical
@pytest.mark.parametrize("k", LENGTHS)
@pytest.mark.parametrize("processors", PROCESSORS)
def test_a_draft_scored_at_the_wrong_temperature_does_not(processors, k):
    """Missed with probability 0.01 each, were the seed drawn anew; scored rightly, the same draft passes above."""
    assert not audited(WrongTemperature(far_draft(), k), processors, k).passed


def test_the_enumerated_fault_is_the_planted_one():
    """Without its wrong score the enumeration gives the target's own law: drafts, rounds and room are counted right."""
    options = sampling(PROCESSORS["top-k"])
    p, q = tables(target(), options, 3), tables(far_draft(), options, 3)
    found = law_of_rounds(p, q, q, VOCAB, 3, 3, 4)
    torch.testing.assert_close(found, law("top-k", 3), atol=1e-6, rtol=0)


# --- prompts and batches ---


@pytest.mark.statistical
@pytest.mark.parametrize("drafter", [specnb.PromptLookup(3), specnb.PromptLookup(5, max_ngram=1)])
def test_a_prompt_of_repeated_tokens_does_not_change_the_law(drafter):
    """n-grams match everywhere: 1e-6 each, power 0.99 against a law with w² = 0.1. Another prompt's law must fail."""
    ids = torch.tensor([[5, 5, 5, 5, 2, 5, 5, 5, 5, 5]])
    draws = loop_sampler(target(), ids, drafter, 2, top_k=0)
    repeated, other = (exact_law(target(), x, 2, do_sample=True, top_k=0) for x in (ids, PROMPT))
    result = specnb.audit(draws, repeated, alternative=0.1)
    assert result.passed, result
    assert not specnb.audit(draws, other, n=result.n).passed


@pytest.mark.statistical
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_every_row_of_a_ragged_batch_follows_its_own_law(batch, make_drafter):
    """Rows of different prompts, 1,000 copies of the batch in one run: 1e-6 for all. A neighbour's law must fail."""
    prompts = [[1, 2, 3, 1, 2, 4, 1, 2], [5, 6], [3, 3, 3, 3, 1], [6, 0, 2, 6, 0]][:batch]
    options = {**sampling({}), "max_new_tokens": 4}
    requests = [prepare(target(), prompt, None, options)[0] for prompt in prompts] * 1000
    padded = torch.zeros(len(requests), 8, dtype=torch.long)
    torch.manual_seed(batch)
    out = decode_requests(target(), padded, requests, make_drafter(target()))
    new = out.sequences[:, 8:10].reshape(1000, batch, 2)
    laws = [exact_law(target(), torch.tensor([prompt]), 2, **options) for prompt in prompts]
    level = 1e-6 / (7 * len(DRAFTERS))
    for b in range(batch):
        assert specnb.audit(lambda n, seed, b=b: new[:, b], laws[b], n=1000, level=level).passed
        if batch > 1:
            neighbour = laws[(b + 1) % batch]
            assert not specnb.audit(lambda n, seed, b=b: new[:, b], neighbour, n=1000, level=level).passed


@pytest.mark.statistical
@pytest.mark.parametrize("option", ["typical-p", "custom", "all at once"])
def test_other_processors_too(option):
    """1e-6 each, power 0.99 against a law with w² = 0.1; the law without the processors must fail."""
    options = sampling(ALL_OPTIONS[option])
    draws = loop_sampler(target(), PROMPT, specnb.DraftModel(far_draft(), 3), 2, **options)
    result = specnb.audit(draws, exact_law(target(), PROMPT, 2, **options), alternative=0.1)
    assert result.passed, result
    assert not specnb.audit(draws, law("plain", 2), n=result.n).passed


# --- the control: transformers' own assisted generation, through the same audit ---


@functools.cache
def control_pair():
    """A target of two layers and hidden size 16, cheap to call five thousand times, and another model of one layer."""
    sizes = {"vocab_size": 6, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    return [tiny_model("llama", seed=n, num_hidden_layers=n, num_key_value_heads=1, **sizes) for n in (2, 1)]


ASSISTED = {
    "draft model": lambda: {"assistant_model": control_pair()[1]},
    "prompt lookup": lambda: {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.statistical
@pytest.mark.slow
@pytest.mark.parametrize("assistant", ASSISTED)
def test_transformers_own_assisted_generation_follows_its_target(assistant):
    """2,500 draws at 1e-6, power 0.99 against a law with w² = 0.05; the law at another temperature must fail.

    Found: both pass.
    """
    model, options = control_pair()[0], {"do_sample": True, "top_k": 0, "max_new_tokens": 2}

    torch.manual_seed(0)
    mask = torch.ones_like(PROMPT)
    runs = (model.generate(PROMPT, attention_mask=mask, **options, **ASSISTED[assistant]()) for _ in range(2500))
    draws = torch.cat([tokens[:, PROMPT.shape[1] :] for tokens in runs])
    right, colder = (exact_law(model, PROMPT, 2, temperature=t, **options) for t in (1.0, 0.8))
    result = specnb.audit(lambda n, seed: draws, right, n=2500, alternative=0.05)
    assert result.passed, result
    assert result.power >= 0.99
    assert not specnb.audit(lambda n, seed: draws, colder, n=2500).passed


# --- the real model: the next token at ten contexts ---

STORY = (
    "The north wind blew past the old bridge. The miller heard the north wind and closed the door. The miller's wife "
    "heard the door and said that the north wind had blown past the old bridge again. The miller opened the door and "
    "the north wind blew past the miller's wife. Nobody heard the old bridge."
)
TEMPERED = {"do_sample": True, "temperature": 0.9, "top_k": 50, "max_new_tokens": 1}


@pytest.fixture(scope="module")
def places(real):
    """Ten contexts of the story where prompt lookup has a guess, as (p, q, guess) over the tokens either can write.

    Tokens outside both top-k sets have probability 0 in p and in q: leaving them out changes no draw.
    """
    model, tokenizer = real
    ids = tokenizer(STORY, return_tensors="pt").input_ids
    request = prepare(model, ids[0].tolist(), None, TEMPERED)[0]
    with torch.no_grad():
        p, q = (request.processors(ids, m(ids).logits[0].float()).softmax(-1) for m in (model, perturbed(model, 0.1)))
    lookup, tokens = specnb.PromptLookup(), ids[0].tolist()
    guesses = {n: lookup.propose(tokens[: n + 1], 1) for n in range(12, len(tokens))}
    found = [n for n, guess in guesses.items() if guess][::3][:10]
    return [narrowed(p[n], q[n], guesses[n][0]) for n in found]


def narrowed(p, q, guess):
    """The same three over the tokens that p or q can write, and the guess: [S], [S], its place among them."""
    kept = (p + q).nonzero().flatten()
    kept = torch.cat([kept, torch.tensor([guess])]).unique()
    return p[kept], q[kept], int((kept == guess).nonzero())


def next_tokens(p, q, guess, rule, n=20_000):
    """How often each token is written by n rounds of one guess: the lookup's if q is None, else drawn from q."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.full((n,), guess) if q is None else torch.multinomial(q, n, replacement=True, generator=generator)
    scored = None if q is None else q.expand(n, 1, -1)
    verdict = rule(drawn[:, None], scored, p.expand(n, 2, -1), generator=generator)
    return torch.where(verdict.num_accepted > 0, drawn, verdict.next_token).bincount(minlength=len(p))


@pytest.mark.statistical
@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.parametrize("draft", ["lookup", "perturbed"])
def test_the_next_token_of_the_real_model(places, draft):
    """20,000 draws at each of ten contexts; false alarms 1e-6 for both drafts. A correction from p must fail."""
    assert len(places) == 10

    def pvalues(rule):
        drafts = [(p, None if draft == "lookup" else q, guess) for p, q, guess in places]
        return [specnb.chi_square(next_tokens(p, q, guess, rule), p, min_expected=30).pvalue for p, q, guess in drafts]

    assert not any(specnb.correct(pvalues(specnb.verify_sample), 5e-7**1.25).rejected)
    assert sum(specnb.correct(pvalues(ZOO["resample from p"].function), 5e-7**1.25).rejected) >= 5


# --- seeds and temperatures ---


def test_a_seed_reproduces_the_run(make_drafter):
    ids = torch.tensor([[1, 2, 3, 1, 2], [4, 4, 5, 4, 4]])
    first, again, other = (
        specnb.generate(target(), ids, make_drafter(target()), seed=seed, max_new_tokens=12, **sampling({})).sequences
        for seed in (5, 5, 50)
    )
    assert first.tolist() == again.tolist()
    assert first.tolist() != other.tolist()


def test_a_temperature_near_0_writes_the_greedy_text(make_drafter):
    expected = specnb.generate(target(), PROMPT, do_sample=False, max_new_tokens=12).sequences
    cold = specnb.generate(
        target(), PROMPT, make_drafter(target()), do_sample=True, temperature=1e-8, max_new_tokens=12
    )
    assert cold.sequences.tolist() == expected.tolist()


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_is_none_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature"):
        specnb.generate(
            target(), PROMPT, specnb.PromptLookup(), do_sample=True, temperature=temperature, max_new_tokens=4
        )
