"""Checks for the notebooks' exercises: each names the slip an answer makes, not only that it is wrong.

`exercises.check_accepted_prefix(my_function)` calls the answer on a few small inputs, compares with a right
solution, and returns a `CheckResult`: true when every case agrees. A wrong answer is also compared with the
answers that well-known slips would give; when one of them fits on every case, the message names it. A stub that
still raises `NotImplementedError` is "not started yet", not an error, so a whole notebook runs before any answer
is written.

The docstring of each check fixes the signature of the function it wants. `budget` sizes the loops of a notebook:
one value for a reader, a smaller one when `SPECNB_MODE=fast`.
"""

from __future__ import annotations

import copy
import functools
import html
import importlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

_MARKS = {"passed": "✓", "failed": "✗", "not started": "…"}


# ---------------------------------------------------------------------------------------------- the framework


@dataclass(frozen=True)
class CheckResult:
    """What a check found. True in an `if` or an `assert` exactly when the answer passed."""

    exercise: str
    status: str  # "passed", "failed" or "not started"
    message: str

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        return f"{_MARKS[self.status]} {self.exercise}: {self.message}"

    def _repr_html_(self) -> str:
        """Text and mark say it all: nothing here depends on colour, and the page may strip any style."""
        lines = "<br>".join(html.escape(line) for line in self.message.split("\n"))
        head = f"{_MARKS[self.status]} {html.escape(self.exercise)}: {self.status}"
        return f'<div role="status"><strong>{head}</strong><br>{lines}</div>'


class Slip(NamedTuple):
    """A mistake people make: what to tell them, and a function that makes it."""

    message: str
    wrong: Callable[..., Any]


@dataclass(frozen=True)
class Exercise:
    """A right solution, inputs to try it on (smallest first), and the slips worth naming."""

    name: str
    arguments: tuple[str, ...]
    right: Callable[..., Any]
    cases: tuple[tuple, ...]
    slips: tuple[Slip, ...]

    def check(self, candidate: Callable[..., Any]) -> CheckResult:
        """Compare a candidate with the right solution on every case."""
        if not callable(candidate):
            return self._failed(f"give the function itself: check_{self.name}({self.name}), without calling it.")
        got = self.outcomes(candidate)
        if any(isinstance(one, NotImplementedError) for one in got):
            return CheckResult(self.name, "not started", "not started yet: replace the `raise` with your answer.")
        want = self.outcomes(self.right)
        failing = [i for i in range(len(want)) if not _same(got[i], want[i])]
        if not failing:
            return CheckResult(self.name, "passed", f"all {len(want)} cases agree.")
        first = failing[0]
        return self._failed(self._diagnosis(got, want, first), self._shown(first, got[first], want[first]))

    def outcomes(self, function: Callable[..., Any]) -> list:
        """What the function returns, or the exception it raises, for each case; inputs are fresh copies."""
        return [_outcome(function, copy.deepcopy(case)) for case in self.cases]

    def _diagnosis(self, got: list, want: list, first: int) -> str:
        """The slip whose outcomes fit on every case, else what the first failing case alone can tell."""
        for slip in self.slips:
            if all(map(_same, got, self.outcomes(slip.wrong))):
                return slip.message
        return _mismatch(got[first], want[first])

    def _shown(self, index: int, got: Any, want: Any) -> str:
        shown = [f"{name}={_text(value)}" for name, value in zip(self.arguments, self.cases[index], strict=False)]
        return f"Smallest failing case: {self.name}({', '.join(shown)}): expected {_text(want)}, got {_text(got)}."

    def _failed(self, *lines: str) -> CheckResult:
        return CheckResult(self.name, "failed", "\n".join(lines))


def _outcome(function: Callable[..., Any], case: tuple) -> Any:
    try:
        return function(*case)
    except Exception as error:  # an answer may fail in any way; the reader is told how, the notebook runs on
        return error


def _same(got: Any, want: Any) -> bool:
    """Equal up to rounding. Lists and tuples count as one kind; a tensor must have the same shape and kind of dtype."""
    if isinstance(want, Exception):
        return type(got) is type(want)
    if isinstance(want, Tensor) and want.dim() > 0:
        return isinstance(got, Tensor) and _same_tensor(got, want)
    if isinstance(want, (list, tuple)):
        return isinstance(got, (list, tuple)) and len(got) == len(want) and all(map(_same, got, want))
    return _same_number(got, want)


def _same_tensor(got: Tensor, want: Tensor) -> bool:
    alike = got.shape == want.shape and _kind(got) == _kind(want)
    return alike and torch.allclose(got.double(), want.double(), rtol=1e-5, equal_nan=True)


def _same_number(got: Any, want: Any) -> bool:
    try:
        return math.isclose(float(got), float(want), rel_tol=1e-6)
    except (TypeError, ValueError, RuntimeError):  # a list, None, text, a tensor of several values
        return got == want if isinstance(got, type(want)) and not isinstance(got, Tensor) else False


def _kind(tensor: Tensor) -> str:
    if tensor.dtype == torch.bool:
        return "bool"
    return "float" if tensor.is_floating_point() else "integer"


def _mismatch(got: Any, want: Any) -> str:
    """What one wrong outcome shows by itself: an exception, a missing return, a shape, a dtype."""
    if isinstance(got, Exception):
        return f"the function raised {type(got).__name__}: {got}"
    if got is None:
        return "the function returned None: is a `return` missing?"
    if isinstance(want, Tensor) and not isinstance(got, Tensor):
        return f"a tensor was expected, the function returned {type(got).__name__}."
    if isinstance(want, Tensor) and got.shape != want.shape:
        return f"the shape is {list(got.shape)}, expected {list(want.shape)}."
    if isinstance(want, Tensor) and _kind(got) != _kind(want):
        return f"the tensor holds {_kind(got)} values, expected {_kind(want)}."
    return "the result is not right yet."


def _text(value: Any) -> str:
    """A value as a reader would write it: tensors as nested lists with their shape, masks as 0 and 1."""
    if isinstance(value, Exception):
        return f"{type(value).__name__}"
    if isinstance(value, Tensor):
        shown = value.int() if value.dtype == torch.bool else value
        rows = str(shown.tolist())
        return f"{rows if len(rows) <= 200 else rows[:200] + ' …'} (shape {list(value.shape)}, {_kind(value)})"
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


@functools.cache
def mode() -> str:
    """`"full"`, or `"fast"` when the environment variable `SPECNB_MODE` says so. Read once per process."""
    found = os.environ.get("SPECNB_MODE", "full")
    if found not in ("full", "fast"):
        raise ValueError(f"SPECNB_MODE is {found!r}; set it to 'full' or 'fast', or unset it for 'full'.")
    return found


def budget(*, full: T, fast: T) -> T:
    """The size of a loop: `full` for a reader, `fast` under `SPECNB_MODE=fast`."""
    return full if mode() == "full" else fast


# --------------------------------------------------------------------------------------- 00: what a pass yields


def _count_passes(num_new_tokens: int, accepted_per_round: Sequence[int], own: int = 1) -> int:
    written = passes = 0
    for accepted in accepted_per_round:
        if written >= num_new_tokens:
            break
        written += accepted + own
        passes += 1
    return passes


def _count_passes_short(num_new_tokens: int, accepted_per_round: Sequence[int]) -> int:
    written = passes = 0
    for accepted in accepted_per_round:
        written += accepted + 1
        if written >= num_new_tokens:
            break
        passes += 1
    return passes


TOKENS_PER_PASS = Exercise(
    "tokens_per_pass",
    ("emitted", "passes"),
    right=lambda emitted, passes: emitted / passes,
    cases=((8, 2), (5, 5), (64, 24), (7, 3)),
    slips=(
        Slip("this is passes per token, upside down: divide the tokens by the passes.", lambda e, p: p / e),
        Slip("the fraction is cut off: use `/`, since `//` rounds 7 / 3 down to 2.", lambda e, p: e // p),
        Slip(
            "each pass already writes its own token, and `emitted` counts it: nothing to add.", lambda e, p: e / p + 1
        ),
        Slip("the difference says how many passes were saved; the ratio was asked for.", lambda e, p: e - p),
    ),
)

COUNT_PASSES = Exercise(
    "count_passes",
    ("num_new_tokens", "accepted_per_round"),
    right=_count_passes,
    cases=((1, [0]), (3, [2]), (8, [2, 4]), (8, [2, 4, 3, 0]), (5, [0, 0, 0, 0, 0]), (6, [1, 1, 4]), (5, [3, 1, 2])),
    slips=(
        Slip(
            "a round writes one token more than it accepts: the target's own correction or bonus token. Add it.",
            lambda n, accepted: _count_passes(n, accepted, own=0),
        ),
        Slip("the generation stops once it has its tokens: rounds after that never run.", lambda n, a: len(a)),
        Slip("one token per pass is plain decoding: use what each round accepted.", lambda n, accepted: n),
        Slip("the last round counts too: its pass ran, even where it fills up the text.", _count_passes_short),
    ),
)


def check_tokens_per_pass(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 00. Wants `tokens_per_pass(emitted: int, passes: int) -> float`, passes > 0."""
    return TOKENS_PER_PASS.check(candidate)


def check_count_passes(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 00. Wants `count_passes(num_new_tokens: int, accepted_per_round: list[int]) -> int`.

    How many target passes a generation of `num_new_tokens` tokens takes, when its rounds accept the listed numbers
    of drafted tokens. The list may be longer than the generation needs, never shorter.
    """
    return COUNT_PASSES.check(candidate)


# --------------------------------------------------------------------------------------- 01: what a pass costs


def _greedy_step(logits: Tensor) -> Tensor:
    return logits[:, -1].argmax(dim=-1)


def _logits(*shape: int, seed: int = 0) -> Tensor:
    """Logits without ties: a random order of small whole numbers, easy to read in a message."""
    numbers = torch.randperm(math.prod(shape), generator=torch.Generator().manual_seed(seed))
    return numbers.reshape(shape).float()


WEIGHT_BYTES = Exercise(
    "weight_bytes",
    ("num_params", "bits"),
    right=lambda num_params, bits: num_params * bits / 8,
    cases=((1, 8), (10, 32), (134_515_008, 16), (70_000_000_000, 4)),
    slips=(
        Slip("these are bits: a byte has 8 of them, so divide.", lambda n, bits: n * bits),
        Slip("`bits // 8` is 0 for 4-bit weights: multiply first, then divide by 8.", lambda n, bits: n * (bits // 8)),
        Slip("float32 is not the only dtype: 4 bytes a weight holds for 32 bits alone.", lambda n, bits: n * 4),
        Slip("8 bits make one byte: divide by 8, not multiply.", lambda n, bits: n * bits * 8),
        Slip("a number of bytes was asked for, not of gigabytes.", lambda n, bits: n * bits / 8 / 1e9),
    ),
)

PREDICTED_MS = Exercise(
    "predicted_ms",
    ("weight_bytes", "bandwidth_gb_s"),
    right=lambda weight_bytes, bandwidth_gb_s: weight_bytes / (bandwidth_gb_s * 1e9) * 1e3,
    cases=((1e9, 1.0), (538e6, 20.0), (269e6, 24.0), (140e9, 3350.0)),
    slips=(
        Slip("these are seconds: a second has 1000 ms.", lambda b, w: b / (w * 1e9)),
        Slip("GB/s means 1e9 bytes a second here; 2**30 bytes are a GiB.", lambda b, w: b / (w * 2**30) * 1e3),
        Slip("the bandwidth is in GB/s and the weights in bytes: bring both to bytes first.", lambda b, w: b / w),
        Slip("upside down: more bytes take longer, more bandwidth takes less.", lambda b, w: w * 1e9 / b * 1e3),
        Slip("these are bits: the bandwidth is in bytes already, no factor of 8.", lambda b, w: 8 * b / (w * 1e6)),
    ),
)

ARITHMETIC_INTENSITY = Exercise(
    "arithmetic_intensity",
    ("num_params", "bytes_per_param", "positions"),
    right=lambda num_params, bytes_per_param, positions: 2 * positions / bytes_per_param,
    cases=((1, 4, 1), (1000, 2, 1), (1000, 4, 8), (134_515_008, 2, 5), (70_000_000_000, 0.5, 64)),
    slips=(
        Slip("a weight is multiplied and added: 2 FLOPs for each, not one.", lambda n, b, t: t / b),
        Slip(
            "the positions of one pass share the weights: they are read once, whatever T is; the FLOPs grow.",
            lambda n, b, t: 2 / b,
        ),
        Slip("upside down: FLOPs per byte, not bytes per FLOP.", lambda n, b, t: b / (2 * t)),
        Slip("these are all FLOPs of the pass: divide them by the bytes read.", lambda n, b, t: 2 * n * t),
        Slip("this divides by the number of weights: a weight takes `bytes_per_param` bytes.", lambda n, b, t: 2 * t),
        Slip("more bytes a weight mean fewer FLOPs per byte: divide by them.", lambda n, b, t: 2 * t * b),
    ),
)

GREEDY_STEP = Exercise(
    "greedy_step",
    ("logits",),
    right=_greedy_step,
    cases=((_logits(1, 1, 3),), (_logits(1, 3, 4, seed=3),), (_logits(2, 3, 5, seed=1),), (_logits(3, 5, 5, seed=2),)),
    slips=(
        Slip("the next token is read off the last position: `logits[:, -1]`.", lambda x: x[:, 0].argmax(-1)),
        Slip("this is a choice for every position; only the last one predicts a new token.", lambda x: x.argmax(-1)),
        Slip("the shape is [B, 1]: return one token per row, [B].", lambda x: x[:, -1].argmax(-1, keepdim=True)),
        Slip(
            "these are the logits' values: `argmax` gives the token ids, `max` the scores.", lambda x: x[:, -1].amax(-1)
        ),
        Slip(
            "this compares positions: take the argmax over the vocabulary, the last dimension.", lambda x: x.argmax(1)
        ),
        Slip("the lowest score was taken: `argmax`, not `argmin`.", lambda x: x[:, -1].argmin(-1)),
        Slip("this keeps the first row alone: every row of the batch gets its token.", lambda x: x[0, -1].argmax(-1)),
    ),
)


def check_weight_bytes(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 01. Wants `weight_bytes(num_params: int, bits: int) -> float`: bytes that the weights take."""
    return WEIGHT_BYTES.check(candidate)


def check_predicted_ms(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 01. Wants `predicted_ms(weight_bytes: float, bandwidth_gb_s: float) -> float`.

    Milliseconds to read the weights once; 1 GB/s is 1e9 bytes a second.
    """
    return PREDICTED_MS.check(candidate)


def check_arithmetic_intensity(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 01. Wants `arithmetic_intensity(num_params: int, bytes_per_param: float, positions: int) -> float`.

    FLOPs per byte of one pass over `positions` positions: 2·N·T FLOPs for N·b bytes of weights.
    """
    return ARITHMETIC_INTENSITY.check(candidate)


def check_greedy_step(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 01. Wants `greedy_step(logits: Tensor[B, T, V]) -> LongTensor[B]`: the next token of each row."""
    return GREEDY_STEP.check(candidate)


# ------------------------------------------------------------------------------- 02: many positions in one pass


def _causal_mask(T: int, past: int, lead: int = 0) -> Tensor:
    """Query i stands at place past + i and sees every key up to there; `lead` moves the edge."""
    return torch.arange(past + T)[None, :] <= torch.arange(T)[:, None] + past + lead


def _without_past(T: int, past: int) -> Tensor:
    return torch.ones(T, past + T, dtype=torch.bool).tril()


def _past_hidden(T: int, past: int) -> Tensor:
    return torch.cat([torch.zeros(T, past, dtype=torch.bool), _causal_mask(T, 0)], dim=1)


def _knee(positions: list[int], ms: list[float], tolerance: float = 1.25) -> int:
    return max(T for T, cost in zip(positions, ms) if cost <= tolerance * ms[0])


def _knee_first_gap(positions: list[int], ms: list[float], tolerance: float = 1.25) -> int:
    for i, cost in enumerate(ms):
        if cost > tolerance * ms[0]:
            return positions[i - 1]
    return positions[-1]


def _knee_beyond(positions: list[int], ms: list[float], tolerance: float = 1.25) -> int:
    return min((T for T, cost in zip(positions, ms) if cost > tolerance * ms[0]), default=positions[-1])


def _knee_by_step(positions: list[int], ms: list[float], tolerance: float = 1.25) -> int:
    return max(T for i, T in enumerate(positions) if ms[i] <= tolerance * ms[max(i - 1, 0)])


def _rows(start: int, stop: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The choices at rows [T − k + start, T + stop): which slice of the pass an answer reads."""

    def choices(logits: Tensor, draft: Tensor) -> Tensor:
        T, k = len(logits), len(draft)
        return logits[max(T - k + start, 0) : T + stop].argmax(-1)

    return choices


_SHIFTED = _rows(-1, -1)

CAUSAL_MASK = Exercise(
    "causal_mask",
    ("T", "past"),
    right=_causal_mask,
    cases=((1, 0), (2, 0), (1, 2), (3, 0), (2, 3), (4, 5)),
    slips=(
        Slip("the mask is inverted: True marks what a position may see.", lambda T, past: ~_causal_mask(T, past)),
        Slip("a position sees itself too: `<=`, not `<`.", lambda T, past: _causal_mask(T, past, lead=-1)),
        Slip(
            "one too many: a position must not see the token after it.", lambda T, past: _causal_mask(T, past, lead=1)
        ),
        Slip("the past is not counted: query i stands at place past + i, so its row reaches that far.", _without_past),
        Slip("the past is hidden: every position sees all of the past.", _past_hidden),
        Slip("nothing is masked: each position would see its own future.", lambda T, past: torch.ones(T, past + T) > 0),
        Slip("the keys of the past are missing: the shape is [T, past + T].", lambda T, past: _causal_mask(T, 0)),
        Slip(
            "the mask is additive (0 and −inf); a bool mask was asked for, True where a position may look.",
            lambda T, past: torch.zeros(T, past + T).masked_fill(~_causal_mask(T, past), -math.inf),
        ),
    ),
)

KNEE = Exercise(
    "knee",
    ("positions", "ms", "tolerance"),
    right=_knee,
    cases=(
        ([1, 2], [10.0, 11.0], 1.25),
        ([1, 2, 4], [10.0, 12.5, 30.0], 1.25),
        ([1, 2, 4], [10.0, 12.0, 14.0], 1.25),
        ([1, 2, 4, 8], [40.0, 41.0, 52.0, 49.0], 1.25),
        ([1, 4, 8, 16, 32], [40.0, 41.0, 44.0, 52.0, 90.0], 1.25),
        ([1, 4, 8, 16, 32], [40.0, 41.0, 44.0, 52.0, 90.0], 1.5),
        ([1, 4, 8], [10.0, 20.0, 40.0], 1.25),
    ),
    slips=(
        Slip(
            "this is the place in the list: return the number of positions that stands there.",
            lambda p, ms, t=1.25: p.index(_knee(p, ms, t)),
        ),
        Slip(
            "this stops at the first pass over the limit: a noisy one in the middle must not end the search.",
            _knee_first_gap,
        ),
        Slip("this is the first T that is too dear: the largest that is still cheap was asked for.", _knee_beyond),
        Slip("compare with the cost of one position, ms[0], not with the pass before.", _knee_by_step),
        Slip(
            "exactly at the limit still counts: `<=`, not `<`.",
            lambda p, ms, t=1.25: max(T for T, c in zip(p, ms) if c < t * ms[0]),
        ),
        Slip(
            "compare whole passes: ms[i] is the cost of the pass, not of one position.",
            lambda p, ms, t=1.25: max(T for T, c in zip(p, ms) if c / T <= t * ms[0]),
        ),
        Slip(
            "the tolerance is a factor: multiply ms[0] by it, do not add it.",
            lambda p, ms, t=1.25: max(T for T, c in zip(p, ms) if c <= t + ms[0]),
        ),
        Slip("use the argument `tolerance`: 1.25 is its default only.", lambda p, ms, t=1.25: _knee(p, ms)),
    ),
)

SHIFTED_SCORES = Exercise(
    "shifted_scores",
    ("logits", "draft"),
    right=_SHIFTED,
    cases=(
        (_logits(2, 4, seed=5), torch.tensor([1])),
        (_logits(3, 4, seed=4), torch.tensor([0])),
        (_logits(4, 6, seed=9), torch.tensor([3, 1, 2])),
        (_logits(7, 6, seed=7), torch.tensor([5, 0, 2])),
    ),
    slips=(
        Slip(
            "the shift is missing: row i of a pass predicts token i + 1, so the choice for a drafted token stands one "
            "row before it.",
            _rows(0, 0),
        ),
        Slip(
            "shifted once too often: the row right before a drafted token is the one that predicts it.", _rows(-2, -2)
        ),
        Slip(
            "these are the first k rows: the draft stands at the end of the pass.", lambda x, d: x[: len(d)].argmax(-1)
        ),
        Slip("one too many: the last row is the bonus place; here one choice for each drafted token.", _rows(-1, 0)),
        Slip("this is the whole pass: keep the k rows that judge the draft.", lambda x, d: x.argmax(-1)),
        Slip("these are comparisons: return the target's choices themselves.", lambda x, d: _SHIFTED(x, d) == d),
        Slip("these are the drafted tokens: return what the target would have written there.", lambda x, d: d),
        Slip("these are scores: `argmax` gives the token ids.", lambda x, d: x[-len(d) - 1 : -1].amax(-1)),
    ),
)


def check_causal_mask(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 02. Wants `causal_mask(T: int, past: int) -> BoolTensor[T, past + T]`, True where query i may look.

    The T new positions follow `past` tokens that are in the cache.
    """
    return CAUSAL_MASK.check(candidate)


def check_knee(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 02. Wants `knee(positions: list[int], ms: list[float], tolerance: float = 1.25) -> int`.

    The largest number of positions whose pass costs at most `tolerance` times a pass over one position.
    `positions` ascends and starts at 1; `ms[i]` is the cost of a pass over `positions[i]`.
    """
    return KNEE.check(candidate)


def check_shifted_scores(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 02. Wants `shifted_scores(logits: Tensor[T, V], draft: LongTensor[k]) -> LongTensor[k]`.

    The pass ran over T tokens of which the last k are the draft (T > k). Return the target's greedy choice for
    each of the k drafted places.
    """
    return SHIFTED_SCORES.check(candidate)


# ----------------------------------------------------------------------------------------- 03: guess and check


def _accepted_prefix(draft: list[int], target: list[int]) -> int:
    for place, token in enumerate(draft):
        if token != target[place]:
            return place
    return len(draft)


def _all_matches(draft: list[int], target: list[int]) -> int:
    return sum(d == t for d, t in zip(draft, target))


def _round(draft: list[int], target: list[int]) -> list[int]:
    accepted = _accepted_prefix(draft, target)
    return draft[:accepted] + [target[accepted]]


def _round_with_later_matches(draft: list[int], target: list[int]) -> list[int]:
    accepted = _accepted_prefix(draft, target)
    later = [d for d, t in zip(draft[accepted + 1 :], target[accepted + 1 :]) if d == t]
    return draft[:accepted] + [target[accepted]] + later


def _round_without_bonus(draft: list[int], target: list[int]) -> list[int]:
    return list(draft) if draft == target[: len(draft)] else _round(draft, target)


def _accounting(rounds: list[int], k: int) -> tuple[int, int, int]:
    accepted, drafted = sum(rounds), k * len(rounds)
    return accepted + len(rounds), drafted, drafted - accepted


def _accounting_with(change: Callable[..., tuple]) -> Callable[[list[int], int], tuple]:
    return lambda rounds, k: change(*_accounting(rounds, k), len(rounds))


_DRAFTS = (
    ([7], [7, 8]),
    ([7], [9, 8]),
    ([5, 6], [4, 6, 7]),
    ([1, 2, 3, 4], [1, 2, 4, 9, 9]),
    ([1, 2, 3, 4], [1, 9, 3, 4, 5]),
    ([1, 2, 3, 4], [1, 2, 3, 4, 5]),
    ([3, 3, 3], [3, 3, 2, 3]),
)

ACCEPTED_PREFIX = Exercise(
    "accepted_prefix",
    ("draft", "target"),
    right=_accepted_prefix,
    cases=_DRAFTS,
    slips=(
        Slip(
            "every match is counted, also those after a rejection. They were guessed after a token that is not in the "
            "text: stop at the first mismatch.",
            _all_matches,
        ),
        Slip(
            "one too many: the target's own token (correction or bonus) is not an accepted one.",
            lambda d, t: _accepted_prefix(d, t) + 1,
        ),
        Slip(
            "the draft is compared one place late: target[i] judges draft[i].", lambda d, t: _accepted_prefix(d, t[1:])
        ),
        Slip(
            "all or nothing: a draft that fails later still keeps its matching beginning.",
            lambda d, t: len(d) if d == t[: len(d)] else 0,
        ),
        Slip(
            "this counts the rejected tokens: return how many are accepted.",
            lambda d, t: len(d) - _accepted_prefix(d, t),
        ),
        Slip("these are the tokens themselves: return how many there are.", lambda d, t: d[: _accepted_prefix(d, t)]),
    ),
)

NEXT_TOKEN = Exercise(
    "next_token",
    ("draft", "target"),
    right=lambda draft, target: target[_accepted_prefix(draft, target)],
    cases=_DRAFTS,
    slips=(
        Slip(
            "this is always the target's last token. It is right only when the whole draft passed; after a rejection "
            "it follows tokens that are not in the text.",
            lambda d, t: t[-1],
        ),
        Slip(
            "this is the target's first token: take the one at the first place that was not accepted.",
            lambda d, t: t[0],
        ),
        Slip(
            "one place late: the correction stands at the rejected place itself.",
            lambda d, t: t[min(_accepted_prefix(d, t) + 1, len(d))],
        ),
        Slip(
            "this is the drafted token, which may just have been rejected: the target's word goes in.",
            lambda d, t: (d + t[-1:])[_accepted_prefix(d, t)],
        ),
        Slip(
            "the place is found by counting all matches: stop at the first mismatch.",
            lambda d, t: t[_all_matches(d, t)],
        ),
        Slip(
            "this is the last accepted token: the target's own token comes after it.",
            lambda d, t: t[_accepted_prefix(d, t) - 1],
        ),
    ),
)

ROUND = Exercise(
    "round",
    ("draft", "target"),
    right=_round,
    cases=_DRAFTS,
    slips=(
        Slip(
            "the target's own token is missing: a round always ends in a correction or a bonus token.",
            lambda d, t: d[: _accepted_prefix(d, t)],
        ),
        Slip(
            "the bonus token is missing: when the whole draft passes, the target's next token is written too.",
            _round_without_bonus,
        ),
        Slip(
            "the rejected token stays in the text: the target's word takes its place.",
            lambda d, t: d[: _accepted_prefix(d, t) + 1],
        ),
        Slip(
            "tokens after the rejection are kept because they match: they were guessed after a token that is gone.",
            _round_with_later_matches,
        ),
        Slip(
            "this is all the target said: what it said after a rejection answers a text that does not exist.",
            lambda d, t: list(t),
        ),
        Slip(
            "the rejected token is kept beside its correction: it must go.",
            lambda d, t: d[: _accepted_prefix(d, t) + 1] + [t[_accepted_prefix(d, t)]],
        ),
    ),
)

FIXED_K_ACCOUNTING = Exercise(
    "fixed_k_accounting",
    ("rounds", "k"),
    right=_accounting,
    cases=(([0], 1), ([2], 4), ([4], 4), ([2, 4], 4), ([0, 0, 0], 3), ([1, 3, 0, 5], 5)),
    slips=(
        Slip(
            "emitted leaves out the target's own token: each round writes one more than it accepts.",
            _accounting_with(lambda e, d, w, n: (e - n, d, w)),
        ),
        Slip(
            "wasted counts drafted tokens that were thrown away, drafted − accepted: corrections are no drafts.",
            _accounting_with(lambda e, d, w, n: (e, d, d - e)),
        ),
        Slip(
            "drafted counts every proposal, accepted or not: k in each round.",
            _accounting_with(lambda e, d, w, n: (e, e - n, w)),
        ),
        Slip(
            "k + 1 positions are scored, but only k of them are drafted.",
            _accounting_with(lambda e, d, w, n: (e, d + n, w + n)),
        ),
        Slip(
            "a round writes the target's own token in both cases: the bonus when all pass, the correction otherwise.",
            lambda rounds, k: (sum(rounds) + rounds.count(k), *_accounting(rounds, k)[1:]),
        ),
        Slip("the order is (emitted, drafted, wasted).", _accounting_with(lambda e, d, w, n: (d, e, w))),
    ),
)


def check_accepted_prefix(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 03. Wants `accepted_prefix(draft: list[int], target: list[int]) -> int`.

    `draft` holds k tokens, `target` the target's greedy choice at each of the k + 1 places. Return how many
    drafted tokens are accepted.
    """
    return ACCEPTED_PREFIX.check(candidate)


def check_next_token(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 03. Wants `next_token(draft: list[int], target: list[int]) -> int`: the correction or bonus token."""
    return NEXT_TOKEN.check(candidate)


def check_round(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 03. Wants `commit_round(draft: list[int], target: list[int]) -> list[int]`.

    All tokens that one round writes; `draft` and `target` as in `check_accepted_prefix`.
    """
    return ROUND.check(candidate)


def check_fixed_k_accounting(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 03. Wants `fixed_k_accounting(rounds: list[int], k: int) -> tuple[int, int, int]`.

    `rounds` lists how many of its k drafted tokens each round accepted. Return `(emitted, drafted, wasted)`.
    """
    return FIXED_K_ACCOUNTING.check(candidate)


# ----------------------------------------------------------------------------------------------- 04: rolling back


def _ragged_write(buffer: Tensor, lengths: Tensor, new: Tensor) -> Tensor:
    out = buffer.clone()
    rows = torch.arange(len(buffer))[:, None]
    out[rows, lengths[:, None] + torch.arange(new.shape[1])] = new
    return out


def _write_reversed(buffer: Tensor, lengths: Tensor, new: Tensor) -> Tensor:
    return _ragged_write(buffer, lengths - new.shape[1], new)


def _write_case(lengths: list[int], capacity: int, T: int, D: int) -> tuple[Tensor, Tensor, Tensor]:
    """A buffer of zeros but for what the rows hold already (1, 2, 3, …), and new entries from 10 up."""
    held = torch.arange(1.0, capacity + 1)[None, :] * (torch.arange(capacity)[None, :] < torch.tensor(lengths)[:, None])
    new = torch.arange(10.0, 10 + len(lengths) * T * D).reshape(len(lengths), T, D)
    return held[:, :, None].repeat(1, 1, D), torch.tensor(lengths), new


def _ragged_mask(lengths: Tensor, T: int, capacity: int, lead: int = 0) -> Tensor:
    last = lengths[:, None] + torch.arange(T) + lead
    return torch.arange(capacity) <= last[:, :, None]


def _same_for_all(lengths: Tensor) -> Tensor:
    return lengths.max().expand(len(lengths))


ROLLBACK_COUNT = Exercise(
    "rollback_count",
    ("k", "num_accepted"),
    right=lambda k, num_accepted: k - num_accepted,
    cases=((1, 1), (1, 0), (4, 2), (4, 4), (5, 0), (8, 3)),
    slips=(
        Slip(
            "nothing is dropped: the entries of rejected tokens would be read as text by every later pass.",
            lambda k, a: 0,
        ),
        Slip(
            "one too many: this drops the entry of the last accepted token. The pass also ran over the last committed "
            "token, and the correction has no entry yet.",
            lambda k, a: k - a + 1,
        ),
        Slip("one too few: the first rejected token stays in the cache.", lambda k, a: max(k - a - 1, 0)),
        Slip("this drops the accepted entries and keeps the rejected ones.", lambda k, a: a),
        Slip(
            "this drops the whole draft, accepted tokens included: they would have to be computed again.",
            lambda k, a: k,
        ),
        Slip(
            "this drops the whole pass: the last committed token and the accepted ones have good entries.",
            lambda k, a: k + 1,
        ),
    ),
)

RAGGED_WRITE = Exercise(
    "ragged_write",
    ("buffer", "lengths", "new"),
    right=_ragged_write,
    cases=(
        _write_case([0], 3, 1, 1),
        _write_case([2, 1], 5, 1, 1),
        _write_case([1, 2], 6, 2, 1),
        _write_case([3, 2, 4], 8, 2, 2),
    ),
    slips=(
        Slip(
            "every row is written at the longest row's place: each has its own length.",
            lambda b, n, x: _ragged_write(b, _same_for_all(n), x),
        ),
        Slip(
            "every row is written at the first row's place: each has its own length.",
            lambda b, n, x: _ragged_write(b, n[:1].expand(len(n)), x),
        ),
        Slip(
            "the entries already there are overwritten: start at lengths[b], not at 0.",
            lambda b, n, x: _ragged_write(b, n * 0, x),
        ),
        Slip(
            "a gap is left: the first free place of a row is lengths[b], for a row that holds lengths[b] entries.",
            lambda b, n, x: _ragged_write(b, n + 1, x),
        ),
        Slip(
            "the new entries are appended after the buffer: they belong inside, and its size stays.",
            lambda b, n, x: torch.cat([b, x], dim=1),
        ),
        Slip(
            "the last entry of each row is overwritten: a row that holds n entries fills places 0 … n − 1.",
            lambda b, n, x: _ragged_write(b, n - 1, x),
        ),
        Slip("the new entries end where the row ends: they start there.", _write_reversed),
    ),
)

RAGGED_MASK = Exercise(
    "ragged_mask",
    ("lengths", "T", "capacity"),
    right=_ragged_mask,
    cases=(
        (torch.tensor([0]), 1, 2),
        (torch.tensor([1]), 1, 3),
        (torch.tensor([2, 1]), 1, 4),
        (torch.tensor([0, 2]), 2, 5),
        (torch.tensor([3, 1, 2]), 3, 8),
    ),
    slips=(
        Slip("the mask is inverted: True marks what a position may see.", lambda n, T, c: ~_ragged_mask(n, T, c)),
        Slip(
            "a position sees itself too: it is written at lengths[b] + t before it looks, so `<=`.",
            lambda n, T, c: _ragged_mask(n, T, c, lead=-1),
        ),
        Slip(
            "one too many: a position must not see the token after it.", lambda n, T, c: _ragged_mask(n, T, c, lead=1)
        ),
        Slip(
            "t is left out: the later positions of a pass see the earlier ones.",
            lambda n, T, c: _ragged_mask(n, 1, c).expand(-1, T, -1),
        ),
        Slip(
            "each row has its own length: the longest row's mask shows the others what they do not hold.",
            lambda n, T, c: _ragged_mask(_same_for_all(n), T, c),
        ),
        Slip(
            "the pass sees its own future: position t looks no further than lengths[b] + t.",
            lambda n, T, c: _ragged_mask(n + T - 1, 1, c).expand(-1, T, -1),
        ),
        Slip(
            "what the rows hold already is not counted: start from lengths[b].",
            lambda n, T, c: _ragged_mask(n * 0, T, c),
        ),
        Slip(
            "everything is visible, also places that hold nothing or what was rolled back.",
            lambda n, T, c: torch.ones(len(n), T, c) > 0,
        ),
    ),
)

DRAFT_CACHE_ROLLBACK = Exercise(
    "draft_cache_rollback",
    ("draft_cache_len", "committed_len"),
    right=lambda draft_cache_len, committed_len: max(draft_cache_len - (committed_len - 1), 0),
    cases=((4, 5), (5, 5), (7, 6), (13, 12), (13, 15), (20, 18)),
    slips=(
        Slip(
            "when the whole draft passes, the draft's cache is shorter than the text, not longer: there is nothing to "
            "drop, and the result must not be negative.",
            lambda cache, text: cache - (text - 1),
        ),
        Slip(
            "one too few: the last committed token has no entry yet (it is the next pass's input), so the cache keeps "
            "committed_len − 1.",
            lambda cache, text: max(cache - text, 0),
        ),
        Slip(
            "one too few, and negative when the cache is short: it keeps committed_len − 1.", lambda c, text: c - text
        ),
        Slip(
            "one too many: the cache keeps committed_len − 1 entries.", lambda cache, text: max(cache - (text - 2), 0)
        ),
        Slip("this is the length to keep: return how many entries to drop.", lambda cache, text: text - 1),
        Slip("nothing is dropped: the draft would go on from tokens that were rejected.", lambda cache, text: 0),
        Slip(
            "the distance alone is not enough: a cache that is behind has nothing to drop.",
            lambda c, text: abs(c - (text - 1)),
        ),
    ),
)


def check_rollback_count(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 04. Wants `rollback_count(k: int, num_accepted: int) -> int`.

    A pass ran over the last committed token and k drafted ones, `num_accepted` of which were accepted. Return how
    many entries the target's cache drops, so that it holds the committed tokens but the last.
    """
    return ROLLBACK_COUNT.check(candidate)


def check_ragged_write(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 04. Wants `ragged_write(buffer, lengths, new) -> Tensor[B, C, D]`.

    `buffer: Tensor[B, C, D]`, `lengths: LongTensor[B]`, `new: Tensor[B, T, D]`.
    Row b holds `lengths[b]` entries; return the buffer with `new[b, t]` at place `lengths[b] + t`. Writing into the
    given buffer is fine.
    """
    return RAGGED_WRITE.check(candidate)


def check_ragged_mask(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 04. Wants `ragged_mask(lengths: LongTensor[B], T: int, capacity: int) -> BoolTensor[B, T, capacity]`.

    True where position t of row b, written at place `lengths[b] + t`, may look.
    """
    return RAGGED_MASK.check(candidate)


def check_draft_cache_rollback(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 04. Wants `draft_cache_rollback(draft_cache_len: int, committed_len: int) -> int`.

    How many entries the draft model's cache drops after a round, so that it holds nothing beyond the committed
    tokens but the last. It may hold fewer: then nothing is dropped.
    """
    return DRAFT_CACHE_ROLLBACK.check(candidate)


# ---------------------------------------------------------------------------------------- 05: spin the wheel


def _law(*weights: float) -> Tensor:
    """A distribution in float64, from its probabilities or from numbers in their proportion."""
    law = torch.tensor(weights, dtype=torch.float64)
    return law / law.sum()


def _acceptance(p: Tensor, q: Tensor) -> Tensor:
    return torch.where(p > 0, (p / q).clamp(max=1), 0.0)


def _normalised(left: Tensor, otherwise: Tensor) -> Tensor:
    return left / left.sum() if left.sum() > 0 else otherwise


def _residual(p: Tensor, q: Tensor) -> Tensor:
    return _normalised((p - q).clamp(min=0), otherwise=p)


_MOON = _law(0.50, 0.30, 0.20), _law(0.80, 0.10, 0.10)
_EQUAL = _law(1, 2, 1), _law(1, 2, 1)
_APART = _law(1, 1, 0, 0), _law(0, 0, 1, 3)
_CERTAIN = _law(5, 2, 3), _law(0, 1, 0)
_FIVE = _law(6, 2, 5, 0, 3), _law(1, 4, 2, 6, 3)

ACCEPTANCE_PROBABILITY = Exercise(
    "acceptance_probability",
    ("p", "q"),
    right=_acceptance,
    cases=(_MOON, _EQUAL, _FIVE, (_law(3, 1, 0, 0), _law(1, 1, 2, 0))),
    slips=(
        Slip(
            "upside down: the more the target likes a token, the more readily it is accepted. p goes on top.",
            lambda p, q: torch.where(q > 0, (q / p).clamp(max=1), 0.0),
        ),
        Slip(
            "p goes on top: with q/p even tokens that the target never writes are accepted.",
            lambda p, q: (q / p).clamp(max=1),
        ),
        Slip(
            "the min is missing: where p > q the ratio is above 1, and no probability is.",
            lambda p, q: torch.where(p > 0, p / q, 0.0),
        ),
        Slip(
            "two things: the ratio is above 1 where p > q, so take the minimum with 1; and 0/0 is NaN.",
            lambda p, q: p / q,
        ),
        Slip(
            "0/0 is NaN: a token with p(x) = 0 is never accepted, so write 0 there.", lambda p, q: (p / q).clamp(max=1)
        ),
        Slip(
            "where both are 0 you accept; a token with p(x) = 0 never may be: write 0 there.",
            lambda p, q: torch.where(q > 0, (p / q).clamp(max=1), 1.0),
        ),
        Slip(
            "this is min(p, q), the mass that is drafted *and* accepted. Given that x was drafted, divide by q(x).",
            torch.minimum,
        ),
        Slip(
            "the target's own probability ignores that the draft chose the token: compare p with q.", lambda p, q: p + 0
        ),
        Slip(
            "a threshold is no probability: where p < q the token still has a chance, p/q.",
            lambda p, q: ((p >= q) & (p > 0)).double(),
        ),
        Slip("this is the probability of a rejection: 1 minus it is wanted.", lambda p, q: 1 - _acceptance(p, q)),
    ),
)

RESIDUAL = Exercise(
    "residual",
    ("p", "q"),
    right=_residual,
    cases=(_MOON, _CERTAIN, _APART, _FIVE, _EQUAL),
    slips=(
        Slip(
            "not normalised: what is left sums to the rejected mass; divide by that, so that it sums to 1.",
            lambda p, q: (p - q).clamp(min=0),
        ),
        Slip(
            "what is left must be divided by its sum, or it is no distribution.",
            lambda p, q: p if torch.equal(p, q) else (p - q).clamp(min=0),
        ),
        Slip(
            "0/0 at p == q: there nothing is left over. Return p itself, so that no NaN gets out.",
            lambda p, q: (p - q).clamp(min=0) / (p - q).clamp(min=0).sum(),
        ),
        Slip(
            "all zeros at p == q are no distribution: return p itself there.",
            lambda p, q: _normalised((p - q).clamp(min=0), otherwise=p * 0),
        ),
        Slip(
            "|p − q| counts the over-bet tokens as well, and they have had their share: max(0, p − q).",
            lambda p, q: _normalised((p - q).abs(), otherwise=p),
        ),
        Slip(
            "no absolute value: where q > p nothing is left, so 0; and mind 0/0 at p == q.",
            lambda p, q: (p - q).abs() / (p - q).abs().sum(),
        ),
        Slip(
            "the other way round: the residual is what the draft bet too little on, max(0, p − q).",
            lambda p, q: _normalised((q - p).clamp(min=0), otherwise=p),
        ),
        Slip(
            "p − q, not q − p: the tokens that the draft bet too *little* on; and mind 0/0 at p == q.",
            lambda p, q: (q - p).clamp(min=0) / (q - p).clamp(min=0).sum(),
        ),
        Slip("negative probabilities: cut p − q at 0, then divide by the sum.", lambda p, q: p - q),
        Slip(
            "p itself would give the accepted tokens a second helping: take away what q has covered.",
            lambda p, q: p + 0,
        ),
        Slip(
            "softmax turns zeros into chances: divide by the sum instead.",
            lambda p, q: (p - q).clamp(min=0).softmax(-1),
        ),
    ),
)

ALPHA = Exercise(
    "alpha",
    ("p", "q"),
    right=lambda p, q: float(torch.minimum(p, q).sum()),
    cases=(_MOON, _EQUAL, _APART, _CERTAIN, _FIVE),
    slips=(
        Slip(
            "Σ p·q is the chance that two independent draws agree. Acceptance is kinder: Σ min(p, q).",
            lambda p, q: float((p * q).sum()),
        ),
        Slip(
            "this is the total variation, the probability of a rejection: α is 1 minus it.",
            lambda p, q: float((p - q).abs().sum() / 2),
        ),
        Slip(
            "the ½ is missing: |p − q| counts every moved mass twice, once where it is missing and once where it is "
            "too much.",
            lambda p, q: float(1 - (p - q).abs().sum()),
        ),
        Slip(
            "Σ |p − q| is twice the total variation, and that is the chance of a rejection.",
            lambda p, q: float((p - q).abs().sum()),
        ),
        Slip("the larger of the two was taken: min, not max.", lambda p, q: float(torch.maximum(p, q).sum())),
        Slip(
            "a plain average over tokens: they are drafted with probability q(x), so weigh with q.",
            lambda p, q: float(_acceptance(p, q).mean()),
        ),
        Slip(
            "a sum of acceptance probabilities: each must be weighted with q(x), the chance that x is drafted.",
            lambda p, q: float(_acceptance(p, q).sum()),
        ),
        Slip(
            "weighted with p: it is the draft that proposes, so weigh with q(x).",
            lambda p, q: float((p * _acceptance(p, q)).sum()),
        ),
        Slip("one number is wanted: sum over the vocabulary.", torch.minimum),
    ),
)

SPIN = Exercise(
    "spin",
    ("p", "q", "token", "r"),
    right=lambda p, q, token, r: bool(r * q[token] < p[token]),
    cases=(
        (*_MOON, 0, 0.60),
        (*_MOON, 0, 0.65),
        (*_MOON, 1, 0.2),
        (*_MOON, 1, 0.99),
        (_law(1, 3), _law(2, 2), 0, 0.5),
        (_law(0, 1), _law(1, 1), 0, 0.0),
        (_law(0, 1), _law(1, 1), 0, 0.7),
        (_law(1, 1), _law(1, 1), 1, 0.9),
        (_law(3, 1), _law(1, 3), 1, 0.3),
        (_law(3, 1), _law(1, 3), 1, 0.4),
    ),
    slips=(
        Slip(
            "r can be exactly 0: with `<=` a token with p = 0 then passes, 0 <= 0. Use `<`.",
            lambda p, q, token, r: bool(r <= p[token] / q[token]),
        ),
        Slip("the verdict is inverted: a small r accepts.", lambda p, q, token, r: bool(r * q[token] >= p[token])),
        Slip("upside down: p over q, not q over p.", lambda p, q, token, r: bool(r * p[token] < q[token])),
        Slip(
            "this accepts with probability p(x): the ratio p(x)/q(x) counts, since x was drafted.",
            lambda p, q, token, r: bool(r < p[token]),
        ),
        Slip(
            "r is not used: where p < q, the token is accepted sometimes.",
            lambda p, q, token, r: bool(p[token] >= q[token]),
        ),
        Slip(
            "this compares with min(p, q), a mass: given that x was drafted, divide by q(x).",
            lambda p, q, token, r: bool(r < min(p[token], q[token])),
        ),
        Slip(
            "True or False is wanted: compare r with the ratio.", lambda p, q, token, r: min(1.0, p[token] / q[token])
        ),
    ),
)


def check_acceptance_probability(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 05. Wants `acceptance_probability(p: Tensor[V], q: Tensor[V]) -> Tensor[V]`: min(1, p/q) of each token.

    A token with p(x) = 0 gets 0, also where q(x) = 0 as well.
    """
    return ACCEPTANCE_PROBABILITY.check(candidate)


def check_residual(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 05. Wants `residual(p: Tensor[V], q: Tensor[V]) -> Tensor[V]`.

    max(0, p − q), divided by its sum; p itself where p and q are equal.
    """
    return RESIDUAL.check(candidate)


def check_alpha(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 05. Wants `alpha(p: Tensor[V], q: Tensor[V]) -> float`.

    The probability that a token drawn from q is accepted.
    """
    return ALPHA.check(candidate)


def check_spin(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 05. Wants `spin(p: Tensor[V], q: Tensor[V], token: int, r: float) -> bool`.

    Is the drafted token accepted, with the random number r from [0, 1)?
    """
    return SPIN.check(candidate)


# ------------------------------------------------------------------------- 06: losslessness, proved and tested


def _emitted(p: Tensor, q: Tensor, correction: Callable[[Tensor, Tensor], Tensor] = _residual) -> Tensor:
    accepted = torch.minimum(p, q)
    return accepted + (1 - accepted.sum()) * correction(p, q)


def _chi_square_statistic(counts: Tensor, probs: Tensor) -> float:
    expected = counts.sum() * probs
    return float(((counts - expected) ** 2 / expected).sum())


def _written(
    p: Tensor, q: Tensor, token: int, r: float, u: float, *, strict: bool = True, clamp: bool = True, norm: bool = True
) -> int:
    """One place, decided by r and u; each switch off is one of the faults that `check_find_the_bug` plants."""
    if r * q[token] < p[token] or (not strict and r * q[token] == p[token]):
        return token
    left = (p - q).clamp(min=0) if clamp else (p - q).abs()
    sums = (left / left.sum() if norm else left).cumsum(-1)
    return min(int((sums <= u).sum()), len(p) - 1)


def _with_faults(**off: bool) -> Callable[..., int]:
    return functools.partial(_written, **off)  # type: ignore[arg-type]


EMITTED_LAW = Exercise(
    "emitted_law",
    ("p", "q"),
    right=_emitted,
    cases=(_MOON, _CERTAIN, _APART, _FIVE, _EQUAL),
    slips=(
        Slip(
            "this is the accepted part alone, and it sums to α: add (1 − α) times the residual, what a rejection "
            "writes.",
            lambda p, q: torch.minimum(p, q),
        ),
        Slip(
            "the residual is drawn from after a rejection, so its weight is 1 − α, not α.",
            lambda p, q: torch.minimum(p, q) + torch.minimum(p, q).sum() * _residual(p, q),
        ),
        Slip(
            "the residual needs its weight, the chance of a rejection 1 − α: as it is the law sums to 1 + α.",
            lambda p, q: torch.minimum(p, q) + _residual(p, q),
        ),
        Slip(
            "max(0, p − q) is not normalised, but you give it the weight 1 − α all the same: divide it by its sum.",
            lambda p, q: _emitted(p, q, lambda p, q: (p - q).clamp(min=0)),
        ),
        Slip(
            "after a rejection you draw from p itself: what the accepted guesses have covered is paid twice.",
            lambda p, q: _emitted(p, q, lambda p, q: p),
        ),
        Slip(
            "after a rejection you draw from q again: the correction comes from the residual.",
            lambda p, q: _emitted(p, q, lambda p, q: q),
        ),
        Slip(
            "0/0 at p == q: there every guess is accepted and nothing is left over. Use `specnb.residual`, which "
            "returns p there, or leave the division out.",
            lambda p, q: _emitted(p, q, lambda p, q: (p - q).clamp(min=0) / (p - q).clamp(min=0).sum()),
        ),
        Slip("this is the law of the guess before anybody judges it.", lambda p, q: q + 0),
        Slip(
            "the accepted part is q(x)·min(1, p(x)/q(x)) = min(p, q): without q(x) it is the chance *given* the guess.",
            lambda p, q: _acceptance(p, q) + (1 - torch.minimum(p, q).sum()) * _residual(p, q),
        ),
    ),
)

CHI_SQUARE_STATISTIC = Exercise(
    "chi_square_statistic",
    ("counts", "probs"),
    right=_chi_square_statistic,
    cases=(
        (torch.tensor([56, 30, 14]), _MOON[0]),
        (torch.tensor([7, 13]), _law(1, 1)),
        (torch.tensor([50, 30, 20]), _MOON[0]),
        (torch.tensor([4, 9, 2, 25]), _law(1, 2, 1, 4)),
    ),
    slips=(
        Slip(
            "divide by the expected count, not by the observed one.",
            lambda o, p: float(((o - o.sum() * p) ** 2 / o).sum()),
        ),
        Slip(
            "probabilities are not counts: the expected count of a cell is n·p, with n the sum of the counts.",
            lambda o, p: float(((o - p) ** 2 / p).sum()),
        ),
        Slip(
            "these are shares: with shares and probabilities the statistic comes out n times too small.",
            lambda o, p: float(((o / o.sum() - p) ** 2 / p).sum()),
        ),
        Slip(
            "the difference is squared; with absolute values this is another number, with no chi-square law.",
            lambda o, p: float(((o - o.sum() * p).abs() / (o.sum() * p)).sum()),
        ),
        Slip(
            "without the square the surplus and the lack cancel.",
            lambda o, p: float(((o - o.sum() * p) / (o.sum() * p)).sum()),
        ),
        Slip(
            "each square is divided by its own expected count before they are added.",
            lambda o, p: float(((o - o.sum() * p) ** 2).sum()),
        ),
        Slip(
            "the square root belongs to single cells, not to the sum: return the sum itself.",
            lambda o, p: math.sqrt(_chi_square_statistic(o, p)),
        ),
        Slip(
            "one number is wanted: add up the cells.",
            lambda o, p: (o - o.sum() * p) ** 2 / (o.sum() * p),
        ),
    ),
)

_ZERO = _law(0, 3, 1), _law(2, 1, 1)

FIND_THE_BUG = Exercise(
    "find_the_bug",
    ("p", "q", "token", "r", "u"),
    right=_written,
    cases=(
        (*_MOON, 0, 0.60, 0.5),
        (*_MOON, 0, 0.70, 0.1),
        (*_MOON, 0, 0.70, 0.5),
        (*_MOON, 0, 0.70, 0.9),
        (*_MOON, 1, 0.99, 0.3),
        (*_ZERO, 0, 0.0, 0.0),
        (*_ZERO, 0, 0.0, 0.4),
        (*_ZERO, 0, 0.3, 0.9),
        (*_CERTAIN, 1, 0.9, 0.35),
        (*_FIVE, 3, 0.5, 0.2),
        (*_FIVE, 1, 0.5, 0.7),
    ),
    slips=(
        Slip("all three faults are still there.", _with_faults(strict=False, clamp=False, norm=False)),
        Slip(
            "one left: what is left over does not sum to 1, and a u beyond its sum falls through to the last token. "
            "Divide by the sum.",
            _with_faults(norm=False),
        ),
        Slip(
            "one left: |p − q| hands a correction to tokens the draft has bet too much on. Cut at 0 instead.",
            _with_faults(clamp=False),
        ),
        Slip(
            "one left, the one no sample shows: with r = 0 a token of probability 0 passes `<=`. Use `<`.",
            _with_faults(strict=False),
        ),
        Slip(
            "two left, both in the correction: which tokens may it be, and what do its weights sum to?",
            _with_faults(clamp=False, norm=False),
        ),
        Slip(
            "two left: the weights of the correction do not sum to 1, and r = 0 lets an impossible token pass.",
            _with_faults(strict=False, norm=False),
        ),
        Slip(
            "two left: the correction writes tokens the draft has bet too much on, and r = 0 lets an impossible token "
            "pass.",
            _with_faults(strict=False, clamp=False),
        ),
        Slip(
            "the correction is drawn from p itself: that repairs the sum and pays the accepted mass twice.",
            lambda p, q, token, r, u: (
                token if r * q[token] < p[token] else min(int((p.cumsum(-1) <= u).sum()), len(p) - 1)
            ),
        ),
    ),
)


def check_emitted_law(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 06. Wants `emitted_law(p: Tensor[V], q: Tensor[V]) -> Tensor[V]`.

    The exact law of the token that is written where a guess was drawn from q and judged against p.
    """
    return EMITTED_LAW.check(candidate)


def check_chi_square_statistic(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 06. Wants `chi_square_statistic(counts: Tensor[V], probs: Tensor[V]) -> float`.

    Σ (O − E)² / E with the observed counts O and the expected counts E.
    """
    return CHI_SQUARE_STATISTIC.check(candidate)


def check_find_the_bug(candidate: Callable[..., Any]) -> CheckResult:
    """Notebook 06. Wants `written(p: Tensor[V], q: Tensor[V], token: int, r: float, u: float) -> int`.

    The token that is written where `token` was drafted: r in [0, 1) decides on acceptance, and u in [0, 1) draws the
    correction, the first token at which the running sum of the residual exceeds u.
    """
    return FIND_THE_BUG.check(candidate)


# ------------------------------------------------------------------------------------------- from 07 on, elsewhere

# 07 to 11
_ELSEWHERE = ("exercises_buys", "exercises_crowd", "exercises_lookup", "exercises_sibling", "exercises_trees")


def __getattr__(name: str) -> Any:
    """The checks of later notebooks are in modules of their own, which need this one."""
    for module in _ELSEWHERE if name.startswith("check_") else ():
        found = getattr(importlib.import_module(f"specnb.{module}"), name, None)
        if found is not None:
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
