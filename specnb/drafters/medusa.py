"""Medusa: extra heads on the target guess the tokens after the next one, and a tree of their candidates is checked.

Head i looks at the hidden state from which the target has predicted the next token, and guesses the token i + 1 places
after that one. A head is one residual block; the output matrix is the target's own.

    drafter = specnb.Medusa.from_pretrained("smollm2-135m-medusa")

Source: Cai et al. 2024 (arXiv 2401.10774); that heads should know the token just chosen: Ankner et al. 2024 (Hydra,
arXiv 2402.05109). Heads are trained by `specnb.train_medusa`; derived in notebook 11.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from specnb import frames, trees
from specnb.drafters.base import Draft, Drafter, Session
from specnb.drafters.hints import LONGEST, Hints
from specnb.drafters.small_model import ROWS, described, signature, stored_weights
from specnb.packed import PackedLinear, packed_copy
from specnb.resources import data_path
from specnb.trees import Path as Ranks

if TYPE_CHECKING:
    from specnb.rows import Rows

FORMAT = "specnb medusa 1"
DESCRIPTION, WEIGHTS = "medusa.json", "medusa.safetensors"
WIDEST = 10  # ranks that a tree grown anew may use
Chances = Sequence[tuple[Ranks, float]]  # of paths of ranks: how often all of the path was right


# --- heads ---


class Block(nn.Module):
    """A plain head: x + SiLU(W x + b). It begins as the identity, and says what the target says."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = _nothing(nn.Linear(size, size))

    def forward(self, hidden: Tensor, newest: Tensor | None = None, hint: Tensor | None = None,
                sizes: Tensor | None = None) -> Tensor:  # fmt: skip
        """hidden [N, H] → what goes into the output matrix [N, H]; the rest is for `HintedBlock`."""
        return hidden + nn.functional.silu(self.linear(hidden))


class HintedBlock(Block):
    """A head that is also told the newest token, and what followed such a text before (`specnb.drafters.hints`).

    Both come as vectors: the target's output matrix has one for each token. The hint's is also added to the outcome,
    as much as the head trusts it: that is how a token is copied.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.newest = _nothing(nn.Linear(size, size, bias=False))
        self.hint = _nothing(nn.Linear(size, size, bias=False))
        self.length = _nothing(nn.Embedding(LONGEST + 1, size))
        self.trust = _nothing(nn.Linear(2 * size, 1, bias=False))
        self.trust_length = _nothing(nn.Embedding(LONGEST + 1, 1))

    def forward(self, hidden: Tensor, newest: Tensor | None = None, hint: Tensor | None = None,
                sizes: Tensor | None = None) -> Tensor:  # fmt: skip
        """hidden, newest, hint [N, H] and the lengths of the hints' suffixes [N] (0: no hint) → [N, H]."""
        assert newest is not None and hint is not None and sizes is not None
        told = self.newest(newest) + self.hint(hint) + self.length(sizes)
        change = nn.functional.silu(self.linear(hidden) + told)
        seen = torch.cat([change, hidden / hidden.shape[-1] ** 0.5], dim=-1)
        return hidden + change + (self.trust(seen) + self.trust_length(sizes)) * hint


class MedusaHeads(nn.Module):
    """A block for each head.

    Args:
        hidden_size: H, of what goes into the target's output head.
        count: how many heads, at least 1.
        ids: LongTensor [V'], the tokens the heads can guess, or None for all: fewer rows of the target's output matrix
            are cheaper to read.
        hinted: whether heads are told the newest token and hints as well; then hinted tokens can be guessed whatever
            ``ids`` says.

    Raises:
        ValueError: for less than one head.
    """

    ids: Tensor | None

    def __init__(self, hidden_size: int, count: int = 3, ids: Tensor | None = None, *, hinted: bool = False) -> None:
        super().__init__()
        if count < 1:
            raise ValueError(f"Medusa needs at least one head, got {count!r}.")
        self.hidden_size, self.hinted = hidden_size, hinted
        self.blocks = nn.ModuleList((HintedBlock if hinted else Block)(hidden_size) for _ in range(count))
        self.register_buffer("ids", None if ids is None else torch.as_tensor(ids).long(), persistent=False)

    def __len__(self) -> int:
        return len(self.blocks)

    def forward(
        self, hidden: Tensor, newest: Tensor | None = None, hint: Tensor | None = None, sizes: Tensor | None = None
    ) -> Tensor:
        """What goes into the output matrix, [N, heads, H].

        Args:
            hidden: [N, H].
            newest, hint, sizes: for hinted heads, [N, H], [N, heads, H] and LongTensor [N, heads].
        """
        if hint is None or sizes is None:
            return torch.stack([block(hidden) for block in self.blocks], dim=1)
        told = [block(hidden, newest, hint[:, i], sizes[:, i]) for i, block in enumerate(self.blocks)]
        return torch.stack(told, dim=1)


def _nothing(module: Any) -> Any:
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    return module


class Attached:
    """Heads on a target: with the rows of its output matrix that they speak through.

    A guess has a *column*: the place of its row among the heads' own, or one more for the hinted token of a place, if
    it has no row there.

    Args:
        heads: their dtype and device are what they compute in.
        target: any causal LM with an output head of the heads' size and vocabulary.

    Raises:
        ValueError: if the sizes do not match.
    """

    def __init__(self, heads: MedusaHeads, target: PreTrainedModel) -> None:
        output: Any = target.get_output_embeddings()
        vocabulary, size = output.weight.shape
        _check_sizes(heads, vocabulary, size)
        self.heads, self.matrix = heads, output.weight.detach()  # [V, H]
        dtype = heads.blocks[0].linear.weight.dtype  # type: ignore[union-attr]
        bias = getattr(output, "bias", None)
        self.bias = None if bias is None else bias.detach()
        self.ids = torch.arange(vocabulary) if heads.ids is None else heads.ids.cpu()
        own = slice(None) if heads.ids is None else heads.ids.to(output.weight.device)
        self.rows = self.matrix[own].to(dtype)  # [V', H]
        self.rows_bias = None if self.bias is None else self.bias[own].to(dtype)
        self.output: Callable[..., Tensor] = partial(nn.functional.linear, weight=self.rows, bias=self.rows_bias)
        self.column = torch.full((vocabulary,), -1)
        self.column[self.ids] = torch.arange(len(self.ids))

    def __call__(self, hidden: Tensor, newest: Tensor, hints: Tensor | None = None) -> Tensor:
        """Logits [N, heads, columns].

        Args:
            hidden: [N, H], of the places that have predicted the newest tokens.
            newest: LongTensor [N].
            hints: for hinted heads LongTensor [N, heads, 2], the hinted token and the length of its suffix.
        """
        hidden = hidden.to(self.rows.dtype)
        if not self.heads.hinted or hints is None:
            return self.output(self.heads(hidden))
        tokens, sizes = hints.to(hidden.device).unbind(-1)
        hint = self.words(tokens) * (sizes > 0)[..., None]
        out = self.heads(hidden, self.words(newest.to(hidden.device)), hint, sizes)
        logits = self.output(out)
        return torch.cat([logits, self._of_hints(out, tokens, self._is_new(hints).to(out.device))[..., None]], dim=-1)

    def compiled(self, given: list[Tensor]) -> Callable[..., Tensor]:
        """The same for one place, as a graph over packed weights; ``given`` are examples of what it is called with."""
        packed = copy.copy(self)
        packed.heads, packed.output = packed_copy(self.heads), PackedLinear(self.rows, self.rows_bias)
        graph = frames.compiled(lambda *tensors: (packed(*tensors),), given)
        return lambda *tensors: graph(*tensors)[0]

    def words(self, tokens: Tensor) -> Tensor:
        """Vectors of tokens, of one length: their rows of the output matrix, each divided by its root mean square."""
        rows = self.matrix[tokens].float()
        return (rows * rows.pow(2).mean(-1, keepdim=True).clamp(min=1e-12).rsqrt()).to(self.rows.dtype)

    def _of_hints(self, out: Tensor, tokens: Tensor, new: Tensor) -> Tensor:
        """The logits [N, heads] of hinted tokens without a row; −∞ for the others."""
        logits = (out * self.matrix[tokens].to(out.dtype)).sum(-1)
        if self.bias is not None:
            logits = logits + self.bias[tokens].to(out.dtype)
        return logits.masked_fill(~new, float("-inf"))

    def _is_new(self, hints: Tensor) -> Tensor:
        """Where a hint has no row among the heads' own, [N, heads]."""
        tokens, sizes = hints.cpu().unbind(-1)
        return (self.column[tokens] < 0) & (sizes > 0)

    def columns(self, tokens: Tensor, hints: Tensor | None) -> Tensor:
        """Of tokens [N, heads, n], on the CPU, the columns; −1 for those that cannot be guessed."""
        found = self.column[tokens]
        if not self.heads.hinted or hints is None:
            return found
        hinted = self._is_new(hints)[..., None] & (tokens == hints[..., 0, None])
        return found.masked_fill(hinted, len(self.ids))

    def tokens(self, columns: Tensor, hints: Tensor | None) -> Tensor:
        """Of columns [N, heads, n] the tokens; both on the CPU."""
        own = self.ids[columns.clamp(max=len(self.ids) - 1)]
        return own if hints is None else own.where(columns < len(self.ids), hints[..., 0, None])


def _check_sizes(heads: MedusaHeads, vocabulary: int, size: int) -> None:
    if heads.hidden_size != size:
        raise ValueError(
            f"These Medusa heads are for a hidden size of {heads.hidden_size}, and the target's output head takes "
            f"{size}. {OTHERS}"
        )
    if heads.ids is not None and int(heads.ids.max()) >= vocabulary:
        raise ValueError(
            f"These Medusa heads guess tokens up to {int(heads.ids.max())}, and the target has {vocabulary}. {OTHERS}"
        )


OTHERS = (
    "Take the target they were made for, or train heads for yours: specnb.train_medusa(target, tokenizer, prompts)."
)


def hints_ahead(text: Hints, count: int) -> list[tuple[int, int]]:
    """What followed such a text before, token after token: (token, length of the suffix); (0, 0) where nothing did."""
    found, end, fresh = [], text.tokens[-LONGEST:], dict[tuple[int, ...], int]()
    for _ in range(count):
        token, size = text._hint(end, fresh)
        found.append((token, size))
        if size:
            fresh |= text._followed(end, token)
            end = [*end, token][-LONGEST:]
    return found


# --- the tree ---


class HasChances(Protocol):
    """Whatever knows how often paths of ranks were right."""

    @property
    def chances(self) -> Chances: ...


def medusa_shape(
    source: HasChances | Chances, cost: Callable[[int], float], *, max_nodes: int = 63, drafting: float = 0.0
) -> list[Ranks]:
    """The tree that writes the most tokens per second on a machine; empty if drafting does not pay.

        curve = specnb.forward_cost(model, positions=(1, 4, 8, 16, 32))
        drafter = specnb.Medusa(heads, specnb.medusa_shape(found, curve))

    Of all trees of a size the one of the most frequent paths writes the most: a path is not more frequent than its
    beginning, so the frequent ones are a tree. What is left to choose is the size.

    Args:
        source: what `train_medusa` has returned, a `Medusa` that was loaded, or the paths and their chances.
        cost: the time of a pass by its number of positions, such as a `CostCurve`; a tree of N nodes has N + 1.
        max_nodes: the largest tree looked at.
        drafting: the time of a round's drafting, in the unit of ``cost``.

    Raises:
        ValueError: if no chances are known.

    Derived in notebook 11.
    """
    chances: Chances = list(source if isinstance(source, Sequence) else source.chances)[:max_nodes]
    if not chances:
        raise ValueError(
            "These heads have not been measured, so nobody knows which tree suits them: use what train_medusa returns, "
            "or heads that were saved by it."
        )
    best, best_rate, tokens = 0, 1 / cost(1), 1.0
    for n, (_, chance) in enumerate(chances, start=1):
        tokens += chance
        rate = tokens / (cost(n + 1) + drafting)
        if rate > best_rate:
            best, best_rate = n, rate
    return [path for path, _ in chances[:best]]


# --- the drafter ---


class Medusa(Drafter):
    """Drafts a tree of guesses with extra heads of the target.

    The first round of a text has no guesses: the heads look at a hidden state of the pass before. Candidates are the
    heads' favourites, also when sampling: each is a deterministic guess, which keeps the law as any other does.

    Args:
        heads: trained ones, for this target.
        shape: the tree, as paths of ranks with parents first: (0,) is the first head's favourite, (1, 0) the second
            head's favourite after the first head's second choice. A number: so many nodes, of a tree that is grown
            anew each round where the heads are surest. Default: the heads' favourites, a chain.
        chances: of paths of ranks, most frequent first, how often they were right: for `medusa_shape`.

    Raises:
        ValueError: for a shape with a hole or of more depth than there are heads.
    """

    trees = True
    needs_hidden = True

    def __init__(
        self, heads: MedusaHeads, shape: Sequence[Sequence[int]] | int | None = None, *, chances: Chances = ()
    ) -> None:
        chain = [(0,) * depth for depth in range(1, len(heads) + 1)]
        self.grows = isinstance(shape, int)  # whether each round has a tree of its own
        paths = chain if shape is None else [] if isinstance(shape, int) else shape
        self.shape: list[Ranks] = [tuple(path) for path in paths]
        super().__init__(shape if isinstance(shape, int) else max(1, len(self.shape)))
        self.heads = heads
        self.chances: list[tuple[Ranks, float]] = [(tuple(path), chance) for path, chance in chances]
        self.parents = torch.tensor(trees.shape_parents(self.shape), dtype=torch.long)
        self._depths = torch.tensor([len(path) - 1 for path in self.shape], dtype=torch.long)
        self._ranks = torch.tensor([path[-1] for path in self.shape], dtype=torch.long)
        if self.shape and int(self._depths.max()) >= len(heads):
            raise ValueError(
                f"The tree is {int(self._depths.max()) + 1} guesses deep, and there are {len(heads)} heads."
            )
        if self.shape and int(self._ranks.min()) < 0:
            raise ValueError(f"A rank in the tree is below 0: {min(self.shape)}. Ranks count from 0, the favourite.")
        self._known: list[tuple[Tensor, int]] = []

    @classmethod
    def from_pretrained(
        cls, name: str | os.PathLike[str], shape: Sequence[Sequence[int]] | int | None = None
    ) -> Medusa:
        """Load heads: those that ship with specnb ("smollm2-135m-medusa"), or a folder that `save` has written.

        Args:
            shape: the tree; default: the one the heads were saved with.

        Raises:
            ValueError: if there are none, or the files are damaged. Whether they fit a target is seen when a run
                starts, before its first pass.
        """
        folder = _folder(name)
        told, weights = described(folder / DESCRIPTION, FORMAT), stored_weights(folder / WEIGHTS)
        ids = weights.pop(ROWS, None)
        heads = MedusaHeads(told["target"]["hidden_size"], told["heads"], ids, hinted=told["hinted"])
        wanted = {name: tuple(p.shape) for name, p in heads.state_dict().items()}
        if wanted != {name: tuple(p.shape) for name, p in weights.items()}:
            raise ValueError(f"{folder / WEIGHTS} does not hold the weights that its {DESCRIPTION} tells of.")
        heads.load_state_dict(weights)
        chances = [(tuple(path), chance) for path, chance in told["chances"]]
        return cls(heads.requires_grad_(False).eval(), told["shape"] if shape is None else shape, chances=chances)

    def save(
        self, folder: str | os.PathLike[str], target: PreTrainedModel, dtype: torch.dtype = torch.bfloat16
    ) -> Path:
        """Write the heads and their tree to a folder: safetensors, and a description with what they were made for.

        Returns:
            the folder.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: p.detach().to(dtype).contiguous().cpu() for name, p in self.heads.state_dict().items()}
        if self.heads.ids is not None:
            weights[ROWS] = self.heads.ids.int().cpu()
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
        made_for = {**signature(target), "hidden_size": self.heads.hidden_size}
        told: dict[str, Any] = {"format": FORMAT, "heads": len(self.heads), "hinted": self.heads.hinted}
        told |= {
            "target": made_for,
            "shape": self.num_draft_tokens if self.grows else self.shape,
            "chances": self.chances,
        }
        (folder / DESCRIPTION).write_text(json.dumps(told) + "\n", encoding="utf-8")
        return folder

    # --- a run ---

    def start(self, session: Session) -> None:
        self._attach(session.model)
        self._compiles = session.twin is not None
        widest, guessable = max([*self._ranks.tolist(), 0]) + 1, len(self._attached.ids)
        if self.grows:
            widest = min(WIDEST, self.num_draft_tokens, guessable)
        if widest > guessable:
            raise ValueError(f"The tree wants the {widest} best tokens of a head that can guess {guessable}.")
        self._widest = widest
        self._hidden: dict[int, Tensor] = {}  # row → [H], of the place that has predicted its newest token
        self._texts: dict[int, Hints] = {}

    def _attach(self, model: PreTrainedModel) -> None:
        """Copies of the heads and of some rows of the output matrix, if the last run's are not still the right ones."""
        output: Any = model.get_output_embeddings()
        tensors = [*output.parameters(), *self.heads.parameters()]
        versions = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
        known, seen = [tensor for tensor, _ in self._known], [version for _, version in self._known]
        if len(known) != len(tensors) or seen != versions or any(a is not b for a, b in zip(known, tensors)):
            self._attached = Attached(_like(self.heads, output.weight), model)
            self._graph: Callable[..., Tensor] | None = None
            self._known = list(zip(tensors, versions))

    def join(self, row: int) -> None:
        self.leave(row)

    def leave(self, row: int) -> None:
        self._hidden.pop(row, None)
        self._texts.pop(row, None)

    def look(self, hidden: Tensor, rows: Sequence[int]) -> None:
        """hidden [R, H] of these rows, at the places that have predicted their newest tokens."""
        self._hidden |= dict(zip(rows, hidden))

    @torch.no_grad()
    def draft(self, rows: Rows, limits: list[int]) -> Draft:
        ready = [b for b, limit in enumerate(limits) if limit > 0 and b in self._hidden]
        if not ready or not (self.shape or self.grows):
            return Draft.empty(len(rows))
        candidates, chances = self._candidates(rows, ready)
        if self.grows:
            return self._grown(candidates, chances, dict(zip(ready, range(len(ready)))), limits)
        tokens = torch.zeros(len(rows), len(self.shape), dtype=torch.long)
        tokens[ready] = candidates[:, self._depths, self._ranks]
        lengths = torch.zeros(len(rows), dtype=torch.long)
        lengths[ready] = torch.tensor([min(limits[b], len(self.shape)) for b in ready])
        return Draft(tokens, lengths, parents=self.parents.repeat(len(rows), 1))

    def _grown(self, candidates: Tensor, chances: Tensor, ready: dict[int, int], limits: list[int]) -> Draft:
        """For each row the tree of the paths that the heads find likeliest together."""
        found: list[tuple[list[int], list[int]]] = []
        for b, limit in enumerate(limits):
            if b not in ready:
                found.append(([], []))
                continue
            words = candidates[ready[b]].tolist()
            shape = trees.grow_shape(chances[ready[b]].tolist(), min(limit, self.num_draft_tokens))
            found.append(([words[len(path) - 1][path[-1]] for path in shape], trees.shape_parents(shape)))
        return Draft.from_trees(found)

    def _candidates(self, rows: Rows, ready: list[int]) -> tuple[Tensor, Tensor]:
        """The heads' best tokens for these rows, LongTensor [R, heads, widest], best first; and their chances."""
        newest = torch.tensor([rows.view(b)[-1] for b in ready])
        hints = torch.tensor([self._hints(rows, b) for b in ready]) if self.heads.hinted else None
        hidden = torch.stack([self._hidden[b] for b in ready])
        logits = self._logits(hidden, newest, hints)
        best = (logits.float().softmax(dim=-1) if self.grows else logits).topk(self._widest, dim=-1)
        return self._attached.tokens(best.indices.cpu(), hints), best.values

    def _logits(self, hidden: Tensor, newest: Tensor, hints: Tensor | None) -> Tensor:
        """Of one row through a graph, if the target's passes go through one, and if that can be."""
        if not self._compiles or len(hidden) > 1:
            return self._attached(hidden, newest, hints)
        given = [hidden, newest] if hints is None else [hidden, newest, hints]
        if self._graph is None:
            try:
                self._graph = self._attached.compiled(given)
            except Exception:  # whatever the compiler trips over, the heads themselves work
                self._compiles = False
                return self._attached(hidden, newest, hints)
        return self._graph(*given)

    def _hints(self, rows: Rows, b: int) -> list[tuple[int, int]]:
        text = self._texts.setdefault(b, Hints())
        text.extend(rows.view(b))
        return hints_ahead(text, len(self.heads))


def _like(heads: MedusaHeads, weight: Tensor) -> MedusaHeads:
    """The heads in the dtype and on the device of the target's output matrix; a copy, if they are not."""
    own = next(heads.parameters())
    if (own.dtype, own.device) == (weight.dtype, weight.device):
        return heads
    return copy.deepcopy(heads).to(device=weight.device, dtype=weight.dtype)


# --- files ---


def _folder(name: str | os.PathLike[str]) -> Path:
    path = Path(name).expanduser()
    shipped = data_path("drafts")
    for folder in (path, shipped / path.name) if len(path.parts) == 1 else (path,):
        if (folder / DESCRIPTION).is_file():
            return folder
    known = sorted(found.parent.name for found in shipped.glob(f"*/{DESCRIPTION}"))
    raise ValueError(
        f"There are no Medusa heads at {os.fspath(name)!r}: a folder with {DESCRIPTION} is wanted, or one of the heads "
        f"that ship with specnb ({', '.join(known) or 'none'})."
    )
