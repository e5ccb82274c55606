"""The `specnb` command: which module a subcommand comes from, what is imported, and the exit status."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from specnb import cli

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def command(monkeypatch):
    """A subcommand `try` whose run is set by the test."""
    home = SimpleNamespace(add_arguments=lambda parser: parser.add_argument("--word"), run=lambda arguments: None)
    monkeypatch.setitem(cli.COMMANDS, "try", ("tests.no_such_module", "tries something"))
    monkeypatch.setattr(cli.importlib, "import_module", {"tests.no_such_module": home}.__getitem__)
    return home


@pytest.mark.parametrize(("returned", "status"), [(None, 0), (0, 0), (3, 3)])
def test_the_status_is_what_run_returns(command, returned, status):
    seen = []
    command.run = lambda arguments: seen.append(arguments.word) or returned
    assert cli.main(["try", "--word", "hello"]) == status
    assert seen == ["hello"]


@pytest.mark.parametrize("error", [ValueError, TypeError, OSError])
def test_an_error_is_one_line(command, capsys, error):
    def run(arguments):
        raise error("the model is too large; take a smaller one.")

    command.run = run
    assert cli.main(["try"]) == 1
    assert capsys.readouterr().err == "specnb: the model is too large; take a smaller one.\n"


def test_interrupted(command, capsys):
    def run(arguments):
        raise KeyboardInterrupt

    command.run = run
    assert cli.main(["try"]) == cli.INTERRUPTED == 130
    assert "stopped" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["sing"], ["try", "--no-such-option"]])
def test_wrong_usage_is_explained(command, capsys, words):
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    assert "usage: specnb" in capsys.readouterr().err


def test_help_names_every_command_and_imports_none():
    code = "import sys\nfrom specnb.cli import main\ntry: main(['--help'])\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in cli.COMMANDS)
    assert done.stdout.endswith("False\n")


def test_it_is_installed_and_can_be_run_as_a_module():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"specnb": "specnb.cli:main"}
    done = subprocess.run([sys.executable, "-m", "specnb"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: specnb")


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_its_module(name, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    assert f"usage: specnb {name}" in capsys.readouterr().out
