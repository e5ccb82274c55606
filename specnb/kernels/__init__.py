"""Two kernels in C++ for a decoding pass on a CPU, built with the user's own compiler when they are first wanted.

`packed_linear` multiplies few rows with weights that are read once, straight through: the general matrix kernels keep
up with the memory for one row and lose it for 2 to 16. `ragged_attention` attends over a `RaggedCache` as it lies
there, without a mask and without copies. What either computes for a row does not depend, bit for bit, on the rows
beside it.

Measured in notebook 07.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from specnb.fetch import cache_folder

SOURCE = Path(__file__).parent / "decoding.cpp"
HEADER = Path(__file__).parent / "replay.h"
FLAGS = ["-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC"]
LARGE_PAGE = 1 << 21  # bytes
PANEL = 32  # outputs side by side in the packed form, as in the C++ source
DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


class NoCompiler(RuntimeError):
    """The kernels cannot be built here; the message says why."""


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels, built once per machine and version of their source (a few seconds).

    Raises:
        NoCompiler: without a C++ compiler that knows OpenMP.
    """
    target = cache_folder() / "kernels" / f"decoding-{_fingerprint()}.so"
    if not target.exists():
        _build(target)
    try:
        lib = ctypes.CDLL(str(target))
    except OSError as error:
        raise NoCompiler(f"the built kernel {target} does not load: {error}") from error
    pointer, number = ctypes.c_void_p, ctypes.c_int
    _declare(lib.store, [pointer] * 3 + [ctypes.c_long] * 3 + [number] * 5)
    _declare(lib.large_pages, [pointer, ctypes.c_long])
    _declare(lib.replay, [pointer, ctypes.c_long, pointer, ctypes.c_long, number, number])
    for dtype in DTYPES.values():
        _declare(getattr(lib, f"linear_{dtype}"), [pointer] * 5 + [number] * 4)
        _declare(
            getattr(lib, f"attention_{dtype}"),
            [pointer] * 6 + [ctypes.c_long, pointer] + [number] * 8 + [ctypes.c_float],
        )
    return lib


def _declare(function: ctypes._CFuncPtr, arguments: Sequence[type]) -> None:  # type: ignore[name-defined]
    function.argtypes, function.restype = arguments, None


def compiler() -> str | None:
    """The command of the C++ compiler that would be used: $CXX, flags and all, or the first of c++, g++, clang++."""
    candidates = [os.environ.get("CXX"), "c++", "g++", "clang++"]
    return next((name for name in candidates if name and name.strip() and shutil.which(shlex.split(name)[0])), None)


def _fingerprint() -> str:
    """What the built file depends on: the source, the flags, the compiler, and the instructions of this processor."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text(encoding="utf-8").splitlines() if cpu.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    sources = [path.read_text(encoding="utf-8") for path in (SOURCE, HEADER)]
    parts = [*sources, " ".join(FLAGS), str(compiler()), platform.machine(), flags]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _build(target: Path) -> None:
    if compiler() is None:
        raise NoCompiler("no C++ compiler was found (looked for $CXX, c++, g++ and clang++)")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        command = [*shlex.split(str(compiler())), *FLAGS, str(SOURCE), "-o", str(built)]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        if said.returncode:
            raise NoCompiler(f"{compiler()} could not build {SOURCE.name}:\n{said.stderr.strip()[-2000:]}")
        built.replace(target)  # at once: another process may be looking


def pack(weight: Tensor) -> Tensor:
    """Weights [N, K] in the order the kernel reads them.

    Returns:
        float32: [P, K, 32] for P = ⌈N / 32⌉ panels; bfloat16: [P, K, 16, 2], output i beside output 16 + i. Outputs
        beyond N are zeros.
    """
    n, k = weight.shape
    panels = -(-n // PANEL)
    padded = nn.functional.pad(weight.detach(), (0, 0, 0, panels * PANEL - n)).view(panels, PANEL, k)
    if weight.dtype == torch.bfloat16:
        return padded.view(panels, 2, PANEL // 2, k).permute(0, 3, 2, 1).contiguous()
    return padded.permute(0, 2, 1).contiguous()


class Stretch:
    """Memory for so many bytes of packed weights, one matrix behind the other, in large pages where there are any."""

    def __init__(self, bytes: int) -> None:
        memory = torch.empty(bytes + LARGE_PAGE, dtype=torch.uint8)
        self.memory = memory[-memory.data_ptr() % LARGE_PAGE :]
        library().large_pages(self.memory.data_ptr(), bytes)

    def take_in(self, tensor: Tensor) -> Tensor:
        """The same numbers, in the next part of the stretch."""
        place, self.memory = self.memory[: tensor.nbytes], self.memory[-(-tensor.nbytes // 64) * 64 :]
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


_operators = torch.library.Library("specnb", "FRAGMENT")
_operators.define("packed_linear(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor")
_operators.define(
    "ragged_attention(Tensor q, Tensor keys, Tensor values, Tensor places, float scale, int window) -> Tensor"
)

_operators.define("ragged_store(Tensor(a!) keys, Tensor(b!) values, Tensor key, Tensor value, Tensor places) -> ()")


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """x [..., K] and weights from `pack`, bias [N] in float32 → [..., N]."""
    _check_dtype(x, packed)
    x = x.contiguous()
    k = x.shape[-1]
    m = x.numel() // k
    y = x.new_empty(*x.shape[:-1], out_features)
    getattr(library(), f"linear_{DTYPES[x.dtype]}")(
        x.data_ptr(), packed.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(), scratch_room(m * k),
        m, out_features, k, torch.get_num_threads(),
    )  # fmt: skip
    return y


def _check_dtype(x: Tensor, other: Tensor) -> None:
    """The kernels go by addresses alone: another dtype would be read as numbers that are not there."""
    if x.dtype not in DTYPES or x.dtype != other.dtype:
        raise TypeError(f"the kernels take float32 or bfloat16, one dtype for all, got {x.dtype} and {other.dtype}")


_room = threading.local()


def scratch_room(floats: int) -> int:
    """The address of that much room for intermediate values; one buffer a thread, used by one kernel at a time."""
    buffer = getattr(_room, "buffer", None)
    if buffer is None or buffer.numel() < floats:
        buffer = _room.buffer = torch.empty(2 * floats, dtype=torch.float32)
    return buffer.data_ptr()


def attention_floats(heads: int, kv_heads: int, t: int, d: int, capacity: int) -> int:
    """The intermediate values of one thread in `ragged_attention`: of all heads, for t tokens of a row."""
    columns, width = (-(-n // PANEL) * PANEL for n in (heads // kv_heads * t, d))
    return kv_heads * (columns * d + capacity * (d + width + columns))


def _ragged_attention(q: Tensor, keys: Tensor, values: Tensor, places: Tensor, scale: float, window: int) -> Tensor:
    """q [R, H, T, D], whose tokens lie at ``places`` of a cache [B, H_kv, capacity, D].

    Places are [R, …, T, 4]: of each token the slot, the number of the row, and what it sees (`RaggedCache.places`): the
    slots before the third number, and of those after them the ones whose bit is set in the fourth. With a
    ``window`` > 0, the last ``window`` of them. Returns [R, T, H, D].
    """
    _check_dtype(q, keys)
    q, places = q.contiguous(), places.contiguous()
    (r, heads, t, d), (_, kv_heads, capacity, _) = q.shape, keys.shape
    floats, threads = attention_floats(heads, kv_heads, t, d, capacity), torch.get_num_threads()
    scratch = scratch_room(threads * floats + r * t)  # for each thread; then where runs of a row start, 4 bytes each
    out = q.new_empty(r, t, heads, d)
    getattr(library(), f"attention_{DTYPES[q.dtype]}")(
        q.data_ptr(), keys.data_ptr(), values.data_ptr(), places.data_ptr(), out.data_ptr(), scratch, floats,
        scratch + 4 * threads * floats, r, heads, kv_heads, t, d, capacity, window, threads, scale,
    )  # fmt: skip
    return out


def _ragged_store(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, places: Tensor) -> None:
    """Write key and value [R, H, T, D] to their places [R, …, T, 4] in a cache [B, H, capacity, D]."""
    places = places.contiguous()
    for fresh, buffer in ((key, keys), (value, values)):
        _check_dtype(fresh, buffer)
        if fresh.stride(3) != 1:
            fresh = fresh.contiguous()
        (r, heads, t, d), size = fresh.shape, fresh.element_size()
        steps = [size * fresh.stride(axis) for axis in range(3)]
        library().store(
            fresh.data_ptr(), buffer.data_ptr(), places.data_ptr(), *steps, r, heads, t, buffer.shape[2], d * size
        )


def _packed_shape(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


def _attention_shape(q: Tensor, keys: Tensor, values: Tensor, places: Tensor, scale: float, window: int) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], q.shape[3])


_operators.impl("packed_linear", _packed_linear, "CPU")
_operators.impl("packed_linear", _packed_shape, "Meta")
_operators.impl("ragged_attention", _ragged_attention, "CPU")
_operators.impl("ragged_attention", _attention_shape, "Meta")
_operators.impl("ragged_store", _ragged_store, "CPU")
_operators.impl("ragged_store", lambda *tensors: None, "Meta")
