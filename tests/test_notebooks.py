"""The notebooks: what is stored is fresh and within its budgets, and every cell runs headless in fast mode.

The second half tests the runner itself, on small notebooks made here.
"""

import base64
import io
import os
import re
import stat
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from PIL import Image

from tests import run_notebooks as runner

NOTEBOOKS = sorted(runner.NOTEBOOKS.glob("*.ipynb"))
BY_NAME = [pytest.param(path, id=path.stem) for path in NOTEBOOKS]


@pytest.mark.parametrize("path", BY_NAME)
def test_stored_outputs_are_fresh_and_within_budget(path):
    found = runner.problems(path)
    assert not found, f"{path.name}: " + "; ".join(found)


@pytest.mark.notebook
@pytest.mark.real_model
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", BY_NAME)
def test_notebook_runs_headless_in_fast_mode(path):
    before = path.read_bytes()
    try:
        executed = runner.run(path, mode="fast")
    except RuntimeError as error:
        pytest.fail(str(error), pytrace=False)
    stderr = [out.text for cell in executed.cells for out in cell.get("outputs", []) if out.get("name") == "stderr"]
    assert not stderr, f"{path.name} wrote to stderr: {stderr[0][:500]}"
    assert path.read_bytes() == before


# ------------------------------------------------------------------------------------------- the runner itself


def save(path, *cells, **metadata):
    notebook = new_notebook(cells=list(cells), metadata=metadata)
    nbformat.write(notebook, path)
    return path


@pytest.fixture
def small(tmp_path):
    """A notebook of two code cells as an author leaves it: no outputs, no hash."""
    cells = [new_markdown_cell("# Title"), new_code_cell("x = 6\nprint('six')"), new_code_cell("x * 7")]
    return save(tmp_path / "03_small.ipynb", *cells)


@pytest.fixture
def no_kernel(monkeypatch):
    """Executes by marking each code cell as run: for tests of what surrounds the execution."""

    def execute(notebook, folder, mode):
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.execution_count = 7
                cell.outputs = [new_output("stream", name="stdout", text=f"ran in {mode} mode")]
        return notebook

    monkeypatch.setattr(runner, "execute", execute)


def outputs_of(path):
    return [cell.outputs for cell in runner.read(path).cells if cell.cell_type == "code"]


@pytest.mark.notebook
def test_new_notebook_is_run_and_stored(small, capsys):
    assert runner.main(["--notebooks", str(small.parent)]) == 0
    stored = runner.read(small)
    assert [cell.get("execution_count") for cell in stored.cells] == [None, 1, 2]
    assert outputs_of(small)[0][0].text == "six\n"
    assert outputs_of(small)[1][0].data == {"text/plain": "42"}
    assert runner.stored_hash(stored) == runner.sources_hash(stored)
    assert os.listdir(small.parent) == [small.name]
    assert re.search(r"03_small.ipynb … \d+ s", capsys.readouterr().out)


@pytest.mark.notebook
def test_cells_see_the_mode_and_the_folder_of_the_notebook(tmp_path):
    cell = new_code_cell("import os, pathlib\nprint(os.environ['SPECNB_MODE'], pathlib.Path('here.txt').read_text())")
    (tmp_path / "here.txt").write_text("found")
    path = save(tmp_path / "00_mode.ipynb", cell)
    for mode in ("fast", "full"):
        assert runner.run(path, mode).cells[0].outputs[0].text == f"{mode} found\n"


@pytest.mark.notebook
def test_failing_notebook_is_left_as_it_was_and_told(tmp_path, capsys):
    cells = [new_code_cell("a = 1"), new_code_cell("def f():\n    return [][3]\nf()"), new_code_cell("b = 2")]
    path = save(tmp_path / "04_bad.ipynb", *cells)
    other = save(tmp_path / "05_good.ipynb", new_code_cell("1 + 1"))
    before = path.read_bytes()
    assert runner.main(["--notebooks", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "cell 1 failed with IndexError: list index out of range" in said
    assert "return [][3]" in said and "\x1b[" not in said
    assert path.read_bytes() == before
    assert outputs_of(other)[0], "the notebooks after a failing one run all the same"


@pytest.mark.notebook
def test_tags_of_nbmake_are_honoured(tmp_path):
    raising = new_code_cell("1 / 0", metadata={"tags": ["raises-exception"]})
    skipped = new_code_cell("raise SystemExit", metadata={"tags": ["skip-execution"]})
    path = save(tmp_path / "00_tags.ipynb", raising, skipped, new_code_cell("2"))
    assert runner.store(path)
    assert [cell.execution_count for cell in runner.read(path).cells] == [1, None, 2]
    assert not [p for p in runner.problems(path) if "counts" in p or "error" in p]


@pytest.mark.notebook
def test_slow_cell_is_stopped_and_named(tmp_path, monkeypatch):
    monkeypatch.setitem(runner.CELL_SECONDS, "fast", 1)
    path = save(tmp_path / "00_slow.ipynb", new_code_cell("a = 1"), new_code_cell("import time; time.sleep(60)"))
    with pytest.raises(RuntimeError, match=r"cell 1 failed with .*timed out"):
        runner.run(path, "fast")


@pytest.mark.notebook
def test_widgets_leave_only_their_twins_behind(tmp_path):
    source = "from specnb import widgets\nwidgets.{}"
    figure = source.format("interactive_figure(lambda ax, k: ax.plot([0, k]), k=(1, 5))")
    quiz = source.format("quiz('Why?', ['x', 'y'], 'y', 'because')")
    path = save(tmp_path / "00_widgets.ipynb", new_code_cell(figure), new_code_cell(quiz))
    assert runner.store(path)
    assert [set(outs[0].data) for outs in outputs_of(path)] == [
        {"image/png", "text/plain"},
        {"text/html", "text/plain"},
    ]
    assert "widgets" not in runner.read(path).metadata
    first = path.read_bytes()
    assert runner.store(path)
    assert path.read_bytes() == first, "the same run stores the same bytes"


def test_changed_notebook_is_left_alone_and_named(small, no_kernel, capsys):
    assert runner.main(["--notebooks", str(small.parent)]) == 0
    notebook = runner.read(small)
    notebook.cells[2].source = "my own answer"
    nbformat.write(notebook, small)
    before = small.read_bytes()
    assert runner.main(["--notebooks", str(small.parent)]) == 0
    assert "changed by you: 03_small.ipynb; left alone. Use --force 03" in capsys.readouterr().out
    assert small.read_bytes() == before


def test_prose_counts_as_an_answer_too(small, no_kernel):
    runner.store(small)
    notebook = runner.read(small)
    notebook.cells[0].source += "\n\nMy answer: because the cache is short."
    assert runner.is_changed(notebook)


def test_force_stores_a_changed_notebook_by_name_only(small, no_kernel):
    runner.store(small)
    notebook = runner.read(small)
    notebook.cells[2].source = "x * 8"
    nbformat.write(notebook, small)
    with pytest.raises(SystemExit, match="name those you mean"):
        runner.main(["--notebooks", str(small.parent), "--force"])
    assert runner.main(["--notebooks", str(small.parent), "--force", "03"]) == 0
    stored = runner.read(small)
    assert stored.cells[2].source == "x * 8" and not runner.is_changed(stored)


def test_outputs_that_were_never_stored_from_here_are_left_alone(tmp_path, no_kernel, capsys):
    mine = new_code_cell("print('mine')", outputs=[new_output("stream", name="stdout", text="mine\n")])
    path = save(tmp_path / "my_experiment.ipynb", mine)
    before = path.read_bytes()
    assert runner.store(path)
    assert path.read_bytes() == before and "changed by you: my_experiment.ipynb" in capsys.readouterr().out


def test_rerun_cells_without_a_change_are_stored_again(small, no_kernel):
    runner.store(small)
    notebook = runner.read(small)
    notebook.cells[1].outputs, notebook.cells[1].execution_count = [], 99
    nbformat.write(notebook, small)
    runner.store(small)
    assert outputs_of(small)[0][0].text == "ran in full mode"


def test_notebook_saved_while_it_runs_is_left_alone(small, monkeypatch, capsys):
    def execute(notebook, folder, mode):
        save(small, new_code_cell("written meanwhile"))
        return notebook

    monkeypatch.setattr(runner, "execute", execute)
    assert runner.store(small)
    assert "changed while it ran" in capsys.readouterr().out
    assert runner.read(small).cells[0].source == "written meanwhile"


def test_fast_mode_stores_nothing(small, no_kernel):
    before = small.read_bytes()
    assert runner.main(["--notebooks", str(small.parent), "--fast"]) == 0
    assert small.read_bytes() == before


def test_names_choose_notebooks(tmp_path):
    for name in ("00_a", "03_b", "03_c"):
        save(tmp_path / f"{name}.ipynb")
    chosen = [[path.stem for path in runner.select(tmp_path, names)] for names in ([], ["03"], ["x/00_a.ipynb"])]
    assert chosen == [["00_a", "03_b", "03_c"], ["03_b", "03_c"], ["00_a"]]
    with pytest.raises(SystemExit, match="No notebook is called 07; there are 00_a"):
        runner.select(tmp_path, ["07", "00"])


def test_file_mode_survives_storing(small, no_kernel):
    small.chmod(0o640)
    runner.store(small)
    assert stat.S_IMODE(small.stat().st_mode) == 0o640


# ---------------------------------------------------------------------------------------------- normalising


def test_only_what_a_reader_sees_is_kept():
    cell = new_code_cell("1", execution_count=31, metadata={"tags": ["solution"], "jupyter": {"source_hidden": True}})
    cell.metadata["execution"] = {"iopub.execute_input": "2026-01-01"}
    cell.outputs = [
        new_output("display_data", {runner.WIDGET_VIEW: {"model_id": "a"}, "text/plain": "twin"}, metadata={"w": 1}),
        new_output("display_data", {runner.WIDGET_VIEW: {"model_id": "b"}}),
        new_output("execute_result", {"text/plain": "1"}, execution_count=31),
    ]
    notebook = new_notebook(
        cells=[cell], metadata={"widgets": {"state": {}}, "kernelspec": {"name": "mine", "display_name": "Mine"}}
    )
    notebook.metadata.language_info = {"name": "python", "version": "3.11.2"}
    stored = runner.normalise(notebook)
    assert set(stored.metadata) == {"kernelspec", "language_info", "specnb"}
    assert stored.metadata.kernelspec.name == "python3" and stored.metadata.language_info == {"name": "python"}
    assert stored.cells[0].metadata == {"tags": ["solution"], "jupyter": {"source_hidden": True}}
    assert [out.data for out in stored.cells[0].outputs] == [{"text/plain": "twin"}, {"text/plain": "1"}]
    assert stored.cells[0].outputs[0].metadata == {}
    assert stored.cells[0].execution_count == stored.cells[0].outputs[1].execution_count == 1
    nbformat.validate(stored)


def a_png(size=(300, 200), colours=3):
    """A picture as matplotlib stores it: RGBA, few colours unless asked for more."""
    image = Image.new("RGBA", size, "white")
    for x in range(size[0]):
        for y in range(size[1]):
            image.putpixel((x, y), (x * 7 % 256 // (256 // colours + 1) * 60, y % 3 * 80, (x * y) % colours, 255))
    stored = io.BytesIO()
    image.save(stored, "PNG")
    return base64.b64encode(stored.getvalue()).decode()


def pixels(picture):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB"), dtype=int)


def test_pictures_are_stored_with_a_palette_and_look_the_same():
    cell = new_code_cell("plot()", outputs=[new_output("display_data", {"image/png": a_png()})])
    other = new_code_cell(
        "x", outputs=[new_output("stream", text="6"), new_output("display_data", {"text/plain": "6"})]
    )
    stored = runner.shrink_pictures(new_notebook(cells=[cell, other])).cells
    picture = stored[0].outputs[0].data["image/png"]
    assert len(picture) < len(a_png())
    assert np.abs(pixels(picture) - pixels(a_png())).max() <= 1
    assert runner.shrink_pictures(new_notebook(cells=stored)).cells[0].outputs[0].data["image/png"] == picture


@pytest.mark.parametrize(
    ("said", "stored"),
    [
        ("<function f at 0x7f12ab34cd56>", "<function f at 0x…>"),
        (f"{runner.ROOT}/specnb/cache.py:3", "./specnb/cache.py:3"),
        (f"{Path.home()}/.cache/specnb", "~/.cache/specnb"),
        ("/any/env/lib/python3.11/site-packages/torch/x.py", "site-packages/torch/x.py"),
        ("/scratch/ipykernel_123/456.py:1", "<cell>:1"),
        ("colour 0xff, and/or, 3/4, https://a.org/home/x", "colour 0xff, and/or, 3/4, https://a.org/home/x"),
    ],
)
def test_machine_names_are_replaced(said, stored):
    assert runner.clean_text(said) == stored


def test_cell_ids_depend_on_the_text_and_are_unique():
    def ids(*sources):
        return [cell.id for cell in runner.normalise(new_notebook(cells=[new_code_cell(s) for s in sources])).cells]

    first = ids("a", "b", "b")
    assert len(set(first)) == 3
    assert ids("new", "a", "b", "b")[1:] == first


# ------------------------------------------------------------------------------------------------- checking


def good_notebook():
    """A notebook that keeps every rule, in its stored form; each test below breaks one."""
    cells = [new_markdown_cell("Prose that is longer than the code. " * 3) for _ in range(40)]
    for place, source, data in [
        (3, "plots.plot_rounds(trace)", {"image/png": "aGk=", "text/plain": "<Axes>"}),
        (6, "widgets.replay(out)", {"text/html": "<p>…</p>", "text/plain": "…"}),
        (9, "widgets.quiz('?', 'ab', 0, '')", {"text/html": "<p>?</p>", "text/plain": "?"}),
        (12, "exercises.check_round(f)", {"text/plain": "… round: not started yet"}),
        (15, "assert exercises.check_knee(solution)", None),
    ]:
        outputs = [new_output("execute_result", data)] if data else []
        cells[place] = new_code_cell(source, outputs=outputs, execution_count=1)
    return runner.normalise(new_notebook(cells=cells))


def problems_after(tmp_path, change, restamp=True):
    notebook = good_notebook()
    change(notebook)
    if restamp and "specnb" in notebook.metadata:
        notebook.metadata.specnb.sources = runner.sources_hash(notebook)
    path = tmp_path / "05_good.ipynb"
    runner.write(notebook, path)
    return runner.problems(path)


def test_good_notebook_has_no_problems(tmp_path):
    assert problems_after(tmp_path, lambda notebook: None) == []


def put(place, **fields):
    def change(notebook):
        notebook.cells[place].update(fields)

    return change


def say(text, name="stdout"):
    return put(3, outputs=[*good_notebook().cells[3].outputs, new_output("stream", name=name, text=text)])


def show(**data):
    shown = {mime.replace("_", "/", 1): value for mime, value in data.items()}
    return put(3, outputs=[*good_notebook().cells[3].outputs, new_output("display_data", shown)])


BREAKS = [
    (say("oh", name="stderr"), "stderr"),
    (say("see /home/someone/x"), "machine path"),
    (say("see /data/models/cache/x"), "machine path"),
    (say(r"see C:\Users\x"), "machine path"),
    (say("<object at 0x7f12ab34cd56>"), "address"),
    (show(text_html='<img src="https://a.org/b.png">'), "remote figure"),
    (show(**{runner.WIDGET_VIEW: {"model_id": "a"}, "text_plain": "a"}), "widget view"),
    (put(12, outputs=[new_output("error", ename="E", evalue="bad", traceback=[])]), "error E: bad"),
    (put(6, execution_count=7), "top to bottom"),
    (put(3, outputs=[]), "no plot"),
    (put(6, outputs=[]), "no static twin"),
    (put(9, outputs=[]), "no quiz"),
    (put(12, source="1"), "1 exercises with a check"),
    (put(1, source="![a](https://a.org/b.png)" + " prose" * 20), "another site"),
    (put(1, source="![a](missing.png)" + " prose" * 20), "missing.png does not exist"),
    (put(3, source="plots.plot_rounds(trace)\n" + "x = 1\n" * 26), "27 lines"),
    (put(15, source="exercises.check_knee(f)\n" + "y" * 9000), "prose"),
    (lambda n: n.cells.extend(new_markdown_cell("more prose") for _ in range(41)), "81 cells"),
    (lambda n: n.cells.__setitem__(slice(16, 20), [new_code_cell("") for _ in range(4)]), "5 code cells in a row"),
    (lambda n: n.metadata.update(widgets={}), "widget state"),
    (lambda n: n.metadata.pop("specnb"), "never stored"),
    (show(image_png="A" * 400_000), "KB stored"),
]


@pytest.mark.parametrize(("change", "said"), BREAKS, ids=[said for _, said in BREAKS])
def test_broken_rule_is_found_and_nothing_else(tmp_path, change, said):
    found = problems_after(tmp_path, change)
    assert len(found) == 1 and said in found[0], found


def test_stale_outputs_are_found(tmp_path):
    assert problems_after(tmp_path, put(3, source="plots.plot_rounds(other)"), restamp=False) == [
        "its cells changed after its outputs were stored; store it again with --force and its name"
    ]


def test_check_command_tells_every_problem_and_fails(tmp_path, capsys):
    problems_after(tmp_path, say("oh", name="stderr"))
    assert runner.main(["--notebooks", str(tmp_path), "--check"]) == 1
    assert "05_good.ipynb:\n  - cell 3: text on stderr: 'oh'" in capsys.readouterr().out
    problems_after(tmp_path, lambda notebook: None)
    assert runner.main(["--notebooks", str(tmp_path), "--check"]) == 0
