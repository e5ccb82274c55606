"""The fast pass on a CPU: a twin of the model with its own kernels, its layers compiled once.

`compile=True` makes `specnb.generate` run its passes through such a twin. It shares the model's parameters, holds a
packed copy of the matrices, and takes the model's place in `target_pass`:

* linear layers read packed weights (`specnb.kernels.packed_linear`),
* attention looks straight into the `RaggedCache` (`specnb.kernels.ragged_attention`): no mask, no repeated heads,
* what remains of a layer (norms, rotations, activations) is fused by ``torch.compile``: one layer is compiled, once per
  number of positions, and serves all layers of its kind,
* and so is what comes before all layers and behind them (`specnb.frames`): a pass is three native calls.

A pass is *packed*: rows stand side by side in one line of positions, each with as many as it has guesses and one, so
that a row without a guess costs one position whatever its neighbours draft.

Measured, piece by piece, in notebook 07.
"""

from __future__ import annotations

import functools
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specnb import compat, kernels
from specnb.ahead import Ahead
from specnb.cache import RAGGED_ATTENTION, RaggedCache, run_pass, target_pass
from specnb.frames import Frame, Layers, Uncuttable
from specnb.layers import PLAIN, LayerView, compile_layer, disassemble, with_view
from specnb.packed import packed_copy
from specnb.progress import Progress
from specnb.replayed import Graph

if TYPE_CHECKING:
    from specnb.drafters.base import Drafter

STEP = 4  # passes are compiled for multiples of this many positions, larger ones for fewer sizes: `pass_size`
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # of a twin's logits, as a share of the largest one


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float | None = None,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """transformers' attention interface, over a cache's whole buffers; places [R, 1, T, 4] come as the mask.

    Args:
        query: [R, H, T, D]; key, value: buffers [B, H_kv, capacity, D].
    """
    if softcap is not None or s_aux is not None:
        raise NotImplementedError("soft-capped attention and attention sinks")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    _windows_seen.append(sliding_window)
    return torch.ops.specnb.ragged_attention(query, key, value, attention_mask, scale, sliding_window or 0), None


ALL_ATTENTION_FUNCTIONS.register(RAGGED_ATTENTION, attention)
_windows_seen: deque[int | None] = deque(maxlen=4096)  # what layers told of their window, newest last


def check_windows(model: PreTrainedModel) -> None:
    """Raise `Unsupported` if the pass just made was not told the windows that the model's layers have.

    Some families leave the window to the mask, which the attention above does not look at.
    """
    expected = compat.layer_windows(model.config)
    if list(_windows_seen)[-len(expected) :] != expected:
        raise Unsupported("its layers have a sliding window and do not tell it to the attention function")


def compiled_width(num_draft_tokens: int) -> int:
    """The pass width that ``compile=True`` alone means: the draft and the token before it, up to a multiple of 4."""
    return -(-(num_draft_tokens + 1) // STEP) * STEP


def compiled_run(
    model: PreTrainedModel, drafter: Drafter | None, pass_width: int | None, compile: bool
) -> tuple[int | None, Twin | None]:
    """What ``compile`` means for a run: its pass width, and the twin where there can be one."""
    if not compile:
        return pass_width, None
    if pass_width is None:
        pass_width = compiled_width(0 if drafter is None else drafter.num_draft_tokens)
    return pass_width, twin_for(model, pass_width)


def pass_size(positions: int) -> int:
    """The size for which a pass over so many positions is compiled: 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, …"""
    step = max(STEP, (1 << (max(1, positions - 1).bit_length() - 1)) // 2)
    return -(-positions // step) * step


def sizes_up_to(pass_width: int) -> list[int]:
    """The sizes that passes over the positions of one row have: `pass_size`, but none above the width."""
    return sorted({min(pass_size(n), pass_width) for n in range(1, pass_width + 1)})


class Unsupported(RuntimeError):
    """The model has something the twin cannot reproduce; the message says what was seen."""


class Twin:
    """A model's fast double: `network` takes the model's place in `target_pass`.

    Attributes:
        network: the copy with packed layers and `attention`.
        widths: numbers of positions whose passes are compiled and checked.
        refused: those whose passes gave other bits, and are not used.
        narrows: whether passes of different sizes give the same bits. If not, each row goes through a pass of its own,
            filled up to the whole pass width.

    Raises:
        kernels.NoCompiler: where nothing can be built.
        Unsupported: if the twin's logits are not the model's.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if model.dtype not in kernels.DTYPES or model.device.type != "cpu":
            raise Unsupported(f"it is {model.dtype} on {model.device}; the kernels take float32 or bfloat16 on a CPU")
        self.lock = threading.RLock()  # while a layer is compiled its parameters are not there for anyone else
        self.network = packed_copy(model)
        self.network.set_attn_implementation(RAGGED_ATTENTION)
        self.widths: set[int] = set()
        self.refused: set[int] = set()
        self.narrows = True
        self.graphs: dict[Any, Callable[..., Any]] = {}
        self.layers: list[tuple[int, dict[str, Tensor]]] = []  # of each the kind, and its parameters and buffers
        self.ahead: dict[RaggedCache, Ahead] = {}  # of the passes under way
        self.breaks: weakref.WeakKeyDictionary[nn.Module, set[int]] = weakref.WeakKeyDictionary()
        self.blocks = blocks(self.network)
        kinds: dict[Any, int] = {}  # a layer's traits are many: their number stands for them
        for index, layer in enumerate(self.blocks):
            tensors = dict(layer.named_parameters()) | dict(layer.named_buffers())
            self.layers.append((kinds.setdefault(traits(layer), len(kinds)), tensors))
            layer.forward = functools.partial(self.run_layer, layer, index)
        self.frames: dict[torch.Size, Frame] = {}  # by the shape of a pass
        self.unframed: str | None = None  # why there are none, if there cannot be
        self.network.forward = functools.partial(self.run_network, type(model).forward)
        compare(probe(model, 5), probe(self.network, 5), model.dtype)
        check_windows(model)
        self.entries = entries_of_a_token(self.network)

    def warm_up(self, pass_width: int) -> None:
        """Compile the passes that one row of this width needs, and compare them with each other and with the network.

        Raises:
            Unsupported: if a compiled pass computes something else.
        """
        missing = [size for size in reversed(sizes_up_to(pass_width)) if size not in self.widths]
        if not missing:
            return
        plain, found, framed = probe(self.network, pass_width), [], self.unframed is None
        with Progress("Compiling the pass, once for this model and width", len(missing), "sizes") as progress:
            for done, width in enumerate(missing):
                found.append(self.checked(plain[:, :width], width))
                progress.update(done + 1)
        if framed and self.unframed is not None:  # found out in the middle
            found = [probe(self.network, width, compiled=True) for width in missing]
        widest = probe(self.network, max(missing + list(self.widths)), compiled=True)
        self.narrows &= all(torch.equal(logits, widest[:, : logits.shape[1]]) for logits in found)
        self.widths.update(missing)  # only now: whoever interrupts the checks gets them again

    def checked(self, expected: Tensor, width: int) -> Tensor:
        """Logits of a compiled pass, which must be these up to rounding; without frames, if it is they that go wrong.

        Raises:
            Unsupported: if they are not.
        """
        found = probe(self.network, width, compiled=True)
        try:
            compare(expected, found, self.network.dtype)
        except Unsupported as error:
            if self.unframed is not None:
                raise
            self.unframed = str(error)
            return self.checked(expected, width)
        return found

    @staticmethod
    def size_of(positions: int) -> int:
        """The size of a pass over so many positions, all rows together: `pass_size`."""
        return pass_size(positions)

    def serves(self, size: int) -> bool:
        """Whether passes of this size can be used: compiled and checked when they are first wanted.

        Every position must come out as in the widest pass of one row, bit for bit.
        """
        with self.lock:
            if size not in self.widths | self.refused:
                with Progress(f"Compiling the pass over {size} positions", 1, "sizes"):
                    found, known = probe(self.network, size, compiled=True), max(w for w in self.widths if w <= size)
                same = torch.equal(found[:, :known], probe(self.network, known, compiled=True))
                (self.widths if same and self._agrees(found) else self.refused).add(size)
            return size in self.widths

    def _agrees(self, found: Tensor) -> bool:
        try:
            compare(probe(self.network, found.shape[1]), found, self.network.dtype)
        except Unsupported:
            return False
        return True

    def target_pass(
        self, cache: RaggedCache, tokens: Tensor, rows: list[int], network: PreTrainedModel | None = None
    ) -> Tensor:
        """`target_pass` over tokens [R, T] of these rows; logits [R, T, V]. The cache must have room for them.

        Args:
            network: some of the network's layers, if not all of them (`specnb.EarlyExit`).
        """
        rows_, T = tokens.shape
        logits = self.packed_pass(cache, tokens, rows, [T] * rows_, max(self.widths | {T}), network)
        return logits.view(rows_, T, -1)

    def packed_pass(
        self,
        cache: RaggedCache,
        tokens: Tensor,
        rows: list[int],
        counts: list[int],
        pass_width: int,
        network: PreTrainedModel | None = None,
        parents: list[list[int]] | None = None,
        scored: bool = True,
    ) -> Tensor:
        """A pass in which these rows stand side by side; row i of tokens [R, T] appends its first ``counts[i]``.

        Args:
            pass_width: of the run; a row of its own is filled up to it where sizes do not give the same bits.
            parents: of the tokens after each row's first, if they are trees: `specnb.target_pass`.
            scored: False to read the tokens only.

        Returns:
            logits [N, V] of the N = Σ counts tokens, row after row; of none if they are not scored.
        """
        flat = tokens[0, : counts[0]] if len(counts) == 1 else torch.cat([row[:n] for row, n in zip(tokens, counts)])
        before, found, first = cache.lengths, [], 0
        cache.compiled = True
        self.ahead[cache] = Ahead(self.breaks_of(network or self.network))
        self.allocate(cache)
        try:
            for some, size in self.passes(counts, pass_width):
                last, count = first + len(some), sum(some)
                trees = None if parents is None else parents[first:last]
                slots = cache.begin_packed(rows[first:last], some, size, trees)
                here, flat, first = flat[:count], flat[count:], last
                if count < size:  # filler repeats the last token
                    here = torch.cat([here, here[-1:].expand(size - count)])
                logits = run_pass(network or self.network, cache, here[None], slots, 0 if scored else 1)
                found.append(logits[0, :count] if scored else torch.empty(0))
        except BaseException:
            cache.rollback(cache.lengths - before)
            raise
        finally:
            cache.compiled = False  # what is not known to give the same bits is not: `specnb.prefill`
            del self.ahead[cache]
        return found[0] if len(found) == 1 else torch.cat(found)

    def allocate(self, cache: RaggedCache) -> None:
        """Give a cache its buffers, as a first pass would: a compiled one wants to find them there."""
        for layer, entry in zip(cache.layers, self.entries):
            if not layer.is_initialized and entry is not None:
                layer.lazy_initialization(*entry)

    def passes(self, counts: list[int], pass_width: int) -> Iterator[tuple[list[int], int]]:
        """How rows with so many positions share passes, and of what size: one for all if that will do."""
        size = pass_size(sum(counts))
        if len(counts) == 1:
            known = [w for w in self.widths if counts[0] <= w <= max(size, pass_width)]
            yield counts, min(known, default=size) if self.narrows else pass_width
        elif self.narrows and self.serves(size):
            yield counts, size
        else:
            half = len(counts) // 2
            yield from self.passes(counts[:half], pass_width)
            yield from self.passes(counts[half:], pass_width)

    def breaks_of(self, network: nn.Module) -> set[int]:
        """Layers of this network, or of the part of one, that nothing is computed ahead for: those behind its last, and
        those that have been called with something else than the layer before."""
        if network not in self.breaks:
            forwards = [vars(module).get("forward") for module in network.modules()]
            self.breaks[network] = {sum(getattr(forward, "func", None) == self.run_layer for forward in forwards)}
        return self.breaks[network]

    def run_network(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The network's forward; of a compiled pass by its frame, if it can be cut. Without a score for prefill."""
        cache = next((value for value in kwargs.values() if isinstance(value, RaggedCache)), None)
        if cache is None or not cache.compiled or args:
            return forward(self.network, *args, **kwargs)
        with self.lock:
            frame = self.frame(forward, kwargs)
            if frame is None:
                return forward(self.network, **kwargs)
            layers, carried = frame.before(kwargs, cache)
            hidden = self.run_layers(frame.form, cache.places.shape, layers)
            logits = None if kwargs.get("logits_to_keep") else frame.behind(hidden, carried)
        return SimpleNamespace(logits=logits)

    def frame(self, forward: Callable[..., Any], call: dict[str, Any]) -> Frame | None:
        """The frame for passes of this shape, made when it is first wanted; None if the forward cannot be cut."""
        shape = call["input_ids"].shape
        if self.unframed is None and shape not in self.frames:
            try:
                if len({kind for kind, _ in self.layers}) > 1:
                    raise Uncuttable("its layers are of several kinds")
                whole = {name: value for name, value in call.items() if name != "logits_to_keep"}
                self.frames[shape] = Frame(self.network, forward, whole)
            except Exception as error:  # whatever the tracer trips over, the forward itself works
                self.unframed = str(error) or type(error).__name__
        return None if self.unframed is not None else self.frames[shape]

    def run_layers(self, form: Any, places: torch.Size, inputs: list[list[Tensor]]) -> Tensor:
        """Hidden states after all layers, each called with what is given for it, after the result before it."""
        layers = [[*given, *own.values()] for given, (_, own) in zip(inputs, self.layers)]
        graph, hidden = self.graph_of(0, form, places, layers[0]), layers[0][0]
        results = graph.chain(layers) if isinstance(graph, Graph) else []
        if len(results) == len(layers):
            return results[-1]
        for given in layers:
            hidden = graph(hidden, *given[1:])
        return hidden

    def graph_of(self, index: int, form: Any, places: torch.Size, given: list[Tensor]) -> Callable[..., Any]:
        """The graph for calls of this form of a layer of this kind, compiled for such a call if there is none."""
        kind, own = self.layers[index]
        case = (kind, form, places)
        if case not in self.graphs:
            self.graphs[case] = compile_layer(self.blocks[index], list(own), form, given)
        return self.graphs[case]

    def run_layer(self, layer: nn.Module, index: int, *args: Any, **kwargs: Any) -> Any:
        """A layer's forward with its own part of the cache in the cache's place; compiled once per kind and shape."""
        if (stand_in := Layers.standing_in()) is not None:
            return stand_in(args, kwargs)
        cache = next(value for value in (*args, *kwargs.values()) if isinstance(value, RaggedCache))
        ahead = self.ahead.get(cache)
        if ahead is not None and (known := ahead.take(index, args, kwargs)) is not None:
            return known
        view = LayerView(cache.layers[index], cache.places)
        seen = with_view(args, kwargs, view)
        with self.lock:
            if not cache.compiled or view.keys is None:
                plain = type(layer).forward(layer, *seen[0], **seen[1])  # also allocates the cache's buffers
                if not cache.compiled:
                    return plain
            inputs: list[Tensor] = []
            form = disassemble(seen, inputs)
            given = [*inputs, *self.layers[index][1].values()]
            graph = self.graph_of(index, form, view.places.shape, given)
            if ahead is None or not isinstance(graph, Graph) or not args or args[0] is not inputs[0]:
                return graph(*given)
            return ahead.keep(index, args, kwargs, graph.chain([given, *self.following(index, inputs, cache, ahead)]))

    def following(self, index: int, inputs: list[Tensor], cache: RaggedCache, ahead: Ahead) -> Iterator[list[Tensor]]:
        """What the next layers will be called with, if it is what this one is called with: of each its own tensors."""
        kind, place = self.layers[index][0], next(i for i, x in enumerate(inputs) if x is cache.layers[index].keys)
        for i in range(index + 1, len(self.layers)):
            layer, (other, own) = cache.layers[i], self.layers[i]
            if i in ahead.breaks or other != kind or layer.keys is None:
                return
            yield [*inputs[:place], layer.keys, layer.values, *inputs[place + 2 :], *own.values()]


def traits(layer: nn.Module) -> Any:
    """What layers must have in common to share a graph: their classes and plain attributes, but not their number."""
    return tuple(
        (name, type(module), attribute, value)
        for name, module in layer.named_modules()
        for attribute, value in vars(module).items()
        if type(value) in PLAIN and attribute != "layer_idx"
    )


def probe(network: PreTrainedModel, width: int, *, compiled: bool = False) -> Tensor:
    """Logits [1, width, V] of a pass over fixed tokens, after a short prompt."""
    vocabulary = network.get_input_embeddings().num_embeddings
    tokens = torch.arange(3, 3 + 7 * (11 + width), 7)[None] % vocabulary
    cache = RaggedCache(network.config, 1, 11 + width)
    target_pass(network, cache, tokens[:, :11], logits_to_keep=1)
    cache.compiled = compiled
    return target_pass(network, cache, tokens[:, 11:])


def entries_of_a_token(network: PreTrainedModel) -> list[tuple[Tensor, Tensor] | None]:
    """Keys and values [1, H, 1, D] that each layer notes of some token; None for a layer that notes none."""
    cache = RaggedCache(network.config, 1, 1)
    target_pass(network, cache, torch.zeros(1, 1, dtype=torch.long), logits_to_keep=1)
    return [(layer.keys, layer.values) if layer.is_initialized else None for layer in cache.layers]


def compare(expected: Tensor, got: Tensor, dtype: torch.dtype) -> None:
    """Raise `Unsupported` unless the logits of models of this dtype agree up to rounding."""
    known = expected.isfinite()  # a draft's head may leave tokens out: −∞ in both
    largest = expected.float()[known].abs().max().clamp(min=1e-6)
    gap = float((expected.float() - got.float())[known].abs().max() / largest)
    if not (gap <= TOLERANCE[dtype] and torch.equal(expected[~known], got[~known])):
        raise Unsupported(f"its fast pass gives other logits: they differ by {gap:.1%} of the largest one")


def fingerprint(model: PreTrainedModel) -> Any:
    """Tells whether the weights have changed: their addresses, versions, and some of their numbers.

    The numbers are for edits through ``.data``, which no version counts: up to 64 of each tensor, evenly spread.
    """
    some: dict[Any, list[Tensor]] = {}
    versions = []
    for p in map(Tensor.detach, model.parameters()):
        every = max(1, p.numel() // 64)
        few = p.as_strided((-(-p.numel() // every),), (every,)) if p.is_contiguous() else p.reshape(-1)[::every]
        some.setdefault((p.dtype, p.device), []).append(few)
        versions.append((p.data_ptr(), 0 if p.is_inference() else p._version))
    numbers = [torch.cat(several).view(torch.uint8).cpu().numpy().tobytes() for several in some.values()]
    return versions, numbers


def check_hooks(model: PreTrainedModel) -> None:
    """Raise `Unsupported` for hooks and replaced forwards: the twin would not call them, or call copies of them.

    transformers' own stand aside unless hidden states are asked for.
    """
    for name, module in model.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        foreign = [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("transformers.")]
        if foreign or "forward" in vars(module):
            raise Unsupported(f"its module {name or type(model).__name__!r} has a hook or a forward of its own")


_twins: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, Twin | None]] = weakref.WeakKeyDictionary()
_making = threading.RLock()


def twin_for(model: PreTrainedModel, pass_width: int) -> Twin | None:
    """The model's twin, compiled for this width; made once, and again if the weights have changed since.

    Returns:
        None, after a warning that says why, where there can be none; the warning comes once.
    """
    compat.layer_windows(model.config)  # a model whose cache cannot forget is refused, not run uncompiled
    version = None
    try:
        check_hooks(model)
        version = fingerprint(model)
        with _making:
            made, twin = _twins.get(model, (None, None))
            if made != version:
                _twins.pop(model, None)  # before there is another: it holds a copy of the weights
                twin = Twin(model)
                _twins[model] = version, twin
            if twin is not None:
                twin.warm_up(pass_width)
    except Exception as error:  # whatever the compiler trips over, the model itself still works
        _twins[model] = version, None
        reason = (str(error).strip() or type(error).__name__).removesuffix(".")
        warnings.warn(f"compile=True: {type(model).__name__} runs uncompiled: {reason}.", stacklevel=users_level())
        return None
    return twin


def users_level() -> int:
    """The ``stacklevel`` at which the function that asks finds the user's own line."""
    ours, frame, level = ("specnb", "torch", "transformers"), sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in ours:
        frame, level = frame.f_back, level + 1
    return level


def blocks(model: nn.Module) -> list[nn.Module]:
    """The model's decoder layers, in order: the longest list of modules it has.

    Raises:
        NotImplementedError: if it has none.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    wanted = compat.text_config(model.config).num_hidden_layers
    for modules in lists:
        if len(modules) == wanted:
            return list(modules)
    raise NotImplementedError("no list of decoder layers")
