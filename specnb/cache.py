"""RaggedCache: a key/value cache with one length per row. Rolling back moves a number, nothing else.

Transformers' own ``DynamicCache`` has one length for the whole batch, so rows that accept different numbers of
draft tokens would have to wait for each other. Here every layer owns one buffer [B, H, capacity, D]; the entry of
row b's token at position i sits in slot i; a pass writes its T new tokens to slots ``lengths[b] … lengths[b] + T - 1``
and a mask hides everything a token must not see: later slots, and whatever a rejected draft left behind.

Derived in notebook 04, "Rolling back".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from specnb import compat, first_calls

first_calls.settle()  # before the first pass of the process

SMALLEST_BUCKET = 256
RAGGED_ATTENTION = "specnb_ragged"  # attention that reads the cache itself and takes places for a mask: compiled.py
GROWTH = 256  # slots added at least when a cache has to grow


def bucket_size(position: int) -> int:
    """How many slots a fixed-width pass attends to at this position: the first of 256, 512, 1024, … above it.

    A function of the absolute position alone, so that two runs which reach a position by different rounds compute
    exactly the same thing there.
    """
    return max(SMALLEST_BUCKET, 1 << position.bit_length())


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer, allocated at the first pass (only then are heads and head size known)."""

    is_sliding = False  # sliding layers keep all their entries; the mask does the sliding

    def __init__(self, owner: RaggedCache) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._zeros(key_states, self.owner.capacity)
        self.values = self._zeros(value_states, self.owner.capacity)
        self.is_initialized = True

    def _zeros(self, like: Tensor, capacity: int) -> Tensor:
        _, heads, _, size = like.shape
        dtype = self.owner.dtype or like.dtype
        # zeros, not empty: a masked slot still enters the sum with weight 0, and 0 · NaN is NaN
        return like.new_zeros((len(self.owner.lengths), heads, capacity, size), dtype=dtype)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.owner.write(self.keys, key_states)
        self.owner.write(self.values, value_states)
        return self.owner.read(self.keys), self.owner.read(self.values)

    def grow(self, capacity: int) -> None:
        if self.is_initialized:
            old_keys, old_values = self.keys, self.values
            self.keys, self.values = self._zeros(old_keys, capacity), self._zeros(old_values, capacity)
            self.keys[:, :, : old_keys.shape[2]] = old_keys
            self.values[:, :, : old_values.shape[2]] = old_values

    def get_seq_length(self) -> int:
        return int(self.owner.lengths.max())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.attended, 0

    def get_max_length(self) -> int:
        return self.owner.capacity


class RaggedCache(Cache):
    """One length per row; appending is a pass (`target_pass`), forgetting is `rollback`.

    Args:
        config: the model's configuration; tells the number of layers and their sliding windows.
        batch_size: rows B.
        capacity: slots per row. `reserve` enlarges it later.
        device, dtype: of the buffers; default: those of the keys and values the model hands over.

    Attributes:
        lengths: LongTensor [B] on the CPU, the tokens each row holds.

    Raises:
        ValueError: if the model's layers cannot forget single tokens (recurrent, linear, chunked attention).
    """

    def __init__(
        self,
        config: Any,
        batch_size: int,
        capacity: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if batch_size < 1 or capacity < 1:
            raise ValueError(f"batch_size and capacity must be at least 1, got {batch_size} and {capacity}.")
        self.windows, self.context_size = compat.layer_windows(config), context_size(config)
        super().__init__(layers=[RaggedLayer(self) for _ in self.windows])
        self.capacity, self.device, self.dtype = capacity, device, dtype
        self.lengths = torch.zeros(batch_size, dtype=torch.long)
        self.attended = 0
        self.remembered: Any = None  # what a finished run left in it, see `specnb.reuse`
        self.compiled = False  # whether the pass under way is, if it is a twin's: compiled.py
        self._slots: Tensor | None = None  # [R, T] where the pass under way writes
        self._tree: Tensor | None = None  # [R, T] who sees whom in it, as bits, if its tokens are trees
        self.positions: Tensor | None = None  # [R, T] of its tokens in their texts; in a chain those are the slots
        self._places: Tensor | None = None  # the same with row numbers, made when they are asked for
        self._growth: list[int] = []  # tokens that the pass adds to each row
        self._start: int | None = None  # its first slot, if all its rows share it
        self._rows: slice | Tensor | None = None  # the rows it is over; None for all

    def __repr__(self) -> str:
        return f"RaggedCache(lengths={self.lengths.tolist()}, capacity={self.capacity}, layers={len(self.layers)})"

    def rollback(self, n: int | Sequence[int] | Tensor) -> None:
        """Drop the newest n entries of each row: O(1), no copy. The slots are overwritten by the next pass.

        Args:
            n: one count for all rows, or one per row [B]. 0 leaves a row as it is.

        Raises:
            ValueError: if a count is negative or larger than the row is long.
        """
        drop = torch.as_tensor(n).cpu()
        if drop.is_floating_point() or drop.shape not in ((), self.lengths.shape):
            raise ValueError(f"rollback takes a whole number, or one per row [{len(self.lengths)}], got {n!r}.")
        held = self.lengths.tolist()
        counts = [int(drop)] * len(held) if drop.ndim == 0 else drop.tolist()
        if not all(0 <= n <= length for n, length in zip(counts, held)):
            raise ValueError(
                f"rollback({counts}) does not fit rows of length {held}: "
                "each count must lie between 0 and the row's length."
            )
        if any(counts):
            self.lengths = self.lengths - drop.long()

    def keep(self, start: Tensor, kept: Sequence[Sequence[int]]) -> None:
        """Of each row's entries from slot ``start[b]`` on keep these, side by side, and drop the others.

        Only entries that are not yet in their place are moved: what a tree's accepted path needs.

        Args:
            start: LongTensor [B] on the CPU.
            kept: for each row the numbers of entries, counted from ``start[b]``, in increasing order.

        Raises:
            ValueError: if a row has no such entry.
        """
        first = start.tolist()
        if any(row and first[b] + row[-1] >= n for b, (row, n) in enumerate(zip(kept, self.lengths.tolist()))):
            raise ValueError(f"keep({list(kept)}) from {first} on does not fit rows of length {self.lengths.tolist()}.")
        moves = [(b, first[b] + n, first[b] + i) for b, row in enumerate(kept) for i, n in enumerate(row) if n != i]
        self.lengths = start + torch.tensor([len(row) for row in kept])
        if not moves:
            return
        b, old, new = torch.tensor(moves).T.to(self.layers[0].keys.device)
        for layer in self.layers:
            layer.keys[b, :, new] = layer.keys[b, :, old]
            layer.values[b, :, new] = layer.values[b, :, old]

    def reserve(self, capacity: int) -> None:
        """Make room for at least ``capacity`` slots per row (more, so that growing stays rare)."""
        if capacity > self.capacity:
            capacity = max(capacity, self.capacity + max(GROWTH, self.capacity // 4))
            for layer in self.layers:
                layer.grow(capacity)
            self.capacity = capacity

    def clear(self, row: int) -> None:
        """Forget a row altogether. Its slots become zeros again: a NaN in a masked slot would still spread."""
        self.rollback(torch.where(torch.arange(len(self.lengths)) == row, self.lengths, 0))
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys[row].zero_()
                layer.values[row].zero_()

    def begin(
        self,
        width: int,
        attended: int | None,
        device: torch.device,
        rows: Sequence[int] | None = None,
        parents: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Plan a pass of ``width`` new tokens per row, chains or trees (`target_pass`); their slots, [R, width]."""
        if rows is not None and list(rows) == list(range(len(self.lengths))):
            rows = None
        lengths = self.lengths if rows is None else self.lengths[list(rows)]
        longest = int(lengths.max())
        if longest + width > self.capacity:
            raise ValueError(
                f"{width} more tokens do not fit: a row holds {longest} of {self.capacity} slots. "
                "Roll back first, or make room with cache.reserve(...)."
            )
        self._slots, self._places, self._tree = (lengths[:, None] + torch.arange(width)).to(device), None, None
        self.positions = self._slots
        if parents is not None:
            bits, depths = torch.tensor([sight(tuple(row)) for row in parents]).unbind(1)  # [R, width] each
            self._tree, self.positions = bits.to(device), (lengths[:, None] + depths).to(device)
        self.positions = self.positions.clamp(max=self.context_size - 1)  # filler may reach beyond
        self._start = longest if bool((lengths == longest).all()) else None
        self._rows = None if rows is None else _selection(rows, device)
        self.attended = attended or longest + width
        self._growth = [width if rows is None or b in rows else 0 for b in range(len(self.lengths))]
        return self._slots

    def begin_packed(
        self,
        rows: Sequence[int],
        counts: Sequence[int],
        size: int,
        parents: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Plan a pass in which these rows stand side by side, each with its own number of new tokens.

        For attention that reads the cache itself. The last place is repeated up to ``size`` of them.

        Returns:
            the tokens' slots, [1, size].
        """
        places, positions = [], []
        held = self.lengths.tolist()
        for i, (b, T) in enumerate(zip(rows, counts)):
            n = held[b]
            bits, depths = ([0] * T, range(T)) if parents is None else sight(tuple(parents[i][: T - 1]))
            places += [(n + t, b, n if bits[t] else n + t + 1, bits[t]) for t in range(T)]
            positions += [n + depth for depth in depths]
        assert len(places) <= size and max(place[0] for place in places) < self.capacity
        filler = size - len(places)
        self._places = torch.tensor(places + places[-1:] * filler)[None, None]
        self.positions = torch.tensor(positions + positions[-1:] * filler)[None]
        growth = dict(zip(rows, counts))
        self._growth = [growth.get(b, 0) for b in range(len(held))]
        self._slots, self._rows = self._places[0, ..., 0], None
        return self._slots

    @property
    def places(self) -> Tensor:
        """Where the planned pass writes and looks, [R, 1, T, 4]: of each token the slot, the row, and what it sees.

        That is all slots before the third number, and of those from there on the ones whose bits are set in the fourth.
        """
        if self._places is None:
            assert self._slots is not None
            rows = torch.arange(len(self.lengths), device=self._slots.device)
            rows = rows if self._rows is None else rows[self._rows]
            slots, bits = self._slots, torch.zeros_like(self._slots) if self._tree is None else self._tree
            before = slots + 1 if self._tree is None else slots[:, :1].expand_as(slots)
            self._places = torch.stack([slots, rows[:, None].expand_as(slots), before, bits], dim=-1)[:, None]
        return self._places

    def write(self, buffer: Tensor, new: Tensor) -> None:
        """Store new [R, H, T, D] in buffer [B, H, capacity, D] at the planned rows and slots."""
        if self._slots is None:
            raise RuntimeError(
                "A RaggedCache is filled by specnb.target_pass(model, cache, tokens), not by model(...)."
            )
        new = new.to(buffer.dtype)
        if isinstance(self._rows, Tensor):  # scattered rows
            buffer[self._rows[:, None], :, self._slots] = new.transpose(1, 2)
            return
        part = buffer if self._rows is None else buffer[self._rows]
        if self._start is not None:  # all rows at the same place: a plain slice is the fastest copy
            part[:, :, self._start : self._start + new.shape[2]] = new
            return
        part.scatter_(2, self._slots[:, None, :, None].expand_as(new), new)

    def read(self, buffer: Tensor) -> Tensor:
        """What the planned pass attends to, [R, H, attended, D]: a view, or a copy if its rows lie scattered."""
        attended = buffer[:, :, : self.attended]
        return attended if self._rows is None else attended[self._rows]

    def finish(self) -> None:
        """The planned pass went through: its tokens now count."""
        alike = len(set(self._growth)) == 1  # then a number will do, which takes less than a tensor
        self.lengths, self._slots = self.lengths + (self._growth[0] if alike else torch.tensor(self._growth)), None

    def abandon(self) -> None:
        """The planned pass broke off: the cache is as before, whatever its slots beyond the lengths hold."""
        self._slots = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.lengths.max())


def _selection(rows: Sequence[int], device: torch.device) -> slice | Tensor:
    """Row numbers as an index: a slice where they are neighbours, since a slice of a buffer costs no copy."""
    if list(rows) == list(range(rows[0], rows[-1] + 1)):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)


MOST_NODES = 62  # of a tree: a row's places in a pass are told by the bits of one integer


@lru_cache(maxsize=4096)
def sight(parents: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """What a tree's tokens see of each other, root first: for each a number with one bit per token seen, and its depth.

    Args:
        parents: of each node the number of an earlier node, or -1 for the root.
    """
    bits, depths = [1], [0]
    for node, parent in enumerate(parents):
        bits.append(bits[parent + 1] | 2 << node)
        depths.append(depths[parent + 1] + 1)
    return bits, depths


def attention_mask(slots: Tensor, attended: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Additive mask [B, 1, T, attended]: 0 where the token in ``slots[b, t]`` may look, very negative elsewhere.

    A token sees the slots up to its own, and with a sliding ``window`` only the last ``window`` of them.
    """
    key = torch.arange(attended, device=slots.device)
    query = slots[:, None, :, None]
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return _additive(hidden, dtype)


def tree_mask(slots: Tensor, tree: Tensor, attended: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """`attention_mask` for trees: a token sees what came before the pass, its ancestors and itself.

    Args:
        slots: [B, T], of each row the root's first.
        tree: [B, T], who sees whom, as bits: `sight`. A ``window`` counts positions, that is the ancestors in between.
    """
    T = tree.shape[1]
    seen = (tree[:, :, None] >> torch.arange(T, device=tree.device)) & 1  # [B, T, T]
    position = (slots[:, :1] + seen.sum(-1) - 1)[:, :, None]  # [B, T, 1]
    start = slots[:, :1, None]
    key = torch.arange(attended + T, device=slots.device)  # filler may lie behind what is attended to
    hidden = (key >= start).expand(-1, T, -1)
    if window is not None:
        seen = seen & (position.mT > position - window)
        hidden = hidden | (key <= position - window)
    hidden = hidden.scatter(2, slots[:, None].expand_as(seen), seen == 0)
    return _additive(hidden[:, None, :, :attended], dtype)


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)


def _masks(cache: RaggedCache, slots: Tensor, dtype: torch.dtype) -> Tensor | dict[str, Tensor] | None:
    """One mask if all layers agree; a mask by layer type for models that mix full and sliding layers."""
    windows = set(cache.windows)
    if windows == {None} and slots.shape[1] == 1 and cache._start is not None and cache.attended == cache._start + 1:
        return None  # one token per row, all at the same place: it sees everything there is
    if cache._tree is None:
        masks = {w: attention_mask(slots, cache.attended, w, dtype) for w in windows}
    else:
        masks = {w: tree_mask(slots, cache._tree, cache.attended, w, dtype) for w in windows}
    if len(masks) == 1:
        return masks.popitem()[1]
    sliding = next(w for w in windows if w is not None)
    return {"full_attention": masks[None], "sliding_attention": masks[sliding]}


def target_pass(
    model: PreTrainedModel,
    cache: RaggedCache,
    tokens: Tensor,
    *,
    rows: Sequence[int] | None = None,
    attended: int | None = None,
    logits_to_keep: int = 0,
    parents: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """One forward pass: append T tokens to every row and score the token after each of them.

    Args:
        model: a causal language model of transformers.
        cache: grows by T per row.
        tokens: LongTensor [B, T]; with ``rows`` [R, T].
        rows: R different row numbers, if only these take part; the others stay as they are.
        attended: slots the pass looks at; default: as many as the longest row then holds.
        logits_to_keep: the output head is computed for so many last positions only, as in transformers; 0: for all.
        parents: for trees, of each row's T - 1 tokens after the first the number of its parent among them, an earlier
            one, or -1 for the first token, the root. A token then sees the cache and its own ancestors, and stands as
            many positions after the root as it has ancestors. `RaggedCache.keep` keeps one path.

    Returns:
        logits [B or R, T, V]; position t scores the token after ``tokens[:, t]``. With ``logits_to_keep`` those of the
        last positions, if the model can leave the others out.

    Raises:
        ValueError: if the tokens do not fit the cache's rows or capacity, or ``rows`` are not such numbers.

    An exception inside the pass (Ctrl-C included) leaves the cache as it was. Derived in notebooks 02 and 04.
    """
    expected = len(cache.lengths) if rows is None else len(rows)
    if tokens.ndim != 2 or tokens.shape[0] != expected:
        raise ValueError(f"tokens must be [{expected}, T], one row per row of the pass, got {list(tokens.shape)}.")
    if rows is not None and not (len({*rows}) == len(rows) and all(0 <= b < len(cache.lengths) for b in rows)):
        raise ValueError(f"rows must be different numbers from 0 to {len(cache.lengths) - 1}, got {list(rows)}.")
    slots = cache.begin(tokens.shape[1], attended, model.device, rows, parents)
    return run_pass(model, cache, tokens, slots, logits_to_keep)


@torch.no_grad()
def run_pass(
    model: PreTrainedModel, cache: RaggedCache, tokens: Tensor, slots: Tensor, logits_to_keep: int = 0
) -> Tensor:
    """The forward pass that the cache has planned: tokens [R, T] go to these slots [R, T]; logits [R, T, V]."""
    arguments: dict[str, Any] = {compat.cache_argument(model): cache}
    if logits_to_keep and compat.accepts(model, "logits_to_keep"):
        arguments["logits_to_keep"] = logits_to_keep
    if compat.accepts(model, "position_ids"):
        assert cache.positions is not None
        arguments["position_ids"] = cache.positions
    reads_cache = model.config._attn_implementation == RAGGED_ATTENTION
    mask = cache.places if reads_cache else _masks(cache, slots, model.dtype)
    tokens = tokens.to(model.device)
    try:
        out = model(input_ids=tokens, attention_mask=mask, use_cache=True, return_dict=True, **arguments)
    except BaseException:
        cache.abandon()
        raise
    cache.finish()
    return out.logits


@contextmanager
def hearing(model: PreTrainedModel, cache: RaggedCache, heard: list[Tensor] | None) -> Iterator[None]:
    """While this holds, what goes into the output head is noted in ``heard``: of each pass [N, H], N its tokens.

    None: nothing is noted, and nothing done.
    """
    if heard is None:
        yield
        return

    def note(_: Any, inputs: tuple[Tensor, ...]) -> None:
        if cache._slots is None:  # somebody else's pass, such as a twin's check of a new size
            return
        heard.append(inputs[0].detach().flatten(0, 1)[: sum(cache._growth)])  # the rest is filler

    hook = model.get_output_embeddings().register_forward_pre_hook(note)
    try:
        yield
    finally:
        hook.remove()


def for_all_rows(part: Tensor, rows: Sequence[int], batch_size: int) -> Tensor:
    """Results [R, …] of some rows, in any order, as [B, …], with zeros for the others."""
    if list(rows) == list(range(batch_size)):
        return part
    whole = part.new_zeros(batch_size, *part.shape[1:])
    whole[list(rows)] = part
    return whole


def context_size(config: Any) -> int:
    """How many tokens the model can place: ``max_position_embeddings``, or no limit if it names none."""
    return getattr(compat.text_config(config), "max_position_embeddings", None) or 2**31
