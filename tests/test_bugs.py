"""The zoo: every lossy entry is caught, the right rule passes, and the slow ones pass and are slow.

All tests here are statistical, with fixed seeds and the audit's default sample size.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from scipy import stats as scipy_stats

import specnb
from specnb import bugs, verification
from specnb.bugs import ZOO, play, random_tables, sampler
from specnb.oracle import exact_law, loop_sampler
from tests.tiny import perturbed, tiny_model

pytestmark = pytest.mark.statistical

TABLES = random_tables()
M = 3
LAW = TABLES.law(M)
AT_THE_TABLE = {name: bug for name, bug in ZOO.items() if bug.place != "run"}
LOSSY = [name for name, bug in AT_THE_TABLE.items() if bug.effect == "lossy"]
SLOW = [name for name, bug in ZOO.items() if bug.effect == "slow"]
RUNS = [name for name, bug in ZOO.items() if bug.place == "run"]


def estimated_law(bug, n=150_000, seed=1):
    """The law of what a bug writes, from a large sample of its own."""
    cells = bugs.play(bug, TABLES, n, M, seed=seed).tokens @ torch.tensor([36, 6, 1])
    return (cells.bincount(minlength=216) / n).reshape(6, 6, 6)


@pytest.mark.parametrize("name", LOSSY)
def test_every_lossy_bug_is_caught_with_power(name):
    """Power ≥ 0.99 at the default sample size: stated for the bug's own law, and shown on three seeds of three."""
    default = specnb.audit(sampler(None, TABLES), LAW)
    against = specnb.audit(sampler(None, TABLES), LAW, n=default.n, alternative=estimated_law(ZOO[name]))
    assert against.power >= 0.99
    assert not any(specnb.audit(sampler(ZOO[name], TABLES), LAW, seed=seed).passed for seed in range(3))


def test_the_right_rule_passes_as_often_as_stated():
    """200 audits at 0.05: more than 27 alarms has probability below 1e-6. A law slightly off alarms far more often."""
    n = specnb.audit(sampler(None, TABLES), LAW).n
    skewed = LAW.clone()
    skewed[LAW.sum((1, 2)).argmax()] *= 1.1
    skewed /= skewed.sum()
    texts = [text for seed in range(40) for text in play(None, TABLES, 5 * n, M, seed=seed).tokens.split(n)]
    audits = [specnb.audit(lambda n, seed, text=text: text, LAW, n=n, level=0.05) for text in texts]
    assert sum(not audit.passed for audit in audits) <= 27
    assert sum(specnb.chi_square(_counts(text), LAW).pvalue < 0.05 for text in texts) <= 27
    assert sum(specnb.chi_square(_counts(text), skewed).pvalue < 0.05 for text in texts) > 27
    assert all(audit.pvalue >= 1e-6**1.25 for audit in audits)
    assert scipy_stats.kstest([audit.pvalue for audit in audits], "uniform").pvalue > 1e-6


def _counts(text):
    return (text @ torch.tensor([36, 6, 1])).bincount(minlength=216).reshape(6, 6, 6)


@pytest.mark.parametrize("name", SLOW)
def test_lossless_but_slow_passes_and_shows_in_alpha(name):
    """Five audits at 1e-6 each; α from 50,000 texts, so that a difference of 0.02 is out of chance's reach."""
    assert all(specnb.audit(sampler(ZOO[name], TABLES), LAW, seed=seed).passed for seed in range(5))
    right, slow = (play(bug, TABLES, 50_000, M).alpha for bug in (None, ZOO[name]))
    assert slow < right - 0.02


def test_r_at_most_the_ratio_shows_only_at_zero(monkeypatch):
    """Its audit passes at 1e-6; with r forced to 0 it writes tokens of probability 0, and the right rule does not."""
    edge = ZOO["r at most the ratio"]
    assert specnb.audit(sampler(edge, TABLES), LAW).passed
    zeros = lambda shape, like, *rest: torch.zeros(tuple(shape), dtype=like.dtype)  # noqa: E731
    monkeypatch.setattr(verification, "uniform", zeros)
    assert specnb.audit(sampler(edge, TABLES), LAW).test.impossible > 0
    assert specnb.audit(sampler(None, TABLES), LAW).test.impossible == 0


PROMPT = torch.tensor([[1, 2, 3, 1, 2, 4, 1, 2]])


@pytest.fixture(scope="module")
def judge():
    """The audit of a run on a tiny model, spoilt or not: 1,500 draws of three tokens."""
    torch.set_num_threads(1)
    target = tiny_model("llama", vocab_size=7, initializer_range=0.15, seed=1)
    law = exact_law(target, PROMPT, M, do_sample=True, top_k=4)

    def judged(spoil):
        drafter = specnb.DraftModel(perturbed(target, 1.0), 3)
        draws = loop_sampler(target, PROMPT, drafter, M, spoil=spoil, top_k=4)
        return specnb.audit(draws, law, n=1500, alternative=0.15)

    return judged


@pytest.mark.parametrize("name", RUNS)
def test_a_spoilt_run_is_caught(judge, name):
    """At level 1e-6; the next test is its control."""
    assert not judge(ZOO[name].function).passed


def test_an_unspoilt_run_passes(judge):
    """False alarms: 1e-6. Power 0.99 against any law with w² = 0.15."""
    result = judge(None)
    assert result.passed
    assert result.power >= 0.99


def test_tables_have_the_law_that_plain_draws_have():
    """100,000 texts written without a draft, at 1e-6; another temperature must fail."""
    generator = torch.Generator().manual_seed(0)
    text = [torch.zeros(100_000, dtype=torch.long)]
    for _ in range(M):
        text.append(torch.multinomial(TABLES.p[text[-1]], 1, generator=generator).squeeze(1))
    tokens = torch.stack(text[1:], dim=1)
    hotter = bugs.Tables(TABLES.target, TABLES.draft, 0.8, TABLES.top_k)
    assert specnb.audit(lambda n, seed: tokens, LAW, n=100_000).passed
    assert not specnb.audit(lambda n, seed: tokens, hotter.law(M), n=100_000).passed


@pytest.mark.parametrize("bug", ZOO.values(), ids=ZOO)
def test_every_entry_explains_itself_and_has_the_signature_of_what_it_replaces(bug):
    right = {"rule": specnb.verify_sample, "draft": bugs.draw_and_score, "target": bugs.processed}.get(bug.place)
    assert len(bug.explanation) > 80
    assert bug.effect in ("lossy", "slow", "edge")
    assert bug.lossy == (bug.effect != "slow")
    if right is not None:
        assert list(inspect.signature(bug.function).parameters) == list(inspect.signature(right).parameters)


def test_a_spoilt_run_needs_a_model():
    with pytest.raises(ValueError, match="loop_sampler"):
        play(ZOO["forgotten rollback"], TABLES, 10)
