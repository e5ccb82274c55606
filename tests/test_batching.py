"""Batcher: every request gets what it would get alone, whoever joins, leaves, fails or is cancelled beside it."""

from __future__ import annotations

import functools
import gc
import threading

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import specnb
from tests.conftest import DRAFTERS
from tests.tiny import CONTEXT, VOCAB, perturbed, plain, prompt, tiny_model
from tests.workers import steady

LENGTHS = (1, 40, 300, 7, 80, 250, 9)
NEW = 16


@functools.cache
def model_of(dtype=torch.float32):
    return tiny_model("llama").to(dtype)


@functools.cache
def alone(length, dtype=torch.float32, width=None, new=NEW):
    """The prompt of this length by itself: transformers' own text, or at a pass width specnb's without drafts."""
    ids = prompt(length, seed=length)
    if width is None:
        return plain(model_of(dtype), ids, max_new_tokens=new)[0, length:].tolist()
    return specnb.generate(model_of(dtype), ids, max_new_tokens=new, pass_width=width).sequences[0, length:].tolist()


def submitted(batcher, lengths=LENGTHS, **options):
    return [batcher.submit(prompt(n, seed=n), **options) for n in lengths]


# --- the same text as alone ---


@pytest.mark.parametrize("max_batch", [2, 3, 8])
def test_every_request_gets_the_text_of_its_prompt_alone(make_drafter, max_batch):
    drafter = make_drafter(model_of())
    batcher = specnb.Batcher(model_of(), drafter, max_batch=max_batch, max_new_tokens=NEW, prefill_chunk=32)
    jobs = submitted(batcher)
    batcher.run()
    assert [job.tokens for job in jobs] == [alone(n) for n in LENGTHS]
    assert {job.finish_reason for job in jobs} == {"length"}


@pytest.mark.parametrize("max_batch", [3, 8])
def test_at_one_pass_width_in_bfloat16_bit_for_bit(make_drafter, max_batch):
    """Prompts of 250 cross a bucket's edge while they write, those of 300 lie in another one than their neighbours."""
    half = model_of(torch.bfloat16)
    batcher = specnb.Batcher(half, make_drafter(half), max_batch=max_batch, max_new_tokens=NEW, pass_width=8)
    jobs = submitted(batcher)
    batcher.run()
    assert [job.tokens for job in jobs] == [alone(n, torch.bfloat16, 8) for n in LENGTHS]


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt2", "opt"])
def test_other_families(family):
    """Sliding windows, learned positions."""
    model = tiny_model(family)
    batcher = specnb.Batcher(model, specnb.DraftModel(perturbed(model), 3), max_batch=3, max_new_tokens=NEW)
    jobs = submitted(batcher, LENGTHS[:6])
    batcher.run()
    for n, job in zip(LENGTHS, jobs):
        assert job.tokens == plain(model, prompt(n, seed=n), max_new_tokens=NEW)[0, n:].tolist()


RULES = [
    {},
    {"do_sample": True, "seed": 11},
    {"do_sample": True, "temperature": 0.7, "top_k": 9, "seed": 12, "max_new_tokens": 9},
    {"do_sample": True, "temperature": 0.7, "top_k": 9, "seed": 13},
    {"repetition_penalty": 1.6, "max_new_tokens": 5},
    {"do_sample": True, "repetition_penalty": 1.3, "seed": 14},
    {"eos_token_id": 9},
]


@pytest.mark.parametrize("max_batch", [1, 4])
@pytest.mark.parametrize("name", [name for name in DRAFTERS if "adaptive" not in name])
def test_each_request_has_rules_and_seeds_of_its_own(name, max_batch):
    """Not with adaptive drafters: how many random numbers a round of theirs uses depends on the neighbours."""
    ids, make_drafter = prompt(12), DRAFTERS[name]
    batcher = specnb.Batcher(model_of(), make_drafter(model_of()), max_batch=max_batch, max_new_tokens=NEW)
    jobs = [batcher.submit(ids, **rules) for rules in RULES]
    batcher.run()
    for rules, job in zip(RULES, jobs):
        out = specnb.generate(model_of(), ids, make_drafter(model_of()), **{"max_new_tokens": NEW, **rules})
        assert job.tokens == out.sequences[0, 12:].tolist(), rules


def test_a_drafter_that_only_proposes_works():
    class Again(specnb.Drafter):
        def propose(self, context, limit):
            return context[:limit]

    batcher = specnb.Batcher(model_of(), Again(3), max_batch=2, max_new_tokens=NEW)
    jobs = submitted(batcher)
    batcher.run()
    assert [job.tokens for job in jobs] == [alone(n) for n in LENGTHS]


def test_a_draft_model_keeps_up_with_slots_that_change_hands():
    """A copy of the target is right about every token, so each row writes k + 1 tokens a pass, as it would alone."""
    batcher = specnb.Batcher(model_of(), specnb.DraftModel(model_of(), 3), max_batch=3, max_new_tokens=NEW)
    jobs = submitted(batcher)
    batcher.run()
    assert [job.completion().tokens_per_pass for job in jobs] == [4.0] * len(LENGTHS)


# --- in what order, and who waits for whom ---


def test_first_come_first_served():
    batcher = specnb.Batcher(model_of(), max_batch=2, max_new_tokens=4)
    jobs = submitted(batcher, (3,) * 7)
    seen = []
    while batcher.step():
        seen += [job.number for job in jobs if job.status != "waiting" and job.number not in seen]
    assert seen == sorted(seen)
    assert [job.slot for job in jobs] == [0, 1] * 3 + [0]


def test_a_long_prompt_does_not_hold_up_who_writes():
    batcher = specnb.Batcher(model_of(), max_batch=2, max_new_tokens=NEW, prefill_chunk=32)
    writer, reader = submitted(batcher, (7, 300))
    batcher.step()
    before = len(writer.tokens)
    for rounds in range(1, 9):
        batcher.step()
        assert (len(writer.tokens), reader.status) == (before + rounds, "reading")
    assert reader.result().tokens == alone(300)


def test_passes_are_over_the_rows_that_write_only(monkeypatch):
    """One slot of eight in use: the model sees one row. Two rows in different buckets: two passes of one row."""
    model = tiny_model("llama")
    shapes, forward = [], model.forward
    monkeypatch.setattr(model, "forward", lambda **kw: shapes.append(kw["input_ids"].shape) or forward(**kw))
    specnb.Batcher(model, specnb.DraftModel(model), max_new_tokens=8).submit(prompt(7)).result()
    assert {rows for rows, _ in shapes} == {1}
    batcher = specnb.Batcher(model, max_new_tokens=8, pass_width=4)
    for lengths, expected in (((20, 30), [(2, 4)] * 8), ((20, 300), [(1, 4)] * 16)):
        shapes.clear()
        submitted(batcher, lengths)
        batcher.run()
        assert [tuple(shape) for shape in shapes if shape[1] == 4] == expected


def test_tokens_stream_while_others_write():
    batcher = specnb.Batcher(model_of(), specnb.PromptLookup(), max_batch=2, max_new_tokens=NEW)
    heard = []
    jobs = submitted(batcher, (12, 40, 7), on_tokens=heard.extend)
    parts = [(job.number, list(tokens)) for job, tokens in batcher.stream()]
    for job in jobs:
        assert [t for number, tokens in parts if number == job.number for t in tokens] == job.tokens
    assert sorted(heard) == sorted(t for job in jobs for t in job.tokens)
    order = [number for number, _ in parts]
    assert order.index(1) < len(order) - 1 - order[::-1].index(0), "the second has begun before the first has ended"


def test_a_job_yields_its_tokens_and_more_can_be_submitted_meanwhile():
    batcher = specnb.Batcher(model_of(), max_batch=2, max_new_tokens=NEW)
    (first,) = submitted(batcher, (12,))
    tokens = []
    for token in first:
        if len(tokens) == 3:
            (late,) = submitted(batcher, (40,))
        tokens.append(token)
    assert (tokens, late.done, len(late.tokens) > 8) == (alone(12), False, True)
    assert list(late) == alone(40)


def test_several_threads_may_wait():
    batcher = specnb.Batcher(model_of(), specnb.PromptLookup(), max_batch=2, max_new_tokens=NEW)
    jobs, found = submitted(batcher, LENGTHS[:4]), {}
    threads = [threading.Thread(target=lambda job=job: found.update({job.number: job.result().tokens})) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {job.number: alone(n) for job, n in zip(jobs, LENGTHS)}


def test_the_account_of_a_request():
    batcher = specnb.Batcher(model_of(), specnb.DraftModel(model_of(), 4), max_batch=1, max_new_tokens=10)
    first, second = submitted(batcher, (12, 40))
    done = [first.result(), second.result()]
    for completion, n in zip(done, (12, 40)):
        expected = specnb.generate(model_of(), prompt(n, seed=n), specnb.DraftModel(model_of(), 4), max_new_tokens=10)
        for name in ("target_passes", "drafted", "accepted"):
            assert getattr(completion, name) == int(getattr(expected.stats, name)), name
        assert completion.tokens_per_pass == 5
        assert 0 <= completion.seconds_waiting <= completion.time_to_first_token <= completion.seconds
    assert done[1].seconds_waiting >= done[0].seconds - done[0].seconds_waiting


# --- a bounded queue, cancelling ---


def test_the_queue_has_a_bound():
    batcher = specnb.Batcher(model_of(), max_batch=1, max_waiting=2, max_new_tokens=4)
    jobs = submitted(batcher, (3, 3))
    with pytest.raises(specnb.QueueFull, match=r"2 requests are waiting.*wait=True"):
        batcher.submit([1, 2])
    jobs += submitted(batcher, (3, 3), wait=True)
    assert batcher.waiting <= 2
    batcher.run()
    assert [job.tokens for job in jobs] == [alone(3)[:4]] * 4


@pytest.mark.parametrize("when", ["waiting", "reading", "writing"])
def test_cancelling_frees_the_place_and_touches_nobody(when):
    batcher = specnb.Batcher(model_of(), specnb.DraftModel(model_of(), 2), max_batch=2, max_new_tokens=NEW)
    jobs = submitted(batcher, (12, 300, 40, 7))
    victim = jobs[{"waiting": 3, "reading": 1, "writing": 0}[when]]
    batcher.step()
    assert victim.status == when
    victim.cancel()
    victim.cancel()
    assert (victim.status, victim.result().finish_reason) == ("done", "cancelled")
    batcher.run()
    for job, n in zip(jobs, (12, 300, 40, 7)):
        assert job is victim or job.tokens == alone(n)
    assert victim.tokens == alone(len(victim.prompt))[: len(victim.tokens)]


def test_a_request_may_cancel_itself_when_it_has_seen_enough():
    batcher = specnb.Batcher(model_of(), max_batch=2, max_new_tokens=NEW)
    jobs = submitted(batcher, (12, 40))
    jobs[0]._on_tokens = lambda tokens: jobs[0].cancel() if len(jobs[0].tokens) == 3 else None
    batcher.run()
    assert (jobs[0].tokens, jobs[0].finish_reason) == (alone(12)[:3], "cancelled")
    assert jobs[1].tokens == alone(40)


def test_leaving_the_with_block_cancels_the_rest():
    with specnb.Batcher(model_of(), max_batch=1, max_new_tokens=NEW) as batcher:
        jobs = submitted(batcher, (12, 40))
        batcher.step()
    assert [job.finish_reason for job in jobs] == ["cancelled"] * 2
    assert (batcher.running, batcher.waiting) == (0, 0)


# --- what fails, fails alone ---


class Boom(Exception):
    pass


class RaiseAfter(LogitsProcessor):
    """Raises once the row has this many tokens."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= self.length:
            raise Boom("processor")
        return scores


class StopRaises(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] >= 20:
            raise Boom("criterion")
        return torch.zeros(len(input_ids), dtype=torch.bool)


def broken_listener(tokens):
    raise Boom("listener")


FAILURES = {
    "processor": {"logits_processor": LogitsProcessorList([RaiseAfter(18)])},
    "processor at once": {"logits_processor": LogitsProcessorList([RaiseAfter(0)])},
    "criterion": {"stopping_criteria": StoppingCriteriaList([StopRaises()])},
    "listener": {"on_tokens": broken_listener},
}


@pytest.mark.parametrize("failure", FAILURES)
def test_what_a_request_raises_fails_that_request_alone(failure, make_drafter):
    batcher = specnb.Batcher(model_of(), make_drafter(model_of()), max_batch=3, max_new_tokens=NEW)
    good = submitted(batcher, (40, 7))
    bad = batcher.submit(prompt(12, seed=12), **FAILURES[failure])
    good += submitted(batcher, (80, 9))
    batcher.run()
    with pytest.raises(Boom, match=failure.split()[0]):
        bad.result()
    assert bad.finish_reason == "error" and bad.tokens == alone(12)[: len(bad.tokens)]
    assert [job.tokens for job in good] == [alone(n) for n in (40, 7, 80, 9)]


class OddUntil(RaiseAfter):
    """Forbids even tokens before that."""

    def __call__(self, input_ids, scores):
        scores = super().__call__(input_ids, scores).clone()
        scores[:, ::2] = float("-inf")
        return scores


@pytest.mark.parametrize("drafter", [None, specnb.PromptLookup()], ids=["none", "lookup"])
def test_a_rule_that_raises_lets_nothing_through_that_it_has_not_seen(drafter):
    batcher = specnb.Batcher(model_of(), drafter, max_batch=2, max_new_tokens=NEW)
    job = batcher.submit(prompt(12), logits_processor=LogitsProcessorList([OddUntil(16)]))
    good = submitted(batcher, (40,))
    batcher.run()
    assert job.finish_reason == "error" and all(token % 2 for token in job.tokens)
    assert good[0].tokens == alone(40)


@pytest.mark.parametrize("drafter", [None, specnb.PromptLookup()], ids=["none", "lookup"])
def test_a_row_of_nan_fails_alone_and_leaves_nothing_in_its_slot(drafter):
    """One token has no sound embedding: who has it in the prompt gets NaN."""
    model = tiny_model("llama")
    texts = [[n % 50 + 1, 3, 5, n % 7 + 1] for n in range(8)]
    expected = [specnb.generate(model, torch.tensor([text]), max_new_tokens=NEW) for text in texts]
    kept = [out.sequences[0, 4:].tolist() for out in expected]
    unused = max(set(range(VOCAB)) - {token for out in expected for token in out.sequences[0].tolist()})
    with torch.no_grad():
        model.model.embed_tokens.weight[unused] = float("nan")
    batcher = specnb.Batcher(model, drafter, max_batch=2, max_new_tokens=NEW)
    jobs = [batcher.submit([unused, *text] if n in (1, 4) else text) for n, text in enumerate(texts)]
    batcher.run()
    for n, job in enumerate(jobs):
        if n in (1, 4):
            with pytest.raises(ValueError, match="NaN"):
                job.result()
        else:
            assert job.result().tokens == kept[n]


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (dict(prompt=[1, 61]), ValueError, "outside the vocabulary"),
        (dict(prompt=[]), ValueError, "empty"),
        (dict(prompt=[1] * (CONTEXT + 1)), ValueError, "context holds"),
        (dict(prompt=[0.5]), TypeError, "torch.float32"),
        (dict(prompt=[[1], [1, 2]]), TypeError, "list or tensor of token ids"),
        (dict(prompt=torch.ones(2, 3, dtype=torch.long)), ValueError, "submit rows apart"),
        (dict(prompt="text"), TypeError, "tokenizer"),
        (dict(prompt=[1], num_beams=2), ValueError, "beam"),
        (dict(prompt=[1], num_return_sequences=2, do_sample=True), ValueError, "another seed"),
        (dict(prompt=[1], streamer=object()), ValueError, "on_tokens"),
        (dict(prompt=[1], no_such_option=2), ValueError, "no_such_option"),
        (dict(prompt=[1], return_dict_in_generate=True, output_scores=True), ValueError, r"specnb\.generate"),
    ],
    ids=steady,
)
def test_a_request_that_cannot_be_honoured_is_refused_and_touches_nobody(wrong, error, message):
    batcher = specnb.Batcher(model_of(), max_batch=2, max_new_tokens=NEW)
    jobs = submitted(batcher, (12, 40))
    batcher.step()
    with pytest.raises(error, match=message):
        batcher.submit(**wrong)
    batcher.run()
    assert [job.tokens for job in jobs] == [alone(12), alone(40)]


@pytest.mark.parametrize("wrong", [dict(max_batch=0), dict(prefill_chunk=True), dict(pass_width=0), dict(drafter=3)])
def test_a_batcher_that_cannot_work_is_refused(wrong):
    with pytest.raises((ValueError, TypeError)):
        specnb.Batcher(model_of(), **wrong)


def test_a_prompt_that_fills_the_context_gets_one_token():
    batcher = specnb.Batcher(model_of(), max_batch=2)
    with pytest.warns(UserWarning, match="context holds"):
        job = batcher.submit([1] * CONTEXT, max_new_tokens=5)
    assert (len(job.result().tokens), job.finish_reason) == (1, "length")


def breaking(model, monkeypatch, error, at):
    """The model's call number ``at`` from now on raises."""
    calls, forward = [], model.forward

    def forward_or_break(**arguments):
        calls.append(1)
        if len(calls) == at:
            raise error
        return forward(**arguments)

    monkeypatch.setattr(model, "forward", forward_or_break)


def test_a_broken_pass_fails_who_was_in_it_and_the_queue_goes_on(monkeypatch):
    model = tiny_model("llama")
    batcher = specnb.Batcher(model, specnb.PromptLookup(), max_batch=2, max_new_tokens=NEW)
    jobs = submitted(batcher, (12, 40, 7, 80))
    for _ in range(3):
        batcher.step()
    breaking(model, monkeypatch, RuntimeError("out of memory"), at=1)
    with pytest.raises(RuntimeError, match="out of memory"):
        batcher.run()
    batcher.run()
    assert [job.finish_reason for job in jobs] == ["error", "error", "length", "length"]
    assert [job.tokens for job in jobs[2:]] == [alone(7), alone(80)]


@pytest.mark.parametrize("whose", ["target", "draft"])
@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_after_ctrl_c_all_go_on(monkeypatch, whose, at):
    target, draft = tiny_model("llama"), perturbed(model_of())
    batcher = specnb.Batcher(target, specnb.DraftModel(draft, 3), max_batch=2, max_new_tokens=NEW, pass_width=8)
    jobs = submitted(batcher, (12, 260, 7))
    for _ in range(3):
        batcher.step()
    breaking(target if whose == "target" else draft, monkeypatch, KeyboardInterrupt(), at)
    with pytest.raises(KeyboardInterrupt):
        batcher.run()
    batcher.run()
    assert [job.tokens for job in jobs] == [alone(n, torch.float32, 8) for n in (12, 260, 7)]


# --- nothing stays behind ---


def live_tensors():
    gc.collect()
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def grown(drafter, keep):
    """Tensors alive after 60 requests that were not after 20; some fail, some are cancelled, jobs are kept or not."""
    batcher, kept, counts = specnb.Batcher(model_of(), drafter, max_batch=3, max_new_tokens=4), [], []
    for requests in (20, 40):
        for n in range(requests):
            options = FAILURES["processor at once"] if n % 5 == 1 else {}
            job = batcher.submit(prompt(5 + n % 7, seed=n), **options)
            batcher.step()
            if n % 5 == 3:
                job.cancel()
            kept += [job] if keep else []
        del job
        batcher.run()
        counts.append(live_tensors())
    return counts[1] - counts[0]


@pytest.mark.parametrize("keep", [False, True], ids=["jobs dropped", "jobs kept"])
def test_served_requests_leave_no_tensor_behind(keep, make_drafter):
    if getattr(make_drafter(model_of()), "trees", False) and not keep:
        pytest.skip("slow, and the same as with the jobs kept")
    # a few belong to the last pass, whose rows may lie scattered or side by side; a leak makes one for every request
    assert grown(make_drafter(model_of()), keep) < 5


def test_a_leak_would_be_seen():
    class Hoarder(specnb.PromptLookup):
        def join(self, row):
            self.hoard = [*getattr(self, "hoard", []), torch.zeros(1)]
            super().join(row)

    assert grown(Hoarder(), keep=False) >= 39


# --- anything in any order ---


class AnyOrder(RuleBasedStateMachine):
    """Requests are submitted, cancelled and fail in any order; each is compared with its prompt decoded alone."""

    @initialize(
        max_batch=st.sampled_from([1, 2, 3]),
        width=st.sampled_from([None, 8]),
        drafter=st.sampled_from([None, "lookup", "model"]),
    )
    def begin(self, max_batch, width, drafter):
        kinds = {None: lambda: None, "lookup": specnb.PromptLookup, "model": lambda: specnb.DraftModel(draft(), 3)}
        self.width, self.entries = width, []
        self.batcher = specnb.Batcher(
            model_of(), kinds[drafter](), max_batch=max_batch, max_waiting=6, max_new_tokens=NEW, pass_width=width,
            prefill_chunk=32,
        )  # fmt: skip

    @rule(length=st.sampled_from(LENGTHS), new=st.integers(1, NEW), fails=st.sampled_from([None, None, *FAILURES]))
    def submit(self, length, new, fails):
        options = {} if fails is None else FAILURES[fails]
        full = self.batcher.waiting == 6
        try:
            job = self.batcher.submit(prompt(length, seed=length), max_new_tokens=new, **options)
        except specnb.QueueFull:
            assert full
            return
        assert not full
        self.entries.append((job, length, new, fails))

    @rule(which=st.integers(0, 30))
    def cancel(self, which):
        if which < len(self.entries):
            self.entries[which][0].cancel()

    @rule(rounds=st.integers(1, 4))
    def play(self, rounds):
        for _ in range(rounds):
            self.batcher.step()

    @invariant()
    def everyone_has_what_is_theirs(self):
        for job, length, new, fails in getattr(self, "entries", ()):
            expected = alone(length, torch.float32, self.width)[:new]
            assert job.tokens == expected[: len(job.tokens)]
            if job.finish_reason == "length":
                assert job.tokens == expected
            assert fails is not None or job.finish_reason in (None, "length", "cancelled")

    def teardown(self):
        if hasattr(self, "batcher"):
            self.batcher.run()
            self.everyone_has_what_is_theirs()
            assert all(job.done for job, *_ in self.entries)
            slots = self.batcher._slots
            assert (self.batcher.running, slots.cache.lengths.sum(), slots.rows.active) == (0, 0, [])


@functools.cache
def draft():
    return perturbed(model_of())


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
