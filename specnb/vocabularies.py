"""Do target and draft read the same token ids the same way?

A drafted id is handed to the target as it is. Vocabularies that were only padded to different sizes (151,936 beside
152,064) are one vocabulary: ids that only the target has are never drafted (q = 0), and ids that only the draft has are
cut off. Under another tokenizer the same id stands for another piece of text: the output would stay the target's, and
hardly a guess would be right. Shown in notebook 10.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

from transformers import PreTrainedModel

from specnb import compat

PADDING = 512  # vocabularies are padded to multiples of up to this


def check_same_vocabulary(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Any = None, draft_tokenizer: Any = None
) -> None:
    """Raise unless draft and target read the same token ids the same way and sit on one device.

    With both tokenizers their vocabularies decide, token by token, whatever their classes: no id may stand for
    different tokens. One may have tokens that the other lacks. Without them the sizes are all there is to go by.

    Args:
        target, draft: the models.
        tokenizer, draft_tokenizer: theirs, if at hand.

    Raises:
        ValueError: that names both models, says what differs and what to do.
        TypeError: for something that is no tokenizer.
    """
    _check_device(target, draft)
    sizes = [compat.vocab_size(model) for model in (target, draft)]
    if tokenizer is not None and draft_tokenizer is not None:
        why = difference(tokenizer, draft_tokenizer)
    elif same_but_for_padding(*sizes):
        why = None
    else:
        why = (
            "their sizes differ by more than padding. If they do have one tokenizer, show it: "
            "DraftModel(..., tokenizer=...) and generate(..., tokenizer=...)"
        )
    if why is not None:
        names = [_name(model, known) for model, known in ((target, tokenizer), (draft, draft_tokenizer))]
        raise ValueError(
            f"The target {names[0]} ({sizes[0]} tokens) and the draft {names[1]} ({sizes[1]} tokens) do not share a "
            f"vocabulary: {why}. A drafted id would mean another token to the target. Take a draft of the target's own "
            "family, or one distilled from it (specnb.distill_draft), or a drafter without a vocabulary of "
            "its own, such as PromptLookup."
        )


def check_tokenizer(tokenizer: Any) -> None:
    """Raise unless it is None or can tell its vocabulary."""
    if tokenizer is not None and not callable(getattr(tokenizer, "get_vocab", None)):
        raise TypeError(
            f"tokenizer must be a transformers tokenizer, which has get_vocab(), got {type(tokenizer).__name__}. "
            "Load it with transformers.AutoTokenizer.from_pretrained(name)."
        )


def same_but_for_padding(a: int, b: int) -> bool:
    """Whether two vocabulary sizes can be one vocabulary padded differently."""
    return abs(a - b) < PADDING and min(a, b) > 0.9 * max(a, b)


def difference(tokenizer: Any, other: Any) -> str | None:
    """What the first says of an id and the other denies, in words; None if no id means different tokens to them.

    Args:
        tokenizer, other: with ``get_vocab()``, a dictionary token → id. Special tokens may differ in name (a reserved
            one is often renamed later); no text is made of them.

    A large vocabulary takes a tenth of a second to go through, so the tokenizers last found to agree are remembered.
    """
    check_tokenizer(tokenizer)
    check_tokenizer(other)
    if tokenizer is other or _known_to_agree(tokenizer, other):
        return None
    mine, theirs = ({id_: token for token, id_ in one.get_vocab().items()} for one in (tokenizer, other))
    shared = (mine.keys() & theirs.keys()) - _added(tokenizer) - _added(other)
    unlike = [id_ for id_ in shared if mine[id_] != theirs[id_]]
    if not shared:
        return "their tokenizers have no id in common"
    if unlike:
        first = min(unlike)
        return (
            f"their tokenizers assign different ids. {len(unlike)} of {len(shared)} ids mean another token, such as "
            f"{first}, which is {mine[first]!r} to the target and {theirs[first]!r} to the draft"
        )
    with contextlib.suppress(TypeError):  # something that is no tokenizer of transformers, and cannot be remembered
        _agreeing[tokenizer] = weakref.ref(other), len(tokenizer), len(other)
    return None


_agreeing: weakref.WeakKeyDictionary[Any, tuple[Any, int, int]] = weakref.WeakKeyDictionary()


def _known_to_agree(tokenizer: Any, other: Any) -> bool:
    with contextlib.suppress(TypeError):
        known, *counts = _agreeing.get(tokenizer, (lambda: None, 0, 0))
        return known() is other and counts == [len(tokenizer), len(other)]  # it may have been given tokens since
    return False


def _added(tokenizer: Any) -> set[int]:
    return set(getattr(tokenizer, "added_tokens_decoder", ()))


def _name(model: PreTrainedModel, tokenizer: Any) -> str:
    """The model by the name it was loaded under, or its tokenizer's, or its class."""
    name = model.config.name_or_path or getattr(tokenizer, "name_or_path", "") or type(model).__name__
    return repr(name)


def _check_device(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    if target.device != draft.device:
        raise ValueError(
            f"The target is on {target.device}, the draft model on {draft.device}; put both on one device: "
            f"draft.to({str(target.device)!r})."
        )
