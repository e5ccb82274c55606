"""How the tests are shared among pytest-xdist's workers (`pytest -n auto`). Without ``-n`` nothing of this is in use.

A unit of work goes to the worker that is free, the long ones first, so that all end at about the same time. A unit is
a file, whose tests share what is dear to set up, or one test of a file whose tests are long and share little.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
MOST_WORKERS = 4  # more would rather need memory: each may hold the real model, and a notebook's kernel as well
BYTES_PER_WORKER = 3e9

# each test of these is a unit of its own
SPREAD = ("tests/test_notebooks.py", "tests/test_losslessness.py", "tests/test_bugs.py")
LONGEST_FIRST = ("slow", "notebook", "browser", "real_model", "statistical")


def cores() -> int:
    """Physical cores that this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def auto_workers() -> int:
    """What ``-n auto`` means."""
    return max(1, min(cores(), MOST_WORKERS, int(psutil.virtual_memory().total / BYTES_PER_WORKER)))


def unit_of(nodeid: str) -> str:
    """The unit a test belongs to: JupyterLab's tests are one, whatever file they are in."""
    path = nodeid.partition("::")[0]
    if path.startswith("tests/browser/"):
        return "tests/browser"
    return nodeid if path in SPREAD else path


def rank(marks: Iterable[str]) -> int:
    """Where a test with these marks stands in the queue: 0 is first."""
    present = set(marks)
    return next((i for i, mark in enumerate(LONGEST_FIRST) if mark in present), len(LONGEST_FIRST))


def steady(value: object) -> str:
    """A test's id from a value: without addresses, which differ from worker to worker."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
