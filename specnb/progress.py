"""One line that says how far a long step is.

A terminal gets a bar that is redrawn, a notebook one output that is updated (and no widget state, which
would break the stored page), anything else a few plain lines that a log can hold.
"""

from __future__ import annotations

import html
import sys
import time
from types import TracebackType
from typing import Any

BAR_WIDTH = 30
SECONDS_BETWEEN_DRAWS = 0.1


class Progress:
    """Progress of one step, in bytes or things when `total` is known, in seconds otherwise.

    Args:
        label: what is being done, as a reader would say it. May be changed on the way.
        total: how much there is to do; `None` where only the time is known.
        unit: what is counted, "passes" say; the time left is then told as well. "%" shows the share that is done,
            whatever is counted. None counts bytes.
    """

    def __init__(self, label: str, total: float | None = None, unit: str | None = None) -> None:
        self.label, self.total, self.unit = label, total, unit
        self._started = time.monotonic()
        self._next_draw = self._started
        self._quarter, self._longest = -1, 0
        self._ended = False
        self._display: Any = None
        self._notebook = in_notebook()
        self._terminal = not self._notebook and sys.stderr.isatty()

    def __enter__(self) -> Progress:
        self.update(0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._next_draw, self._ended = 0.0, True
            self.update(self.total or 0)
        if self._terminal:
            print(file=sys.stderr)

    def update(self, done: float) -> None:
        """Show how much is done; calls that come too soon after the last one draw nothing."""
        now = time.monotonic()
        if now < self._next_draw:
            return
        self._next_draw = now + SECONDS_BETWEEN_DRAWS
        self._draw(done)

    def text(self, done: float) -> str:
        """The line, without the bar."""
        if self.total is None:
            return f"{self.label}: {time.monotonic() - self._started:.0f} s"
        if self.unit is None:
            return f"{self.label}: {done / 1e6:.0f} of {self.total / 1e6:.0f} MB"
        if self.unit == "%":
            return f"{self.label}: {done / self.total:.0%}{self._time_left(done)}"
        return f"{self.label}: {done:.0f} of {self.total:.0f} {self.unit}{self._time_left(done)}"

    def _time_left(self, done: float) -> str:
        """How long the rest takes if it goes on as it did so far; at the end, how long it took."""
        assert self.total is not None
        elapsed = time.monotonic() - self._started
        if done >= self.total:
            return f", {duration(elapsed)}"
        return f", {duration(elapsed / done * (self.total - done))} left" if done > 0 else ""

    def _draw(self, done: float) -> None:
        if self._notebook:
            self._draw_in_notebook(done)
        elif self._terminal:
            line = f"{self._bar(done)}{self.text(done)} "
            self._longest = max(self._longest, len(line))  # spaces cover what a longer line has left behind
            print(f"\r{line:{self._longest}}", end="", file=sys.stderr, flush=True)
        else:
            self._print_at_quarters(done)

    def _bar(self, done: float) -> str:
        if not self.total:
            return ""
        filled = min(BAR_WIDTH, int(BAR_WIDTH * done / self.total))
        return f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] "

    def _draw_in_notebook(self, done: float) -> None:
        from IPython.display import HTML, display

        line = HTML(f"<pre>{self._bar(done)}{html.escape(self.text(done))}</pre>")
        if self._display is None:
            self._display = display(line, display_id=True)
        else:
            self._display.update(line)

    def _print_at_quarters(self, done: float) -> None:
        """At every quarter; where there are no quarters, at the start and the end."""
        quarter = int(4 * done / self.total) if self.total else int(self._ended)
        if quarter > self._quarter:
            self._quarter = quarter
            print(self.text(done), file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """12 s, 3 min, 1 h 20 min: as exact as a reader needs it."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this code; imports nothing to find out."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def say(message: str) -> None:
    """Tell the person at the screen one thing that is neither a result nor an error."""
    # A notebook shows stderr in red, as if something had failed.
    print(message, file=sys.stdout if in_notebook() else sys.stderr, flush=True)
