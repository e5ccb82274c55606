"""How tests are shared among workers: what stays together, what goes first, and that no worker takes another's core."""

import os
import subprocess
import sys

import psutil
import pytest

from tests import workers


@pytest.mark.parametrize(
    ("nodeid", "unit"),
    [
        ("tests/test_cache.py::test_x[a::b]", "tests/test_cache.py"),
        ("tests/test_notebooks.py::test_x[00]", "tests/test_notebooks.py::test_x[00]"),
        ("tests/browser/test_lab.py::test_x", "tests/browser"),
        ("tests/browser/test_other.py::test_y", "tests/browser"),
    ],
)
def test_units(nodeid, unit):
    assert workers.unit_of(nodeid) == unit


def test_every_file_that_is_spread_is_there():
    assert all((workers.ROOT / path).exists() for path in workers.SPREAD)


def test_long_tests_go_first_and_plain_ones_last():
    queue = [["parametrize"], ["statistical"], ["real_model", "notebook"], ["slow", "real_model"], ["browser"]]
    assert sorted(queue, key=workers.rank) == [queue[3], queue[2], queue[4], queue[1], queue[0]]


@pytest.mark.parametrize(("memory", "physical", "expected"), [(64, 1, 1), (64, 2, 2), (64, 32, 4), (4, 32, 1)])
def test_auto_asks_for_cores_and_memory(monkeypatch, memory, physical, expected):
    monkeypatch.setattr(workers, "cores", lambda: physical)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"total": memory * 1e9}))
    assert workers.auto_workers() == expected


@pytest.mark.parametrize(("count", "shared"), [("1", False), ("2", True)])
def test_workers_share_the_cores(count, shared):
    script = "import sys, tests, os; assert 'torch' not in sys.modules; print(os.environ.get('OMP_NUM_THREADS'))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    environment["PYTEST_XDIST_WORKER_COUNT"] = count
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=workers.ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == (str(max(1, workers.cores() // 2)) if shared else "None")
