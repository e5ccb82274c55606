"""`BenchmarkResult`: everything a benchmark measured, and its readings: table, HTML, CSV, JSON, plots."""

from __future__ import annotations

import csv
import html
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from specnb.contestants import BASELINE, Contestant, Way
from specnb.machine import describe_machine
from specnb.measurements import Measurement, Row, Summary, conditions
from specnb.prediction import PassTimes
from specnb.profiling import interquartile_range

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMAT = "specnb benchmark 1"
ALPHA_PLACES = 5  # positions of α by position that a table has room for
TOLD_DIFFERENCES = 3
CLEARLY_SLOWER = 0.98
UNSTEADY, ENOUGH_SAMPLES = 0.15, 6
HEADS = ("contestant", "ms/token", "first token, ms", "tokens/pass", "α", "α by position", "speed-up", "95 % interval",
         "predicted", "same text")  # fmt: skip


@dataclass(repr=False)
class BenchmarkResult:
    """What a benchmark measured. Made by `specnb.run_benchmark`; `from_json` reads one back.

    Attributes:
        measurements: every answer, with its tokens and times.
        settings: how the run was made.
        machine: where and with what.
        contestants: name → what the report says of it: ``about``, ``reference``, ``plain`` and ``way``.
        passes: v(T) of each way to make passes, sampled throughout the run.
        absent: contestant → why it did not take part, or no longer.
        complete: False if the run was stopped before its end.
    """

    measurements: list[Measurement]
    settings: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    contestants: dict[str, dict[str, Any]] = field(default_factory=dict)
    passes: list[PassTimes] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    complete: bool = True

    # --- readings ---

    def rows(self) -> list[Row]:
        """One `Row` per dtype, temperature, group (then "all") and contestant."""
        return [row for summary, members in self._summaries() for row in summary.rows(_groups(members))]

    def differences(self) -> list[dict[str, Any]]:
        """Greedy answers that are not those of plain decoding: who, on which prompt, from which token on."""
        return [difference for summary, _ in self._summaries() for difference in summary.differences()]

    def table(self, groups: bool = True) -> str:
        """The report as text: a section per group, then all groups together, then what the columns mean.

        Args:
            groups: False leaves the single groups out.
        """
        parts = [self.title()]
        for title, rows in self._sections(groups):
            parts.append("\n".join([title, *_aligned([HEADS, *map(cells, rows)])]))
        return "\n\n".join([*parts, "\n".join(self.notes())])

    def __repr__(self) -> str:
        return self.table(groups=False)

    def _repr_html_(self) -> str:
        from specnb.profiling import html_table

        tables = [html_table(HEADS, map(cells, rows), title) for title, rows in self._sections(True)]
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes())
        return f"<p>{html.escape(self.title())}</p>{''.join(tables)}<ul>{notes}</ul>"

    def plot(self, ax: Axes | None = None, kind: str = "speedup") -> Axes:
        """Draw the result; needs matplotlib and seaborn (``pip install 'specnb[lab]'``).

        Args:
            ax: None makes new axes.
            kind: "speedup" shows every contestant's speed-up by group with its interval; "prediction" the predicted
                against the measured speed-up of every group.
        """
        from specnb import plots

        draw = {"speedup": plots.plot_speedups, "prediction": plots.plot_predictions}
        if kind not in draw:
            raise ValueError(f"kind must be 'speedup' or 'prediction', got {kind!r}.")
        return draw[kind](self.rows(), ax)

    # --- files ---

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write `rows` as CSV; α by position is one cell, places separated by spaces."""
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(Row.__dataclass_fields__))
            writer.writeheader()
            for row in self.rows():
                positions = " ".join(f"{a:.4f}" for a in row.alpha_by_position)
                writer.writerow({**asdict(row), "alpha_by_position": positions})

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write everything, raw measurements included, one to a line. An older file is replaced in one step."""
        head = {"format": FORMAT, "complete": self.complete, "machine": self.machine, "settings": self.settings,
                "contestants": self.contestants, "absent": self.absent}  # fmt: skip
        parts = [f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in head.items()]
        parts.append(f'"passes": {_lines(_pass_record(times) for times in self.passes)}')
        parts.append(f'"measurements": {_lines(asdict(m) for m in self.measurements)}')
        fresh = Path(f"{os.fspath(path)}.new")
        fresh.write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")
        os.replace(fresh, path)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> BenchmarkResult:
        """Read what `to_json` wrote.

        Raises:
            ValueError: if the file holds something else.
        """
        try:
            read = json.loads(Path(path).read_text(encoding="utf-8"))
            if read.pop("format") != FORMAT:
                raise ValueError("another format")
            measurements = [_measurement(record) for record in read.pop("measurements")]
            return cls(measurements, passes=[_pass_times(record) for record in read.pop("passes")], **read)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a result of specnb bench in the form {FORMAT!r} ({error}).") from error

    def merged(self, other: BenchmarkResult) -> BenchmarkResult:
        """Both results as one, such as those of two dtypes."""
        return replace(
            self,
            measurements=self.measurements + other.measurements,
            contestants={**self.contestants, **other.contestants},
            passes=self.passes + other.passes,
            absent={**self.absent, **other.absent},
            complete=self.complete and other.complete,
        )

    # --- words ---

    def title(self) -> str:
        """What was measured, where, in one paragraph."""
        tokens = self.settings.get("max_new_tokens", "?")
        stopped = "" if self.complete else " The run was stopped before its end: this is what it has."
        machine = self.machine
        where = f"{machine.get('name', '?')}, {machine.get('threads', '?')} threads"
        versions = f"torch {machine.get('torch', '?')}, transformers {machine.get('transformers', '?')}"
        model = self.settings.get("model", "a model")
        return f"{model}, up to {tokens} new tokens, one prompt at a time. {where}; {versions}.{stopped}"

    def notes(self) -> list[str]:
        """What the columns mean, and what a reader must not overlook."""
        rows = self.rows()
        return [
            *_explanations(any(row.predicted > 0 for row in rows)),
            *fastest(rows),
            *unsteady(self.passes),
            *self._differing(),
            *slower(rows),
            *self._peers(rows),
            *self._absences(),
        ]

    def _differing(self) -> list[str]:
        """Where greedy texts differ, in a line per dtype."""
        found = []
        for dtype in dict.fromkeys(m.dtype for m in self.measurements):
            differ = [d for d in self.differences() if d["dtype"] == dtype]
            some = ", ".join(
                f"{d['contestant']} on {d['prompt']} from token {d['place']}" for d in differ[:TOLD_DIFFERENCES]
            )
            more = f" and {len(differ) - TOLD_DIFFERENCES} more" if len(differ) > TOLD_DIFFERENCES else ""
            why = "" if dtype == "float32" else (
                " Without a fixed pass width the rounding depends on the pass: near-ties may fall the other way."
            )  # fmt: skip
            found += (
                [f"{dtype}: {len(differ)} greedy answers differ from their reference ({some}{more}).{why}"]
                if differ
                else []
            )
        return found

    def _peers(self, rows: Sequence[Row]) -> list[str]:
        """Whether another engine was faster than the best of specnb, or not; over all prompts."""
        found = []
        for row in overall(rows):
            known = self.contestants.get(row.contestant, {})
            ours = [
                r for r in overall(rows) if _same_place(r, row) and self.contestants.get(r.contestant, {}).get("way")
            ]
            if known.get("peer") and ours:
                best = max(ours, key=lambda r: r.speedup)
                word = "faster" if row.speedup > best.speedup else "slower"
                found.append(
                    f"{row.dtype}: {row.contestant} is {word} than specnb's best here, {best.contestant}: speed-up "
                    f"{row.speedup:.2f} against {best.speedup:.2f}. {known['about']}."
                )
        return found

    def _absences(self) -> list[str]:
        asked = {m.contestant for m in self.measurements}
        how = {
            name: "took part only until it failed" if name in asked else "is not in this report" for name in self.absent
        }
        return [f"{name} {how[name]}: {reason}." for name, reason in self.absent.items()]

    def _sections(self, groups: bool) -> Iterable[tuple[str, list[Row]]]:
        rows = self.rows()
        for row in rows:
            members = [r for r in rows if _same_place(r, row)]
            single = len({r.group for r in rows}) == 1
            if members[0] is row and (groups or single or row.group == "all"):
                heat = "greedy" if row.temperature == 0 else f"temperature {row.temperature:g}"
                group = "all groups" if row.group == "all" else row.group or "no group"
                prompts = f"{row.prompts} prompt{'s' if row.prompts != 1 else ''}"
                yield f"{group} ({prompts}, {row.dtype}, {heat})", members

    def _summaries(self) -> list[tuple[Summary, list[Measurement]]]:
        references = {name: known["reference"] for name, known in self.contestants.items()}
        found = []
        for dtype, _, members in conditions(self.measurements):
            times = {t.way: t for t in self.passes if t.dtype == dtype and t.samples}
            ways = {n: (known["plain"], Way(**known["way"])) for n, known in self.contestants.items() if known["way"]}
            plains = {n: (p, times.get(way)) for n, (p, way) in ways.items() if way.pass_width or way in times}
            found.append((Summary(members, references, plains), members))
        return found


def described(contestant: Contestant) -> dict[str, Any]:
    """What a result keeps of a contestant."""
    way = None if contestant.way is None else asdict(contestant.way)
    return {"about": contestant.about, "reference": contestant.reference, "plain": contestant.plain, "way": way,
            "peer": contestant.peer}  # fmt: skip


def machine(device: Any) -> dict[str, Any]:
    """Where and with what, and when."""
    import specnb

    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {**asdict(describe_machine(device)), "specnb": specnb.__version__, "date": now}


# --- cells and notes ---


def cells(row: Row) -> tuple[str, ...]:
    """A row as words, in the order of `HEADS`."""
    baseline = row.contestant == BASELINE
    return (
        row.contestant,
        f"{row.ms_per_token:.1f}",
        number(row.first_token_ms, ".0f"),
        number(row.tokens_per_pass, ".2f"),
        number(row.alpha, ".2f"),
        " ".join(number(a, ".2f") for a in row.alpha_by_position[:ALPHA_PLACES]),
        number(row.speedup, ".2f"),
        "" if baseline or math.isnan(row.low) else f"{row.low:.2f} to {row.high:.2f}",
        number(row.predicted, ".2f"),
        f"{row.same_text} of {row.compared}" if row.compared else "",
    )


def number(value: float, form: str) -> str:
    """The number, or nothing where there is none."""
    return "" if math.isnan(value) else format(value, form)


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Columns: words to the left, numbers to the right; those empty in every line are left out."""
    columns = [column for column in zip(*lines) if any(column[1:])]
    texts = {"contestant", "α by position", "95 % interval"}
    padded = []
    for column in columns:
        width = max(map(len, column))
        padded.append([cell.ljust(width) if column[0] in texts else cell.rjust(width) for cell in column])
    return ["  ".join(line).rstrip() for line in zip(*padded)]


def fastest(rows: Sequence[Row]) -> list[str]:
    """Who was fastest over all prompts, in a line per dtype and temperature."""
    best: dict[str, Row] = {}
    for row in overall(rows):
        if row.speedup > best.setdefault(_condition(row), row).speedup:
            best[_condition(row)] = row
    return [f"{where}: {row.contestant} is fastest, speed-up {row.speedup:.2f}." for where, row in best.items()]


def unsteady(passes: Sequence[PassTimes]) -> list[str]:
    """Whether the same pass took very different times in the course of the run, in a line per dtype."""
    found = {}
    for times in passes:
        spreads = [
            interquartile_range(ms) / median(ms)
            for curve in times.samples.values()
            for ms in curve.values()
            if len(ms) >= ENOUGH_SAMPLES
        ]
        if spreads and median(spreads) > UNSTEADY:
            found[times.dtype] = (
                f"{times.dtype}: the machine was not steady: the middle half of the times of one and the same pass "
                f"spreads over {median(spreads):.0%} of their median. Close other programs, or take more repeats."
            )
    return list(found.values())


def slower(rows: Sequence[Row]) -> list[str]:
    """Where a contestant took longer than the baseline, in a line per contestant, dtype and temperature."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.contestant != BASELINE and row.group != "all" and is_slower(row):
            where = found.setdefault(f"{_condition(row)}: {row.contestant}", [])
            where.append(f"{row.group or 'no group'} ({row.speedup:.2f})")
    return [f"{who} is slower than {BASELINE} on {', '.join(groups)}." for who, groups in found.items()]


def is_slower(row: Row) -> bool:
    """The whole interval lies below 1; where there is none, the speed-up lies clearly below."""
    return row.speedup < CLEARLY_SLOWER if math.isnan(row.high) else row.high < 1


def _condition(row: Row) -> str:
    return row.dtype if row.temperature == 0 else f"{row.dtype}, temperature {row.temperature:g}"


def _explanations(predicted: bool) -> list[str]:
    lines = [
        "ms/token: the whole call, prompt included, by the tokens written; median over prompts.",
        f"speed-up: over {BASELINE}, which is transformers' plain generate in the same run, prompt by prompt; "
        "geometric mean, with a bootstrap interval over prompts (from five on).",
        "same text: greedy answers equal, token for token, to those of plain decoding whose passes are made the same "
        f"way; plain decoding itself is held against {BASELINE}.",
    ]
    if predicted:
        lines.insert(2, "predicted: the speed-up to be expected from the numbers of drafted and accepted tokens and "
                        "from what passes and drafting cost.")  # fmt: skip
    return lines


def _same_place(one: Row, other: Row) -> bool:
    return (one.dtype, one.temperature, one.group) == (other.dtype, other.temperature, other.group)


def overall(rows: Sequence[Row]) -> list[Row]:
    """The rows over all prompts: those of "all", or of the only group."""
    several = any(row.group == "all" for row in rows)
    return [row for row in rows if row.group == "all" or not several]


def _groups(measurements: Iterable[Measurement]) -> list[str]:
    return list(dict.fromkeys(m.group for m in measurements))


# --- JSON ---


def _lines(records: Iterable[dict[str, Any]]) -> str:
    return "[\n" + ",\n".join(json.dumps(record, ensure_ascii=False) for record in records) + "]"


def _measurement(record: dict[str, Any]) -> Measurement:
    rounds = record["rounds"]
    known = None if rounds is None else tuple((int(d), int(a), int(e)) for d, a, e in rounds)
    return Measurement(**{**record, "tokens": tuple(record["tokens"]), "rounds": known})


def _pass_record(times: PassTimes) -> dict[str, Any]:
    return {"way": asdict(times.way), "dtype": times.dtype, "samples": times.samples}


def _pass_times(record: dict[str, Any]) -> PassTimes:
    samples = {int(c): {int(T): list(ms) for T, ms in curve.items()} for c, curve in record["samples"].items()}
    return PassTimes(Way(**record["way"]), record["dtype"], samples)
