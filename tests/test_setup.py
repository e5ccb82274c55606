"""`make` in a fresh clone, and what it says when the machine lacks something. Nothing real is installed here."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHELL_TOOLS = ("awk", "cat", "cp", "df", "grep", "make", "mkdir", "mktemp", "mv", "rm", "sed", "sh", "touch", "uname")

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


class Machine:
    """A clone of the project, and a PATH with nothing on it but the shell's tools and what a test adds."""

    def __init__(self, folder: Path) -> None:
        self.clone, self.bin = folder / "clone", folder / "bin"
        (self.clone / ".ci").mkdir(parents=True)
        self.bin.mkdir()
        for name in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/setup.sh"):
            shutil.copy(ROOT / name, self.clone / name)
        for tool in SHELL_TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))

    def make(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        env = {"PATH": str(self.bin), "HOME": str(self.clone), "TMPDIR": str(self.clone), **environment}
        quiet = dict(stdin=subprocess.DEVNULL, capture_output=True, text=True)
        return subprocess.run([str(self.bin / "make"), *arguments], cwd=self.clone, env=env, **quiet)

    def python(self, body: str) -> None:
        """Put a python3 on the PATH that is a few lines of shell, and otherwise the real one."""
        script(self.bin / "python3", f'#!/bin/sh\n{body}\nexec {sys.executable} "$@"\n')

    def environment(self, log: Path | None = None, body: str = "") -> None:
        """A finished-looking .venv whose python only writes down what it is asked to do."""
        note = f'echo "$@" >>{log}' if log else ""
        script(self.clone / ".venv/bin/python", f"#!/bin/sh\n{note}\n{body}\nexit 0\n")
        (self.clone / ".venv/pyvenv.cfg").touch()

    def stamp(self, index: str = "", folder: Path | None = None) -> None:
        (self.clone / ".venv/.installed").write_text(f"{folder or self.clone}\n{index}\n")
        (self.clone / ".venv/.model").touch()

    def plan(self, *arguments: str) -> str:
        """What make would do."""
        done = self.make("-n", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path.resolve())


def message(done: subprocess.CompletedProcess) -> str:
    """The one message of a run that must have failed."""
    assert done.returncode != 0
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("specnb: ")]
    return said


# --- what the machine may lack ---


def test_no_python(machine):
    assert "there is no 'python3'. Install Python 3.11" in message(machine.make("lab"))


def test_a_python_that_was_named_is_named_back(machine):
    assert "there is no 'python3.99'" in message(machine.make("lab", "PYTHON=python3.99"))


def test_old_python(machine):
    machine.python('case "$*" in *version_info*) exit 1;; --version) echo Python 3.9.2; exit;; esac')
    assert "is Python 3.9.2, and specnb needs 3.11 or newer" in message(machine.make("lab"))


def test_no_venv_module(machine):
    machine.python('case "$*" in *ensurepip*) echo "No module named ensurepip" >&2; exit 1;; esac')
    assert "sudo apt install python3-venv" in message(machine.make("lab"))


def test_no_room(machine):
    machine.python("")
    (machine.bin / "df").unlink()
    script(machine.bin / "df", "#!/bin/sh\nprintf 'head\\n/dev/x 10 5 812 50%% /\\n'\n")
    assert "only 812 MB are free" in message(machine.make("lab"))
    assert not (machine.clone / ".venv").exists()


@pytest.mark.parametrize("put", [Path.touch, Path.mkdir])
def test_something_else_is_in_the_way(machine, put):
    machine.python("")
    put(machine.clone / ".venv")
    assert "'.venv' is in the way" in message(machine.make("lab"))
    assert (machine.clone / ".venv").exists()


def test_failing_pip_says_what_to_try(machine):
    machine.environment(body='case "$*" in *"pip install"*) echo "No space left on device" >&2; exit 1;; esac')
    done = machine.make("test")
    assert "pip could not install everything; its message is above" in message(done)
    assert done.stderr.index("No space left on device") < done.stderr.index("specnb: pip could")
    assert not (machine.clone / ".venv/.installed").exists()


def test_packages_that_do_not_load_are_not_taken_for_installed(machine):
    machine.environment(body='case "$*" in *"import torch, transformers"*) exit 1;; esac')
    assert "do not work together" in message(machine.make("test"))
    assert not (machine.clone / ".venv/.installed").exists()


# --- half-finished runs ---


def fake_venv(machine: Machine, log: Path) -> None:
    """A python3 whose `-m venv` gives an environment that only writes down what it is asked."""
    inner = script(machine.bin / "inner", f'#!/bin/sh\necho "$@" >>{log}\n')
    machine.python(f'case "$*" in "-m venv "*) mkdir -p "$3/bin"; cp {inner} "$3/bin/python"; exit;; esac')


@pytest.mark.parametrize("left", [".venv/.unfinished", ".venv/pyvenv.cfg"])
def test_what_a_killed_run_left_is_made_anew(machine, tmp_path, left):
    fake_venv(machine, tmp_path / "log")
    for name in (left, ".venv/lib/half-copied"):
        (machine.clone / name).parent.mkdir(parents=True, exist_ok=True)
        (machine.clone / name).touch()
    done = machine.make(".venv/.installed")
    assert done.returncode == 0, done.stderr
    assert "unfinished or broken; making it again" in done.stdout
    assert not (machine.clone / ".venv/lib/half-copied").exists()
    assert (machine.clone / ".venv/.installed").exists()
    assert not (machine.clone / ".venv/.unfinished").exists()


def test_a_run_that_fails_is_known_as_unfinished(machine, tmp_path):
    fake_venv(machine, tmp_path / "log")
    script(machine.bin / "inner", '#!/bin/sh\ncase "$*" in *"pip install"*) exit 1;; esac\n')
    assert machine.make(".venv/.installed").returncode != 0
    assert (machine.clone / ".venv/.unfinished").exists()


def test_an_environment_of_the_readers_own_is_kept(machine, tmp_path):
    machine.environment(tmp_path / "log")
    (machine.clone / ".venv/their-file").touch()
    assert machine.make(".venv/.installed").returncode == 0
    assert (machine.clone / ".venv/their-file").exists()
    assert "-e .[lab,test]" in (tmp_path / "log").read_text()


# --- the second run ---


@pytest.mark.parametrize("target", ["lab", "test", "test-quick", "notebooks"])
def test_every_target_is_a_first_command(machine, target):
    assert "setup.sh .venv" in machine.plan(target)


@pytest.mark.parametrize("target", ["lab", "test", "test-quick", "notebooks"])
def test_the_second_run_installs_nothing(machine, target):
    machine.environment()
    machine.stamp()
    planned = machine.plan(target)
    assert "setup.sh" not in planned
    assert "specnb.fetch" not in planned


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_are_installed(machine, changed):
    machine.environment()
    machine.stamp()
    os.utime(machine.clone / ".venv/.installed", (1, 1))
    for name in {"pyproject.toml", "constraints.txt", ".ci/setup.sh"} - {changed}:
        os.utime(machine.clone / name, (0, 0))
    assert "setup.sh" in machine.plan("test-quick")


def test_a_moved_clone_is_installed_again(machine):
    machine.environment()
    machine.stamp(folder=machine.clone.parent / "where it was")
    assert "setup.sh" in machine.plan("test-quick")


def test_the_oldest_transformers_has_its_own_environment(machine):
    planned = machine.plan("test-oldest")
    assert "setup.sh .venv-oldest transformers==5.17.0" in planned
    assert ".venv-oldest/bin/python -m pytest" in planned


@pytest.mark.parametrize("target", ["test", "test-quick", "test-oldest"])
def test_tests_run_on_all_cores_unless_told_otherwise(machine, target):
    machine.environment()
    machine.stamp()
    assert "-m pytest -n auto" in machine.plan(target)
    assert "-m pytest -n 1" in machine.plan(target, "WORKERS=1")


# --- another build of torch ---

INDEX = "https://example.org/cu128"


def test_another_build_is_installed_once(machine):
    machine.environment()
    machine.stamp()
    assert "setup.sh" in machine.plan("lab", f"TORCH_INDEX={INDEX}")
    machine.stamp(INDEX)
    assert "setup.sh" not in machine.plan("lab", f"TORCH_INDEX={INDEX}")
    assert "setup.sh" not in machine.plan("lab")  # and it stays


@pytest.mark.parametrize(("index", "pinned"), [("", True), (INDEX, False)])
def test_the_pin_stands_in_no_ones_way(machine, tmp_path, index, pinned):
    """The constraints that pip is given with `-e .` hold the pin only where no other build was chosen."""
    log = tmp_path / "log"
    machine.environment(log, body=f'case "$*" in *"-e ."*) cat "$6" >>{log};; esac')
    done = machine.make(".venv/.installed", f"TORCH_INDEX={index}")
    assert done.returncode == 0, done.stderr
    said = log.read_text()
    assert ("\ntorch==2.13.0\n" in said) is pinned
    assert (f"--index-url {INDEX} torch\n" in said) is not pinned
