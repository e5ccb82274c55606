"""generate_many: results in order, and a file from which a run that broke off goes on."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import specnb
from specnb.batching import Batcher
from tests.tiny import plain, prompt, tiny_model
from tests.workers import steady

LENGTHS = (40, 3, 120, 7, 1, 80, 12, 9)
NEW = 10
PROMPTS = [prompt(n, seed=n)[0].tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def texts(llama):
    """Each prompt's text, by transformers."""
    return [plain(llama, torch.tensor([p]), max_new_tokens=NEW)[0, len(p) :].tolist() for p in PROMPTS]


@pytest.fixture
def submitted(monkeypatch):
    """Prompts that were put into a batcher's queue."""
    seen, submit = [], Batcher.submit
    monkeypatch.setattr(Batcher, "submit", lambda self, ids, **kw: seen.append(list(ids)) or submit(self, ids, **kw))
    return seen


def many(model, prompts=PROMPTS, drafter=None, **options):
    return specnb.generate_many(
        model, prompts, drafter, **{"max_batch": 3, "max_new_tokens": NEW, "progress": False, **options}
    )


def test_results_come_in_the_prompts_order(llama, make_drafter, texts):
    done = list(many(llama, drafter=make_drafter(llama)))
    assert [d.number for d in done] == list(range(len(PROMPTS)))
    assert [d.prompt for d in done] == PROMPTS
    assert [d.tokens for d in done] == texts


def test_seeds_are_those_of_generate(llama):
    done = many(llama, PROMPTS[:4], specnb.PromptLookup(), seed=5, do_sample=True, temperature=0.9)
    for i, d in enumerate(done):
        ids = torch.tensor([d.prompt])
        out = specnb.generate(
            llama, ids, specnb.PromptLookup(), seed=5 + i, do_sample=True, temperature=0.9, max_new_tokens=NEW
        )
        assert d.tokens == out.sequences[0, ids.shape[1] :].tolist()


def test_an_iterator_is_taken_from_little_by_little(llama):
    taken = []
    endless = (taken.append(i) or PROMPTS[i % len(PROMPTS)] for i in range(10**9))
    results = many(llama, endless, max_batch=2)
    assert [next(results).number for _ in range(3)] == [0, 1, 2]
    assert len(taken) < 20
    results.close()


def test_progress_is_told(llama, capsys):
    list(many(llama, progress=True))
    assert f"prompts: {len(PROMPTS)} of {len(PROMPTS)} prompts" in capsys.readouterr().err


def test_a_failing_prompt_has_its_own_error(llama, texts):
    prompts = [*PROMPTS[:2], [999], [], "text", *PROMPTS[2:]]
    done = list(many(llama, prompts))
    assert [d.finish_reason for d in done] == ["length"] * 2 + ["error"] * 3 + ["length"] * 6
    assert [type(d.error) for d in done[2:5]] == [ValueError, ValueError, TypeError]
    assert [d.tokens for d in done if d.error is None] == texts


# --- the file ---


def test_what_is_in_the_file_is_not_decoded_again(llama, texts, tmp_path, submitted):
    path = tmp_path / "answers.jsonl"
    first = list(many(llama, path=path))
    submitted.clear()
    again = list(many(llama, path=path, drafter=specnb.PromptLookup(), max_batch=2))
    assert submitted == []
    assert again == first
    assert [d.tokens for d in again] == texts
    more = list(many(llama, [*PROMPTS, [5, 6]], path=path))
    assert submitted == [[5, 6]] and more[:-1] == first


@pytest.mark.parametrize("share", [0.0, 0.01, 0.05, 0.3, 0.5, 0.77, 0.99])
def test_a_run_that_broke_off_anywhere_goes_on(llama, texts, tmp_path, submitted, share):
    """The file cut at any byte: whole lines count, the torn one is done again, nothing is there twice."""
    path = tmp_path / "answers.jsonl"
    list(many(llama, path=path))
    written = path.read_bytes()
    kept = written[: int(share * len(written))]
    path.write_bytes(kept)
    submitted.clear()
    assert [d.tokens for d in many(llama, path=path)] == texts
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(line["number"] for line in lines[1:]) == list(range(len(PROMPTS)))
    assert len(submitted) == len(PROMPTS) - max(0, kept.count(b"\n") - 1)


def test_leaving_early_keeps_what_has_ended(llama, texts, tmp_path, submitted):
    path = tmp_path / "answers.jsonl"
    for done in many(llama, path=path):
        if done.number == 2:
            break
    kept = {json.loads(line)["number"] for line in path.read_text().splitlines()[1:]}
    assert {0, 1, 2} <= kept
    submitted.clear()
    assert [d.tokens for d in many(llama, path=path)] == texts
    assert len(submitted) == len(PROMPTS) - len(kept)


def test_a_model_that_breaks_leaves_the_finished_prompts_in_the_file(tmp_path, texts, monkeypatch):
    path, model = tmp_path / "answers.jsonl", tiny_model("llama")
    calls, forward = [], model.forward

    def limited(**arguments):
        calls.append(1)
        if len(calls) > 25:
            raise RuntimeError("out of memory")
        return forward(**arguments)

    monkeypatch.setattr(model, "forward", limited)
    seen = []
    with pytest.raises(RuntimeError, match="out of memory"):
        seen.extend(many(model, path=path))
    finished = path.read_text().count("\n") - 1
    assert 3 <= finished < len(PROMPTS)
    monkeypatch.undo()
    assert [d.tokens for d in many(model, path=path)] == texts


class RaiseOnce(LogitsProcessor):
    """Raises the first time it is asked."""

    def __init__(self):
        self.asked = 0

    def __call__(self, input_ids, scores):
        self.asked += 1
        if self.asked == 1:
            raise OSError("not yet")
        return scores


def test_what_failed_is_tried_again(llama, tmp_path, submitted):
    path, rules = tmp_path / "answers.jsonl", LogitsProcessorList([RaiseOnce()])
    first = list(many(llama, path=path, max_batch=1, logits_processor=rules))
    assert [d.finish_reason for d in first] == ["error"] + ["length"] * (len(PROMPTS) - 1)
    assert "OSError: not yet" in path.read_text()
    submitted.clear()
    again = list(many(llama, path=path, max_batch=1, logits_processor=rules))
    assert submitted == PROMPTS[:1]
    assert {d.finish_reason for d in again} == {"length"}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"max_new_tokens": 4}, "max_new_tokens = 10, now it is 4"),
        ({"temperature": 0.5, "do_sample": True}, "do_sample|temperature"),
        ({"seed": 3}, "seed = None"),
        ({"pass_width": 8}, "pass_width"),
        ({"logits_processor": LogitsProcessorList([RaiseOnce()])}, "RaiseOnce"),
    ],
    ids=steady,
)
def test_other_settings_are_refused(llama, tmp_path, changed, named):
    path = tmp_path / "answers.jsonl"
    list(many(llama, path=path))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=named):
        many(llama, path=path, **changed)
    with pytest.raises(ValueError, match=r"dtype = 'torch\.float32'"):
        many(tiny_model("llama").to(torch.bfloat16), path=path)
    assert path.read_bytes() == before


def test_other_prompts_are_refused(llama, tmp_path):
    path = tmp_path / "answers.jsonl"
    list(many(llama, path=path))
    with pytest.raises(ValueError, match="prompt 0 is another one"):
        list(many(llama, PROMPTS[::-1], path=path))


@pytest.mark.parametrize("content", ["my diary", "my diary\n", '{"a": 1}\n', '{"format": "another"}\n'])
def test_somebody_elses_file_is_left_alone(llama, tmp_path, content):
    path = tmp_path / "diary.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"diary\.txt"):
        many(llama, path=path)
    assert path.read_text() == content


def test_a_broken_line_in_the_middle_is_named(llama, tmp_path):
    path = tmp_path / "answers.jsonl"
    list(many(llama, path=path))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], lines[3][:10], *lines[4:]]) + "\n")
    with pytest.raises(ValueError, match="line 4"):
        many(llama, path=path)
