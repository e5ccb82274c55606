"""generate_many: a list of prompts through a `Batcher`, results in order, and a file from which a broken run goes on.

The file is JSON lines: first the settings that determine the texts, then one line per finished prompt, appended and
flushed as it ends. Whatever stops the run, what is in the file stays done. Used in notebook 08.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from specnb.batching import Batcher, Completion, Job, prompt_ids
from specnb.drafters.base import Drafter
from specnb.prefill import CHUNK
from specnb.progress import Progress

FORMAT = "specnb completions 1"
AHEAD = 4  # prompts taken from the iterable before the oldest unfinished one, in batches
_NUMBERS = ("target_passes", "drafted", "accepted", "seconds", "seconds_waiting", "time_to_first_token")

Prompt = Sequence[int] | Tensor | str


def generate_many(
    model: PreTrainedModel,
    prompts: Iterable[Prompt],
    drafter: Drafter | None = None,
    *,
    path: str | os.PathLike[str] | None = None,
    max_batch: int = 8,
    seed: int | None = None,
    pass_width: int | None = None,
    compile: bool = False,
    tokenizer: Any = None,
    progress: bool = True,
    **generation_kwargs: Any,
) -> Iterator[Completion]:
    """Decode many prompts, a few at a time, and yield what became of each, in the prompts' order.

        for done in specnb.generate_many(model, prompts, path="answers.jsonl", max_new_tokens=64):
            print(done.number, tokenizer.decode(done.tokens))

    A prompt that fails, because of its ids or of a rule that raises, yields a `Completion` with its ``error``; the
    others go on. Leaving the loop early gives up what has not ended.

    Args:
        model, drafter, pass_width, compile, **generation_kwargs: as for `generate`.
        prompts: token ids, or texts if there is a tokenizer. An iterator is taken from little by little.
        path: a JSON-lines file. What it holds is not decoded again; what ends is appended. Prompts that failed are
            tried again. With a tokenizer the text is written too.
        max_batch: slots of the `Batcher`.
        seed: prompt i samples with seed + i, as ``generate(seed=seed + i)`` would.
        progress: show how many prompts are done.

    Raises:
        ValueError: if the file was written with other settings, or for other prompts.
        what the model or the drafter raises, once the finished prompts are in the file.
    """
    batcher = Batcher(
        model, drafter, max_batch=max_batch, pass_width=pass_width, compile=compile, tokenizer=tokenizer,
        prefill_chunk=CHUNK,  # nobody watches a text grow: what counts is that all slots are in use
        **generation_kwargs,
    )  # fmt: skip
    record = None if path is None else Record(Path(path), settings(model, seed, batcher.pass_width, generation_kwargs))
    return _run(batcher, prompts, seed, record, progress)


def _run(
    batcher: Batcher, prompts: Iterable[Prompt], seed: int | None, record: Record | None, progress: bool
) -> Iterator[Completion]:
    total = len(prompts) if isinstance(prompts, Sequence | Tensor) else None
    source, window = enumerate(prompts), AHEAD * len(batcher._slots.rows)
    line: deque[Completion | Job] = deque()  # in the prompts' order, from the oldest that has not been yielded
    told = 0
    with batcher, record or nullcontext(), Progress("prompts", total, "prompts") if progress else nullcontext() as bar:
        exhausted = False
        while line or not exhausted:
            while len(line) < window and not exhausted:
                exhausted = (entry := next(source, None)) is None
                line += [] if entry is None else [_entry(batcher, *entry, seed, record)]
            while line and isinstance(line[0], Completion):
                yield line.popleft()  # type: ignore[misc]
                told += 1
            if bar is not None:
                bar.update(told)
            if line and isinstance(line[0], Job):
                batcher.step()
                line = deque(_settled(entry, record) for entry in line)


def _entry(batcher: Batcher, i: int, prompt: Prompt, seed: int | None, record: Record | None) -> Completion | Job:
    """What is known of prompt i: done before, refused, or now in the queue."""
    ids: list[int] = []
    try:
        ids = prompt_ids(prompt, batcher.tokenizer).tolist()
        if record is not None and (done := record.of(i, ids)) is not None:
            return done
        job = batcher.submit(ids, seed=None if seed is None else seed + i)
        job.number = i
        return job
    except (ValueError, TypeError) as error:
        if isinstance(error, OtherRun):
            raise
        return _noted(Completion(i, ids, [], "error", error), record, batcher.tokenizer)


def _settled(entry: Completion | Job, record: Record | None) -> Completion | Job:
    if isinstance(entry, Completion) or not entry.done:
        return entry
    return _noted(entry.completion(), record, entry._batcher.tokenizer)


def _noted(done: Completion, record: Record | None, tokenizer: Any) -> Completion:
    if record is not None:
        record.append(done, None if tokenizer is None else tokenizer.decode(done.tokens, skip_special_tokens=True))
    return done


class OtherRun(ValueError):
    """The file belongs to another run."""


class Record:
    """The file of a run: read at once, appended to from `__enter__` on. A line that a crash cut off is dropped.

    Raises:
        OtherRun: a ValueError, if the file is of another run, or of no run at all; it is left as it is.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, settings
        written = path.read_bytes() if path.exists() else b""
        whole = written[: written.rfind(b"\n") + 1]
        lines = [_parsed(path, i, line) for i, line in enumerate(whole.split(b"\n")[:-1])]
        if lines:
            _check_head(path, lines[0], settings)
        elif written and not _HEAD.startswith(written[: len(_HEAD)]):
            raise OtherRun(f"{path} was not written by generate_many; take another file.")
        self._whole, self._is_cut = len(whole), len(whole) < len(written)
        self._done = {line["number"]: line for line in lines[1:]}

    def of(self, i: int, prompt: list[int]) -> Completion | None:
        """What the file says of prompt i; None if it is not done, or failed."""
        line = self._done.get(i)
        if line is None or line["finish_reason"] == "error":
            return None
        if line["prompt"] != fingerprint(prompt):
            raise OtherRun(
                f"{self.path}: prompt {i} is another one than when its line was written. The file goes with the "
                "prompts it was begun for; take another file."
            )
        return Completion(i, prompt, line["tokens"], line["finish_reason"], **{name: line[name] for name in _NUMBERS})

    def append(self, done: Completion, text: str | None) -> None:
        line = {"number": done.number, "prompt": fingerprint(done.prompt), "tokens": done.tokens}
        line |= {} if text is None else {"text": text}
        line |= {"finish_reason": done.finish_reason, **{name: getattr(done, name) for name in _NUMBERS}}
        line |= {} if done.error is None else {"error": f"{type(done.error).__name__}: {done.error}"}
        self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()

    def __enter__(self) -> Record:
        if self._is_cut:
            os.truncate(self.path, self._whole)
        self._file = open(self.path, "a", encoding="utf-8")
        if not self._whole:
            self._write({"format": FORMAT, "settings": self.settings})
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


_HEAD = json.dumps({"format": FORMAT})[:-1].encode()


def _parsed(path: Path, i: int, line: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(line)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict) or ("format" if i == 0 else "number") not in parsed:
        raise OtherRun(f"{path}: line {i + 1} is none that generate_many wrote; take another file, or remove the line.")
    return parsed


def _check_head(path: Path, head: dict[str, Any], settings: dict[str, Any]) -> None:
    if head["format"] != FORMAT:
        raise OtherRun(f"{path} says {head['format']!r}, expected {FORMAT!r}; take another file.")
    for name in {**head["settings"], **settings}:
        before, now = head["settings"].get(name), settings.get(name)
        if before != now:
            raise OtherRun(
                f"{path} was written with {name} = {before!r}, now it is {now!r}. Results of both do not belong in "
                "one file: go on with the settings it was begun with, or take another file."
            )


def settings(
    model: PreTrainedModel, seed: int | None, pass_width: int | None, options: dict[str, Any]
) -> dict[str, Any]:
    """What determines the texts, or their law, as JSON has it. Drafter and batch size do not."""
    defaults = {k: v for k, v in model.generation_config.to_diff_dict().items() if k != "transformers_version"}
    return json.loads(json.dumps({
        "model": model.config.name_or_path or type(model).__name__,
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype),
        "seed": seed,
        "pass_width": pass_width,
        **{f"default {name}": _plain(value) for name, value in defaults.items()},
        **{name: _plain(value) for name, value in options.items()},
    }))  # fmt: skip


def _plain(value: Any) -> Any:
    """A value as JSON can hold it, the same in every process; of objects, what they are."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, GenerationConfig):
        return _plain(value.to_diff_dict())
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(v) for v in value]
    return getattr(value, "__qualname__", type(value).__qualname__)


def fingerprint(prompt: list[int]) -> str:
    """A prompt in sixteen letters."""
    return hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:16]
