"""`specnb doctor` on tiny models: every part for real once, and the decision with passes whose times are made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import specnb
from specnb import advice, cli, doctor
from specnb.advice import Candidate
from specnb.compiled import twin_for
from specnb.diagnosis import Diagnosis, LoopCost
from specnb.doctor import Plan, diagnose
from specnb.machine import describe_machine
from specnb.profiling import PassCost, Rate
from specnb.replay import Replay
from specnb.workloads import Prompt
from tests.tiny import VOCAB, perturbed, tiny_model

PLAN = Plan((1, 2, 3, 5, 9), 2, 1, 1, 24, 2, 5.0, 5.0, 100.0)
MEMORY_BOUND = {1: 50.0, 2: 51.0, 3: 52.0, 5: 54.0, 9: 58.0}
COMPUTE_BOUND = {T: 50.0 * T for T in MEMORY_BOUND}


@pytest.fixture(scope="module")
def tokenizer():
    """Words w0 … w60, one token each."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")


@pytest.fixture(scope="module")
def prompts():
    numbers = torch.randint(1, VOCAB, (4, 12), generator=torch.Generator().manual_seed(1)).tolist()
    groups = ("copy_heavy_summary", "copy_heavy_summary", "open_story", "open_story")
    return [
        Prompt(str(i), group, (" ".join(f"w{n}" for n in row),)) for i, (group, row) in enumerate(zip(groups, numbers))
    ]


@pytest.fixture
def fast(monkeypatch):
    """Little of everything, so that a real examination takes a second."""
    monkeypatch.setattr(doctor, "FULL", PLAN)
    monkeypatch.setattr(doctor, "QUICK", replace(PLAN, checked=0))
    monkeypatch.setattr(doctor, "memory_bandwidth", lambda *_, **__: Rate([2e10], "B/s"))
    monkeypatch.setattr(doctor, "arithmetic_peak", lambda *_, **__: Rate([2e11], "FLOP/s"))


@pytest.fixture
def passes(monkeypatch, fast):
    """Sets what a pass costs. The loop and the drafters then take no time: the decision depends on nothing else."""

    def cost(ms: dict[int, float]) -> None:
        curve = PassCost(tuple(ms), tuple(ms.values()), context=20, samples=tuple((t, t) for t in ms.values()))
        monkeypatch.setattr(doctor, "forward_cost", lambda *_, **__: curve)
        monkeypatch.setattr(doctor, "_loop_cost", lambda *_: LoopCost(0.0, 0.0))
        monkeypatch.setattr("specnb.replay.perf_counter", lambda: 0.0)

    return cost


def examine(model, tokenizer, prompts, **options):
    return diagnose(model, tokenizer, prompts=prompts, **{"progress": False, "quick": True, **options})


def generated(model, ids, drafter, new):
    return specnb.generate(model, ids, drafter=drafter, max_new_tokens=new, do_sample=False)


# --- the decision ---


def test_on_a_memory_bound_machine_a_good_drafter_is_recommended(llama, tokenizer, prompts, passes):
    passes(MEMORY_BOUND)
    found = examine(llama, tokenizer, prompts, drafters={"its copy": specnb.DraftModel(llama)})
    answer = found.recommendation
    assert (answer.verdict, answer.outcome.k) == ("use", 8)
    assert "reading the weights" in answer.reasons[0]
    report = str(found)
    for part in ("Use its copy with k = 8", "specnb.DraftModel(draft, num_draft_tokens=8)", "specnb.load_model("):
        assert part in report


def test_on_a_compute_bound_machine_none_is(llama, tokenizer, prompts, passes):
    passes(COMPUTE_BOUND)
    found = examine(llama, tokenizer, prompts, drafters={"its copy": specnb.DraftModel(llama)})
    assert found.recommendation.verdict == "do not use"
    report = str(found)
    assert "Do not use speculative decoding here" in report
    assert "limited by arithmetic here, not by memory" in " ".join(report.split())
    assert "drafter=" not in report


def test_the_better_drafter_is_chosen(llama, tokenizer, prompts, passes):
    passes(MEMORY_BOUND)
    drafters = {
        "a poor one": specnb.DraftModel(perturbed(llama, 0.5)),
        "a good one": specnb.DraftModel(llama),
        "lookup": specnb.PromptLookup(4),
    }
    found = examine(llama, tokenizer, prompts, drafters=drafters)
    assert found.recommendation.outcome.candidate.title == "a good one"
    lengths = {title: [o.k for o in found.outcomes if o.candidate.title == title] for title in drafters}
    assert lengths == {"a poor one": [1, 2, 4, 8], "a good one": [1, 2, 4, 8], "lookup": [1, 2, 4]}


def test_what_is_predicted_are_the_rounds_that_generate_makes(llama, tokenizer, prompts, passes):
    passes(MEMORY_BOUND)
    found = examine(llama, tokenizer, prompts, drafters={"lookup": specnb.PromptLookup(8)})
    for o in found.outcomes:
        drafter = specnb.PromptLookup(o.k)
        runs = [generated(llama, specnb.encode(tokenizer, p), drafter, 24).stats for p in prompts]
        emitted, passes = (sum(getattr(s, name).item() for s in runs) for name in ("emitted", "target_passes"))
        assert o.tokens_per_round == pytest.approx(emitted / passes)


# --- everything for real, once ---


def test_a_whole_examination(llama, tokenizer, prompts, fast, capsys):
    before = {name: weight.clone() for name, weight in llama.state_dict().items()}
    drafters = {"prompt lookup": specnb.PromptLookup(), "a copy": specnb.DraftModel(llama)}
    found = diagnose(llama, tokenizer, prompts=prompts, drafters=drafters, name="tiny")
    assert (found.model, found.dtype, found.answers, found.tokens) == ("tiny", "float32", 4, 4 * 24)
    assert found.cost.positions == PLAN.positions and found.cost.context == 12 + 12
    assert found.roofline.bandwidth == found.bandwidth
    assert found.loop.ms > 0 and 0 < found.loop.share < 1
    assert not found.interrupted and found.seconds > 0
    assert {o.k for o in found.outcomes} == {1, 2, 4, 8}
    if found.check is not None:  # depends on how long tiny passes take
        assert found.check.prompts == 2 and found.check.same_text == 2
        assert found.check.predicted > 0 and found.check.measured > 0
    parts = [
        "This machine",
        "One pass of the model",
        "What more positions cost",
        "96 tokens (greedy): prompt lookup, which",
    ]
    parts += ["a copy, which takes", "copy heavy summary", "What another drafter", "Answer"]
    assert [part for part in parts if part not in str(found)] == []
    assert "Examined: 100%" in capsys.readouterr().err
    assert not llama._forward_hooks and not llama._forward_pre_hooks
    assert all(torch.equal(weight, before[name]) for name, weight in llama.state_dict().items())


def test_compiled_passes_are_examined_the_same_way(llama, tokenizer, prompts, fast):
    found = diagnose(llama, tokenizer, prompts=prompts, compile=True, progress=False)
    assert found.compiled and found.as_dict()["compiled"]
    assert "One compiled pass of the model" in str(found)
    assert "compile=True" in found.recommendation.code
    assert found.cost.positions == PLAN.positions and found.loop.ms > 0
    subject = doctor.Subject(llama, twin_for(llama, 4))
    run = doctor._decoded(subject, list(range(1, 10)), 8, specnb.PromptLookup(3))
    out = specnb.generate(llama, torch.arange(1, 10)[None], specnb.PromptLookup(3), compile=True, max_new_tokens=8)
    assert run.text == out.sequences[0, 9:].tolist() and len(run.passes_ms) == out.stats.target_passes.item()


def test_the_check_runs_what_is_recommended(llama, tokenizer, prompts, passes, monkeypatch):
    passes(MEMORY_BOUND)
    used = []
    real = doctor.generate

    def spy(model, ids, drafter=None, **options):
        used.append(drafter)
        return real(model, ids, drafter, **options)

    monkeypatch.setattr(doctor, "generate", spy)
    mine = specnb.DraftModel(llama, num_draft_tokens=2)
    found = examine(llama, tokenizer, prompts, drafters={"its copy": mine}, quick=False)
    checked = used[-4:]  # plain and drafted, twice
    assert [drafter is None for drafter in checked] == [True, False, True, False]
    assert {drafter.num_draft_tokens for drafter in checked if drafter} == {found.recommendation.outcome.k} == {8}
    assert mine.num_draft_tokens == 2
    assert found.check.predicted == pytest.approx(found.recommendation.outcome.speedup, rel=0.2)
    assert f"{found.check.predicted:.2f} was predicted" in str(found)


@pytest.mark.parametrize(("ms", "verdict"), [(30.0, "use"), (60.0, "do not use")])
def test_what_was_slower_when_it_was_run_is_not_recommended(
    llama, tokenizer, prompts, passes, monkeypatch, ms, verdict
):
    passes(MEMORY_BOUND)
    plain, drafted = (doctor._Decoded([1], [], [], ms) for ms in (50.0, ms))
    monkeypatch.setattr(doctor, "_decoded", lambda model, prompt, new, drafter=None: drafted if drafter else plain)
    drafters = {"its copy": specnb.DraftModel(llama)}
    found = examine(llama, tokenizer, prompts, drafters=drafters, quick=False)
    assert found.recommendation.verdict == verdict
    assert ("took longer when it was run (0.83 times as fast)" in " ".join(str(found).split())) == (verdict != "use")
    assert "far from what was predicted" in str(found)
    assert ("drafter=drafter" in str(found)) == (verdict == "use")


@pytest.mark.parametrize(("verdict", "groups"), [("use", ("b",)), ("use for some", ("a", "c"))])
def test_the_check_takes_prompts_that_the_drafter_is_meant_for(verdict, groups):
    written = [doctor.Written(group, [1], [2]) for group in "abcabc"]
    outcome = advice.outcome(Candidate("lookup", "", "", (("a", Replay((0,), (0,))),)), 2, specnb.CostCurve.free())
    advised = advice.Recommendation(verdict, "", (), "", outcome, groups)
    assert doctor._meant(advised, written, 10) == [0, 2, 3, 5]
    assert doctor._meant(advised, written, 2) == [2, 5]


def test_the_check_ends_when_time_is_up(llama, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(doctor.time, "perf_counter", lambda: now[0])

    def decoded(model, prompt, new, drafter=None):
        now[0] += 5.0
        return prompt

    monkeypatch.setattr(doctor, "_decoded", decoded)
    answers = [doctor.Written("a", [i], [1, 2]) for i in range(6)]
    shares = []
    assert doctor._pairs(llama, answers, specnb.PromptLookup(), 35.0, shares.append) == [([i], [i]) for i in range(3)]
    assert shares == pytest.approx([1 / 6, 2 / 6, 3 / 6])
    assert len(doctor._pairs(llama, answers, specnb.PromptLookup(), 0.0, shares.append)) == 1


def test_plain_data_is_json(llama, tokenizer, prompts, passes):
    passes(MEMORY_BOUND)
    drafters = {"nothing": specnb.Scripted(lambda context: [], 2)}  # α is NaN: JSON has no such number
    found = examine(llama, tokenizer, prompts, drafters=drafters)
    data = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert data["recommendation"]["verdict"] == "do not use"
    assert data["recommendation"]["best"] == {"drafter": "nothing", "k": 1}
    assert [o["alpha"] for o in data["outcomes"]] == [None, None]
    assert [row["T"] for row in data["cost"]["passes"]] == list(PLAN.positions)
    assert data["machine"]["torch"] == torch.__version__
    assert data["bandwidth_bytes_per_second"] == 2e10


# --- what is measured, piece by piece ---


@pytest.mark.parametrize("length", [1, 9])
def test_passes_of_the_decoding_phase_are_told_from_prefill(llama, length):
    run = doctor._decoded(doctor.Subject(llama), list(range(1, length + 1)), 10, specnb.PromptLookup(2))
    out = generated(llama, torch.arange(1, length + 1)[None], specnb.PromptLookup(2), 10)
    assert run.text == out.sequences[0, length:].tolist()
    assert len(run.passes_ms) == out.stats.target_passes.item() == len(run.between_ms) + 1
    assert run.ms >= sum(run.passes_ms) + sum(run.between_ms) > 0


def test_hooks_are_gone_after_an_error(llama, monkeypatch):
    monkeypatch.setattr(doctor, "generate", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        doctor._decoded(doctor.Subject(llama), [1, 2], 4)
    assert not llama._forward_hooks and not llama._forward_pre_hooks


def test_answers_of_a_batch_are_those_of_each_prompt_alone(llama):
    asked = [("a", [1, 2, 3]), ("b", [4, 5, 6, 7, 8]), ("c", [9])]
    shares = []
    written = doctor._answers(llama, asked, (3, 12), shares.append)
    assert [(w.group, w.prompt) for w in written] == asked
    for w in written:
        alone = generated(llama, torch.tensor([w.prompt]), None, 12)
        assert w.text == alone.sequences[0, len(w.prompt) :].tolist()
    assert shares[-1] == pytest.approx(1.0)
    assert shares == sorted(shares)
    two = doctor._answers(llama, asked, (2, 4), shares.append)
    assert [w.group for w in two] == ["a", "b"]


@pytest.mark.parametrize(("pass_ms", "size"), [(10.0, (4, 64)), (200.0, (4, 27)), (400.0, (2, 24)), (9000.0, (1, 24))])
def test_slow_models_get_less_to_do(llama, pass_ms, size):
    """First shorter answers, then fewer prompts; here a pass costs a quarter of its four rows for one row."""
    found = Diagnosis("tiny", "float32", describe_machine())
    found.cost = PassCost((1, 4), (pass_ms / 4, pass_ms), samples=((), ()))
    found.roofline = specnb.roofline(llama, bandwidth=1e10, peak=1e11)
    assert doctor._affordable(found, [("a", [1] * 5)] * 4, 64, 6.5) == size


def test_prompts_that_do_not_fit_are_left_out(tokenizer, fast):
    short, long = Prompt("1", "a", ("w1 w2",)), Prompt("2", "b", ("w1 " * 60,))
    model = tiny_model(max_position_embeddings=64)
    assert doctor._prompts_that_fit(model, tokenizer, [short, long], PLAN) == [("a", [1, 2])]
    with pytest.raises(ValueError, match=r"None of the 1 prompts leaves room for 24 tokens .* of 64"):
        diagnose(model, tokenizer, prompts=[long], progress=False)


def test_places_are_spread_evenly():
    assert [doctor._spread(*pair) for pair in ((9, 3), (2, 4), (18, 4), (1, 1))] == [
        [1, 4, 7],
        [0, 1],
        [2, 6, 11, 15],
        [0],
    ]


def test_what_is_no_model_is_refused(tokenizer):
    with pytest.raises(TypeError, match="expected a transformers causal language model"):
        diagnose("SmolLM2", tokenizer)


# --- interrupted ---

STEPS = ["memory_bandwidth", "forward_cost", "_loop_cost", "_answers", "replay", "_decoded"]


@pytest.mark.parametrize("step", STEPS)
def test_after_ctrl_c_there_is_what_was_measured(llama, tokenizer, prompts, passes, monkeypatch, step):
    passes(MEMORY_BOUND)

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, step, interrupted)
    found = examine(llama, tokenizer, prompts, drafters={"its copy": specnb.DraftModel(llama)}, quick=False)
    assert found.interrupted
    reached = [found.bandwidth, found.cost, found.loop, found.answers or None, found.recommendation, found.check]
    known = [value is not None for value in reached]
    assert known == sorted(known, reverse=True)  # nothing after the interruption
    assert sum(known) == STEPS.index(step)
    report = str(found)
    assert ("No recommendation" in report) == (found.recommendation is None)
    json.dumps(found.as_dict(), allow_nan=False)


# --- notes ---


def report_of(**changes) -> str:
    found = Diagnosis("tiny", "float32", replace(describe_machine(), threads=2, cores=2, instructions="AVX"))
    for name, value in changes.items():
        setattr(found, name, value)
    return " ".join(str(found).split())


def test_doubtful_numbers_are_said_to_be():
    calm = PassCost((1, 2), (10.0, 11.0), context=5, samples=((9.9, 10.0, 10.1),) * 2)
    busy = PassCost((1, 2), (10.0, 11.0), context=5, samples=((7.0, 10.0, 15.0),) * 2)
    assert "scattered" not in report_of(cost=calm)
    assert "scattered by 38%" in report_of(cost=busy)


def test_a_quick_answer_is_said_to_be_one(llama, tokenizer, prompts, passes):
    passes(MEMORY_BOUND)
    drafters = {"its copy": specnb.DraftModel(llama)}
    reports = [str(examine(llama, tokenizer, prompts, drafters=drafters, quick=quick)) for quick in (True, False)]
    assert ["Quick: 4 short answers decide" in report for report in reports] == [True, False]


@pytest.mark.parametrize(
    ("samples", "tells"),
    [
        ({1: (10.0, 10.0, 10.1), 5: (12.0, 12.1, 12.1)}, True),
        ({1: (10.0, 10.0, 90.0), 5: (12.0, 40.0, 99.0)}, False),  # nothing repeats itself
        ({1: (99.0, 99.0, 99.0), 5: (12.0, 12.0, 12.0)}, False),  # five positions in an eighth of the time of one
    ],
)
def test_times_that_tell_nothing_lead_to_no_advice(llama, tokenizer, prompts, passes, monkeypatch, samples, tells):
    passes(MEMORY_BOUND)
    middle = tuple(sorted(times)[1] for times in samples.values())
    cost = PassCost(tuple(samples), middle, context=20, samples=tuple(samples.values()))
    monkeypatch.setattr(doctor, "forward_cost", lambda *_, **__: cost)
    run = doctor._Decoded([1], [], [], 1.0)
    monkeypatch.setattr(doctor, "_decoded", lambda *_: run)
    found = examine(llama, tokenizer, prompts, drafters={"its copy": specnb.DraftModel(llama)}, quick=False)
    assert found.recommendation.verdict == ("use" if tells else "measure again")
    assert (found.check is None) == ("Measure again" in str(found)) == (not tells)


def test_threads_left_idle_are_named():
    idle = replace(describe_machine(), threads=1, cores=4, instructions="AVX")
    assert "torch uses 1 of 4 cores: OMP_NUM_THREADS=4" in report_of(machine=idle)
    assert "OMP_NUM_THREADS" not in report_of()


@pytest.mark.parametrize(
    ("dtype", "peaks", "note"),
    [
        ("bfloat16", {"bfloat16": 1e11, "float32": 3e11}, "3.0 times as fast in float32"),
        ("bfloat16", {"bfloat16": 3e11, "float32": 1e11}, None),
        ("float32", {"float32": 1e11, "bfloat16": 2e11}, "half the bytes"),
        ("float32", {"float32": 2e11, "bfloat16": 1e11}, None),
        ("float32", {"float32": 2e11}, None),
    ],
)
def test_a_better_dtype_is_named(dtype, peaks, note):
    report = report_of(dtype=dtype, peaks={name: Rate([peak], "FLOP/s") for name, peak in peaks.items()})
    assert (note in report) if note else ("Note" not in report)


def test_without_a_compiler_the_report_says_so():
    assert "none found" in report_of(machine=replace(describe_machine(), compiler=None))


# --- the command ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer) -> Path:
    """A tiny model and its tokenizer, as save_pretrained writes them."""
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_the_command_prints_a_report(folder, fast, capsys):
    assert cli.main(["doctor", "--model", str(folder), "--device", "cpu", "--quick", "--draft", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("specnb doctor: tiny-llama in float32 on cpu\n")
    assert "the draft model tiny-llama, which takes" in out
    assert all(line.endswith(" ms a guess") for line in out.splitlines() if "draft model tiny-llama, which" in line)
    assert out.index("This machine") < out.index("Answer")
    assert max(map(len, out.splitlines())) <= 110
    assert "Answers" in err


def test_the_command_prints_json_alone(folder, fast, capsys):
    words = ["--model", str(folder), "--device", "cpu", "--dtype", "bfloat16", "--quick", "--json"]
    assert cli.main(["doctor", *words]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["model"], data["dtype"]) == ("tiny-llama", "bfloat16")
    assert "out = specnb.generate(model, input_ids" in data["recommendation"]["code"]


def test_the_command_survives_ctrl_c(folder, fast, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_answers", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert cli.main(["doctor", "--model", str(folder), "--device", "cpu", "--quick"]) == cli.INTERRUPTED
    out, err = capsys.readouterr()
    assert "What more positions cost" in out
    assert "No recommendation" in out
    assert "stopped after" in err


def test_a_model_that_is_not_there_is_one_line(tmp_path, capsys):
    assert cli.main(["doctor", "--model", str(tmp_path / "nothing")]) == 1
    assert capsys.readouterr().err.startswith("specnb: ")
