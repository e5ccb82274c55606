"""How the shipped draft was made: `python -m specnb.recipe` and one of its steps.

    python -m specnb.recipe lessons FOLDER            # questions, and the default model's answers with p, part by part
    python -m specnb.recipe lessons FOLDER --worker 1 --of 2     # half of the parts, in a process of its own

A part that is there is not made again, so each step can be broken off and started anew; the seeds are fixed, and which
process makes a part does not matter.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from specnb import curriculum, teaching
from specnb.models import load_model
from specnb.workloads import encode

SEED = 20240
PART = 256  # questions from templates in a part
INVENTED = 48  # questions that the target invents for every other part
LAG = 4  # parts come in fours: one is drawn, two invent; and each asks about the answers of the part so many before
PARTS = 64
TOP = 32
ANSWER_TOKENS, TURN_TOKENS = 128, 80
USER_TURN = "<|im_start|>user\n"


def questions_of(part: int) -> list[tuple[str, str]]:
    """Questions from templates, no two parts the same."""
    return list(itertools.islice(curriculum.questions(PART * PARTS, SEED), PART * part, PART * (part + 1)))


def temperature_of(part: int) -> float:
    """Three of four parts are greedy, one is drawn: the draft is to guess under both."""
    return 0.8 if part % 4 == 3 else 0.0


def make_part(model: PreTrainedModel, tokenizer: Any, part: int, folder: Path, max_batch: int) -> None:
    """Questions from templates, questions the model invents, and tasks about earlier answers; all answered by it."""
    seed = SEED + 10_000 * part

    def answers(prompts: list[list[int]], temperature: float, tokens: int) -> list[teaching.Lesson]:
        made = teaching.lessons(
            model, prompts, top=TOP, max_batch=max_batch, seed=seed, temperature=temperature, max_new_tokens=tokens
        )
        return list(made)

    turns = answers([opening(tokenizer)] * INVENTED, 1.0, TURN_TOKENS) if part % LAG < 2 else []
    asked = questions_of(part) + list(invented(tokenizer, turns))
    if part >= LAG:
        asked += curriculum.further(answered(tokenizer, part - LAG, folder), seed)
    prompts = [encode(tokenizer, question)[0].tolist() for _, question in asked]
    lessons = answers(prompts, temperature_of(part), ANSWER_TOKENS)
    teaching.save(lessons, path_of(part, folder))
    path_of(part, folder).with_suffix(".jsonl").write_text(curriculum.as_json(asked), encoding="utf-8")


def path_of(part: int, folder: Path) -> Path:
    return folder / f"part-{part:03d}.safetensors"


def answered(tokenizer: Any, part: int, folder: Path) -> Iterator[tuple[str, str]]:
    """Kinds and answers of a part's questions from templates."""
    for (kind, _), lesson in zip(questions_of(part), teaching.load(path_of(part, folder))):
        yield kind, tokenizer.decode(lesson.tokens[lesson.answer :], skip_special_tokens=True)


def opening(tokenizer: Any) -> list[int]:
    """A conversation up to where the user begins to speak: the model goes on as the user."""
    before, _, _ = tokenizer.decode(encode(tokenizer, "?")[0]).partition(USER_TURN)
    return tokenizer(before + USER_TURN).input_ids


def invented(tokenizer: Any, turns: Sequence[teaching.Lesson]) -> Iterator[tuple[str, str]]:
    """The invented questions of a sensible length that touch no held-out one."""
    runs = curriculum.held_out_runs()
    for turn in turns:
        text = tokenizer.decode(turn.tokens[turn.answer :], skip_special_tokens=True).strip()
        if 15 < len(text) < 500 and not curriculum.overlaps(text, runs):
            yield "invented", text


def make_lessons(folder: Path, worker: int, of: int, max_batch: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_model()
    for part in range(worker, PARTS, of):
        if not path_of(part, folder).exists():
            make_part(model, tokenizer, part, folder, max_batch)
            print(json.dumps({"part": part}), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m specnb.recipe", description=__doc__.splitlines()[0])
    steps = parser.add_subparsers(dest="step", required=True)
    lessons = steps.add_parser("lessons", help="questions and the default model's answers")
    lessons.add_argument("folder", type=Path)
    lessons.add_argument("--worker", type=int, default=0)
    lessons.add_argument("--of", type=int, default=1)
    lessons.add_argument("--max-batch", type=int, default=96)
    options = vars(parser.parse_args(arguments))
    {"lessons": make_lessons}[options.pop("step")](**options)


if __name__ == "__main__":
    main()
