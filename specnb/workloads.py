"""What is asked while measuring: the suite that comes with specnb, or any file of questions in the MT-bench form.

    prompts = specnb.load_prompts(group="code_edit", limit=3)
    ids = specnb.encode(tokenizer, prompts[0])

A line of such a file is a JSON object with ``turns``, the user's messages in order, and usually ``question_id`` and
``category`` (the group). MT-bench and Spec-Bench publish their questions in this form; other keys are ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specnb.resources import data_path

# The suite's groups, in the order of the reports: from answers that repeat the question to answers that do not.
GROUPS = (
    "copy_heavy_summary",
    "retrieval_answer",
    "code_edit",
    "code_completion",
    "structured_output",
    "list",
    "maths",
    "translation",
    "open_story",
)


@dataclass(frozen=True)
class Prompt:
    """One question.

    Attributes:
        id: what the file calls it; unique in a workload.
        group: the kind of question; "" if the file names none.
        turns: the user's messages, at least one. `encode` asks the first; the later ones follow the model's answers.
    """

    id: str
    group: str
    turns: tuple[str, ...]


def load_prompts(
    source: str | os.PathLike[str] | None = None,
    group: str | Sequence[str] | None = None,
    limit: int | None = None,
) -> list[Prompt]:
    """Read questions.

    Args:
        source: a JSONL file, or a folder of them; None means the suite of ninety that comes with specnb.
        group: only this one, or these.
        limit: at most so many of each group, the first ones.

    Returns:
        The prompts, group by group in the order of `GROUPS` (the suite) or of the file.

    Raises:
        ValueError: for a line that is not such a question (file and line are named), two questions of one id, a group
            that does not occur, or nothing to read.
        OSError: if the file cannot be read.
    """
    folder = data_path("prompts") if source is None else Path(source).expanduser()
    prompts = [prompt for path in _files(folder, suite=source is None) for prompt in _read(path)]
    if not prompts:
        raise ValueError(f"{folder} holds no questions; expected JSON objects with `turns`, one a line.")
    _refuse_twins(prompts, folder)
    wanted = _groups(group, prompts, folder)
    return list(_first_of_each([prompt for prompt in prompts if prompt.group in wanted], limit))


def encode(tokenizer: Any, prompt: Prompt | str, answers: Sequence[str] = ()) -> Tensor:
    """The token ids a chat model sees for the question: LongTensor [1, n].

    With ``answers`` to the first turns, the conversation goes on to the turn after them. A tokenizer without a chat
    template gets the messages as plain text, an empty line between them.

    Args:
        tokenizer: the model's.
        prompt: a `Prompt`, or one message.
        answers: the model's answers so far, fewer than the prompt has turns.

    Raises:
        ValueError: if there is no turn after the answers, or nothing is left after tokenizing.
    """
    turns = (prompt,) if isinstance(prompt, str) else prompt.turns
    if len(answers) >= len(turns):
        raise ValueError(f"The prompt has {len(turns)} turns; with {len(answers)} answers there is none left to ask.")
    said = [text for pair in zip(turns, answers) for text in pair] + [turns[len(answers)]]
    ids = _chat_ids(tokenizer, said) if getattr(tokenizer, "chat_template", None) else tokenizer("\n\n".join(said))
    if not ids["input_ids"]:
        raise ValueError(f"The tokenizer makes no tokens of {said!r}; a prompt needs at least one.")
    return torch.tensor([ids["input_ids"]])


def _chat_ids(tokenizer: Any, said: Sequence[str]) -> Any:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)


def _files(folder: Path, suite: bool) -> list[Path]:
    if suite:
        return [folder / f"{group}.jsonl" for group in GROUPS]
    return sorted(folder.glob("*.jsonl")) if folder.is_dir() else [folder]


def _read(path: Path) -> Iterator[Prompt]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file in UTF-8 ({error}).") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _prompt(line, number, path)


def _prompt(line: str, number: int, path: Path) -> Prompt:
    where = f"{path}, line {number}"
    try:
        question = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error}); expected one object a line.") from error
    if not isinstance(question, dict):
        raise ValueError(f"{where}: expected a JSON object with `turns`, got {_short(question)}.")
    turns = question.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        told = "there is none" if "turns" not in question else f"got {_short(turns)}"
        raise ValueError(f"{where}: `turns` must be a list of messages (text, at least one, none empty); {told}.")
    name = question.get("question_id", f"{path.stem}:{number}")
    return Prompt(str(name), str(question.get("category") or ""), tuple(turns))


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse_twins(prompts: Iterable[Prompt], folder: Path) -> None:
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise ValueError(f"{folder}: two questions have the question_id {prompt.id!r}; each needs its own.")
        seen.add(prompt.id)


def _groups(group: str | Sequence[str] | None, prompts: Sequence[Prompt], folder: Path) -> set[str]:
    there = list(dict.fromkeys(prompt.group for prompt in prompts))
    if group is None:
        return set(there)
    wanted = [group] if isinstance(group, str) else list(group)
    if missing := [name for name in wanted if name not in there]:
        raise ValueError(f"{folder} has no group {missing[0]!r}. There is: {', '.join(map(repr, there))}.")
    return set(wanted)


def _first_of_each(prompts: Iterable[Prompt], limit: int | None) -> Iterator[Prompt]:
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(f"limit must be a whole number of at least 1, or None for all, got {limit!r}.")
    taken: dict[str, int] = {}
    for prompt in prompts:
        taken[prompt.group] = taken.get(prompt.group, 0) + 1
        if limit is None or taken[prompt.group] <= limit:
            yield prompt
