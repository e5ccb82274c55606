"""The shape of the package: imports point one way, functions stay short, public names explain themselves."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from statistics import median

import pytest

import specnb

PACKAGE = Path(specnb.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))


def imports_of(path: Path) -> set[str]:
    """specnb modules imported by a file, those only for type checkers left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = []
    nodes = list(ast.walk(tree))
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    names = {
        f"specnb.{a.name}" for n in nodes if isinstance(n, ast.ImportFrom) and n.module == "specnb" for a in n.names
    }
    return {m for m in modules | names if m.startswith("specnb.")}


@pytest.mark.parametrize(
    ("module", "may_know"),
    [
        ("verification.py", set()),
        ("trees.py", {"specnb.verification"}),
        ("lossy.py", {"specnb.trees", "specnb.verification"}),
        ("scores.py", {"specnb.verification"}),
        ("theory.py", set()),
        ("estimates.py", {"specnb.theory"}),
        ("adaptive.py", {"specnb.checks", "specnb.drafters.base", "specnb.estimates", "specnb.theory"}),
        ("compat.py", set()),
        ("report.py", set()),
        ("rows.py", {"specnb.report"}),
        ("first_calls.py", set()),
        ("cache.py", {"specnb.compat", "specnb.first_calls"}),
        ("prefill.py", {"specnb.cache"}),
        ("reuse.py", {"specnb.cache", "specnb.prefill"}),
        ("drafters/base.py", {"specnb.verification"}),
        ("drafters/scripted.py", {"specnb.drafters.base"}),
        ("drafters/suffixes.py", set()),
        (
            "drafters/prompt_lookup.py",
            {"specnb.drafters.base", "specnb.drafters.suffixes", "specnb.rows", "specnb.trees"},
        ),
    ],
)
def test_imports_point_one_way(module, may_know):
    assert imports_of(PACKAGE / module) <= may_know


def lines_of(function: ast.FunctionDef) -> int:
    """Lines of the body, docstring left out."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (body[-1].end_lineno - body[0].lineno + 1) if body else 0


def test_functions_are_short():
    lengths = {
        f"{path.name}:{node.name}": lines_of(node)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    assert {name: n for name, n in lengths.items() if n > 40} == {}
    assert median(lengths.values()) <= 8


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_file_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", specnb.__all__)
def test_public_names_are_documented(name):
    assert inspect.getdoc(getattr(specnb, name))


def test_names_for_editors_are_the_names_at_run_time():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    shown = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert shown == {name: f"specnb.{module}" for name, module in specnb._HOME_OF.items()}
    with pytest.raises(AttributeError, match="no attribute 'speculate'"):
        specnb.speculate  # noqa: B018
