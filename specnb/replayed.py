"""A compiled layer's native calls, recorded once and replayed by a single call.

What ``torch.compile`` makes of a layer is a Python function: it allocates buffers and calls a dozen kernels, each a few
microseconds of work and as many of Python. For a small model at batch 1 that Python takes a third of the pass. So a
graph is run once under a recorder, which notes the kernels and where each of their arguments lies: in an input, in a
weight of the layer, or in memory the graph made for itself. Later calls hand the list and the new addresses to
`replay` in C++ (``kernels/replay.h``).

A graph that does anything else than call such kernels is not replayed, and runs as before.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specnb import kernels

ADDRESSES, ALONE, SHARED = range(3)  # kinds of calls, as in the C++ source
MOST = 24  # arguments of a call there
ALIGNED = 64  # bytes at which memory begins

Base = tuple[str, int]  # a number that changes from call to call: what it is of, and of which
Word = tuple[Base, int]  # an argument: a base, and what is added to it
Call = tuple[int, int, list[Word]]  # function, kind, arguments
ZERO: Base = ("zero", 0)
SCRATCH: Base = ("scratch", 0)
ARENA: Base = ("arena", 0)


class Unrecordable(RuntimeError):
    """The graph does something a list of native calls cannot say; the message says what."""


@dataclass
class Attention:
    """What the number of slots means for one call of attention."""

    cache: int  # which input its keys are
    tokens: int
    heads: tuple[int, int, int, int]  # heads, those of keys and values, tokens of a row, numbers of a head

    def numbers(self, capacity: int, threads: int) -> tuple[int, int]:
        """Floats for each thread, and bytes to where runs of one row are noted, behind those of all threads."""
        floats = kernels.attention_floats(*self.heads, capacity)
        return floats, 4 * threads * floats


class Recorder(TorchDispatchMode):
    """Notes the calls of a graph while it runs.

    Args:
        given: tensors of which no two overlap; by their place among them a program knows them again.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.given = [(tensor.data_ptr(), _bytes(tensor)) for tensor in given]
        self.numbers = {start: i for i, (start, _) in enumerate(self.given)}
        self.made: dict[int, int] = {}  # where the graph's own memory begins: bytes
        self.kept: list[Any] = []  # nothing is freed while recording: its place could be given to something else
        self.calls: list[Call] = []
        self.attentions: list[Attention] = []
        self.refusal: str | None = None

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if str(func) == "specnb.packed_linear.default":
            self._linear(out, *args)
        elif str(func) == "specnb.ragged_attention.default":
            self._attention(out, *args)
        elif str(func) == "specnb.ragged_store.default":
            self._store(*args)
        else:
            self.refusal = f"it calls {func}"
        return out

    def allocate(self, make: Callable[..., Tensor], *args: Any) -> Tensor:
        """Run the graph's own allocation."""
        return self.own(make(*args))

    def own(self, tensor: Tensor) -> Tensor:
        """Memory that the graph made for itself."""
        storage = tensor.untyped_storage()
        self.made[storage.data_ptr()] = storage.nbytes()
        self.kept.append(tensor)
        return tensor

    def kernel(self, function: Callable[..., None], address: int, *args: Tensor) -> None:
        """Run a kernel of the compiler's; it takes addresses."""
        function(*args)
        if len(args) > MOST or not all(isinstance(arg, Tensor) for arg in args):
            raise Unrecordable("a kernel takes something else than a few addresses")
        self.calls.append((address, ADDRESSES, [self.word(arg) for arg in args]))

    def word(self, value: Tensor | int) -> Word:
        """Where a tensor lies, or a constant."""
        if isinstance(value, int):
            return ZERO, value
        address, made = value.data_ptr(), value.untyped_storage().data_ptr()
        for i, (start, size) in enumerate(self.given):
            if start <= address < start + size:
                return ("given", i), address - start
        if made not in self.made:
            raise Unrecordable("it reads memory that was not seen to be made")
        return ("made", made), address - made

    def _note(self, name: str, kind: int, *arguments: Any) -> None:
        words = [a if isinstance(a, tuple) else self.word(a) for a in arguments]
        self.calls.append((_address(getattr(kernels.library(), name)), kind, words))

    def _contiguous(self, x: Tensor) -> Tensor:
        """x, or what a call of `gather` would make of it."""
        if x.is_contiguous():
            return x
        if x.ndim != 4 or x.stride(3) != 1:
            raise Unrecordable("a kernel of ours copies its input")
        out, size = self.own(x.contiguous()), x.element_size()
        r, heads, t, d = x.shape
        self._note("replay_gather", ALONE, x, out, *[size * x.stride(axis) for axis in range(3)], r, heads, t, d * size)
        return out

    def _linear(self, y: Tensor, x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> None:
        x, k = self._contiguous(x), x.shape[-1]
        scratch = self.own(torch.empty(x.numel()))
        name = f"replay_linear_{kernels.DTYPES[x.dtype]}"
        m = x.numel() // k
        self._note(name, SHARED, x, packed, 0 if bias is None else bias, self.own(y), scratch, m, out_features, k)

    def _attention(
        self, out: Tensor, q: Tensor, keys: Tensor, values: Tensor, places: Tensor, scale: float, window: int
    ) -> None:
        (r, heads, t, d), kv_heads = q.shape, keys.shape[1]
        cache, n = self._cache(keys, values, places), len(self.attentions)
        self.attentions.append(Attention(cache, r * t, (heads, kv_heads, t, d)))
        bits = struct.unpack("<i", struct.pack("<f", scale))[0]
        self._note(
            f"replay_attention_{kernels.DTYPES[q.dtype]}", SHARED, self._contiguous(q), keys, values, places,
            self.own(out), (SCRATCH, 0), (("floats", n), 0), (("starts", n), 0), r, heads, kv_heads, t, d,
            (("capacity", cache), 0), window, bits,
        )  # fmt: skip

    def _store(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor, places: Tensor) -> None:
        cache = self._cache(keys, values, places)
        for fresh, buffer in ((key, keys), (value, values)):
            if fresh.stride(3) != 1:
                raise Unrecordable("a kernel of ours copies its input")
            (r, heads, t, d), size = fresh.shape, fresh.element_size()
            steps = [size * fresh.stride(axis) for axis in range(3)]
            capacity = (("capacity", cache), 0)
            self._note("replay_store", ALONE, fresh, buffer, places, *steps, r, heads, t, capacity, d * size)

    def _cache(self, keys: Tensor, values: Tensor, places: Tensor) -> int:
        """Which input the keys are: its size is a number that changes, and that of the values with it."""
        found = [self.numbers.get(tensor.data_ptr()) for tensor in (keys, values)]
        if None in found or not all(tensor.is_contiguous() for tensor in (keys, values, places)):
            raise Unrecordable("its cache is not an input")
        assert found[0] is not None
        return found[0]


class Program:
    """The calls of a graph, to be made again with other tensors.

    Args:
        recorder: what the graph did.
        given: with these tensors.
        inputs: how many of them are a layer's inputs; the others are its weights, whose layout does not change.
        outs: what the graph returned.

    Raises:
        Unrecordable: if the outputs are not memory of their own.
    """

    def __init__(self, recorder: Recorder, given: Sequence[Tensor], inputs: int, outs: Sequence[Tensor]) -> None:
        self.attentions = recorder.attentions
        bases = {base for _, _, words in recorder.calls for base, _ in words}
        self.caches = sorted(i for what, i in bases if what == "capacity")
        self.layouts = [
            (i, given[i].dtype, given[i].is_contiguous(), given[i].stride())
            for i in sorted(i for what, i in bases if what == "given" and i < inputs)
        ]
        self.outs = [(out.shape, out.stride(), out.dtype) for out in outs]
        places, size = _places(recorder.made, outs)
        self.arena = torch.empty(size, dtype=torch.uint8)
        code = self._code(recorder.calls, places, self._bases(len(outs), len(given)))
        self.code, self.length = (ctypes.c_int64 * len(code))(*code), len(code)
        self.replay = kernels.library().replay
        self.sizes_of: Any = None  # the capacities and threads that `sizes` and `floats` are for

    def _bases(self, outs: int, given: int) -> list[Base]:
        """The numbers of a call, in the order in which `__call__` puts them together."""
        of_attention = [(what, n) for n in range(len(self.attentions)) for what in ("floats", "starts")]
        caches = [("capacity", i) for i in self.caches]
        tensors = [*[("out", i) for i in range(outs)], *[("given", i) for i in range(given)]]
        return [ZERO, ARENA, SCRATCH, *of_attention, *caches, *tensors]

    @staticmethod
    def _code(calls: list[Call], places: dict[Base, Word], bases: list[Base]) -> list[int]:
        code: list[int] = []
        for function, kind, words in calls:
            code += [function, kind, len(words)]
            for base, offset in words:
                base, place = places.get(base, (base, 0))
                code += [bases.index(base), place + offset]
        return code

    def __call__(self, layers: Sequence[Sequence[Tensor]]) -> list[list[Tensor]] | None:
        """What the graph would return for the tensors of each of these layers; None if their layout is another.

        A layer's first tensor is replaced by the first result of the layer before.
        """
        if not all(map(self._fits, layers)):
            return None
        threads = torch.get_num_threads()
        results: list[list[Tensor]] = []
        numbers: list[int] = []
        arena, known = self.arena.data_ptr(), None
        for given in layers:
            outs = [torch.empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype in self.outs]
            capacities = [given[i].shape[2] for i in self.caches]
            if capacities != known:
                known, room = capacities, self._room(capacities, threads)
            numbers += [0, arena, *room, *capacities]
            numbers += [out.data_ptr() for out in outs]
            numbers += [(results[-1][0] if results else given[0]).data_ptr(), *[x.data_ptr() for x in given[1:]]]
            results.append(outs)
        count = len(layers)
        array = (ctypes.c_int64 * len(numbers))(*numbers)
        self.replay(self.code, self.length, array, len(numbers) // count, count, threads)
        return results

    def _fits(self, given: Sequence[Tensor]) -> bool:
        return not any(
            given[i].dtype != dtype or not (given[i].is_contiguous() if contiguous else given[i].stride() == stride)
            for i, dtype, contiguous, stride in self.layouts
        )

    def _room(self, capacities: list[int], threads: int) -> list[int]:
        """Where attention has scratch memory; then of each call the floats for a thread, and where runs are noted."""
        if self.sizes_of != (capacities, threads):
            found = dict(zip(self.caches, capacities))
            self.sizes = [a.numbers(found[a.cache], threads) for a in self.attentions]
            rooms = [behind // 4 + a.tokens for a, (_, behind) in zip(self.attentions, self.sizes)]
            self.floats = max(rooms, default=0)
            self.sizes_of = capacities, threads
        scratch = kernels.scratch_room(self.floats)
        return [scratch, *[n for size, behind in self.sizes for n in (size, scratch + behind)]]


def _places(made: dict[int, int], outs: Sequence[Tensor]) -> tuple[dict[Base, Word], int]:
    """Where the graph's own memory is put: outputs are new tensors each time, the rest shares so many bytes."""
    places: dict[Base, Word] = {}
    for i, out in enumerate(outs):
        storage = out.untyped_storage()
        base = ("made", storage.data_ptr())
        if base in places or made.get(storage.data_ptr()) != _bytes(out) or out.storage_offset():
            raise Unrecordable("it returns a part of something")
        places[base] = ("out", i), 0
    size = 0
    for start, count in made.items():
        if ("made", start) not in places:
            places["made", start] = ARENA, size
            size += -(-count // ALIGNED) * ALIGNED
    return places, size


class Graph:
    """A compiled graph, replayed from the second call on if that can be done.

    Args:
        inputs: how many of its arguments are a layer's inputs; the others are its weights.
    """

    def __init__(self, inputs: int) -> None:
        self.inputs = inputs
        self.program: Program | None = None
        self.refusal: str | None = None
        self.made: Any = None  # what the compiler made

    def compile(self, graph: Any, example: list[Tensor]) -> Graph:
        """Compile it, and see whether its calls can be recorded."""
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        def inner(*args: Any, **kwargs: Any) -> Any:
            self.made = compile_fx_inner(*args, **kwargs)
            return self.made

        self.compiled: Any = compile_fx(graph, example, inner_compile=inner)
        try:
            self._record(example)
        except Exception as error:  # internals of the compiler: whatever is not as expected, the graph itself works
            self.refusal = str(error) or type(error).__name__
        self.made = None
        return self

    def __call__(self, *given: Tensor) -> Any:
        return self.chain([given])[0]

    def chain(self, layers: Sequence[Sequence[Tensor]]) -> list[Any]:
        """The results of these layers, each over the result of the one before; only the first's if not replayed."""
        results = None if self.program is None else self.program(layers)
        return [self.compiled(*layers[0])] if results is None else list(map(self._result, results))

    def _record(self, example: list[Tensor]) -> None:
        """Raise unless the calls of two runs, the graph's and the program's, write the same bits."""
        given, again = ([*map(apart, example[: self.inputs]), *example[self.inputs :]] for _ in range(2))
        recorder, call = Recorder(given), self.made.current_callable
        self.made.current_callable = listened(call, recorder)
        try:
            with recorder:
                result = self.compiled(*given)
        finally:
            self.made.current_callable = call
        if recorder.refusal:
            raise Unrecordable(recorder.refusal)
        outs = [result] if isinstance(result, Tensor) else list(result)
        self._result = (lambda some: some[0]) if isinstance(result, Tensor) else type(result)
        program = Program(recorder, given, self.inputs, outs)
        replayed = program([again])
        assert replayed is not None
        if not all(map(same_bits, [*outs, *given], [*replayed[0], *again])):
            raise Unrecordable("its replay gives other bits")
        self.program = program


def listened(call: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """A graph's function with kernels and allocations that tell the recorder. The function itself stays as it is."""
    function: Any = getattr(call, "__func__", call)
    names = dict(function.__globals__)
    for name, value in names.items():
        if name == "empty_strided_cpu":
            names[name] = functools.partial(recorder.allocate, value)
        elif isinstance(getattr(value, "__self__", None), types.ModuleType) and value.__name__ == "kernel":
            address = _address(ctypes.CDLL(value.__self__.__file__).kernel)
            names[name] = functools.partial(recorder.kernel, value, address)
    copy = types.FunctionType(function.__code__, names, None, function.__defaults__, function.__closure__)
    return copy if function is call else types.MethodType(copy, call.__self__)  # type: ignore[attr-defined]


def apart(tensor: Tensor) -> Tensor:
    """A copy with the same layout, in memory of its own."""
    flat = tensor.as_strided((_bytes(tensor) // tensor.element_size(),), (1,)).clone()
    return flat.as_strided(tensor.shape, tensor.stride(), 0)


def same_bits(one: Tensor, other: Tensor) -> bool:
    one, other = (x.detach().reshape(-1).view(torch.uint8) for x in (one, other))
    return torch.equal(one, other)


def _bytes(tensor: Tensor) -> int:
    """From the tensor's first byte to its last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()


def _address(function: Any) -> int:
    found = ctypes.cast(function, ctypes.c_void_p).value
    assert found is not None
    return found
