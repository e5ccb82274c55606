"""Run the notebooks headless, store their outputs, and check what is stored.

    python tests/run_notebooks.py                 run all in full mode and store the outputs
    python tests/run_notebooks.py 03 04           only these
    python tests/run_notebooks.py --fast          run in fast mode; stores nothing
    python tests/run_notebooks.py --check         run nothing; check the stored outputs and the budgets
    python tests/run_notebooks.py --force 03      store a notebook whose cells were changed

A stored notebook carries a hash of its cells. Where the cells no longer fit it, somebody has written in them: the
notebook is named and left alone, so that answers are never lost. What is stored is the same on every machine: no
paths, no addresses, no timings, no widget state.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import os
import re
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
CELL_SECONDS = {"full": 900, "fast": 300}

MAX_KB, CELLS, MAX_LINES, MAX_CODE_RUN, EXERCISES = 300, (40, 80), 25, 3, (2, 4)
MAX_TRACE = 40  # lines of a traceback worth printing

# Paths that give a machine away, and what is stored for them, in this order.
_FOLDERS = [(str(ROOT), "."), (str(Path.home()), "~"), (tempfile.gettempdir(), "<tmp>")]
_PLACES = [
    (re.compile(r"(?:[A-Za-z]:)?[/\\][^\s'\"<>:]*[/\\]site-packages(?=[/\\])"), "site-packages"),
    (re.compile(r"(?:[A-Za-z]:)?[/\\][^\s'\"<>:]*[/\\]ipykernel_\d+[/\\]\d+\.py"), "<cell>"),
    *((re.compile(re.escape(path) + r"(?![\w-])"), name) for path, name in _FOLDERS if len(path) > 1),
]
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")
_MACHINE_PATH = re.compile(
    r"(?<![\w.:/<>~-])/(?:(?:home|root|Users|tmp|mnt|usr|opt|var|private)/\w|(?:[\w.-]+/){2,}[\w.-])|\b[A-Z]:\\\w"
)
_REMOTE_FIGURE = re.compile(r"!\[[^\]]*\]\(\s*https?:|<img[^>]+src=[\"']?https?:", re.IGNORECASE)


# ------------------------------------------------------------------------------------------ reading and writing


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def write(notebook: NotebookNode, path: Path) -> None:
    """All or nothing: a run that is killed while it writes leaves the old file."""
    text = nbformat.writes(notebook)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".part", delete=False) as part:
        part.write(text if text.endswith("\n") else text + "\n")
    os.chmod(part.name, path.stat().st_mode if path.exists() else 0o644)
    os.replace(part.name, path)


def sources_hash(notebook: NotebookNode) -> str:
    """A hash of what the cells say, prose included: the answer to an exercise may be a sentence."""
    digest = hashlib.sha256()
    for cell in notebook.cells:
        digest.update(f"{cell.cell_type}\0{cell.source}\0".encode())
    return digest.hexdigest()[:16]


def stored_hash(notebook: NotebookNode) -> str | None:
    return notebook.metadata.get("specnb", {}).get("sources")


def is_changed(notebook: NotebookNode) -> bool:
    """Would storing lose somebody's work? Without a hash: only if there are outputs, which nobody stored from here."""
    if stored_hash(notebook) is None:
        return any(cell.get("outputs") for cell in notebook.cells)
    return stored_hash(notebook) != sources_hash(notebook)


# ------------------------------------------------------------------------------------------------------ running


def execute(notebook: NotebookNode, folder: Path, mode: str) -> NotebookNode:
    """Run all cells with `folder` as working directory; an error in a cell is raised."""
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=CELL_SECONDS[mode],
        coalesce_streams=True,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
        extra_arguments=["--log-level=ERROR"],
    )
    os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")  # the kernel of this environment, not a user-wide python3
    with tempfile.TemporaryDirectory(prefix="specnb-ipython-") as ipython:
        return client.execute(env={**os.environ, "SPECNB_MODE": mode, "IPYTHONDIR": ipython, "PYTHONHASHSEED": "0"})


def failure(notebook: NotebookNode, error: Exception) -> str:
    """What to tell when a run ends early: which cell, its code, the error."""
    number, cell = _failing_cell(notebook)
    told = f"{error.ename}: {error.evalue}" if isinstance(error, CellExecutionError) else str(error).strip()
    code = textwrap.indent(cell.source, "    ") if cell else ""
    trace = _ANSI.sub("", getattr(error, "traceback", "")).strip().splitlines()[-MAX_TRACE:]
    return "\n".join([f"cell {number} failed with {told}", code, *trace])


def _failing_cell(notebook: NotebookNode) -> tuple[int, NotebookNode | None]:
    """The last cell that has started: nbclient numbers a cell's outputs as it runs."""
    started = [i for i, c in enumerate(notebook.cells) if c.cell_type == "code" and (c.outputs or c.execution_count)]
    return (started[-1], notebook.cells[started[-1]]) if started else (0, None)


def run(path: Path, mode: str = "full") -> NotebookNode:
    """Execute a copy of a notebook without its old outputs. Raises RuntimeError, with the cell, if a cell fails."""
    notebook = read(path)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    try:
        return execute(notebook, path.parent, mode)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        raise RuntimeError(f"{path.name}: {failure(notebook, error)}") from error


# -------------------------------------------------------------------------------------------------- normalising


def normalise(notebook: NotebookNode) -> NotebookNode:
    """Keep what a reader sees and nothing that changes from run to run or from machine to machine."""
    notebook.metadata = nbformat.from_dict(
        {"kernelspec": KERNEL, "language_info": {"name": "python"}, "specnb": {"sources": sources_hash(notebook)}}
    )
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    seen: dict[str, int] = {}
    count = 0
    for cell in notebook.cells:
        cell.id = _cell_id(cell, seen)
        cell.metadata = nbformat.from_dict(_kept_metadata(cell.metadata))
        if cell.cell_type == "code":
            count += cell.execution_count is not None
            cell.execution_count = count if cell.execution_count is not None else None
            cell.outputs = [out for out in map(_clean_output, cell.outputs) if out is not None]
            _number_results(cell)
    return notebook


def _cell_id(cell: NotebookNode, seen: dict[str, int]) -> str:
    """From the cell's text, so that a new cell leaves the other ids alone."""
    name = hashlib.sha256(f"{cell.cell_type}\0{cell.source}".encode()).hexdigest()[:8]
    seen[name] = seen.get(name, 0) + 1
    return name if seen[name] == 1 else f"{name}-{seen[name]}"


def _kept_metadata(metadata: NotebookNode) -> dict:
    kept = {"tags": list(metadata["tags"])} if metadata.get("tags") else {}
    if metadata.get("jupyter", {}).get("source_hidden"):
        kept["jupyter"] = {"source_hidden": True}
    return kept


def _clean_output(output: NotebookNode) -> NotebookNode | None:
    """One output without widget views and machine names; None if nothing of it is left."""
    if output.output_type == "stream":
        output.text = clean_text(output.text)
        return output if output.text else None
    if output.output_type == "error":
        output.evalue, output.traceback = clean_text(output.evalue), [clean_text(line) for line in output.traceback]
        return output
    output.metadata = NotebookNode()
    output.data = NotebookNode({mime: _clean_data(mime, d) for mime, d in output.data.items() if mime != WIDGET_VIEW})
    return output if output.data else None


def _clean_data(mime: str, data: object) -> object:
    return clean_text(data) if mime.startswith("text/") and isinstance(data, str) else data


def shrink_pictures(notebook: NotebookNode) -> NotebookNode:
    """Plots with a palette in place of full colour: a third of the bytes, and no difference that an eye would see."""
    for output in (output for cell in _code(notebook) for output in cell.outputs):
        if "image/png" in output.get("data", {}):
            output.data["image/png"] = _with_palette(output.data["image/png"])
    return notebook


def _with_palette(picture: str) -> str:
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    few = image.quantize(128, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    stored = io.BytesIO()
    few.save(stored, "PNG", optimize=True)
    smaller = base64.b64encode(stored.getvalue()).decode()
    return smaller if len(smaller) < len(picture) else picture


def clean_text(text: str) -> str:
    for pattern, name in _PLACES:
        text = pattern.sub(name, text)
    return _ADDRESS.sub("0x…", text)


def _number_results(cell: NotebookNode) -> None:
    for output in cell.outputs:
        if output.output_type == "execute_result":
            output.execution_count = cell.execution_count


# ----------------------------------------------------------------------------------------------------- checking


def problems(path: Path) -> list[str]:
    """Everything wrong with a stored notebook, without running it."""
    notebook = read(path)
    found = [*_stale(notebook), *_output_problems(notebook), *_budget_problems(notebook), *_parts_missing(notebook)]
    if path.stat().st_size > MAX_KB * 1024:
        found.append(f"{path.stat().st_size // 1024} KB stored, at most {MAX_KB}: smaller or fewer pictures")
    return found + [f"figure {name} does not exist" for name in _lost_figures(notebook, path.parent)]


def _stale(notebook: NotebookNode) -> Iterator[str]:
    if stored_hash(notebook) is None:
        yield "its outputs were never stored by this command"
    elif stored_hash(notebook) != sources_hash(notebook):
        yield "its cells changed after its outputs were stored; store it again with --force and its name"
    counts = [c.execution_count for c in _code(notebook) if c.source.strip() and not _tagged(c, "skip-execution")]
    if counts != list(range(1, len(counts) + 1)):
        yield f"its cells were not run once each from top to bottom: counts {counts}"


def _output_problems(notebook: NotebookNode) -> Iterator[str]:
    if "widgets" in notebook.metadata:
        yield "it holds widget state (metadata.widgets), which breaks the page on GitHub"
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            for problem in _one_output(output, _tagged(cell, "raises-exception")):
                yield f"cell {number}: {problem}"


def _one_output(output: NotebookNode, may_raise: bool) -> Iterator[str]:
    if output.output_type == "error" and not may_raise:
        yield f"error {output.ename}: {output.evalue}"
    if output.get("name") == "stderr":
        yield f"text on stderr: {output.text[:80]!r}"
    if WIDGET_VIEW in output.get("data", {}):
        yield "a widget view, which nobody can see without its kernel"
    text = _text_of(output)
    for what, pattern in (("machine path", _MACHINE_PATH), ("address", _ADDRESS), ("remote figure", _REMOTE_FIGURE)):
        if match := pattern.search(text):
            yield f"{what}: {text[match.start() : match.start() + 60]!r}"


def _text_of(output: NotebookNode) -> str:
    texts = [data for mime, data in output.get("data", {}).items() if mime.startswith("text/")]
    return "\n".join([output.get("text", ""), output.get("evalue", ""), *output.get("traceback", []), *texts])


def _budget_problems(notebook: NotebookNode) -> Iterator[str]:
    code = _code(notebook)
    prose = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    if not CELLS[0] <= len(notebook.cells) <= CELLS[1]:
        yield f"{len(notebook.cells)} cells, expected {CELLS[0]} to {CELLS[1]}"
    if (said := sum(map(len, prose))) < (coded := sum(len(cell.source) for cell in code)):
        yield f"{said} characters of prose for {coded} of code, expected at least as many"
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and (lines := len(cell.source.splitlines())) > MAX_LINES:
            yield f"cell {number}: {lines} lines of code, at most {MAX_LINES}"
        if cell.cell_type == "markdown" and _REMOTE_FIGURE.search(cell.source):
            yield f"cell {number}: a figure from another site; keep figures beside the notebook"
    if (row := _longest_code_run(notebook)) > MAX_CODE_RUN:
        yield f"{row} code cells in a row, at most {MAX_CODE_RUN}"


def _longest_code_run(notebook: NotebookNode) -> int:
    kinds = "".join("c" if cell.cell_type == "code" else " " for cell in notebook.cells)
    return max(map(len, kinds.split()), default=0)


def _parts_missing(notebook: NotebookNode) -> Iterator[str]:
    """Each notebook has a plot, something to move with its static twin, a quiz, and two to four exercises."""
    shown = [(cell.source, {mime for out in cell.outputs for mime in out.get("data", {})}) for cell in _code(notebook)]
    if not any("image/png" in mimes for _, mimes in shown):
        yield "no plot is stored"
    if not any(re.search(r"\b(interactive_\w+|replay)\(", source) and _is_twin(mimes) for source, mimes in shown):
        yield "no static twin is stored: show a replay or an interactive figure"
    if not any(re.search(r"\bquiz\(", source) and "text/html" in mimes for source, mimes in shown):
        yield "no quiz is stored"
    checks = set(re.findall(r"\bexercises\.check_\w+", "\n".join(source for source, _ in shown)))
    if not EXERCISES[0] <= len(checks) <= EXERCISES[1]:
        yield f"{len(checks)} exercises with a check, expected {EXERCISES[0]} to {EXERCISES[1]}"


def _is_twin(mimes: set[str]) -> bool:
    return bool(mimes & {"image/png", "text/html"})


def _lost_figures(notebook: NotebookNode, folder: Path) -> list[str]:
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    local = re.findall(r"!\[[^\]]*\]\((?!https?:|attachment:|data:)([^)\s]+)", prose)
    return [name for name in local if not (folder / name).exists()]


def _code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _tagged(cell: NotebookNode, tag: str) -> bool:
    return tag in cell.metadata.get("tags", [])


# ------------------------------------------------------------------------------------------------- command line


def select(folder: Path, names: Sequence[str]) -> list[Path]:
    """The notebooks meant by `03`, `03_guess_and_check`, or a path; all of them without names."""
    every = sorted(folder.glob("*.ipynb"))
    chosen = {path for name in names for path in every if path.stem.startswith(Path(name).stem)}
    unknown = [name for name in names if not any(path.stem.startswith(Path(name).stem) for path in every)]
    if unknown:
        raise SystemExit(f"No notebook is called {', '.join(unknown)}; there are {', '.join(p.stem for p in every)}.")
    return sorted(chosen) if names else every


def store(path: Path, force: bool = False) -> bool:
    """Run one notebook in full mode and store it; False if it failed. A changed one is left alone."""
    if is_changed(read(path)) and not force:
        print(f"changed by you: {path.name}; left alone. Use --force {path.stem[:2]} to store it anyway.", flush=True)
        return True
    notebook = _timed_run(path, "full")
    if notebook is None:
        return False
    if sources_hash(notebook) != sources_hash(read(path)):
        print(f"changed while it ran: {path.name}; left alone. Run again to store it.", flush=True)
        return True
    write(normalise(shrink_pictures(notebook)), path)
    return True


def _timed_run(path: Path, mode: str) -> NotebookNode | None:
    print(f"{path.name} … ", end="", flush=True)
    start = time.monotonic()
    try:
        notebook = run(path, mode)
    except RuntimeError as error:
        print(f"FAILED after {time.monotonic() - start:.0f} s; the file is as it was.\n{error}", flush=True)
        return None
    print(f"{time.monotonic() - start:.0f} s", flush=True)
    return notebook


def check(path: Path) -> bool:
    found = problems(path)
    print("\n".join([f"{path.name}: {'ok' if not found else ''}".rstrip(), *(f"  - {one}" for one in found)]))
    return not found


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.force and not options.names:
        raise SystemExit("--force stores over changed notebooks: name those you mean, for example --force 03.")
    paths = select(options.notebooks, options.names)
    if options.check:
        done = [check(path) for path in paths]
    elif options.fast:
        done = [_timed_run(path, "fast") is not None for path in paths]
    else:
        done = [store(path, options.force) for path in paths]
    if not paths:
        print(f"There are no notebooks in {options.notebooks}.")
    return 0 if all(done) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="notebooks by number, name or path; default: all")
    parser.add_argument("--fast", action="store_true", help="run in fast mode and store nothing")
    parser.add_argument("--force", action="store_true", help="store the named notebooks even if their cells changed")
    parser.add_argument("--check", action="store_true", help="run nothing: check what is stored")
    parser.add_argument("--notebooks", type=Path, default=NOTEBOOKS, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
