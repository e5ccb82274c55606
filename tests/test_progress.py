"""The line that says how far a long step is, and how long the rest takes. (Bytes: test_fetch.py.)"""

import sys

import pytest

from specnb import progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is set."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (12, "12 s"), (99, "99 s"), (100, "2 min"), (3540, "59 min"), (3600, "1 h 0 min")],
)
def test_durations_are_as_exact_as_a_reader_needs(seconds, text):
    assert progress.duration(seconds) == text


def test_the_time_left_follows_from_what_is_done(clock):
    bar = progress.Progress("Measuring", 8, "passes")
    assert bar.text(0) == "Measuring: 0 of 8 passes"
    clock[0] = 10.0
    assert bar.text(2) == "Measuring: 2 of 8 passes, 30 s left"
    assert bar.text(8) == "Measuring: 8 of 8 passes, 10 s"


def test_a_share_is_shown_in_per_cent(clock):
    bar = progress.Progress("Measuring", 40.0, "%")
    clock[0] = 10.0
    assert bar.text(10.0) == "Measuring: 25%, 30 s left"


def test_a_shorter_line_covers_a_longer_one(capsys, monkeypatch, clock):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress.Progress("a long label", 4, "steps") as bar:
        bar.label = "short"
        clock[0] = 1.0
        bar.update(2)
    lines = capsys.readouterr().err.rstrip("\n").split("\r")[1:]
    assert "short" in lines[1]
    assert len(lines[1]) >= len(lines[0])
