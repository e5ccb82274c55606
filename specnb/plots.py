"""The notebooks' plots. Each draws on the axes it is given (`ax=None` makes new ones) and returns them.

Colours are a palette that colour-blind readers can tell apart; hatches, markers and labels say the same without
colour. Needs the `lab` extra (matplotlib, seaborn); `import specnb` does not load this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

_PALETTE = sns.color_palette("colorblind")

# Parts of a round, from the axis up: colour and hatch both tell them apart.
_PARTS = {
    "accepted": dict(color=_PALETTE[2], hatch=""),
    "correction": dict(color=_PALETTE[1], hatch="xx"),
    "bonus": dict(color=_PALETTE[0], hatch=".."),
    "target, nothing drafted": dict(color=_PALETTE[7], hatch="\\\\"),
    "drafted in vain": dict(color="white", hatch="//"),
}


def use_style() -> None:
    """One look for every notebook: light grid, readable type, a palette for colour-blind readers."""
    sns.set_theme(
        context="notebook",
        style="whitegrid",
        palette="colorblind",
        rc={
            "figure.figsize": (7.0, 3.6),
            "figure.dpi": 100,
            "figure.constrained_layout.use": True,
            "axes.titlesize": "medium",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "hatch.linewidth": 0.8,
            "legend.fontsize": "small",
            "svg.hashsalt": "specnb",
        },
    )


def _axes(ax: Axes | None) -> Axes:
    return plt.subplots()[1] if ax is None else ax


def _plain_log_ticks(axis: Any, values: Sequence[float]) -> None:
    """A log axis labelled with the values that were measured, not with powers of ten."""
    axis.set_ticks(list(values), minor=False)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(plt.NullLocator())


def _same_length(**series: Sequence) -> None:
    lengths = {name: len(values) for name, values in series.items()}
    if len(set(lengths.values())) > 1 or 0 in lengths.values():
        raise ValueError(f"The series must have the same length, at least 1; got {lengths}.")


# ------------------------------------------------------------------------------------------------- rounds


def _parts(one: Any) -> dict[str, int]:
    """How many tokens of a round fall to each part."""
    own = "bonus" if one.is_bonus else "correction"
    own = own if len(one.drafted) else "target, nothing drafted"
    counts = dict.fromkeys(_PARTS, 0)
    counts["accepted"] = one.num_accepted
    counts[own] = int(one.next_token is not None)
    counts["drafted in vain"] = len(one.drafted) - one.num_accepted
    return counts


def plot_rounds(trace: Iterable[Any], ax: Axes | None = None, *, row: int = 0) -> Axes:
    """One bar per round: what it wrote (accepted, then correction or bonus) and what it drafted in vain.

    `trace` is the list of rounds in `out.trace`; `row` chooses a row of a batch.
    """
    rounds = [_parts(one) for one in trace if getattr(one, "row", 0) == row]
    if not rounds:
        raise ValueError(f"The trace holds no round of row {row}: generate with return_trace=True.")
    ax = _axes(ax)
    bottom = np.zeros(len(rounds))
    for part, style in _PARTS.items():
        heights = np.array([counts[part] for counts in rounds])
        if heights.any():
            ax.bar(range(1, len(rounds) + 1), heights, bottom=bottom, label=part, edgecolor="0.25", width=0.8, **style)
        bottom += heights
    _finish_rounds(ax, rounds, top=bottom.max())
    return ax


def _finish_rounds(ax: Axes, rounds: Sequence[Mapping[str, int]], top: float) -> None:
    written = sum(sum(counts.values()) - counts["drafted in vain"] for counts in rounds)
    passes = f"{len(rounds)} target pass" + "es" * (len(rounds) > 1)
    ax.set(xlabel="round", ylabel="tokens", title=f"{written} tokens in {passes}")
    ax.set(xlim=(0.4, len(rounds) + 0.6), ylim=(0, top * 1.05))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(axis="x", visible=False)
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


# --------------------------------------------------------------------------------------------- cost of a pass


def plot_pass_cost(
    positions: Sequence[int],
    ms: Sequence[float],
    ax: Axes | None = None,
    *,
    label: str | None = None,
    tolerance: float = 1.25,
    relative: bool = True,
) -> Axes:
    """Cost of one pass by its number of positions T, as cost(T)/cost(1) or in ms, with the knee marked.

    Call it again on the same axes for a second curve. `tolerance` draws the line up to which positions count as
    nearly free; the knee is the largest T under it. `positions` ascends from 1.
    """
    _same_length(positions=positions, ms=ms)
    ax = _axes(ax)
    cost = np.asarray(ms, dtype=float) / (ms[0] if relative else 1.0)
    marker = "osD^v"[len(ax.lines) // 3 % 5]
    (line,) = ax.plot(positions, cost, marker=marker, label=label)
    _mark_knee(ax, positions, cost, tolerance, line.get_color())
    ax.set_xscale("log", base=2)
    _plain_log_ticks(ax.xaxis, positions)
    ax.set(xlabel="positions in one pass, T", ylabel="cost(T) / cost(1)" if relative else "ms per pass")
    ax.autoscale(axis="y")  # a second curve may be higher than the first
    ax.set_ylim(bottom=0)
    if label:
        ax.legend(frameon=False)
    return ax


def _mark_knee(ax: Axes, positions: Sequence[int], cost: np.ndarray, tolerance: float, color: Any) -> None:
    limit = tolerance * cost[0]
    knee = max(i for i in range(len(cost)) if cost[i] <= limit)
    ax.axhline(limit, linestyle="--", linewidth=1, color="0.5")
    ax.plot(positions[knee], cost[knee], marker="o", markersize=14, fillstyle="none", color=color, linestyle="none")
    above = len(ax.texts) % 2 == 1  # two curves often share their knee: one label below it, one above
    ax.annotate(
        f"knee: T = {positions[knee]}",
        (positions[knee], cost[knee]),
        xytext=(0, 16 if above else -16),
        textcoords="offset points",
        ha="center",
        va="bottom" if above else "top",
        fontsize="small",
        color=color,
    )


def plot_roofline(
    points: Mapping[str, tuple[float, float]], bandwidth: float, peak_flops: float, ax: Axes | None = None
) -> Axes:
    """Measured passes under the roof that memory and arithmetic set.

    Args:
        points: label → (FLOPs per byte, FLOP/s reached).
        bandwidth: bytes per second.
        peak_flops: FLOP/s of the arithmetic units.
    """
    if not points or bandwidth <= 0 or peak_flops <= 0:
        raise ValueError("Give at least one point, and a bandwidth (bytes/s) and peak_flops (FLOP/s) above 0.")
    ax = _axes(ax)
    ridge = peak_flops / bandwidth
    low = min([x for x, _ in points.values()] + [ridge]) / 3
    high = max([x for x, _ in points.values()] + [ridge]) * 6
    x = np.geomspace(low, high, 200)
    ax.plot(x, np.minimum(x * bandwidth, peak_flops) / 1e9, color="0.3", label="roof")
    ax.axvline(ridge, linestyle=":", color="0.5", linewidth=1)
    ax.text(ridge, 0.03, f" ridge: {ridge:.3g} FLOPs/byte", transform=ax.get_xaxis_transform(), fontsize="small")
    for (name, (intensity, flops)), marker in zip(points.items(), "osD^vP*X" * len(points), strict=False):
        ax.plot(intensity, flops / 1e9, marker=marker, linestyle="none", markersize=8, label=name)
    ax.set(xscale="log", yscale="log", xlim=(low, high))
    ax.set(xlabel="arithmetic intensity (FLOPs per byte of weights)", ylabel="GFLOP/s")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return ax


# ---------------------------------------------------------------------------------------- measured and predicted


def plot_latency(
    measured: Mapping[str, float], predicted: Mapping[str, float] | None = None, ax: Axes | None = None
) -> Axes:
    """Milliseconds per token, one bar per label; a prediction stands beside its measurement."""
    if not measured:
        raise ValueError("Give at least one measurement: label → ms.")
    ax = _axes(ax)
    series = {"predicted": predicted, "measured": measured} if predicted else {"measured": measured}
    styles = {"predicted": dict(color="white", hatch="//"), "measured": dict(color=_PALETTE[0], hatch="")}
    height = 0.8 / len(series)
    for i, (name, values) in enumerate(series.items()):
        places = [row + (i - (len(series) - 1) / 2) * height for row, label in enumerate(measured) if label in values]
        bars = ax.barh(
            places, [values[n] for n in measured if n in values], height, label=name, edgecolor="0.25", **styles[name]
        )
        ax.bar_label(bars, fmt="%.3g", padding=3, fontsize="small")
    ax.set_yticks(range(len(measured)), list(measured))
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.grid(axis="y", visible=False)
    ax.set(xlabel="ms per token")
    if predicted:
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return ax


def plot_series(
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    ax: Axes | None = None,
    *,
    xlabel: str = "",
    ylabel: str = "",
) -> Axes:
    """Several curves over one x, told apart by marker and dash as well as by colour."""
    ax = _axes(ax)
    for i, (name, y) in enumerate(series.items()):
        _same_length(x=x, **{name: y})
        ax.plot(x, y, marker="osD^v"[i % 5], linestyle=("-", "--", "-.", ":")[i % 4], label=name)
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.legend(frameon=False)
    return ax


def plot_mask(mask: Any, ax: Axes | None = None, *, keys: Sequence[str] = (), queries: Sequence[str] = ()) -> Axes:
    """An attention mask [queries, keys]: a ● where a query may look. `keys` and `queries` name the tokens."""
    cells = np.asarray(mask, dtype=bool)
    if cells.ndim != 2:
        raise ValueError(f"A mask of two dimensions [queries, keys] is drawn; got shape {list(cells.shape)}.")
    ax = _cells(_axes(ax), cells.astype(int), marks=("", "●"), tints=(None, _PALETTE[0]))
    if len(keys):
        ax.set_xticks(np.arange(cells.shape[1]) + 0.5, list(keys))
    if len(queries):
        ax.set_yticks(np.arange(cells.shape[0]) + 0.5, list(queries))
    ax.set(xlabel="key: looked at", ylabel="query: looking")
    return ax


def plot_cache(lengths: Sequence[int], capacity: int, ax: Axes | None = None, *, stale: Sequence[int] = ()) -> Axes:
    """What each row of a cache holds: ● valid entries, × entries rolled back and not yet overwritten, else free.

    Args:
        lengths: valid entries of each row.
        capacity: places of each row.
        stale: entries behind the valid ones that were rolled back, per row.
    """
    held, gone = [int(n) for n in lengths], [int(n) for n in stale] or [0] * len(lengths)
    _same_length(lengths=held, stale=gone)
    if any(a + b > capacity for a, b in zip(held, gone, strict=True)):
        raise ValueError(f"A row holds more than its capacity {capacity}: lengths {held}, stale {gone}.")
    place, ends = np.arange(capacity), np.array(held)[:, None]
    states = np.where(place < ends, 2, np.where(place < ends + np.array(gone)[:, None], 1, 0))
    ax = _cells(_axes(ax), states, marks=("", "×", "●"), tints=(None, _PALETTE[1], _PALETTE[2]))
    ax.set(xlabel="place in the buffer", ylabel="row", title="● held    × rolled back    blank: free")
    return ax


def plot_kept(before: int, nodes: int, path: Sequence[int], ax: Axes | None = None) -> Axes:
    """What `RaggedCache.keep` does to one row after a tree was verified: ● text, ◆ the accepted path, × other nodes.

    Args:
        before: entries in front of the tree, its root among them.
        nodes: of the tree, one entry each.
        path: the accepted nodes.
    """
    if any(not 0 <= node < nodes for node in path):
        raise ValueError(f"path {list(path)} names a node that a tree of {nodes} does not have.")
    states = np.zeros((2, before + nodes), dtype=int)
    states[:, :before], states[0, before:] = 2, 1
    states[0, [before + node for node in path]] = states[1, before : before + len(path)] = 3
    tints = (None, _PALETTE[1], _PALETTE[2], _PALETTE[0])
    ax = _cells(_axes(ax), states, marks=("", "×", "●", "◆"), tints=tints)
    ax.set_yticks([0.5, 1.5], ["after the pass", "after keep"])
    ax.set(xlabel="place in the buffer", title="● text    ◆ accepted path    × other branches    blank: free")
    return ax


def _cells(ax: Axes, states: np.ndarray, marks: Sequence[str], tints: Sequence[Any]) -> Axes:
    """A grid of cells, each with the mark and the tint of its state."""
    colours = [(1, 1, 1) if tint is None else (*tint, 0.4) for tint in tints]
    look = dict(cbar=False, linewidths=0.5, linecolor="0.7", square=True, annot_kws={"color": "0.15"})
    sns.heatmap(states, ax=ax, cmap=colours, vmin=0, vmax=len(marks) - 1, annot=np.array(marks)[states], fmt="", **look)
    ax.grid(visible=False)
    ax.tick_params(axis="y", labelrotation=0)
    return ax


# ---------------------------------------------------------------------------------------------------- trees


def plot_tree(
    parents: Sequence[int],
    labels: Sequence[str] = (),
    ax: Axes | None = None,
    *,
    path: Sequence[int] = (),
    root: str = "",
    fontsize: float = 9,
) -> Axes:
    """A tree of guesses, its root at the left; the nodes of ``path`` are framed and joined by thick lines.

    Args:
        parents: of each node the number of an earlier node, or -1 for the root.
        labels: what is written at the nodes; default: their numbers.
        path: numbers of nodes, such as those that were accepted.
        root: what is written at the root.
    """
    labels = list(labels) or [str(node) for node in range(len(parents))]
    _same_length(parents=parents, labels=labels)
    places, kept = _tree_places(parents), {-1, *path}
    ax = _axes(ax)
    for node, parent in enumerate(parents):
        (x0, y0), (x1, y1) = places[parent + 1], places[node + 1]
        on = node in kept and parent in kept
        ax.plot([x0, x1], [y0, y1], color=_PALETTE[2] if on else "0.7", linewidth=3 if on else 1, zorder=1)
    for node, (label, (x, y)) in enumerate(zip([root, *labels], places), start=-1):
        frame = dict(color=_PALETTE[2], linewidth=2) if node in path else dict(color="0.7", linewidth=0.8)
        box = dict(boxstyle="round,pad=0.25", facecolor="white", edgecolor=frame["color"], linewidth=frame["linewidth"])
        ax.text(x, y, label or "•", ha="center", va="center", fontsize=fontsize, bbox=box, zorder=2)
    deepest = max(x for x, _ in places)
    ax.set(xlim=(-0.5, deepest + 0.5), ylim=(min(y for _, y in places) - 0.7, 0.7), yticks=[], xlabel="depth")
    ax.set_xticks(range(deepest + 1))
    ax.grid(visible=False)
    return ax


def _tree_places(parents: Sequence[int]) -> list[tuple[int, float]]:
    """(depth, height) of the root and each node: leaves one below another, a parent in the middle of its children."""
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"Node {node} of a tree cannot have parent {parent}: parents come first, -1 is the root.")
        children[parent + 1].append(node + 1)
    places: dict[int, tuple[int, float]] = {}
    leaves = 0

    def lay(place: int, depth: int) -> float:
        nonlocal leaves
        below = [lay(child, depth + 1) for child in children[place]]
        if not below:
            leaves += 1
        places[place] = depth, (below[0] + below[-1]) / 2 if below else 1.0 - leaves
        return places[place][1]

    lay(0, 0)
    return [places[place] for place in range(len(children))]


# ------------------------------------------------------------------------------------------------ benchmark


def plot_speedups(rows: Sequence[Any], ax: Axes | None = None) -> Axes:
    """Speed-up of every contestant by group, with its 95 % interval; a dashed line where nothing is gained.

    `rows` are those of a benchmark (`BenchmarkResult.rows`); of several dtypes or temperatures each is a series.
    """
    series = _benchmark_series(rows)
    ax = _axes(ax)
    groups = list(dict.fromkeys(row.group for row in rows))
    step = 0.8 / len(series)
    for i, (name, mine) in enumerate(series.items()):
        places = [groups.index(row.group) + (i - (len(series) - 1) / 2) * step for row in mine]
        speedups = np.array([row.speedup for row in mine])
        ends = np.array([[row.low, row.high] for row in mine]).T
        reach = np.nan_to_num(np.abs(ends - speedups))  # a group too small for an interval is a dot alone
        look = dict(marker="osD^vP*X"[i % 8], linestyle="none", color=_PALETTE[i % len(_PALETTE)], capsize=2)
        ax.errorbar(speedups, places, xerr=reach, label=name, **look)
    ax.axvline(1.0, linestyle="--", linewidth=1, color="0.5")
    ax.set_yticks(range(len(groups)), [group or "no group" for group in groups])
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.set(xlabel="speed-up over transformers' plain generate", xlim=(0, None))
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return ax


def plot_predictions(rows: Sequence[Any], ax: Axes | None = None) -> Axes:
    """Predicted against measured speed-up, a point per group; the band holds predictions that are at most 10 % off."""
    predicted = [row for row in rows if np.isfinite(row.predicted)]
    if not predicted:
        raise ValueError("No row has a prediction: it needs a drafter of specnb and plain decoding in the same run.")
    ax = _axes(ax)
    values = [value for row in predicted for value in (row.speedup, row.predicted)]
    ends = np.array([0.9 * min(values), 1.1 * max(values)])
    ax.plot(ends, ends, linestyle="--", linewidth=1, color="0.5")
    ax.fill_between(ends, 0.9 * ends, 1.1 * ends, color="0.5", alpha=0.15, label="within 10 %")
    for i, (name, mine) in enumerate(_benchmark_series(predicted).items()):
        look = dict(marker="osD^vP*X"[i % 8], linestyle="none", color=_PALETTE[i % len(_PALETTE)])
        ax.plot([row.speedup for row in mine], [row.predicted for row in mine], label=name, **look)
    ax.set(xlabel="measured speed-up", ylabel="predicted speed-up", aspect="equal")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return ax


def _benchmark_series(rows: Sequence[Any]) -> dict[str, list[Any]]:
    """Rows by contestant, the baseline left out; dtype and temperature are in the name where there are several."""
    several = len({row.dtype for row in rows}) > 1, len({row.temperature for row in rows}) > 1
    found: dict[str, list[Any]] = {}
    for row in rows:
        notes = [row.dtype] * several[0] + [f"T {row.temperature:g}"] * several[1]
        if row.contestant != "transformers":
            found.setdefault(", ".join([row.contestant, *notes]), []).append(row)
    if not found:
        raise ValueError("There is nothing to draw: the result has no contestant beside the baseline.")
    return found
