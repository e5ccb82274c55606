"""The workbench in a real JupyterLab: cells run, sliders move pictures, the replay steps, the quiz answers."""

import re
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell
from playwright.sync_api import Locator, expect

from tests import run_notebooks as runner
from tests.browser.lab import Lab
from tests.browser.workbench import save

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent.parent / "notebooks").glob("*.ipynb"))

ROUND_1 = "Round 1 of 2 · target passes: 1 · tokens: 3 · tokens per pass: 3.00"
ROUND_2 = "Round 2 of 2 · target passes: 2 · tokens: 8 · tokens per pass: 4.00"
BEFORE = "Before the first of 2 rounds"


def said(lab: Lab) -> Locator:
    return lab.output(".specnb-replay [role=status]")


def picture(lab: Lab) -> Locator:
    return lab.output("img.specnb-picture")


# --------------------------------------------------------------------------------------------------- replay


def test_replay_shows_every_kind_in_words_and_marks(bench):
    expect(said(bench)).to_have_text(ROUND_1)
    tokens = bench.output(".specnb-replay .specnb-tokens li")
    expect(tokens).to_have_text(["bell✓", "will✓", "soon✗", "ring○", "ring↻"])
    expect(tokens.locator("del")).to_have_text(["soon", "ring"])
    labels = [token.get_attribute("aria-label") for token in tokens.all()]
    assert labels[0] == "bell: accepted" and labels[2] == "soon: rejected" and labels[4].startswith("ring: correction")
    expect(bench.output(".specnb-replay .specnb-text")).to_have_text(re.compile("sleeping bell will ring$"))


def test_replay_steps_with_buttons_and_tells_the_kernel(bench):
    replay = bench.output(".specnb-replay")
    replay.get_by_role("button", name="Next round").click()
    expect(said(bench)).to_have_text(ROUND_2)
    expect(replay.locator(".specnb-text")).to_have_text(re.compile("bell will ring again, waking the city$"))
    expect(replay.locator(".specnb-tokens strong")).to_have_text("city")
    assert bench.run_code("print(replay.index)") == "2"
    replay.get_by_role("button", name="Before the first round").click()
    expect(said(bench)).to_have_text(BEFORE)
    expect(replay.locator(".specnb-tokens li")).to_have_count(0)
    replay.get_by_role("button", name="Previous round").click(force=True)  # marked as disabled
    expect(said(bench)).to_have_text(BEFORE)
    replay.get_by_role("button", name="Last round").click()
    expect(said(bench)).to_have_text(ROUND_2)


def test_replay_steps_with_keys_and_keeps_them_from_the_notebook(bench):
    replay = bench.output(".specnb-replay")
    replay.focus()
    cell = bench.active_cell()
    for key, text in [("ArrowRight", ROUND_2), ("ArrowRight", ROUND_2), ("Home", BEFORE), ("ArrowUp", ROUND_1),
                      ("End", ROUND_2), ("ArrowLeft", ROUND_1), ("ArrowDown", BEFORE)]:  # fmt: skip
        bench.page.keyboard.press(key)
        expect(said(bench)).to_have_text(text)
    assert bench.active_cell() == cell
    expect(replay).to_be_focused()


def test_replay_slider_and_buttons_are_reached_with_tab(bench):
    replay = bench.output(".specnb-replay")
    replay.focus()
    reached = []
    for _ in range(6):
        bench.page.keyboard.press("Tab")
        reached.append(bench.page.evaluate("document.activeElement.getAttribute('aria-label')"))
    assert reached == [
        "Before the first round",
        "Previous round",
        "Round",
        "Next round",
        "Last round",
        "Play the rounds",
    ]
    replay.get_by_role("slider", name="Round").press("ArrowRight")
    expect(said(bench)).to_have_text(ROUND_2)
    assert replay.get_by_role("slider", name="Round").get_attribute("aria-valuetext") == ROUND_2


def test_replay_plays_to_its_end_and_stops(bench):
    play = bench.output(".specnb-replay").get_by_role("button", name="Play the rounds")
    play.click()
    expect(play).to_have_attribute("aria-pressed", "true")
    expect(said(bench)).to_have_text(ROUND_2)
    expect(play).to_have_attribute("aria-pressed", "false")


def test_replay_follows_python(bench):
    bench.run_code("replay.index = 2")
    expect(said(bench)).to_have_text(ROUND_2)


def test_replay_steps_while_the_kernel_is_busy(bench):
    bench.start_code("import time; time.sleep(60)")
    bench.page.wait_for_function("() => jupyterapp.shell.currentWidget.sessionContext.session.kernel.status === 'busy'")
    bench.output(".specnb-replay").get_by_role("button", name="Next round").click()
    expect(said(bench)).to_have_text(ROUND_2)
    assert bench.kernel_status() == "busy"
    bench.interrupt()


def test_replay_and_quiz_work_after_the_kernel_has_gone(lab):
    lab.open("gone.ipynb")
    lab.run_all()
    lab.page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    lab.page.wait_for_function("() => !jupyterapp.shell.currentWidget.sessionContext.session?.kernel")
    lab.output(".specnb-replay").get_by_role("button", name="Next round").click()
    expect(said(lab)).to_have_text(ROUND_2)
    lab.output(".specnb-replay").press("Home")
    expect(said(lab)).to_have_text(BEFORE)
    lab.output(".specnb-quiz").get_by_role("radio").nth(1).check()
    expect(lab.output(".specnb-quiz [role=status]")).to_contain_text("Right.")


# ------------------------------------------------------------------------------------------ sliders and quiz


def test_slider_moves_the_picture_with_the_keyboard(bench):
    expect(picture(bench)).to_have_count(1)
    expect(picture(bench)).to_have_js_property("complete", True)
    before = picture(bench).get_attribute("src")
    assert picture(bench).get_attribute("alt") == "chance to reach a position (alpha = 0.5, k = 5)"
    handle = bench.output(".widget-slider .noUi-handle").nth(1)
    handle.focus()
    bench.page.keyboard.press("ArrowRight")
    expect(picture(bench)).to_have_attribute("alt", "chance to reach a position (alpha = 0.5, k = 6)")
    expect(picture(bench)).not_to_have_attribute("src", before)
    assert picture(bench).evaluate("img => img.naturalWidth") > 300
    assert bench.run_code("print(figure.values['k'])") == "6"


def test_live_figure_shows_one_picture_not_two(bench):
    cell = bench.page.locator(".jp-Cell", has_text="def draw(ax, alpha, k)")
    expect(cell.locator("img")).to_have_count(1)
    expect(cell.locator(".widget-slider")).to_have_count(2)


def test_slider_moves_text(bench):
    expect(bench.output(".passes")).to_have_text("6 positions")
    bench.output(".widget-slider .noUi-handle").nth(2).focus()
    bench.page.keyboard.press("ArrowLeft")
    expect(bench.output(".passes")).to_have_text("5 positions")


def test_quiz_answers_a_click_and_the_arrow_keys(bench):
    quiz = bench.output(".specnb-quiz")
    answer = quiz.get_by_role("status")
    quiz.get_by_text("The draft's first token").click()
    expect(answer).to_have_text("✗ Not this one. A draft may be wrong everywhere.")
    cell = bench.active_cell()
    bench.page.keyboard.press("ArrowDown")
    expect(answer).to_have_text("✓ Right. A correction or a bonus token comes from the target itself.")
    assert bench.active_cell() == cell
    assert bench.run_code("print(quiz.chosen)") == "1"
    expect(quiz.locator("code")).to_have_text("next_token")


def test_exercise_names_the_slip(bench):
    result = bench.page.locator(".jp-Cell", has_text="exercises.check_accepted_prefix").locator(".jp-OutputArea-output")
    expect(result).to_contain_text("✗ accepted_prefix: failed")
    expect(result).to_contain_text("also those after a rejection")


# ------------------------------------------------------------------------------------------ twins, themes, errors


def test_stored_twins_show_without_a_kernel(bench, lab, lab_root):
    """As on GitHub or after a fresh clone: what was run and stored is opened, and nothing is run."""
    bench.save()
    runner.write(runner.normalise(runner.read(lab_root / "workbench.ipynb")), lab_root / "stored.ipynb")
    lab.open("stored.ipynb")
    expect(lab.output("table tr")).to_have_count(3)
    expect(lab.output("del")).to_have_text(["soon", "ring"])
    expect(lab.output("img")).to_have_count(1)
    expect(lab.output("details")).to_have_count(1)
    why = lab.output("details").get_by_text("A correction or a bonus token")
    expect(why).to_be_hidden()
    lab.output("details summary").click()
    expect(why).to_be_visible()
    assert lab.complaints() == []


def contrast(locator: Locator) -> float:
    """The contrast ratio of a text against the background it stands on (WCAG: at least 4.5)."""
    return locator.evaluate(
        """element => {
          const paint = document.createElement("canvas").getContext("2d");
          const over = (colour) => { paint.fillStyle = colour; paint.fillRect(0, 0, 1, 1); };
          const parents = [];
          for (let node = element; node; node = node.parentElement) parents.unshift(node);
          over("white");
          parents.forEach(node => over(getComputedStyle(node).backgroundColor));
          const luminance = () => {
            const [r, g, b] = [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3).map(v => v / 255)
              .map(v => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const ground = luminance();
          over(getComputedStyle(element).color);
          const [dark, light] = [ground, luminance()].sort((a, b) => a - b);
          return (light + 0.05) / (dark + 0.05);
        }"""
    )


def test_text_is_readable_in_both_themes(bench):
    for theme in ("JupyterLab Light", "JupyterLab Dark"):
        bench.set_theme(theme)
        for index in (1, 2):
            bench.run_code(f"replay.index = {index}")
            expect(said(bench)).to_have_text(ROUND_1 if index == 1 else ROUND_2)
            texts = [*bench.output(".specnb-token").all(), *bench.output(".specnb-legend li").all(), said(bench)]
            texts += bench.output(".specnb-quiz label").all() + bench.output(".specnb-prompt").all()
            low = {text.inner_text(): contrast(text) for text in texts}
            assert min(low.values()) >= 4.5, (theme, low)


def test_error_output_fails_the_run(lab, lab_root):
    save(lab_root / "error.ipynb", new_code_cell("1 / 0"))
    lab.open("error.ipynb")
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        lab.run_all()


@pytest.mark.real_model
@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in NOTEBOOKS[:1]])
def test_notebook_runs_in_jupyterlab(lab, path):
    lab.open(f"notebooks/{path.name}")
    lab.run_all(timeout=600)
    replay = lab.output(".specnb-replay").first
    replay.focus()
    lab.page.keyboard.press("Home")
    expect(replay.get_by_role("status")).to_contain_text("Before the first")
    lab.page.keyboard.press("End")
    expect(replay.get_by_role("status")).to_contain_text("tokens per pass")
