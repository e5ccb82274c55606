"""Early exit: the target's own first layers, its last norm and its head are the draft. No second model, no training.

The draft shares the target's cache. What the first layers have computed of the committed tokens is there already, so
that nothing is prefilled twice; their entries of the guesses are dropped before the target's pass, which writes its
own. So the target's pass is the very one it would have been with any other drafter, bit for bit where one pass width
is asked for.

Could that pass start from what the first layers have computed of the guesses, instead of computing it again? The last
guess has not been through them, and a pass over it reads the same weights as one over all: where speculation pays,
reading is what takes the time, so next to nothing would be saved.

Sources: Zhang et al. 2023, "Draft & Verify" (arXiv 2309.08168); Elhoushi et al. 2024, "LayerSkip" (arXiv 2404.16710).
Notebook 10 measures α by layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specnb import compat
from specnb.cache import for_all_rows, target_pass
from specnb.drafters.base import Draft, Session
from specnb.drafters.draft_model import DraftModel
from specnb.drafters.stepwise import StepwiseDrafter

if TYPE_CHECKING:
    from specnb.rows import Rows

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class EarlyExit(StepwiseDrafter):
    """Drafts with the first layers of the target.

        specnb.generate(model, input_ids, drafter=specnb.EarlyExit(layer=20), max_new_tokens=64)

    Handles every family whose cache `specnb` can roll back, batches, sampling, and ``compile=True``. The model is not
    modified. A model that was not trained to exit early agrees with its own first layers seldom; measure before use.

    Args:
        layer: how many of the target's layers draft, from 1 to one less than it has. Passes cost about as much as this
            share of the layers, and the head.
        num_draft_tokens: k, tokens drafted per round.

    Raises:
        ValueError: for a layer that is no such number; if the target's number of layers decides, when a run starts.
    """

    needs_cache = True

    def __init__(self, layer: int, num_draft_tokens: int = 4) -> None:
        super().__init__(num_draft_tokens)
        if isinstance(layer, bool) or not isinstance(layer, int) or layer < 1:
            raise ValueError(
                f"layer must be a whole number from 1 to one less than the target has, got {layer!r}: that many of "
                "its first layers draft."
            )
        self.layer = layer

    def start(self, session: Session) -> None:
        super().start(session)
        self._network = first_layers(session.model if session.twin is None else session.twin.network, self.layer)
        if session.cache is None:
            raise ValueError(
                "EarlyExit drafts from the target's own cache, and here is none. EarlyExit.alone(model) is the same "
                "draft with a cache of its own."
            )
        self._cache = session.cache

    def alone(self, model: PreTrainedModel) -> DraftModel:
        """The same draft as a model of its own, with a second cache: where there is no target pass to share one with.

        Args:
            model: the target.

        Raises:
            ValueError: as a run with this target would.
        """
        return DraftModel(first_layers(model, self.layer), self.num_draft_tokens)

    def draft(self, rows: Rows, limits: list[int]) -> Draft:
        before = self._cache.lengths
        try:
            return super().draft(rows, limits)
        finally:  # the target writes its own entries
            self._cache.rollback(self._cache.lengths - before)

    def _logits(self, rows: Rows, wanted: Tensor, guesses: Tensor) -> Tensor:
        chosen = wanted.nonzero().flatten().tolist()
        newest = guesses[:, -1] if guesses.shape[1] else torch.tensor([rows.view(b)[-1] for b in range(len(rows))])
        return for_all_rows(self._pass(newest[chosen], chosen), chosen, len(rows))

    def _pass(self, tokens: Tensor, rows: list[int]) -> Tensor:
        """One token [R] of each of these rows through the first layers; logits [R, V]."""
        twin, cache = self._session.twin, self._cache
        cache.reserve(max(cache.lengths[rows].tolist()) + 1)
        if twin is None:
            return target_pass(self._network, cache, tokens[:, None], rows=rows)[:, 0]
        return twin.target_pass(cache, tokens[:, None], rows, self._network)[:, 0]


def first_layers(model: PreTrainedModel, layer: int) -> PreTrainedModel:
    """The model cut off after its first layers: a view that shares everything it keeps, weights and modules.

    Args:
        model: a causal LM of transformers; it is not touched.
        layer: how many layers stay, from 1 to one less than there are.

    Raises:
        ValueError: if layer lies outside, or if the model's layers cannot be told from the rest of it.
    """
    count = compat.text_config(model.config).num_hidden_layers
    if not 1 <= layer < count:
        raise ValueError(
            f"layer must lie between 1 and {count - 1}, since {type(model).__name__} has {count} layers, got {layer}."
            + ("" if count > 1 else " A model of one layer has no early exit.")
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and _writes_to_cache(module[-1]):
            return _replaced(model, name.split("."), nn.ModuleList(list(module)[:layer]))
    raise ValueError(
        f"{type(model).__name__} has no list of decoder layers that can be cut short, so it cannot exit early. Take "
        "another drafter."
    )


def _replaced(module: ModuleT, path: list[str], part: nn.Module) -> ModuleT:
    """A copy of the module with the submodule at this path replaced; it shares all others. Hooks stay behind."""
    copy: Any = object.__new__(type(module))
    vars(copy).update(vars(module))
    for attribute in ("forward", "_compiled_call_impl"):  # both would run the whole module
        vars(copy).pop(attribute, None)
    copy._forward_hooks, copy._forward_pre_hooks = {}, {}
    copy._output_capturing_hooks_installed = True  # else transformers might give the shared layers hooks, a second time
    inner = getattr(module, path[0])
    vars(copy)["_modules"] = {**module._modules, path[0]: _replaced(inner, path[1:], part) if path[1:] else part}
    return copy


def _writes_to_cache(layer: nn.Module) -> bool:
    """Whether it is a layer of the decoder, and not of an image encoder that happens to have as many."""
    return any(getattr(module, "layer_idx", None) is not None for module in layer.modules())
