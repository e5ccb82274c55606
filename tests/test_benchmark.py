"""The benchmark: its arithmetic by hand, and whole runs with tiny models and a clock that moves when it is told to."""

import csv
import json
import math
import random
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace

import matplotlib
import pytest
import torch

import specnb
from specnb import benchmark, contest, contestants, prediction, results
from specnb.cli import main
from specnb.contestants import Answer, Way
from specnb.measurements import (
    Measurement,
    Summary,
    acceptance,
    first_difference,
    interval,
    ms_per_token,
    ratios,
)
from specnb.prediction import PassTimes, plain_costs, predicted_ms
from specnb.results import BenchmarkResult
from specnb.workloads import Prompt
from tests.tiny import VOCAB, perturbed, plain, tiny_model

matplotlib.use("Agg")


class Letters:
    """A tokenizer: one token per letter, and a way back."""

    chat_template = None

    def __call__(self, text):
        return {"input_ids": [ord(letter) % (VOCAB - 1) + 1 for letter in text]}

    def decode(self, tokens, skip_special_tokens):
        return "".join(chr(96 + token) for token in tokens)


PROMPTS = [
    Prompt("1", "first", ("the sea, the sea, the",)),
    Prompt("2", "first", ("one and two and one",)),
    Prompt("3", "second", ("abcabcabc",)),
]
NAMES = ["transformers", "transformers-lookup", "plain", "lookup", "adaptive-lookup"]


def measured(contestant="transformers", prompt="1", seconds=1.0, tokens=10, rounds=None, **more):
    """A measurement with `tokens` equal tokens."""
    given = dict(dtype="float32", temperature=0.0, group="g", turn=0, repeat=0, prompt_tokens=20)
    passes = None if rounds is None else len(rounds)
    return Measurement(contestant, prompt=prompt, tokens=(7,) * tokens, seconds=seconds, rounds=rounds, passes=passes,
                       **{**given, **more})  # fmt: skip


def run(model, prompts=PROMPTS, **options):
    return specnb.run_benchmark(model, Letters(), prompts, **{"max_new_tokens": 8, "progress": False, **options})


@pytest.fixture
def hand_clock(monkeypatch):
    """A clock that moves only when it is told to: `hand_clock.now += seconds`."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(contestants, "clock", lambda: clock.now)
    return clock


# --- arithmetic ---


def test_ms_per_token_adds_turns_and_takes_the_median_of_repeats():
    answers = [
        measured(seconds=1.0, tokens=10, turn=0, repeat=0), measured(seconds=2.0, tokens=5, turn=1, repeat=0),
        measured(seconds=1.5, tokens=10, turn=0, repeat=1), measured(seconds=3.0, tokens=5, turn=1, repeat=1),
        measured(seconds=9.0, tokens=10, turn=0, repeat=2), measured(seconds=9.0, tokens=5, turn=1, repeat=2),
        measured(prompt="2", seconds=0.5, tokens=5),
    ]  # fmt: skip
    assert ms_per_token(answers) == {"1": pytest.approx(300), "2": pytest.approx(100)}


def test_ratios_pair_the_same_prompts():
    assert ratios({"1": 10.0, "2": 30.0, "3": 5.0}, {"2": 10.0, "1": 20.0}) == [0.5, 3.0]


def test_speedup_is_the_geometric_mean_over_prompts():
    answers = [measured(prompt=p, seconds=1.0) for p in "12"]
    answers += [measured("fast", "1", seconds=0.5), measured("fast", "2", seconds=0.125)]
    rows = {row.contestant: row for row in Summary(answers, {}, {}).rows(["g"])}
    assert rows["fast"].speedup == pytest.approx(4.0)  # √(2 · 8)
    assert rows["fast"].ms_per_token == pytest.approx((50 + 12.5) / 2)
    assert rows["transformers"].speedup == 1.0


def test_an_interval_needs_five_prompts():
    assert all(math.isnan(end) for end in interval([1.0, 2.0, 3.0, 4.0]))
    assert interval([2.0] * 5) == (2.0, 2.0)
    low, high = interval([1.0, 1.5, 2.0, 2.5, 3.0])
    assert 1.0 < low < 1.86 < high < 3.0


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    """200 samples of ten from a law of known geometric mean. Bootstrap intervals of ten run short: 0.90 on average."""
    draws = random.Random(0)
    hits = 0
    for _ in range(200):
        low, high = interval([draws.lognormvariate(0.5, 0.4) for _ in range(10)])
        hits += low <= math.exp(0.5) <= high
    assert 0.84 <= hits / 200 <= 0.98


def test_acceptance_is_that_of_the_statistics(llama):
    """The oracle: what the loop itself counts."""
    drafter = specnb.DraftModel(perturbed(llama), num_draft_tokens=3)
    ids = torch.tensor([Letters()(PROMPTS[0].turns[0])["input_ids"]])
    out = specnb.generate(llama, ids, drafter, max_new_tokens=40, return_trace=True)
    alpha, by_position = acceptance(contestants.counts(r) for r in out.trace)
    assert alpha == pytest.approx(out.stats.alpha.item()) and 0 < alpha < 1
    assert by_position == pytest.approx(out.stats.acceptance_by_position.tolist())


def test_acceptance_of_nothing_drafted():
    alpha, by_position = acceptance([(0, 0, 1), (0, 0, 1)])
    assert math.isnan(alpha) and by_position == ()


def test_first_difference():
    assert first_difference((1, 2, 3), (1, 2, 3)) is None
    assert first_difference((1, 2, 3), (1, 9, 3)) == 1
    assert first_difference((1, 2), (1, 2, 3)) == 2


# --- the prediction ---

ROUNDS = ((4, 4, 5), (0, 0, 1), (4, 1, 2), (4, 0, 1))


FREE_WIDTH = Way()


def pass_times(way=FREE_WIDTH, **by_context):
    """v by context, a sample per place: pass_times(c20={1: 10.0, 5: 14.0})."""
    times = PassTimes(way, "float32")
    for context, curve in by_context.items():
        for positions, ms in curve.items():
            times.add(int(context[1:]), positions, [ms])
    return times


def test_pass_times_take_the_median_and_go_linearly_between_contexts():
    v = pass_times(c20={1: 10.0, 5: 14.0}, c120={1: 20.0, 5: 34.0})
    v.add(20, 1, [11.0, 90.0])
    assert v(1, 20) == 11.0 and v(3, 20) == 12.5
    assert v(5, 70) == pytest.approx((14 + 34) / 2)
    assert v(5, 5) == 14.0 and v(5, 500) == 34.0


def test_predicted_time_by_hand():
    v = pass_times(c20={1: 10.0, 5: 14.0})
    # plain: 50 ms before the first round, then four rounds of 10 + 2
    answer = measured("plain", tokens=4, seconds=0.098, first_seconds=0.062, rounds=((0, 0, 1),) * 4)
    costs = plain_costs([answer], v)
    assert (costs.loop, costs.prompt) == ({("1", 0): pytest.approx(2.0)}, {("1", 0): pytest.approx(50.0)})
    # drafting: 20 prompt tokens cost 4 ms at the start, 12 drafted tokens 6 ms
    drafted = measured("draft", tokens=9, seconds=9.9, rounds=ROUNDS, start_seconds=0.004, draft_seconds=0.006)
    draft = prediction.draft_costs([drafted])
    assert (draft.per_prompt_token, draft.per_drafted_token) == (pytest.approx(0.2), pytest.approx(0.5))
    assert predicted_ms(drafted, v, costs, draft) == pytest.approx(50 + 4 + (14 + 10 + 14 + 14) + 4 * 2 + 12 * 0.5)


def test_predicted_time_at_a_fixed_width_by_hand():
    """Every round takes what plain decoding's rounds take; an answer of one round borrows the usual time."""
    long = measured("plain", "1", tokens=4, seconds=0.098, first_seconds=0.062, rounds=((0, 0, 1),) * 4)
    short = measured("plain", "2", tokens=1, seconds=0.032, first_seconds=0.032, rounds=((0, 0, 1),))
    costs = plain_costs([long, short], None)
    assert costs.loop == {("1", 0): pytest.approx(12.0), ("2", 0): pytest.approx(12.0)}
    assert costs.prompt == {("1", 0): pytest.approx(50.0), ("2", 0): pytest.approx(20.0)}
    free = prediction.DraftCosts(0.0, 0.0)
    drafted = measured("draft", "2", tokens=9, seconds=9.9, rounds=ROUNDS)
    assert predicted_ms(drafted, None, costs, free) == pytest.approx(20 + 4 * 12)


def made_world(v_true):
    """Answers of a machine whose passes cost `v_true(T)`: three prompts, plain and drafted, without noise."""
    answers = []
    for prompt, rounds in {"1": ROUNDS, "2": ROUNDS[::-1], "3": ((4, 4, 5),) * 2}.items():
        tokens = sum(emitted for _, _, emitted in rounds)
        own = [(0, 0, 1)] * tokens
        for name, passes in (("plain", own), ("lookup", rounds)):
            drafting = sum(drafted for drafted, _, _ in passes) * 0.25
            ms = [v_true(1 + drafted) + 1.5 for drafted, _, _ in passes]
            answers.append(measured(name, prompt, (40 + sum(ms) + drafting) / 1000, tokens, tuple(passes),
                                    first_seconds=(40 + ms[0]) / 1000, draft_seconds=drafting / 1000))  # fmt: skip
        answers.append(measured("transformers", prompt, seconds=0.013 * tokens, tokens=tokens))
    return answers


@pytest.mark.parametrize(("measured_v", "error"), [({1: 10.0, 5: 14.0}, 0.0), ({1: 10.0, 5: 10.0}, 0.1)])
def test_prediction_finds_the_measured_speedup_where_passes_cost_what_was_measured(measured_v, error):
    """With the right v(T) exactly; with the assumption that wide passes are free it promises too much."""
    v = pass_times(c20=measured_v)
    summary = Summary(made_world(lambda T: 9.0 + T), {}, dict.fromkeys(("plain", "lookup"), ("plain", v)))
    rows = {row.contestant: row for row in summary.rows(["g"])}
    assert math.isnan(rows["plain"].predicted) and math.isnan(rows["transformers"].predicted)
    if error:
        assert rows["lookup"].error > error
    else:
        assert rows["lookup"].predicted == pytest.approx(rows["lookup"].speedup)


def test_no_prediction_without_plain_decoding():
    answers = [m for m in made_world(lambda T: 10.0) if m.contestant != "plain"]
    (row, *_) = Summary(answers, {"lookup": "plain"}, {"lookup": ("plain", pass_times(c20={1: 10.0}))}).rows(["g"])
    assert row.contestant == "lookup" and math.isnan(row.predicted) and row.speedup > 1


# --- whole runs ---


@pytest.fixture(scope="module")
def result(llama):
    """One run with everything in it: two drafters, both temperatures, compiled ones left out."""
    drafters = {"lookup": specnb.PromptLookup(4), "draft": specnb.DraftModel(perturbed(llama), 3)}
    return run(llama, drafters=drafters, temperatures=(0.0, 1.0))


def test_everyone_takes_part(result):
    names = ["transformers", "transformers-lookup", "transformers-assisted", "plain", "lookup", "draft",
             "adaptive-lookup", "adaptive-draft"]  # fmt: skip
    assert list(result.contestants) == names
    assert len(result.measurements) == len(PROMPTS) * 2 * len(names)
    places = [(row.temperature, row.group, row.contestant) for row in result.rows()]
    assert places == [(t, g, n) for t in (0.0, 1.0) for g in ("first", "second", "all") for n in names]


def test_trees_take_part_by_themselves(llama):
    """Nothing chooses their length."""
    found = run(llama, PROMPTS[:1], drafters={"tree": specnb.PromptLookup(6, branches=2)})
    assert list(found.contestants) == ["transformers", "transformers-lookup", "plain", "tree"]
    tree = next(row for row in found.rows() if row.contestant == "tree")
    assert tree.same_text == tree.compared and tree.tokens_per_pass >= 1


def test_greedy_answers_are_the_models_own(result, llama):
    for prompt in PROMPTS:
        ids = torch.tensor([Letters()(prompt.turns[0])["input_ids"]])
        own = plain(llama, ids, max_new_tokens=8)[0, ids.shape[1] :].tolist()
        answers = [m for m in result.measurements if m.prompt == prompt.id and m.temperature == 0]
        assert len(answers) == 8 and all(list(m.tokens) == own for m in answers)
    for row in result.rows():
        compared = 0 if row.temperature > 0 or row.contestant == "transformers" else row.prompts
        assert (row.same_text, row.compared) == (compared, compared)
    assert result.differences() == []


def test_contestants_take_turns_in_changing_order(result):
    slots = [[m.contestant for m in slot] for _, slot in groupby(result.measurements, key=lambda m: m.slot)]
    assert len(slots) == 6 and all(sorted(slot) == sorted(result.contestants) for slot in slots)
    assert len({tuple(slot) for slot in slots}) > 3


def test_groups_take_turns():
    order = [slot.prompt.id for slot in contest.slots(PROMPTS, (0.0,), 2)]
    assert order == ["1", "3", "2"] * 2


def test_numbers_are_those_of_the_measurements(result):
    row = next(r for r in result.rows() if (r.temperature, r.group, r.contestant) == (0.0, "all", "draft"))
    mine = [m for m in result.measurements if m.contestant == "draft" and m.temperature == 0]
    assert row.tokens_per_pass == sum(len(m.tokens) for m in mine) / sum(len(m.rounds) for m in mine)
    assert row.alpha == acceptance(r for m in mine for r in m.rounds)[0]
    assert all(m.seconds > m.first_seconds > 0 and m.draft_seconds > 0 for m in mine)
    assert math.isfinite(row.predicted) and row.predicted > 0


def test_transformers_passes_are_counted(result):
    mine = [m for m in result.measurements if m.contestant == "transformers"]
    assert all(m.passes == len(m.tokens) == 8 for m in mine)


def test_drafters_are_left_as_they_were(llama):
    drafter = specnb.PromptLookup(4)
    run(llama, PROMPTS[:1], drafters=drafter, contestants=["lookup"])
    assert not {"start", "draft", "observe"} & vars(drafter).keys()


def test_the_callers_random_numbers_are_left_alone(llama):
    torch.manual_seed(3)
    wanted = torch.rand(1)
    torch.manual_seed(3)
    run(llama, PROMPTS[:1], temperatures=[1.0], contestants=["transformers"])
    assert torch.rand(1) == wanted


def test_times_come_from_the_clock(llama, hand_clock, monkeypatch):
    """Baseline: 8 tokens in 0.8 s, the first after 0.3 s; another one takes half of that, a third has its own clock."""

    def generate(ids, streamer, **_):
        streamer.put(ids)
        hand_clock.now += 0.3
        streamer.put(ids[0, :1])
        hand_clock.now += 0.5
        return torch.cat([ids, ids[:, :8]], dim=1)

    def half(ids, max_new_tokens, temperature, seed):
        hand_clock.now += 0.4
        return ids[0, :8]

    own = lambda ids, *_: Answer([1, 2], seconds=0.1)  # noqa: E731
    monkeypatch.setattr(llama, "generate", generate)
    found = run(llama, others={"half": half, "own": own}, contestants=["half", "own"])
    rows = {row.contestant: row for row in found.rows() if row.group == "all"}
    assert {name: row.ms_per_token for name, row in rows.items()} == {
        "transformers": pytest.approx(100), "half": pytest.approx(50), "own": pytest.approx(50)}  # fmt: skip
    assert rows["transformers"].first_token_ms == pytest.approx(300) and math.isnan(rows["half"].first_token_ms)
    assert rows["half"].speedup == pytest.approx(2.0)
    assert rows["half"].same_text == 3 and rows["own"].same_text == 0


def test_later_turns_follow_the_baselines_answers(llama):
    prompts = [Prompt("1", "g", ("abc abc", "def", "ghi"))]
    seen = []

    def other(ids, max_new_tokens, temperature, seed):
        seen.append(ids[0].tolist())
        return [5]

    found = run(llama, prompts, others={"other": other}, contestants=["other"])
    turns = seen[-3:]
    said = [Letters().decode(m.tokens, True) for m in found.measurements if m.contestant == "transformers"]
    assert turns == [Letters()(text)["input_ids"] for text in (
        "abc abc", f"abc abc\n\n{said[0]}\n\ndef", f"abc abc\n\n{said[0]}\n\ndef\n\n{said[1]}\n\nghi")]  # fmt: skip
    assert [m.turn for m in found.measurements if m.contestant == "other"] == [0, 1, 2]
    assert found.rows()[0].prompts == 1 and found.rows()[1].compared == 3


def test_a_fixed_width_is_a_way_of_its_own(llama):
    found = run(llama, PROMPTS[:1], pass_width=8, contestants=["plain", "lookup"])
    assert found.contestants["lookup"]["way"] == {"pass_width": 8, "compiled": False} and found.passes == []
    rows = {row.contestant: row for row in found.rows()}
    assert all(row.same_text == row.compared for row in rows.values()) and rows["lookup"].predicted > 0
    assert "every pass 8 positions wide" in found.contestants["plain"]["about"]


def test_compiled_ones_have_names_and_one_width_of_their_own(llama):
    drafters = {"lookup": specnb.PromptLookup(10), "draft": specnb.DraftModel(llama)}
    known = contestants.everyone(llama, drafters, compile=True)
    ours = [name for name, contestant in known.items() if contestant.way and contestant.way.compiled]
    assert ours == [f"{n}+compile" for n in ("plain", "lookup", "draft", "adaptive-lookup", "adaptive-draft")]
    assert {known[name].way for name in ours} == {Way(12, compiled=True)}
    assert [known[n].reference for n in ("lookup", "lookup+compile", "plain+compile")] == [
        "plain", "plain+compile", "transformers"]  # fmt: skip
    assert contestants.everyone(llama, drafters, compile=True, pass_width=8)["plain+compile"].way == Way(8, True)


@pytest.mark.parametrize(("k", "width"), [(3, 4), (4, 8), (10, 12), (11, 12)])
def test_one_width_for_all_holds_the_longest_draft(k, width):
    assert contestants.common_width({"a": specnb.PromptLookup(k), "b": specnb.PromptLookup(1)}) == width


def test_drafters_are_named_after_their_classes(llama):
    assert list(contestants.named_drafters([specnb.PromptLookup(), specnb.Scripted([[1]])])) == ["lookup", "scripted"]
    with pytest.raises(ValueError, match="give a dict"):
        contestants.named_drafters([specnb.PromptLookup(), specnb.PromptLookup(3)])


# --- stopped and resumed ---


def stopping_after(calls):
    """A contestant during whose n-th answer Ctrl-C is pressed (the first one is the warm-up)."""
    left = [calls]

    def ask(ids, *_):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return [1]

    return ask


def test_ctrl_c_leaves_whole_slots(llama, capsys):
    kept = []
    found = run(llama, others={"mine": stopping_after(4)}, contestants=["mine", "plain"], after_each=kept.append)
    assert not found.complete and "Stopped" in capsys.readouterr().err
    slots = [sorted(m.contestant for m in slot) for _, slot in groupby(found.measurements, key=lambda m: m.slot)]
    assert slots == [["mine", "plain", "transformers"]] * 2
    assert "stopped before its end" in found.table()
    assert [r.complete for r in kept] == [False, False]
    ended = run(llama, others={"mine": stopping_after(99)}, contestants=["mine", "plain"], resume=found)
    assert ended.complete and len(ended.measurements) == 9
    assert ended.measurements[:6] == found.measurements
    assert [m.prompt for m in ended.measurements[6:]] == ["2"] * 3


def test_ctrl_c_before_anything_was_measured(llama):
    with pytest.raises(KeyboardInterrupt):
        run(llama, others={"mine": stopping_after(1)}, contestants=["mine"])


def test_only_the_same_run_can_go_on(llama):
    found = run(llama, PROMPTS[:1], contestants=["plain"])
    with pytest.raises(ValueError, match="max_new_tokens was 8 and is now 9"):
        run(llama, PROMPTS[:1], contestants=["plain"], max_new_tokens=9, resume=found)
    with pytest.raises(ValueError, match="questions was"):
        run(llama, PROMPTS[1:2], contestants=["plain"], resume=found)
    with pytest.raises(ValueError, match=r"contestants was \['plain', 'transformers'\]"):
        run(llama, PROMPTS[:1], contestants=["lookup"], resume=found)
    found.machine["threads"] = 77
    with pytest.raises(ValueError, match="machine's threads was 77"):
        run(llama, PROMPTS[:1], contestants=["plain"], resume=found)


# --- reports ---


def test_json_brings_everything_back(result, tmp_path):
    result.to_json(tmp_path / "r.json")
    again = BenchmarkResult.from_json(tmp_path / "r.json")
    assert again == result and again.table() == result.table()
    assert {"name", "threads", "torch", "transformers", "date"} <= again.machine.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "another"}', '{"format": "specnb benchmark 1"}'])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ValueError, match=r"r\.json is not a result of specnb bench"):
        BenchmarkResult.from_json(tmp_path / "r.json")


def test_csv_has_a_line_per_row(result, tmp_path):
    result.to_csv(tmp_path / "r.csv")
    with open(tmp_path / "r.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    rows = result.rows()
    assert [line["contestant"] for line in lines] == [row.contestant for row in rows]
    assert [float(line["speedup"]) for line in lines] == [row.speedup for row in rows]


def test_table_names_what_is_slower_and_what_differs():
    answers = [measured(prompt=p, group=p) for p in "12"]
    answers += [measured("slow", "1", 2.0, group="1"), measured("slow", "2", 0.5, tokens=9, group="2")]
    text = BenchmarkResult(answers).table()
    assert "float32: slow is slower than transformers on 1 (0.50)." in text
    assert "float32: transformers is fastest, speed-up 1.00." in text  # √(½ · 1.8) = 0.95
    assert "1 greedy answers differ from their reference (slow on 2 from token 9)" in text
    assert "1 of 2" in text and "Without a fixed pass width" not in text
    assert "1 (1 prompt, float32, greedy)" in text and "all groups (2 prompts, float32, greedy)" in text
    assert "1 (1 prompt" not in BenchmarkResult(answers).table(groups=False)


@pytest.mark.parametrize(("low", "high", "verdict"), [(0.8, 0.99, True), (0.8, 1.01, False), (math.nan,) * 2 + (True,)])
def test_slower_means_the_whole_interval(low, high, verdict):
    (row,) = Summary([measured()], {}, {}).rows(["g"])
    assert results.is_slower(replace(row, speedup=0.9, low=low, high=high)) is verdict


@pytest.mark.parametrize(("scatter", "told"), [(0.5, False), (4.0, True)])
def test_an_unsteady_machine_is_reported(scatter, told):
    times = pass_times(c20={1: 10.0, 5: 14.0})
    for positions in (1, 5):
        times.add(20, positions, [10.0 + scatter * step for step in (-1, -1, 0, 0, 1, 1)])
    notes = results.unsteady([times])
    assert bool(notes) is told and all("not steady" in note for note in notes)


def test_near_ties_are_explained_in_bfloat16():
    answers = [measured(dtype="bfloat16"), measured("other", tokens=9, dtype="bfloat16")]
    assert "near-ties" in BenchmarkResult(answers).table()


def test_dtypes_stand_side_by_side(llama):
    one = run(llama, PROMPTS[:1], contestants=["plain"])
    two = run(tiny_model("llama").bfloat16(), PROMPTS[:1], contestants=["plain"])
    both = one.merged(two)
    assert [(row.dtype, row.contestant) for row in both.rows()] == [
        (dtype, name) for dtype in ("float32", "bfloat16") for name in ("transformers", "plain")]  # fmt: skip
    assert both.table().index("float32, greedy") < both.table().index("bfloat16, greedy")


def test_html_escapes_names():
    answers = [measured(), measured("<b>", seconds=0.5)]
    page = BenchmarkResult(answers)._repr_html_()
    assert "&lt;b&gt;" in page and "<b>" not in page and page.count("<table>") == 1


def test_plots(result):
    from matplotlib import pyplot as plt

    ax = result.plot()
    assert [label.get_text() for label in ax.get_yticklabels()] == ["first", "second", "all"]
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert "lookup, T 0" in labels and "plain, T 1" in labels and len(labels) == 14
    _, mine = plt.subplots()
    assert result.plot(mine, kind="prediction") is mine
    drawn = [line for line in mine.lines if line.get_label() == "lookup, T 0"]
    rows = [r for r in result.rows() if (r.contestant, r.temperature) == ("lookup", 0.0)]
    assert list(drawn[0].get_ydata()) == [row.predicted for row in rows]
    with pytest.raises(ValueError, match="kind must be"):
        result.plot(kind="pie")
    with pytest.raises(ValueError, match="No row has a prediction"):
        BenchmarkResult([measured(), measured("b")]).plot(kind="prediction")
    with pytest.raises(ValueError, match="nothing to draw"):
        BenchmarkResult([measured()]).plot()
    plt.close("all")


# --- bad input ---


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(prompts=[]), ValueError, "at least one question"),
        (dict(prompts="file.jsonl"), TypeError, r"load_prompts\(file\)"),
        (dict(prompts=[3]), ValueError, "each a string or a specnb.Prompt"),
        (dict(prompts=[Prompt("1", "", ("a",)), Prompt("1", "", ("b",))]), ValueError, "the same id"),
        (dict(temperatures=[]), ValueError, "temperatures must be numbers"),
        (dict(temperatures=[-1.0]), ValueError, "temperatures must be numbers"),
        (dict(temperatures=[math.nan]), ValueError, "temperatures must be numbers"),
        (dict(temperatures="hot"), ValueError, "temperatures must be numbers"),
        (dict(max_new_tokens=0), ValueError, "max_new_tokens must be at least 1"),
        (dict(max_new_tokens=500), ValueError, "Prompt 1 needs up to 521 tokens .* holds 512"),
        (dict(repeats=0), ValueError, "repeats must be at least 1"),
        (dict(seed="x"), TypeError, "seed must be a whole number"),
        (dict(pass_width=0), ValueError, "pass_width"),
        (dict(contestants=["medusa"]), ValueError, "no contestant 'medusa' here. There is: transformers, "),
        (dict(drafters={"a": 3}), TypeError, r"drafters\['a'\] must be a specnb.Drafter, got int"),
        (dict(drafters={"plain": specnb.PromptLookup()}), ValueError, "Two contestants are named 'plain'"),
        (dict(others={"mute": lambda *_: []}, contestants=["mute"]), ValueError, "mute returned no tokens"),
    ],
)
def test_bad_input_is_refused(llama, options, error, message):
    with pytest.raises(error, match=message):
        run(llama, **options)


def test_bare_questions_are_numbered(llama):
    found = run(llama, ["abc", "def"], contestants=["plain"], temperatures=0.0)
    assert {m.prompt for m in found.measurements} == {"1", "2"}
    assert found.rows()[0].group == "" and "no group (2 prompts" in found.table()


# --- the command ---


@pytest.fixture
def tiny_command(monkeypatch, tmp_path):
    """`specnb bench` with a tiny model; the folder it writes to."""

    def load(name, dtype):
        return tiny_model("llama").to(getattr(torch, dtype or "float32")), Letters()

    (tmp_path / "q.jsonl").write_text("".join(
        json.dumps({"question_id": p.id, "category": p.group, "turns": p.turns}) + "\n" for p in PROMPTS))  # fmt: skip
    monkeypatch.setattr(benchmark, "load_model", load)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "out"


def bench(*words):
    return main(["bench", "--questions", "q.jsonl", "--max-new-tokens", "6", "--contestants", "plain,lookup", *words])


def test_command_writes_every_form(tiny_command, capsys):
    assert bench("--dtype", "float32,bfloat16", "--out", "out", "--limit", "1") == 0
    files = {path.name for path in tiny_command.iterdir()}
    assert files == {"result.json", "rows.csv", "report.txt", "speedup.png", "prediction.png"}
    read = BenchmarkResult.from_json(tiny_command / "result.json")
    assert read.complete and len(read.measurements) == 2 * 2 * 3
    assert {m.dtype for m in read.measurements} == {"float32", "bfloat16"}
    assert capsys.readouterr().out.strip() == (tiny_command / "report.txt").read_text().strip() == read.table()


def test_command_survives_ctrl_c_and_goes_on(tiny_command, monkeypatch):
    measure, left = contest.Bench.measure, [8]

    def interrupted(self, *arguments):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return measure(self, *arguments)

    monkeypatch.setattr(contest.Bench, "measure", interrupted)
    assert bench("--out", "out") == 130
    assert len(BenchmarkResult.from_json(tiny_command / "result.json").measurements) == 6
    assert "stopped before its end" in (tiny_command / "report.txt").read_text()
    assert bench("--resume", "out") == 0
    assert len(BenchmarkResult.from_json(tiny_command / "result.json").measurements) == 9


def test_quick_is_one_question_of_each_group(tiny_command):
    assert main(["bench", "--questions", "q.jsonl", "--quick", "--contestants", "plain", "--draft-model", "x",
                 "--out", "out"]) == 0  # fmt: skip
    read = BenchmarkResult.from_json(tiny_command / "result.json")
    assert {m.prompt for m in read.measurements} == {"1", "3"} and read.settings["max_new_tokens"] == 32


def test_command_refuses_in_a_sentence(tiny_command, capsys):
    assert bench("--groups", "third") == 1
    assert "specnb: q.jsonl has no group 'third'. There is: 'first', 'second'." in capsys.readouterr().err
    assert bench("--peer", "llama-cpp") == 1
    assert "--peer takes ENGINE=PATH" in capsys.readouterr().err
    assert bench("--peer-weights", "vllm=x") == 1
    assert "which no --peer starts" in capsys.readouterr().err
    assert bench("--resume", "nowhere") == 1
    assert main(["bench", "--questions", "q.jsonl", "--contestants", "typo", "--out", "out"]) == 1
    assert "no contestant 'typo'" in capsys.readouterr().err
    assert not tiny_command.exists()


def test_machine_is_described():
    described = results.machine("cpu")
    assert described["threads"] == torch.get_num_threads() and described["name"] and described["specnb"]
