"""What a pass costs: measured by number of positions, and predicted from bytes, operations, bandwidth and peak.

    cost = specnb.forward_cost(model)       # v(T), measured: cost(8) is the milliseconds of a pass over 8 positions
    specnb.roofline(model, positions=8)     # what memory and arithmetic would allow at best, on this machine

Nothing here is particular to a device: kernels are waited for where they run in the background.
Derived in notebooks 01 (bandwidth, roofline) and 02 (the cost of positions).
"""

from __future__ import annotations

import contextlib
import html
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median, quantiles
from time import perf_counter
from typing import Any, overload

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specnb import checks, compat
from specnb.cache import RaggedCache, bucket_size, context_size, target_pass
from specnb.prefill import prefill
from specnb.progress import Progress
from specnb.theory import CostCurve, whole_number

POSITIONS = (1, 2, 4, 8, 12, 16, 24, 32)
PROBE_BYTES = 1 << 30  # caches of 260 MB exist; a gigabyte is beyond all of them

Pass = Callable[[RaggedCache, Tensor], Tensor]  # (cache, tokens [B, T]) → logits [B, T, V]; the cache grows by T


# --- the cost of a pass, measured ---


@dataclass(frozen=True, repr=False)
class PassCost(CostCurve):
    """A measured `CostCurve`: medians, and all the samples they were taken from.

    Attributes:
        samples: for each of ``positions``, the milliseconds of every pass that was timed, in order.
        batch_size: rows per pass.
        dtype: of the weights, in words.
    """

    samples: tuple[tuple[float, ...], ...] = field(default=(), kw_only=True)
    batch_size: int = field(default=1, kw_only=True)
    dtype: str = field(default="", kw_only=True)

    @property
    def spread(self) -> tuple[float, ...]:
        """Interquartile range at each of ``positions``, in ms: half of the passes lie within it. NaN for one sample."""
        return tuple(interquartile_range(times) for times in self.samples)

    def rows(self) -> list[dict[str, Any]]:
        """The curve as a table, one dict per number of positions; ``pandas.DataFrame(cost.rows())`` shows it."""
        spreads = self.spread or (math.nan,) * len(self.positions)
        return [
            {"T": T, "ms": ms, "spread": spread, "relative": self.relative(T)}
            for T, ms, spread in zip(self.positions, self.milliseconds, spreads)
        ]

    def __repr__(self) -> str:
        lines = [f"Cost of a pass: {self._title()}", "     T  median ms   spread  v(T)/v(1)"]
        lines += ["{T:6d}  {ms:9.2f}  {spread:7.2f}  {relative:9.2f}".format(**row) for row in self.rows()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        cells = [(row["T"], *(f"{row[name]:.2f}" for name in ("ms", "spread", "relative"))) for row in self.rows()]
        heads = ("positions T", "median ms", "spread (interquartile range), ms", "v(T) / v(1)")
        return html_table(heads, cells, self._title())

    def _title(self) -> str:
        rows = f"{self.batch_size} rows" if self.batch_size > 1 else ""
        passes = f"{len(self.samples[0])} passes each" if self.samples else ""
        parts = [self.label, self.dtype, f"context {self.context}", rows, passes]
        return ", ".join(part for part in parts if part)


class CostTable(dict[int, PassCost]):
    """Curves by context: ``table[200](8)`` is the cost of 8 positions with 200 tokens in the cache, in ms."""

    def rows(self) -> list[dict[str, Any]]:
        """One dict per context and number of positions."""
        return [{"context": context, **row} for context, cost in self.items() for row in cost.rows()]

    def __repr__(self) -> str:
        return "\n".join(repr(cost) for cost in self.values())

    def _repr_html_(self) -> str:
        curves = list(self.values())
        cells = [(T, *(f"{curve(T):.2f}" for curve in curves)) for T in curves[0].positions]
        heads = ("positions T", *(f"ms, context {context}" for context in self))
        return html_table(heads, cells, f"{curves[0].label}, {curves[0].dtype}")


@overload
def forward_cost(
    model: PreTrainedModel,
    positions: Sequence[int] = ...,
    *,
    context: int = ...,
    batch_size: int = ...,
    repeats: int = ...,
    pass_width: int | None = ...,
    run: Pass | None = ...,
    max_seconds: float | None = ...,
    progress: bool | Callable[[float], None] = ...,
) -> PassCost: ...


@overload
def forward_cost(
    model: PreTrainedModel,
    positions: Sequence[int] = ...,
    *,
    context: Sequence[int],
    batch_size: int = ...,
    repeats: int = ...,
    pass_width: int | None = ...,
    run: Pass | None = ...,
    max_seconds: float | None = ...,
    progress: bool | Callable[[float], None] = ...,
) -> CostTable: ...


@torch.no_grad()
def forward_cost(
    model: PreTrainedModel,
    positions: Sequence[int] = POSITIONS,
    *,
    context: int | Sequence[int] = 200,
    batch_size: int = 1,
    repeats: int = 9,
    pass_width: int | None = None,
    run: Pass | None = None,
    max_seconds: float | None = None,
    progress: bool | Callable[[float], None] = False,
) -> PassCost | CostTable:
    """v(T): how many milliseconds a pass over T positions takes, for several T.

    Every repetition goes once through all positions (and contexts), in an order of its own, so that a busy moment
    and a pass's neighbours meet all of them alike; the median of the repetitions counts. One repetition before
    warms up. After each pass the cache is rolled back to the context.

    Args:
        model: the target, or a draft model.
        positions: the T to measure, at least 1 each.
        context: tokens in every row of the cache before the pass; a sequence measures each of them, interleaved too.
        batch_size: rows B; a pass then computes B · T positions.
        repeats: passes timed for each T.
        pass_width: W, as in `generate`: a pass always has W positions and attends to its whole bucket. Only that
            pass is measured, and the curve is flat up to T = W.
        run: another way to do the pass, such as a compiled one: a function ``(cache, tokens [B, T]) -> logits`` that
            appends the tokens to the cache like `target_pass`, which is the default.
        max_seconds: stop early after this time, with at least 3 repetitions done.
        progress: show how far it is; or a function that is told after each pass which share is done.

    Returns:
        `PassCost`, a `CostCurve` with its samples; for a sequence of contexts a `CostTable`, context → `PassCost`.

    Raises:
        ValueError, TypeError: for numbers out of range, a context that does not fit the model, or a ``run`` that does
            not fill the cache.

    Notebook 02 measures the same by hand.
    """
    checks.check_model(model)
    contexts = _whole_numbers("context", [context] if isinstance(context, int) else context, at_least=0)
    widths = _widths(positions, pass_width)
    rows, repeats = whole_number("batch_size", batch_size, 1), whole_number("repeats", repeats, 1)
    _check_fits(model, max(contexts) + max(widths))
    bench = _PassBench(model, run, pass_width, rows, max(widths), contexts)
    places = [(n, T) for n in contexts for T in widths]
    samples = _interleaved(bench, places, repeats, max_seconds, progress)
    notes: dict[str, Any] = dict(batch_size=rows, dtype=_dtype_name(model), label=_label(run, pass_width))
    curves = CostTable({n: _curve([samples[n, T] for T in widths], widths, pass_width, n, notes) for n in contexts})
    return curves[contexts[0]] if isinstance(context, int) else curves


class _PassBench:
    """One filled cache per context, and a pass over any number of positions that leaves it as it was."""

    def __init__(
        self, model: PreTrainedModel, run: Pass | None, pass_width: int | None, rows: int, widest: int,
        contexts: Sequence[int],
    ) -> None:  # fmt: skip
        self.model, self.run, self.pass_width = model, run, pass_width
        tokens = some_tokens(model, rows, max(contexts) + widest)
        self.tokens = tokens[:, -widest:].to(model.device)
        self.caches = {n: self._filled(tokens[:, :n], widest) for n in contexts}

    def _filled(self, tokens: Tensor, widest: int) -> RaggedCache:
        rows, n = tokens.shape
        attended = 0 if self.pass_width is None else bucket_size(n)
        cache = RaggedCache(self.model.config, rows, max(attended, n) + widest)
        if n:
            prefill(self.model, cache, tokens.tolist(), fixed=self.pass_width is not None)
        return cache

    def milliseconds(self, context: int, positions: int) -> float:
        """Time one pass."""
        cache, tokens = self.caches[context], self.tokens[:, :positions]
        synchronise(self.model.device)
        start = perf_counter()
        self._pass(cache, tokens)
        synchronise(self.model.device)
        elapsed = perf_counter() - start
        grown = cache.lengths - context
        if not bool((grown == positions).all()):
            raise ValueError(
                f"run must append its {positions} tokens to every row of the cache, as specnb.target_pass does; the "
                f"rows have grown by {grown.tolist()}."
            )
        cache.rollback(positions)
        return 1000 * elapsed

    def _pass(self, cache: RaggedCache, tokens: Tensor) -> None:
        if self.run is not None:
            self.run(cache, tokens)
            return
        attended = None if self.pass_width is None else bucket_size(int(cache.lengths.max()))
        target_pass(self.model, cache, tokens, attended=attended)


def _interleaved(
    bench: _PassBench, places: list[tuple[int, int]], repeats: int, max_seconds: float | None, progress: Any
) -> dict[tuple[int, int], list[float]]:
    """The times of every place (context, positions), taken round by round."""
    samples: dict[tuple[int, int], list[float]] = {place: [] for place in places}
    started, order = perf_counter(), random.Random(0)
    with _bar(progress, "Timing passes", (repeats + 1) * len(places)) as tell:
        for repeat in range(repeats + 1):  # the first one warms up
            for place in order.sample(places, len(places)):
                taken = bench.milliseconds(*place)
                samples[place] += [taken] if repeat else []
                tell()
            if max_seconds is not None and repeat >= 3 and perf_counter() - started > max_seconds:
                break
    return samples


def _curve(
    samples: list[list[float]], widths: list[int], pass_width: int | None, context: int, notes: dict[str, Any]
) -> PassCost:
    if pass_width is not None and pass_width > 1:  # any number of positions up to W is the same pass
        widths, samples = [1, pass_width], [samples[0], samples[0]]
    medians = tuple(median(times) for times in samples)
    return PassCost(tuple(widths), medians, context=context, samples=tuple(map(tuple, samples)), **notes)


def _widths(positions: Sequence[int], pass_width: int | None) -> list[int]:
    """The T to time, rising, each once; with a fixed width only that one."""
    checks.check_pass_width(pass_width)
    widths = sorted(set(_whole_numbers("positions", positions, at_least=1)))
    if pass_width is None:
        return widths
    if tuple(positions) != POSITIONS and widths[-1] > pass_width:
        raise ValueError(
            f"A pass of width {pass_width} has no {widths[-1]} positions: leave positions out, or raise W."
        )
    return [pass_width]


def _whole_numbers(name: str, values: Any, at_least: int) -> list[int]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a sequence of whole numbers, got {values!r}.")
    numbers = [whole_number(f"each of {name}", value, at_least) for value in values]
    if not numbers:
        raise ValueError(f"{name} is empty: give at least one number.")
    return numbers


def _check_fits(model: PreTrainedModel, tokens: int) -> None:
    room = context_size(model.config)
    if tokens > room:
        raise ValueError(
            f"The longest context and the widest pass make {tokens} tokens, the model's context holds {room}. "
            "Measure with a shorter context or fewer positions."
        )


def some_tokens(model: PreTrainedModel, rows: int, length: int) -> Tensor:
    """Random token ids [rows, length], the same at every call: a pass costs the same whatever they say."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(compat.vocab_size(model), (rows, length), generator=generator)


def _label(run: Pass | None, pass_width: int | None) -> str:
    name = "target_pass" if run is None else getattr(run, "__name__", type(run).__name__)
    return name if pass_width is None else f"{name}, width {pass_width}"


def _dtype_name(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


# --- bandwidth and peak, measured ---


class Rate(float):
    """A measured rate per second, the median of its samples: a float that remembers them.

    Attributes:
        samples: every measurement.
        unit: what is counted, "B/s" or "FLOP/s".
    """

    samples: tuple[float, ...]
    unit: str

    def __new__(cls, samples: Sequence[float], unit: str) -> Rate:
        rate = super().__new__(cls, median(samples))
        rate.samples, rate.unit = tuple(samples), unit
        return rate

    def __reduce__(self) -> tuple[type[Rate], tuple[tuple[float, ...], str]]:  # for copies and pickles
        return Rate, (self.samples, self.unit)

    @property
    def spread(self) -> float:
        """Interquartile range of the samples."""
        return interquartile_range(self.samples)

    def __repr__(self) -> str:
        return f"{quantity(self, self.unit)} (median of {len(self.samples)}, spread {quantity(self.spread, self.unit)})"


# How a buffer [n, 1024] is read once. A product with a vector is what a pass over one position does with a weight
# matrix, but not every library spreads it over the cores; a sum is spread by torch itself.
_READERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matrix times vector": lambda buffer, vector: buffer @ vector,
    "sum": lambda buffer, vector: buffer.sum(),
}


def memory_bandwidth(
    device: torch.device | str | None = None, *, num_bytes: int = PROBE_BYTES, repeats: int = 9
) -> Rate:
    """Bytes per second at which weights can be *read*, with as many threads as torch is set to.

    A pass reads its weights and writes next to nothing, so the probe reads too: it sums a buffer up, and multiplies
    it with a vector, and the faster of the two counts (medians), as either may be held back by its arithmetic. A
    copy would measure something else: it also writes, and stores have traffic of their own.

    Args:
        device: None means a GPU where there is one, otherwise the CPU.
        num_bytes: size of the buffer. The default, 1 GiB, is far beyond any processor's cache (some hold 260 MB). To
            ask what the weights of a small model can reach, part of which may stay in the cache from pass to
            pass, give their size.
        repeats: readings of each kind.

    Returns:
        `Rate` in bytes per second: a float; ``rate / 1e9`` is GB/s.

    Notebook 01 explains what such a probe can tell.
    """
    rows = whole_number("num_bytes", num_bytes, 1 << 20) // 4096
    repeats, place = whole_number("repeats", repeats, 1), _device(device)
    buffer = torch.ones(rows, 1024, device=place)  # written, not just allocated: untouched pages are all one page
    vector = torch.ones(1024, device=place)
    rates = []
    for read in _READERS.values():
        seconds = time_repeatedly(partial(read, buffer, vector), repeats, place)
        rates.append(Rate([4096 * rows / s for s in seconds], "B/s"))
    return max(rates)


def arithmetic_peak(
    dtype: torch.dtype = torch.float32, device: torch.device | str | None = None, *, repeats: int = 7
) -> Rate:
    """FLOP/s of a product of two large square matrices: 2·s³ operations, in which each number is used s times.

    The size s is doubled until a product takes 30 ms, so that starting it costs nothing to speak of.

    Args:
        dtype: a floating-point type; peaks differ by type.
        device: None means a GPU where there is one, otherwise the CPU.
        repeats: products timed.

    Returns:
        `Rate` in FLOP/s, the median.

    Notebook 01 draws the roof from it.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point torch.dtype, such as torch.bfloat16, got {dtype!r}.")
    repeats, place, size = whole_number("repeats", repeats, 1), _device(device), 256
    while _seconds_of_product(size, dtype, 1, place)[0] < 0.03 and size < 8192:
        size *= 2
    return Rate([2 * size**3 / s for s in _seconds_of_product(size, dtype, repeats, place)], "FLOP/s")


def _seconds_of_product(size: int, dtype: torch.dtype, repeats: int, device: torch.device) -> list[float]:
    a, b = torch.ones(2, size, size, device=device).to(dtype)
    return time_repeatedly(partial(torch.matmul, a, b), repeats, device)


def time_repeatedly(work: Callable[[], Any], repeats: int, device: torch.device) -> list[float]:
    """Seconds of each of several runs, after one that warms up."""
    seconds = []
    for _ in range(repeats + 1):
        synchronise(device)
        start = perf_counter()
        work()
        synchronise(device)
        seconds.append(perf_counter() - start)
    return seconds[1:]


def synchronise(device: torch.device) -> None:
    """Wait for what runs on the device in the background; nothing does on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _device(device: torch.device | str | None) -> torch.device:
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


# --- the cost of a pass, predicted ---


@dataclass(frozen=True, repr=False)
class Roofline:
    """What memory and arithmetic allow a pass at best. Made by `roofline`.

    Attributes:
        positions, context, batch_size: of the pass.
        weight_bytes: bytes of weights the pass reads; a table that embedding and head share counts once, an embedding
            table of its own only with the rows that are looked up.
        kv_bytes: keys and values of the context and of the new tokens.
        flops: floating-point operations: matrix products and attention.
        bandwidth: bytes per second.
        peak: FLOP/s.
        knee: T*, the number of positions at which arithmetic takes as long as memory; up to there positions hide
            behind the reading of weights. `math.inf` if that never happens.
        label: the model, in words.
    """

    positions: int
    context: int
    batch_size: int
    weight_bytes: float
    kv_bytes: float
    flops: float
    bandwidth: float
    peak: float
    knee: float
    label: str = ""

    @property
    def arithmetic_intensity(self) -> float:
        """FLOPs per byte read."""
        return self.flops / (self.weight_bytes + self.kv_bytes)

    @property
    def ridge(self) -> float:
        """FLOPs per byte at which this machine's memory and arithmetic are equally busy."""
        return self.peak / self.bandwidth

    @property
    def memory_ms(self) -> float:
        """Milliseconds to read weights, keys and values."""
        return 1000 * (self.weight_bytes + self.kv_bytes) / self.bandwidth

    @property
    def compute_ms(self) -> float:
        """Milliseconds of arithmetic."""
        return 1000 * self.flops / self.peak

    @property
    def predicted_ms(self) -> float:
        """The longer of the two: a pass cannot be faster."""
        return max(self.memory_ms, self.compute_ms)

    @property
    def bound(self) -> str:
        """Which of the two that is: "memory" or "compute"."""
        return "memory" if self.memory_ms >= self.compute_ms else "compute"

    def __repr__(self) -> str:
        return "\n".join([f"Roofline of {self._title()}", *(f"  {name:13} {text}" for name, text in self._lines())])

    def _repr_html_(self) -> str:
        return html_table(("", ""), self._lines(), f"Roofline of {self._title()}")

    def _title(self) -> str:
        plural = "s" if self.positions > 1 else ""
        rows = f", {self.batch_size} rows" if self.batch_size > 1 else ""
        return f"{self.label or 'a model'}: a pass over {self.positions} position{plural}, context {self.context}{rows}"

    def _lines(self) -> list[tuple[str, str]]:
        weights, kv = quantity(self.weight_bytes, "B"), quantity(self.kv_bytes, "B")
        bandwidth, peak, flops = (
            quantity(self.bandwidth, "B/s"),
            quantity(self.peak, "FLOP/s"),
            quantity(self.flops, "FLOP"),
        )
        return [
            ("memory", f"{weights} of weights + {kv} of keys and values at {bandwidth}: {self.memory_ms:.3g} ms"),
            ("arithmetic", f"{flops} at {peak}: {self.compute_ms:.3g} ms"),
            ("at best", f"{self.predicted_ms:.3g} ms, bound by {self.bound}"),
            ("intensity", f"{self.arithmetic_intensity:.3g} FLOPs per byte; the ridge is at {self.ridge:.3g}"),
            ("knee", f"arithmetic takes over at {self.knee:.3g} positions"),
        ]


def roofline(
    model: PreTrainedModel | float,
    *,
    positions: int = 1,
    context: int = 200,
    batch_size: int = 1,
    bandwidth: float | None = None,
    peak: float | None = None,
    bytes_per_param: float = 2,
    kv_bytes_per_token: float = 0,
) -> Roofline:
    """What a pass costs at best: the longer of reading its bytes and doing its arithmetic.

    A bound, not a forecast: starting kernels, small matrices and everything that is not a matrix product come on top.
    Bytes are those the pass must move at least: weights once, keys and values once; scores and other results between
    layers are left out. Every weight counts as read and used, so for a mixture of experts it is an upper bound.

    Args:
        model: a loaded model, of which bytes and operations are counted (with one pass over one token); or the number
            of parameters of a model on paper, such as ``70e9``.
        positions: T.
        context: tokens in the cache.
        batch_size: rows B, each with T positions and a context of its own.
        bandwidth: bytes per second; None measures it, with a buffer of the weights' size (at most 1 GiB).
        peak: FLOP/s; None measures it, in the model's dtype (on paper: bfloat16, or float32 for 4 bytes).
        bytes_per_param, kv_bytes_per_token: of a model on paper; a loaded model has its own.

    Raises:
        ValueError, TypeError: for anything that is neither a model nor a number above 0, and for rates not above 0.

    Equations (01.3) to (01.7) and (02.3); Williams et al. 2009, "Roofline".
    """
    T, n = whole_number("positions", positions, 1), whole_number("context", context)
    B = whole_number("batch_size", batch_size, 1)
    if isinstance(model, PreTrainedModel):
        checks.check_model(model)
        count, device, dtype = count_pass(model), model.device, model.dtype
        label = f"{type(model).__name__} ({model.num_parameters() / 1e6:.4g} M weights, {_dtype_name(model)})"
    else:
        count, device = _paper_count(model, bytes_per_param, kv_bytes_per_token), None
        dtype = torch.float32 if bytes_per_param >= 4 else torch.bfloat16
        label = f"{float(model):.3g} weights of {bytes_per_param:g} bytes"
    if bandwidth is None:
        bandwidth = memory_bandwidth(device, num_bytes=min(max(int(count.weight_bytes), 1 << 24), PROBE_BYTES))
    if peak is None:
        peak = arithmetic_peak(dtype, device)
    _check_rates(bandwidth=bandwidth, peak=peak)
    weights, kv, flops = count.of_pass(B, T, n)
    return Roofline(T, n, B, weights, kv, flops, bandwidth, peak, count.knee(B, n, bandwidth, peak), label)


@dataclass(frozen=True)
class PassCount:
    """What a pass reads and computes, by what it grows with.

    Attributes:
        weight_bytes: weights read whatever the number of positions.
        bytes_per_position: embedding rows looked up.
        kv_bytes_per_token: one token's keys and values, all layers.
        flops_per_position: products with weight matrices.
        flops_per_pair: attention, for each position and each token it is compared with, masked ones too.
    """

    weight_bytes: float
    bytes_per_position: float
    kv_bytes_per_token: float
    flops_per_position: float
    flops_per_pair: float

    def of_pass(self, rows: int, positions: int, context: int) -> tuple[float, float, float]:
        """(weight bytes, KV bytes, FLOPs) of a pass."""
        seen = context + positions
        weights = self.weight_bytes + rows * positions * self.bytes_per_position
        flops = rows * positions * (self.flops_per_position + seen * self.flops_per_pair)
        return weights, rows * seen * self.kv_bytes_per_token, flops

    def knee(self, rows: int, context: int, bandwidth: float, peak: float) -> float:
        """T at which the arithmetic takes as long as the reading: the root of a·T² + b·T = c, all in seconds."""
        a = rows * self.flops_per_pair / peak
        b = rows * (self.flops_per_position + context * self.flops_per_pair) / peak
        b -= rows * (self.bytes_per_position + self.kv_bytes_per_token) / bandwidth
        c = (self.weight_bytes + rows * context * self.kv_bytes_per_token) / bandwidth
        if a == 0:
            return c / b if b > 0 else math.inf
        return (math.sqrt(b * b + 4 * a * c) - b) / (2 * a)


def count_pass(model: PreTrainedModel) -> PassCount:
    """Count a loaded model's bytes and operations; keys and values are those of one pass over one token."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    others = [module for module in model.modules() if not isinstance(module, nn.Embedding)]
    read = {id(weight): weight for module in others for weight in module.parameters(recurse=False)}
    rows = [table.weight[0] for table in tables if id(table.weight) not in read]
    cache = RaggedCache(model.config, 1, 1)
    target_pass(model, cache, torch.zeros(1, 1, dtype=torch.long))
    layers: list[Any] = list(cache.layers)
    heads = compat.text_config(model.config).num_attention_heads
    return PassCount(
        weight_bytes=sum(weight.nbytes for weight in read.values()),
        bytes_per_position=sum(row.nbytes for row in rows),
        kv_bytes_per_token=sum(layer.keys.nbytes + layer.values.nbytes for layer in layers),
        flops_per_position=2 * sum(_multiplications(module) for module in others),
        flops_per_pair=2 * heads * sum(layer.keys.shape[-1] + layer.values.shape[-1] for layer in layers),
    )


def _multiplications(module: nn.Module) -> int:
    """Multiplications of one position with the module's own matrices (packed ones tell their size by name)."""
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if isinstance(sizes[0], int) and isinstance(sizes[1], int):
        return sizes[0] * sizes[1]
    return sum(weight.numel() for weight in module.parameters(recurse=False) if weight.ndim >= 2)


def _paper_count(model: Any, bytes_per_param: float, kv_bytes_per_token: float) -> PassCount:
    if isinstance(model, bool) or not isinstance(model, (int, float)):
        raise TypeError(
            f"roofline takes a transformers model or a number of parameters such as 70e9, got {type(model).__name__}."
        )
    if not 0 < model < math.inf or not bytes_per_param > 0 or not kv_bytes_per_token >= 0:
        raise ValueError(
            "A model on paper has more than 0 parameters of more than 0 bytes, and no negative cache: got "
            f"{model!r}, bytes_per_param={bytes_per_param!r}, kv_bytes_per_token={kv_bytes_per_token!r}."
        )
    return PassCount(model * bytes_per_param, 0, kv_bytes_per_token, 2 * model, 0)


def _check_rates(**rates: float) -> None:
    for name, rate in rates.items():
        if isinstance(rate, bool) or not isinstance(rate, (int, float)):
            raise TypeError(f"{name} must be a number per second, got {rate!r}.")
        if not 0 < rate < math.inf:
            raise ValueError(f"{name} must be above 0, in bytes or FLOP per second (not GB/s), got {rate!r}.")


# --- words and tables ---


def interquartile_range(samples: Sequence[float]) -> float:
    """Width of the middle half of the samples; NaN for fewer than two."""
    if len(samples) < 2:
        return math.nan
    first, _, third = quantiles(samples, n=4, method="inclusive")
    return third - first


def quantity(value: float, unit: str) -> str:
    """1.23e9 B/s → "1.23 GB/s": three digits and a prefix of thousands."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def html_table(heads: Sequence[Any], rows: Iterable[Sequence[Any]], caption: str = "") -> str:
    """A plain HTML table, numbers to the right; all text is escaped."""

    def line(tag: str, cells: Sequence[Any]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    head = f"<thead>{line('th', heads)}</thead>" if any(heads) else ""
    body = "".join(line("td", row) for row in rows)
    return f"<table><caption>{html.escape(caption)}</caption>{head}<tbody>{body}</tbody></table>"


@contextlib.contextmanager
def _bar(show: bool | Callable[[float], None], label: str, total: int) -> Iterator[Callable[[], None]]:
    """A function to call after each pass."""
    done = itertools.count(1)
    if callable(show):
        yield lambda: show(next(done) / total)
        return
    if not show:
        yield lambda: None
        return
    with Progress(label, total, "passes") as bar:
        yield lambda: bar.update(next(done))
