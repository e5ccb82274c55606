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
    """Progress of one step, in bytes when `total` is known, in seconds otherwise.

    Args:
        label: what is being done, as a reader would say it.
        total: bytes to do; `None` where only the time is known.
    """

    def __init__(self, label: str, total: int | None = None) -> None:
        self.label, self.total = label, total
        self._started = time.monotonic()
        self._next_draw = self._started
        self._quarter = -1
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

    def update(self, done: int) -> None:
        """Show that `done` bytes are done; calls that come too soon after the last one draw nothing."""
        now = time.monotonic()
        if now < self._next_draw:
            return
        self._next_draw = now + SECONDS_BETWEEN_DRAWS
        self._draw(done)

    def text(self, done: int) -> str:
        """The line for `done` bytes, without the bar."""
        if self.total is None:
            return f"{self.label}: {time.monotonic() - self._started:.0f} s"
        return f"{self.label}: {done / 1e6:.0f} of {self.total / 1e6:.0f} MB"

    def _draw(self, done: int) -> None:
        if self._notebook:
            self._draw_in_notebook(done)
        elif self._terminal:
            print(f"\r{self._bar(done)}{self.text(done)} ", end="", file=sys.stderr, flush=True)
        else:
            self._print_at_quarters(done)

    def _bar(self, done: int) -> str:
        if not self.total:
            return ""
        filled = min(BAR_WIDTH, BAR_WIDTH * done // self.total)
        return f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] "

    def _draw_in_notebook(self, done: int) -> None:
        from IPython.display import HTML, display

        line = HTML(f"<pre>{self._bar(done)}{html.escape(self.text(done))}</pre>")
        if self._display is None:
            self._display = display(line, display_id=True)
        else:
            self._display.update(line)

    def _print_at_quarters(self, done: int) -> None:
        """At every quarter; where there are no quarters, at the start and the end."""
        quarter = 4 * done // self.total if self.total else int(self._ended)
        if quarter > self._quarter:
            self._quarter = quarter
            print(self.text(done), file=sys.stderr, flush=True)


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this code; imports nothing to find out."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def say(message: str) -> None:
    """Tell the person at the screen one thing that is neither a result nor an error."""
    # A notebook shows stderr in red, as if something had failed.
    print(message, file=sys.stdout if in_notebook() else sys.stderr, flush=True)
