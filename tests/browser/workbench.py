"""A small notebook with one of each widget, for tests that need no model."""

from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

CELLS = [
    "# Widgets",
    """
from types import SimpleNamespace
from specnb import exercises, plots, widgets
plots.use_style()
""",
    "## Replay",
    """
words = ["bell", "will", "soon", "ring", "again", ",", "waking", "the", "city"]

def one(drafted, accepted, own, bonus=False):
    ids = [words.index(word) for word in drafted.split()]
    return SimpleNamespace(row=0, drafted=ids, num_accepted=accepted, next_token=words.index(own), is_bonus=bonus)

trace = [one("bell will soon ring", 2, "ring"), one("again , waking the", 4, "city", bonus=True)]
prompt = "When the north wind blows past the seventh bridge, the sleeping"
replay = widgets.replay(trace, words=words, prompt=prompt)
replay
""",
    "## Slider",
    """
def draw(ax, alpha, k):
    ax.bar(range(1, k + 1), [alpha**i for i in range(1, k + 1)])
    ax.set(ylim=(0, 1), xlabel="position", ylabel="reached")

figure = widgets.interactive_figure(draw, alt="chance to reach a position", alpha=(0.0, 1.0, 0.1), k=(1, 9))
figure
""",
    "## Text",
    """
text = widgets.interactive_html(lambda k: f"<p class='passes'>{k + 1} positions</p>", k=(1, 9))
text
""",
    "## Quiz",
    """
quiz = widgets.quiz(
    "Why at least one token a round?",
    ["The draft's first token is always right.", "The target's own token is always written: `next_token`."],
    answer=1,
    why="A correction or a bonus token comes from the target itself.",
    hints=["A draft may be wrong everywhere.", ""],
)
quiz
""",
    "## Exercise",
    """
def accepted_prefix(draft, target):
    return sum(d == t for d, t in zip(draft, target))

exercises.check_accepted_prefix(accepted_prefix)
""",
]


# Every widget back to its start.
RESET = """
replay.index, quiz.chosen, text.controls["k"].value = 1, -1, 5
figure.controls["alpha"].value, figure.controls["k"].value = 0.5, 5
"""


def workbench(path: Path) -> None:
    """Write the notebook: prose and code take turns."""
    save(path, *(new_code_cell(text.strip()) if i % 2 else new_markdown_cell(text) for i, text in enumerate(CELLS)))


def save(path: Path, *cells: NotebookNode) -> None:
    """Write a notebook that names its kernel: without a name JupyterLab would ask for one."""
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    nbformat.write(new_notebook(cells=list(cells), metadata={"kernelspec": kernel}), path)
