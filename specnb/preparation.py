"""From what a caller passes to what the loop needs: transformers prepares each row as if it were alone.

`model.generate` turns a `GenerationConfig` and keyword arguments into logits processors and stopping criteria, then
calls a function of ours instead of its own loop. Preparing each row by itself keeps prompt lengths, penalties and
minimum lengths those of the unpadded row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import MaxLengthCriteria, StopStringCriteria

from specnb import checks

# what model.generate hands to a custom loop for its own bookkeeping; anything else would be an input we do not use
_BOOKKEEPING = {
    "attention_mask", "position_ids", "cache", "past_key_values", "cache_position", "use_cache", "logits_to_keep",
    "token_type_ids", "synced_gpus",
}  # fmt: skip


# arguments of model.generate that would be dropped in silence, and what to do instead
_OTHER_INPUTS = {
    "assistant_model": "Pass drafter=specnb.DraftModel(model).",
    "assistant_tokenizer": "Pass drafter=specnb.DraftModel(model, tokenizer=...).",
    "negative_prompt_ids": "Classifier-free guidance is not supported.",
    "position_ids": "Positions follow from the attention mask.",
    "token_type_ids": "The model is fed token ids only.",
}


@dataclass
class Request:
    """One row to decode: its prompt, and the rules transformers made for it."""

    prompt: list[int]
    budget: int
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig


def prepare(model: PreTrainedModel, prompt: list[int], tokenizer: Any, options: dict[str, Any]) -> list[Request]:
    """One request per returned sequence of this prompt (``num_return_sequences``).

    Raises:
        ValueError: from transformers for options it does not know, from specnb for those it cannot honour.
    """
    options = with_stop_strings(model, tokenizer, options)
    if unused := sorted(name for name in _OTHER_INPUTS if options.get(name) is not None):
        raise ValueError(f"{unused[0]}: specnb does not use it. {_OTHER_INPUTS[unused[0]]}")
    input_ids = torch.tensor([prompt], device=model.device)
    mask = torch.ones_like(input_ids)
    return model.generate(input_ids, attention_mask=mask, custom_generate=_capture, **options)  # type: ignore[return-value]


def _capture(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> list[Request]:
    check_inputs(model_kwargs)
    return requests_of(input_ids.tolist(), input_ids.shape[1], logits_processor, stopping_criteria, generation_config)


def requests_of(
    prompts: list[list[int]],
    padded_length: int,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
) -> list[Request]:
    """Requests that share one preparation. The length limit becomes a budget of new tokens, the same for all rows."""
    checks.check_generation_config(config)
    checks.check_processors(processors, prompts, padded_length)
    ends = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
    others = StoppingCriteriaList(c for c in criteria if type(c) is not MaxLengthCriteria)
    budget = min(ends) - padded_length if ends else 2**31
    return [Request(prompt, budget, processors, others, config) for prompt in prompts]


def with_stop_strings(model: PreTrainedModel, tokenizer: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Turn stop strings into a criterion here: transformers does not pass the tokenizer on to a custom loop."""
    configs = [options.get("generation_config"), model.generation_config]
    defaults = [getattr(config, "stop_strings", None) for config in configs]
    stop_strings = options["stop_strings"] if "stop_strings" in options else next((s for s in defaults if s), None)
    if not stop_strings:
        return {**options, "stop_strings": None} if "stop_strings" in options else options
    if tokenizer is None:
        raise ValueError(
            f"stop_strings={stop_strings!r} needs the model's tokenizer: generate(..., tokenizer=tokenizer)."
        )
    stop = StopStringCriteria(tokenizer=tokenizer, stop_strings=stop_strings)
    criteria = StoppingCriteriaList([*(options.get("stopping_criteria") or []), stop])
    return {**options, "stop_strings": None, "stopping_criteria": criteria}


def check_inputs(model_kwargs: dict[str, Any]) -> None:
    """Raise for model inputs that the loop would silently leave out."""
    unused = sorted(name for name, value in model_kwargs.items() if value is not None and name not in _BOOKKEEPING)
    if unused:
        raise ValueError(
            f"specnb feeds the model token ids only; it does not pass on {', '.join(unused)}. "
            "Leave them out, or use model.generate."
        )
    given = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
    if given is not None and given.get_seq_length() > 0:
        raise ValueError("A cache that already holds tokens cannot be continued; pass the whole prompt without it.")
