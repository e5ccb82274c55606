"""What `diagnose` has found, and how it is told: as a report, and as plain data."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from specnb import advice
from specnb.advice import Candidate, Outcome, Recommendation
from specnb.machine import Machine
from specnb.profiling import PassCost, Rate, Roofline, quantity

BUSY = 0.15  # times that scatter more than this share deserve a warning,
TOO_BUSY = 0.5  # and no conclusions
BAR = 30  # columns of the longest bar
WIDTH = 100  # columns of the report


@dataclass(frozen=True)
class LoopCost:
    """What a round of plain decoding takes beside its pass.

    Attributes:
        ms: between the end of one pass and the start of the next, median; what `target_pass` prepares included.
        share: of the whole round.
    """

    ms: float
    share: float


@dataclass(frozen=True)
class Check:
    """The recommendation, run for real beside plain decoding.

    Attributes:
        prompts: how many.
        predicted, measured: speed-up over these prompts alone.
        same_text: how many answers were those of plain decoding, token for token.
    """

    prompts: int
    predicted: float
    measured: float
    same_text: int


@dataclass(repr=False)
class Diagnosis:
    """Everything `diagnose` has found; what was not reached (Ctrl-C) is None or empty. ``print(diagnosis)`` reports it.

    Attributes:
        model, dtype: what was examined.
        machine: where.
        bandwidth: bytes per second at which memory is read.
        peaks: FLOP/s by dtype.
        roofline: a pass over one position, at best.
        cost: v(T), measured.
        loop: the loop's own cost.
        answers: how many answers drafters were tried on; ``tokens``: how many tokens they have together.
        outcomes: what each drafter brings, by number of drafted tokens.
        recommendation: what to do.
        check: how the recommendation did when it was run.
        compiled: whether the passes are those of ``compile=True``.
        quick: whether the short form was asked for.
        interrupted: whether Ctrl-C cut it short.
        seconds: what the examination took.
    """

    model: str
    dtype: str
    machine: Machine
    bandwidth: Rate | None = None
    peaks: dict[str, Rate] = field(default_factory=dict)
    roofline: Roofline | None = None
    cost: PassCost | None = None
    loop: LoopCost | None = None
    answers: int = 0
    tokens: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    recommendation: Recommendation | None = None
    check: Check | None = None
    compiled: bool = False
    quick: bool = False
    interrupted: bool = False
    seconds: float = 0.0

    def __repr__(self) -> str:
        return "\n\n".join("\n".join(section) for section in _sections(self) if section)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, texts, lists and dicts, for JSON. NaN and infinity become None."""
        return _plain(_as_dict(self))


# --- the report ---


def _sections(d: Diagnosis) -> list[list[str]]:
    sections = [[f"specnb doctor: {d.model} in {d.dtype} on {d.machine.device}"], _machine_lines(d)]
    if d.cost is not None:
        sections += [_pass_lines(d), _curve_lines(d.cost)]
    for candidate in dict.fromkeys(o.candidate.title for o in d.outcomes):
        sections.append(_drafter_lines(d, [o for o in d.outcomes if o.candidate.title == candidate]))
    return [*sections, _hope_lines(d), _notes(d), _answer_lines(d)]


def _item(name: str, text: str) -> str:
    return f"  {name:13} {text}"


def _wrapped(text: str, indent: str = "", first: str | None = None) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent if first is None else first, subsequent_indent=indent)


def _machine_lines(d: Diagnosis) -> list[str]:
    m = d.machine
    cores = f" ({m.instructions}), {m.threads} threads on {m.cores} cores" if m.instructions else ""
    lines = [
        "This machine",
        _item("processor" if m.instructions else "card", f"{m.name}{cores}"),
        _item("software", f"torch {m.torch}, transformers {m.transformers}, Python {m.python}"),
        _item("compiler", f"{m.compiler}, which compile=True needs" if m.compiler else
              "none found: compile=True would run uncompiled"),
    ]  # fmt: skip
    if d.bandwidth is not None:
        lines.append(_item("memory", f"is read at {quantity(d.bandwidth, 'B/s')}"))
    if d.peaks:
        lines.append(
            _item("arithmetic", ", ".join(f"{quantity(r, 'FLOP/s')} in {name}" for name, r in d.peaks.items()))
        )
    return lines


def _pass_lines(d: Diagnosis) -> list[str]:
    assert d.cost is not None
    kind = "compiled pass" if d.compiled else "pass"
    lines = [f"One {kind} of the model, over one position, with {d.cost.context} tokens before it"]
    if d.roofline is not None:
        r, ms = d.roofline, d.cost(1)
        lines += [
            _item("reads", f"{quantity(r.weight_bytes, 'B')} of weights and {quantity(r.kv_bytes, 'B')} of keys and "
                  f"values, which takes at least {r.memory_ms:.3g} ms"),
            _item("computes", f"{quantity(r.flops, 'FLOP')}, which takes at least {r.compute_ms:.2g} ms: "
                  f"the pass is bound by {'memory' if r.bound == 'memory' else 'arithmetic'}"),
            _item("takes", f"{ms:.3g} ms: {ms / r.predicted_ms:.1f} times the longer of these two"),
        ]  # fmt: skip
    if d.loop is not None:
        lines.append(_item("specnb's loop", f"adds {d.loop.ms:.2f} ms a round ({d.loop.share:.1%})"))
    return lines


def _curve_lines(cost: PassCost) -> list[str]:
    """The cost curve as a table with bars."""
    longest = max(cost.milliseconds)
    lines = [f"What more positions cost (median of {len(cost.samples[0])} passes; the bars are ms)"]
    lines.append("  positions       ms   × one")
    for T, ms in zip(cost.positions, cost.milliseconds):
        lines.append(f"  {T:9d} {ms:8.1f} {cost.relative(T):7.2f}  {'#' * round(BAR * ms / longest)}")
    return lines


def _drafter_lines(d: Diagnosis, outcomes: Sequence[Outcome]) -> list[str]:
    """One column per k."""
    drafter = outcomes[0].candidate
    rows: dict[str, Callable[[Outcome], str]] = {
        "drafted tokens, k": lambda o: f"{o.k}",
        "guesses right, α": lambda o: "-" if math.isnan(o.alpha) else f"{o.alpha:.0%}",
        "tokens a round": lambda o: f"{o.tokens_per_round:.2f}",
        "cost of a round": lambda o: f"{o.round_cost:.2f}",
        "speed-up": lambda o: f"{o.speedup:.2f}",
    }
    lines = [f"Tried on {d.answers} answers with {d.tokens} tokens (greedy): {drafter.title}, {_drafting(drafter)}"]
    lines += [f"  {name:19}" + "".join(f"{cell(o):>6}" for o in outcomes) for name, cell in rows.items()]
    chosen = advice.best(outcomes)
    if len(chosen.by_group) > 1:
        order = sorted(chosen.by_group.items(), key=lambda item: -item[1])
        gains = ", ".join(f"{advice.spoken(name)} {gain:.2f}" for name, gain in order)
        lines += _wrapped(f"by kind of prompt, with k = {chosen.k}: {gains}", "    ", first="  ")
    return lines


def _drafting(drafter: Candidate) -> str:
    """What drafting takes, in words."""
    _, tried = drafter.replays[0]
    ms = median(replay.call_ms for _, replay in drafter.replays)
    return f"which takes {ms:.2g} ms {'a guess' if tried.per_token else 'a round'}"


def _hope_lines(d: Diagnosis) -> list[str]:
    """What a better drafter could bring, by the closed form."""
    if d.cost is None or d.recommendation is None:
        return []
    lines = ["What another drafter could bring here, if each of its guesses costs a tenth of a pass"]
    for alpha, k, gain in advice.better_drafters(d.cost):
        best = f"{gain:.2f} times as fast, with k = {k}" if k else "nothing: plain decoding is faster"
        lines.append(f"  right {alpha:.0%} of the time: {best}")
    return lines


def _notes(d: Diagnosis) -> list[str]:
    """Whatever makes the numbers doubtful, or could be changed for the better."""
    notes = []
    m = d.machine
    if m.instructions and m.threads < m.cores:
        notes.append(f"torch uses {m.threads} of {m.cores} cores: OMP_NUM_THREADS={m.cores} lets it use all of them.")
    if d.cost is not None and (doubt := doubt_about(d.cost)) > BUSY:
        notes.append(
            f"Times scattered by {doubt:.0%}: something else was running. Try again before you trust the digits."
        )
    if d.check is not None and abs(d.check.measured / d.check.predicted - 1) > BUSY:
        notes.append("What was measured in the end is far from what was predicted: trust neither before you try again.")
    if d.quick and d.recommendation is not None:
        notes.append(f"Quick: {d.answers} short answers decide. Without --quick there are more, and the result is run.")
    notes += _dtype_note(d)
    return [line for note in notes for line in _wrapped(f"Note: {note}")]


def doubt_about(cost: PassCost) -> float:
    """How far its times contradict each other: their typical spread, or by how much a pass was faster than over one."""
    spread = median(0.0 if math.isnan(spread) else spread / ms for spread, ms in zip(cost.spread, cost.milliseconds))
    return max(spread, 1 - min(cost.milliseconds) / cost(1))


def _dtype_note(d: Diagnosis) -> list[str]:
    other = [name for name in d.peaks if name != d.dtype]
    if not other or d.dtype not in d.peaks:
        return []
    ratio = d.peaks[other[0]] / d.peaks[d.dtype]
    if d.dtype != "float32" and ratio > 1.2:
        return [
            f"This processor computes {ratio:.1f} times as fast in float32 as in {d.dtype}: compare --dtype float32."
        ]
    if d.dtype == "float32" and ratio > 0.9:
        return [f"bfloat16 has half the bytes, and this processor computes it as fast: compare --dtype {other[0]}."]
    return []


def _answer_lines(d: Diagnosis) -> list[str]:
    if d.recommendation is None:
        why = "It was interrupted before" if d.interrupted else "It ended before"
        return [f"No recommendation: {why[0].lower()}{why[1:]} any drafter had been tried."]
    r = d.recommendation
    lines = ["Answer", *_wrapped(r.headline, "  "), "", *(f"      {line}" for line in r.code.splitlines()), ""]
    reasons = list(r.reasons)
    if d.check is not None:
        c = d.check
        measured = f"{c.measured:.2f} times as fast, where {c.predicted:.2f} was predicted"
        reasons.append(f"Run for real on {c.prompts} of the prompts, it was {measured}.")
    return lines + [line for reason in reasons for line in _wrapped(reason, "    ", first="  - ")]


# --- as plain data ---


def _as_dict(d: Diagnosis) -> dict[str, Any]:
    return {
        "model": d.model,
        "dtype": d.dtype,
        "machine": asdict(d.machine),
        "bandwidth_bytes_per_second": d.bandwidth,
        "peak_flops_per_second": d.peaks,
        "roofline": None if d.roofline is None else _roofline_dict(d.roofline),
        "cost": None if d.cost is None else {"context": d.cost.context, "passes": d.cost.rows()},
        "loop": None if d.loop is None else asdict(d.loop),
        "answers": d.answers,
        "tokens": d.tokens,
        "outcomes": [_outcome_dict(o) for o in d.outcomes],
        "recommendation": None if d.recommendation is None else _recommendation_dict(d.recommendation),
        "check": None if d.check is None else asdict(d.check),
        "compiled": d.compiled,
        "quick": d.quick,
        "interrupted": d.interrupted,
        "seconds": d.seconds,
    }


def _roofline_dict(r: Roofline) -> dict[str, Any]:
    derived = ("arithmetic_intensity", "ridge", "memory_ms", "compute_ms", "predicted_ms", "bound")
    return {**asdict(r), **{name: getattr(r, name) for name in derived}}


def _outcome_dict(o: Outcome) -> dict[str, Any]:
    fields = ("k", "speedup", "by_group", "tokens_per_round", "round_cost", "alpha", "step_cost")
    return {"drafter": o.candidate.title, **{name: getattr(o, name) for name in fields}}


def _recommendation_dict(r: Recommendation) -> dict[str, Any]:
    chosen = None if r.outcome is None else {"drafter": r.outcome.candidate.title, "k": r.outcome.k}
    return {"verdict": r.verdict, "headline": r.headline, "reasons": r.reasons, "code": r.code, "groups": r.groups,
            "best": chosen}  # fmt: skip


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value
