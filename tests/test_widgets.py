"""The widgets without a browser: what they hold, what their static twins say, what they refuse."""

import base64
import html
import io
import re
from types import SimpleNamespace

import matplotlib
import pytest
import torch
import traitlets
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

matplotlib.use("Agg")
from matplotlib import image
from matplotlib import pyplot as plt

from specnb import widgets
from specnb.report import Round

WORDS = ["bell", "will", "soon", "ring", "again", ",", "waking", "the", "city"]
PROMPT = "When the north wind blows past the seventh bridge, the sleeping"
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


def ids(text):
    return [WORDS.index(word) for word in text.split()]


def made(drafted, accepted, own=None, bonus=False, row=0):
    return Round(row, ids(drafted), accepted, None if own is None else WORDS.index(own), bonus)


LESSON = [made("bell will soon ring", 2, "ring"), made("again , waking the", 4, "city", bonus=True)]


@pytest.fixture
def lesson():
    return widgets.replay(LESSON, words=WORDS, prompt=PROMPT)


@pytest.fixture(scope="module")
def byte_tokenizer():
    """Every byte is a token, as in a byte-level BPE without merges: é takes two tokens, an emoji four."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def kinds(replay):
    return [[(token["label"].strip(), token["kind"]) for token in step["tokens"]] for step in replay.steps]


def words_of(twin):
    return html.unescape(re.sub(r"<[^>]+>", " ", twin))


# --------------------------------------------------------------------------------------------------- replay


def test_lesson_has_the_kinds_of_both_rounds(lesson):
    assert kinds(lesson) == [
        [("bell", "accepted"), ("will", "accepted"), ("soon", "rejected"), ("ring", "unused"), ("ring", "correction")],
        [("again", "accepted"), (",", "accepted"), ("waking", "accepted"), ("the", "accepted"), ("city", "bonus")],
    ]
    assert [step["written"] for step in lesson.steps] == [3, 8]
    assert lesson.text() == " bell will ring again, waking the city"
    assert lesson.text(1) == " bell will ring"


def test_row_that_ends_inside_the_accepted_block():
    replay = widgets.replay([made("bell will soon ring", 2)], words=WORDS)
    assert [kind for _, kind in kinds(replay)[0]] == ["accepted", "accepted", "unused", "unused"]
    assert replay.steps[0]["written"] == 2


def test_round_without_a_draft_is_neither_correction_nor_bonus():
    replay = widgets.replay([made("", 0, "bell", bonus=True), made("", 0, "will")], words=WORDS)
    assert kinds(replay) == [[("bell", "plain")], [("will", "plain")]]


def test_words_as_a_mapping_and_tokens_that_are_words():
    by_id = widgets.replay(LESSON, words=dict(enumerate(WORDS)))
    spoken = [SimpleNamespace(drafted=["a", "b"], num_accepted=1, next_token="c", is_bonus=False)]
    assert by_id.text() == " bell will ring again, waking the city"
    assert widgets.replay(spoken).text() == " a c"


def test_row_of_a_batch_is_chosen():
    trace = [LESSON[0], made("city", 0, "bell", row=1)]
    assert widgets.replay(trace, words=WORDS, row=1).text() == " bell"
    with pytest.raises(ValueError, match=r"no round of row 2; it holds the rows \[0, 1\]"):
        widgets.replay(trace, words=WORDS, row=2)


def encode(tokenizer, text):
    return tokenizer(text)["input_ids"]


def test_output_of_generate_with_its_prompt(byte_tokenizer):
    prompts = torch.tensor([encode(byte_tokenizer, "ab"), encode(byte_tokenizer, "cd")])
    new = torch.tensor([encode(byte_tokenizer, "xyz")] * 2)
    rounds = [Round(row, new[row, :2].tolist(), 2, int(new[row, 2]), True) for row in range(2)]
    out = SimpleNamespace(sequences=torch.cat([prompts, new], 1), num_new_tokens=torch.tensor([3, 3]), trace=rounds)
    replay = widgets.replay(out, byte_tokenizer, row=1)
    assert (replay.prompt, replay.text()) == ("cd", "xyz")
    assert widgets.replay(out.trace, byte_tokenizer, prompts, row=1).prompt == "cd"


@pytest.mark.parametrize("text", ["café", "a😀b", "日本語", "e\u0301", "naïve 😀😀"])
def test_characters_spread_over_tokens_come_out_whole(byte_tokenizer, text):
    tokens = encode(byte_tokenizer, text)
    rounds = [Round(0, tokens[i : i + 2], len(tokens[i : i + 2]), None, False) for i in range(0, len(tokens), 2)]
    replay = widgets.replay(rounds, byte_tokenizer, encode(byte_tokenizer, "x"))
    assert replay.text() == text
    assert "\ufffd" not in repr(replay)
    halves = [token for step in replay.steps for token in step["tokens"] if not token["text"]]
    assert len(halves) == len(tokens) - len(text)
    assert all(token["label"] == "▯" for token in halves)


def test_rejected_half_character_leaves_the_correction_whole(byte_tokenizer):
    first, second = encode(byte_tokenizer, "é")
    _, other = encode(byte_tokenizer, "è")
    replay = widgets.replay([Round(0, [first, other], 1, second, False)], byte_tokenizer, [])
    assert replay.text() == "é"
    assert [token["text"] for token in replay.steps[0]["tokens"]] == ["", "è", "é"]


def test_newlines_and_bare_spaces_are_visible(byte_tokenizer):
    tokens = encode(byte_tokenizer, "\n \ta")
    replay = widgets.replay([Round(0, tokens, 4, None, False)], byte_tokenizer, [])
    assert [token["label"] for token in replay.steps[0]["tokens"]] == ["⏎", "␣", "⇥", "a"]
    assert "⏎" in replay._twin() and replay.text() == "\n \ta"


def test_twin_tells_every_kind_without_colour_script_or_style(lesson):
    twin = lesson._repr_mimebundle_()["text/html"]
    assert twin.count("<tr>") == 1 + len(LESSON)
    assert "<del><code> soon</code></del>✗" in twin
    assert "<del><code> ring</code></del>○" in twin
    assert "<ins><code> ring</code></ins>↻" in twin
    assert "<strong><code> city</code></strong>★" in twin
    assert "<code> bell</code></span>✓" in twin
    assert not re.search(r"<script|<style|style=|class=|color", twin)
    assert "8 tokens in 2 target passes: 4.00 tokens per pass." in words_of(twin)
    assert "bell will ring again, waking the city" in words_of(twin)


def test_twin_reads_as_plain_text(lesson):
    assert lesson._repr_mimebundle_()["text/plain"] == repr(lesson)
    assert "round 1: bell✓ will✓ [soon]✗ [ring]○ ring↻" in repr(lesson)
    assert "round 2: again✓ ,✓ waking✓ the✓ city★" in repr(lesson)


def test_legend_names_the_marks_that_occur_and_no_other(lesson):
    legend = repr(lesson).splitlines()[-1]
    assert all(mark in legend for mark in "✓✗○↻★")
    assert "→" not in legend


def test_twin_escapes_what_a_model_may_write():
    spoken = [SimpleNamespace(drafted=["<script>"], num_accepted=0, next_token="</table>", is_bonus=False)]
    twin = widgets.replay(spoken, prompt="<b>&")._twin()
    assert "<script" not in twin and "<b>" not in twin and twin.count("</table>") == 1


def test_twin_is_the_same_every_time():
    twins = {widgets.replay(LESSON, words=WORDS, prompt=PROMPT)._twin() for _ in range(2)}
    assert len(twins) == 1


def test_bundle_holds_the_live_view_and_both_twins(lesson):
    assert set(lesson._repr_mimebundle_()) == {WIDGET_VIEW, "text/html", "text/plain"}


def test_index_starts_at_the_first_round_and_stays_in_range(lesson):
    assert lesson.index == 1
    lesson.index = 2
    for wrong in (-1, 3):
        with pytest.raises(traitlets.TraitError, match="2 rounds"):
            lesson.index = wrong
    assert lesson.index == 2


def test_long_prompt_is_cut_at_its_beginning():
    replay = widgets.replay(LESSON, words=WORDS, prompt="x" * 5000 + " the end")
    assert replay.prompt.endswith(" the end") and len(replay.prompt) < 500


@pytest.mark.parametrize("trace", [None, [], SimpleNamespace(trace=None)])
def test_missing_trace_says_how_to_get_one(trace):
    with pytest.raises(ValueError, match="return_trace=True"):
        widgets.replay(trace)


@pytest.mark.parametrize(
    ("one", "error", "said"),
    [
        (SimpleNamespace(drafted=[1]), TypeError, "num_accepted"),
        (Round(0, [1, 2], 3, None, False), ValueError, "accepts 3 of 2"),
        (Round(0, [1, 2], 1, 5, True), ValueError, "bonus token after a rejection"),
    ],
)
def test_impossible_rounds_are_refused(one, error, said):
    with pytest.raises(error, match=said):
        widgets.replay([one])


def test_token_without_a_word_and_two_spellings_are_refused(byte_tokenizer):
    with pytest.raises(ValueError, match="Token 99 has no word"):
        widgets.replay([Round(0, [99], 1, None, False)], words=WORDS)
    with pytest.raises(ValueError, match="not both"):
        widgets.replay(LESSON, byte_tokenizer, words=WORDS)


# --------------------------------------------------------------------------------------------------- sliders


def line(ax, slope, k):
    ax.plot([0, k], [0, slope * k])
    ax.set_title(f"slope {slope}")


def pixels(png):
    return image.imread(io.BytesIO(png))


def test_figure_follows_its_controls():
    shown = widgets.interactive_figure(line, slope=(0.0, 1.0, 0.1), k=(1, 9))
    before, described = shown.picture.png, shown.picture.alt
    shown.controls["k"].value = 9
    assert shown.values["k"] == 9
    assert (pixels(shown.picture.png) != pixels(before)).any()
    assert shown.picture.alt != described and "k = 9" in shown.picture.alt
    shown.controls["k"].value = 5
    assert shown.picture.png == before


def test_figure_leaves_no_open_figure_behind():
    shown = widgets.interactive_figure(line, slope=(0.0, 1.0), k=(1, 9))
    for k in range(1, 9):
        shown.controls["k"].value = k
    shown._repr_mimebundle_()
    assert plt.get_fignums() == []


def test_figure_bundle_has_a_png_twin_of_the_starting_values():
    shown = widgets.interactive_figure(line, slope=(0.0, 1.0), k=(1, 9))
    start = shown.picture.png
    shown.controls["k"].value = 9
    bundle = shown._repr_mimebundle_()
    assert set(bundle) == {WIDGET_VIEW, "image/png", "text/plain"}
    assert base64.b64decode(bundle["image/png"]) == start
    assert bundle["text/plain"] == "Plot (slope = 0.5, k = 5)"


def test_twin_of_several_values_has_a_titled_panel_each():
    titles = []

    def draw(ax, k):
        ax.plot([0, k])
        titles.append(ax)

    shown = widgets.interactive_figure(draw, static=[{"k": 1}, {"k": 4}], alt="a line", k=(1, 9))
    png = base64.b64decode(shown._repr_mimebundle_()["image/png"])
    assert [ax.get_title() for ax in titles[-2:]] == ["k = 1", "k = 4"]
    assert pixels(png).shape[1] > pixels(shown.picture.png).shape[1]
    assert repr(shown) == "a line (k = 1); a line (k = 4)"


def test_twin_is_byte_for_byte_the_same():
    twins = {
        widgets.interactive_figure(line, slope=(0.0, 1.0), k=(1, 9))._repr_mimebundle_()["image/png"] for _ in "ab"
    }
    assert len(twins) == 1


def test_failing_redraw_is_told_and_the_next_one_recovers():
    def draw(ax, k):
        if k == 3:
            raise RuntimeError("three is too many")

    shown = widgets.interactive_figure(draw, k=(1, 3))
    shown.controls["k"].value = 3
    assert shown.picture.error == "RuntimeError: three is too many"
    shown.controls["k"].value = 1
    assert shown.picture.error == ""
    assert plt.get_fignums() == []


def test_failing_first_draw_is_raised_so_that_a_headless_run_fails():
    with pytest.raises(ZeroDivisionError):
        widgets.interactive_figure(lambda ax, k: 1 / 0, k=(1, 3))


def test_pyplot_calls_in_draw_reach_their_panel():
    seen = []

    def draw(ax, k):
        plt.title(f"k is {k}")
        seen.append(ax.get_title())

    widgets.interactive_figure(draw, k=(1, 3))
    assert seen == ["k is 2"]


def test_controls_are_named_and_checked():
    slider = widgets.ipywidgets.FloatSlider(value=0.7, min=0, max=1, description="α, acceptance")
    shown = widgets.interactive_figure(lambda ax, a, mode: None, a=slider, mode=["greedy", "sampled"])
    assert [control.description for control in shown.controls.values()] == ["α, acceptance", "mode"]
    assert "α, acceptance = 0.7, mode = greedy" in repr(shown)
    with pytest.raises(ValueError, match="at least one control"):
        widgets.interactive_figure(lambda ax: None)
    with pytest.raises(ValueError, match="k=<object"):
        widgets.interactive_figure(lambda ax, k: None, k=object())
    with pytest.raises(ValueError, match="which are no controls"):
        widgets.interactive_figure(lambda ax, k: None, static=[{"alpha": 1}], k=(1, 2))


def test_html_follows_its_controls_and_its_twin_does_not():
    shown = widgets.interactive_html(lambda k: f"<b>{10 // k}</b>", k=(0, 4))
    shown.controls["k"].value = 1
    assert shown._view.value == "<b>10</b>"
    shown.controls["k"].value = 0
    assert "ZeroDivisionError" in shown._view.value and 'role="alert"' in shown._view.value
    bundle = shown._repr_mimebundle_()
    assert set(bundle) == {WIDGET_VIEW, "text/html", "text/plain"}
    assert bundle["text/html"].startswith("<b>5</b>") and "k = 2" in bundle["text/html"]


# ------------------------------------------------------------------------------------------------------ quiz


def test_quiz_twin_folds_the_answer_away():
    quiz = widgets.quiz("Why is `q` < p?", ["chance", "no `reason`"], 1, "since `a < b`")
    twin = quiz._repr_mimebundle_()["text/html"]
    before, folded = twin.split("<details>")
    assert "<code>q</code> &lt; p" in before and "<br>B. no <code>reason</code></p>" in before
    assert "B. no" in folded and "<code>a &lt; b</code>" in folded
    assert "since" not in before and not re.search(r"<script|style", twin)


def test_quiz_plain_text_does_not_give_the_answer_away():
    assert repr(widgets.quiz("Why?", ["x", "y"], "y", "because")) == "Why?\n  A. x\n  B. y"


@pytest.mark.parametrize("answer", [1, "y"])
def test_quiz_answer_by_place_or_text(answer):
    assert widgets.quiz("Why?", ["x", "y"], answer, "because").answer == 1


@pytest.mark.parametrize("answer", [2, -1, "z", None, True, 1.0])
def test_quiz_refuses_an_answer_that_is_no_option(answer):
    with pytest.raises(ValueError, match="none of the options"):
        widgets.quiz("Why?", ["x", "y"], answer, "because")


@pytest.mark.parametrize(
    ("options", "hints", "said"),
    [(["x"], None, "two or more"), (["x", "x"], None, "different"), (["x", "y"], ["h"], "one hint per option")],
)
def test_quiz_refuses_bad_options(options, hints, said):
    with pytest.raises(ValueError, match=said):
        widgets.quiz("Why?", options, 0, "because", hints)
