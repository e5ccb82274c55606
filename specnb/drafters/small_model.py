"""A small causal model made of a target's own parts: a few of its layers, its embedding, some rows of its head.

A draft that reads and writes the target's vocabulary could spend most of its bytes on it: the embedding and head of
SmolLM2-135M are 28 million of its 135 million weights, and a layer is 3.5 million. So the embedding is the target's own
tensor, and the head a copy of the rows of those tokens that the target really writes. Only the layers, the norm
and two square matrices, one for hints and one before the head, are the draft's own, to be trained
(`specnb.distill_draft`), and only they are saved.

Which layers to begin with, and how many rows are enough, is measured in notebook 10.
"""

from __future__ import annotations

import copy
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from specnb import compat
from specnb.drafters.hints import LONGEST, decoded
from specnb.resources import data_path

FORMAT = "specnb draft 1"
DESCRIPTION, WEIGHTS = "draft.json", "draft.safetensors"
ROWS = "head_ids"  # the tokens that the head scores, beside the weights


class HintedEmbedding(nn.Module):
    """The target's embedding of a token, and what the draft makes of the token's hint (`specnb.drafters.hints`).

    The target's embedding is looked at but neither copied, trained nor saved; its vectors come in the draft's dtype.
    """

    def __init__(self, embedding: nn.Module, size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.__dict__["embedding"] = embedding  # no part of this module: it stays where it is, as it is
        self.hint = nn.Linear(size, size, bias=False, dtype=dtype, device=device)
        self.length = nn.Embedding(LONGEST + 1, size, dtype=dtype, device=device)
        with torch.no_grad():
            self.hint.weight.copy_(0.5 * _rotation(size))
            self.length.weight.zero_()

    def __deepcopy__(self, memo: dict[int, Any]) -> HintedEmbedding:
        """A copy looks at the same embedding of the target, and shares what the memo says is shared."""
        embedding: Any = self.embedding
        twin = HintedEmbedding(embedding, self.length.embedding_dim, self.dtype, self.device)
        twin.hint, twin.length = copy.deepcopy(self.hint, memo), copy.deepcopy(self.length, memo)
        return twin

    @property
    def device(self) -> torch.device:
        return self.length.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.length.weight.dtype

    @property
    def num_embeddings(self) -> int:
        embedding: Any = self.embedding
        return embedding.num_embeddings

    def forward(self, codes: Tensor) -> Tensor:
        """Encoded tokens [B, T] (or plain ones, which have no hint) → vectors [B, T, H]."""
        tokens, hints, sizes = decoded(codes)
        _heard.hints = torch.where(sizes > 0, hints, -1)
        own, told = self._look_up(tokens), self._look_up(hints)
        return own + (self.hint(told) + self.length(sizes)) * (sizes > 0)[..., None]

    def _look_up(self, tokens: Tensor) -> Tensor:
        embedding: Any = self.embedding
        with torch.no_grad():
            return embedding(tokens).to(self.dtype)


def _rotation(size: int) -> Tensor:
    """A fixed orthogonal matrix [size, size]: turned by it, a hint is told from the token it comes with."""
    generator = torch.Generator().manual_seed(0)
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q.float()


class ShortHead(nn.Module):
    """Output head for some of the tokens, and for the one that is hinted; the others get the logit −∞: q is 0 there.

    Its rows are the target's and fixed. Before them comes a square matrix of the draft's own: what a few layers make of
    a text does not point where the target's last layer does. At first it passes everything on, and turns hints back
    into tokens.

    Args:
        head: the target's, with ``weight`` [V, H] and perhaps ``bias`` [V].
        ids: LongTensor [V'], the tokens of the rows.

    Attributes:
        places: while training, a mask [B, T] of the places whose logits [N, V' + 1] are wanted. The last column is the
            hint's, if it has no row among the others; else −∞.
    """

    ids: Tensor
    has_row: Tensor

    def __init__(self, head: nn.Module, ids: Tensor) -> None:
        super().__init__()
        whole: Any = head
        self.__dict__["head"] = head  # looked at, but no part of this module
        weight, bias = whole.weight.detach(), getattr(whole, "bias", None)
        self.vocab_size, size = weight.shape
        ids = ids.to(weight.device)
        self.bridge = nn.Linear(size, size, bias=False, device=weight.device)
        self.bridge.weight = nn.Parameter((torch.eye(size) + _rotation(size).T).to(weight))
        self.linear = nn.Linear(size, len(ids), bias=bias is not None, device=weight.device)
        self.linear.weight = nn.Parameter(weight[ids].clone(), requires_grad=False)
        if bias is not None:
            self.linear.bias = nn.Parameter(bias.detach()[ids].clone(), requires_grad=False)
        self.register_buffer("ids", ids, persistent=False)
        self.register_buffer("has_row", torch.zeros(self.vocab_size + 1, dtype=torch.bool), persistent=False)
        self.has_row[ids] = self.has_row[-1] = True  # −1 stands for "no hint"
        self.places: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ShortHead:
        """A copy looks at the same head of the target, and shares what the memo says is shared."""
        twin = ShortHead.__new__(ShortHead)
        memo |= {id(self): twin, id(self.head): self.head}
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return twin

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [B, T, H] → logits [B, T, V]."""
        hints = _heard.hints[:, -hidden.shape[1] :]
        if self.places is not None:
            hidden, hints = self.bridge(hidden[self.places]), hints[self.places]
            return torch.cat([self.linear(hidden), self._of_hints(hidden, hints)], dim=-1)
        hidden = self.bridge(hidden)
        logits = hidden.new_full((*hidden.shape[:-1], self.vocab_size), float("-inf"))
        logits[..., self.ids] = self.linear(hidden)
        place = torch.where(self.has_row[hints], 0, hints)[..., None]  # where there is no such hint, nothing changes
        of_place = torch.where(self.has_row[hints][..., None], logits.gather(-1, place), self._of_hints(hidden, hints))
        return logits.scatter(-1, place, of_place)

    def _of_hints(self, hidden: Tensor, hints: Tensor) -> Tensor:
        """The logits [..., 1] of hinted tokens that have no row; −∞ for the others."""
        head: Any = self.head
        own = self.has_row[hints]
        tokens = hints.clamp(min=0)
        logits = (hidden * head.weight.detach()[tokens].to(hidden)).sum(-1)
        if getattr(head, "bias", None) is not None:
            logits = logits + head.bias.detach()[tokens].to(hidden)
        return logits.masked_fill(own, float("-inf"))[..., None]


_heard = threading.local()  # the hints of the pass under way in this thread: an embedding hears, a head speaks


def small_model(
    target: PreTrainedModel, layers: Sequence[int], ids: Tensor, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """A model of the target's family with copies of some of its layers, and a head for some of its tokens.

    Args:
        target: a causal LM; it is not modified, and its embedding and head are looked at.
        layers: which of its layers, in order; one may be named twice.
        ids: LongTensor [V'], different token ids.
        dtype: of the layers and the head; default: the target's.

    Returns:
        a model like any other of transformers, in eval mode, whose own parameters (`own_parameters`) can be trained.

    Raises:
        ValueError: for a layer or token that the target does not have.
    """
    depth, vocabulary = compat.text_config(target.config).num_hidden_layers, compat.vocab_size(target)
    if not layers or not all(0 <= layer < depth for layer in layers):
        raise ValueError(f"layers must name some of the target's layers 0…{depth - 1}, got {list(layers)}.")
    ids = torch.as_tensor(ids).long()
    if ids.ndim != 1 or not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise ValueError(f"ids must be a list of tokens 0…{vocabulary - 1}, got {ids!r:.80}.")
    shared = {id(tensor): tensor for tensor in [*target.parameters(), *target.buffers()]}
    draft = copy.deepcopy(target, shared)  # new modules around the target's tensors
    _keep_layers(draft, list(layers))
    _own(draft)
    embedding: Any = target.get_input_embeddings()
    head: Any = target.get_output_embeddings()
    size = embedding.weight.shape[1]
    draft.set_input_embeddings(HintedEmbedding(embedding, size, target.dtype, head.weight.device))
    draft.set_output_embeddings(ShortHead(head, ids))
    draft.config.grown_from = list(layers)
    compat.text_config(draft.config).tie_word_embeddings = draft.config.tie_word_embeddings = False
    return draft.to(dtype or target.dtype).eval()


def _keep_layers(draft: PreTrainedModel, layers: list[int]) -> None:
    """Cut the model down to these layers, and its configuration with it."""
    config = compat.text_config(draft.config)
    depth = config.num_hidden_layers
    for module in draft.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == depth:
                kept = [_renumbered(copy.deepcopy(child[old], _same(draft)), new) for new, old in enumerate(layers)]
                setattr(module, name, nn.ModuleList(kept))
    config.num_hidden_layers = len(layers)
    for name in ("layer_types", "no_rope_layers"):
        if getattr(config, name, None):
            setattr(config, name, [getattr(config, name)[old] for old in layers])


def _same(draft: PreTrainedModel) -> dict[int, Any]:
    """What a copy of a layer has in common with the others: the configuration, where settings are looked up."""
    return {id(config): config for config in (draft.config, compat.text_config(draft.config))}


def _renumbered(layer: nn.Module, index: int) -> nn.Module:
    for module in layer.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = index  # type: ignore[assignment]
    return layer


def _own(draft: PreTrainedModel) -> None:
    """Copies in place of all shared parameters but the embedding's and the head's."""
    ends = {id(p) for end in (draft.get_input_embeddings(), draft.get_output_embeddings()) for p in end.parameters()}
    for module in draft.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in ends:
                setattr(module, name, nn.Parameter(parameter.detach().clone()))


def own_parameters(draft: PreTrainedModel) -> dict[str, nn.Parameter]:
    """What a `small_model` does not take from its target: the parameters of the layers and of what is around them."""
    head: Any = draft.get_output_embeddings()
    frozen = {id(p) for p in head.linear.parameters()}
    return {name: p for name, p in draft.named_parameters() if id(p) not in frozen}


# --- files ---


def save_small_model(
    draft: PreTrainedModel, target: PreTrainedModel, folder: str | os.PathLike[str], dtype: torch.dtype | None = None
) -> Path:
    """Write a `small_model` to a folder: ``draft.safetensors``, and ``draft.json`` with what it was made for.

    Args:
        draft: of `small_model`.
        target: whose parts it was made of.
        folder: is made if need be.
        dtype: of the weights in the file; default: the draft's.

    Returns:
        the folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: p.detach().to(dtype or p.dtype).contiguous().cpu() for name, p in own_parameters(draft).items()}
    head: Any = draft.get_output_embeddings()
    save_file({**weights, ROWS: head.ids.int().cpu()}, folder / WEIGHTS, metadata={"format": "pt"})
    told = {"format": FORMAT, "layers": draft.config.grown_from, "head_rows": len(head.ids)}
    told["target"] = signature(target)
    (folder / DESCRIPTION).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return folder


def signature(model: PreTrainedModel) -> dict[str, Any]:
    """What a draft made for one target requires of another."""
    config = compat.text_config(model.config)
    names = ("model_type", "vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers")
    return {name: getattr(config, name) for name in names}


def small_model_folder(name: str | os.PathLike[str]) -> Path | None:
    """The folder of a small model: this one, or the one that ships with specnb under this name; None if neither is."""
    path = Path(name).expanduser()
    if path.exists() or len(path.parts) != 1:
        return path if (path / DESCRIPTION).is_file() else None
    shipped = data_path("drafts") / path.name
    return shipped if (shipped / DESCRIPTION).is_file() else None


def load_small_model(
    folder: str | os.PathLike[str], target: PreTrainedModel, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """Read a small model back, and give it the target's embedding and head.

    Raises:
        ValueError: if it was made for a target of another size, family or vocabulary, or the files are damaged.
    """
    folder = Path(folder)
    told = described(folder / DESCRIPTION, FORMAT)
    _check_target(folder, told["target"], signature(target))
    weights = _weights(folder)
    draft = small_model(target, told["layers"], weights.pop(ROWS), dtype)
    own = own_parameters(draft)
    found, expected = ({name: tuple(p.shape) for name, p in which.items()} for which in (weights, own))
    if found != expected:
        wrong = sorted(set(found.items()) ^ set(expected.items()))[0]
        raise ValueError(f"{folder / WEIGHTS} does not hold the weights that its {DESCRIPTION} tells of: {wrong}.")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])
            parameter.requires_grad_(False)
    return draft


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype, or its name."""
    if dtype is None:
        return None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f"dtype must be a floating-point torch.dtype or its name, got {dtype!r}.")
    return found


def described(path: Path, format: str) -> dict[str, Any]:
    """The description that lies beside weights of this project's own, in the format it must have."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged: {error}.") from error
    if told.get("format") != format:
        raise ValueError(f"{path} says format {told.get('format')!r}; this release reads {format!r}.")
    return told


def stored_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file."""
    from safetensors import SafetensorError

    try:
        return load_file(path)
    except (SafetensorError, FileNotFoundError) as error:
        raise ValueError(f"{path} is missing or damaged: {error}. Fetch or save it again.") from error


def _weights(folder: Path) -> dict[str, Tensor]:
    weights = stored_weights(folder / WEIGHTS)
    if ROWS not in weights:
        raise ValueError(f"{folder / WEIGHTS} lacks {ROWS!r}, the tokens that the draft's head scores.")
    return weights


def _check_target(folder: Path, wanted: dict[str, Any], there: dict[str, Any]) -> None:
    if wanted != there:
        differ = ", ".join(f"{name} {value!r}, not {there.get(name)!r}" for name, value in wanted.items()
                           if value != there.get(name))  # fmt: skip
        raise ValueError(
            f"The draft in {folder} shares its embedding and head with the target it was trained for, and this is "
            f"another model. It wants {differ}. Take the target it was made for, or distil a draft for yours: "
            "specnb.distill_draft(target, tokenizer)."
        )
