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
PART = 320  # questions from templates in a part
INVENTED = 64  # questions that the target invents for each part
PARTS = 40
ANSWER = dict(max_new_tokens=128)
USER_TURN = "<|im_start|>user\n"


def questions_of(part: int) -> list[tuple[str, str]]:
    """Questions from templates, no two parts the same."""
    return list(itertools.islice(curriculum.questions(PART * PARTS, SEED), PART * part, PART * (part + 1)))


def temperatures(count: int) -> list[float]:
    """Three of four answers are greedy, one is drawn: the draft is to guess under both."""
    return [0.8 if i % 4 == 3 else 0.0 for i in range(count)]


def make_part(model: PreTrainedModel, tokenizer: Any, part: int, folder: Path, max_batch: int) -> None:
    """Two rounds: questions from templates, and inventing some; then those, and tasks about the first answers."""
    seed = SEED + 10_000 * part
    asked = questions_of(part)
    prompts = ids(tokenizer, asked) + [opening(tokenizer)] * INVENTED
    warm = temperatures(PART) + [1.0] * INVENTED
    options = dict(max_batch=max_batch, top=32)
    first = list(teaching.lessons(model, prompts, seed=seed, temperature=warm, **options, **ANSWER))
    answers = [tokenizer.decode(lesson.tokens[lesson.answer :], skip_special_tokens=True) for lesson in first]
    more = [("invented", text) for text in invented(answers[PART:])]
    more += curriculum.further(zip([kind for kind, _ in asked], answers), seed)
    second = list(
        teaching.lessons(
            model, ids(tokenizer, more), seed=seed + 5000, temperature=temperatures(len(more)), **options, **ANSWER
        )
    )
    teaching.save(first[:PART] + second, folder / f"part-{part:03d}.safetensors")
    (folder / f"part-{part:03d}.jsonl").write_text(curriculum.as_json(asked + more), encoding="utf-8")


def ids(tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
    return [encode(tokenizer, question)[0].tolist() for _, question in pairs]


def opening(tokenizer: Any) -> list[int]:
    """A conversation up to where the user begins to speak: the model goes on as the user."""
    before, _, _ = tokenizer.decode(encode(tokenizer, "?")[0]).partition(USER_TURN)
    return tokenizer(before + USER_TURN).input_ids


def invented(texts: Sequence[str]) -> Iterator[str]:
    """The invented questions of a sensible length that touch no held-out one."""
    runs = curriculum.held_out_runs()
    for text in texts:
        if 15 < len(text.strip()) < 500 and not curriculum.overlaps(text, runs):
            yield text.strip()


def make_lessons(folder: Path, worker: int, of: int, max_batch: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_model()
    for part in range(worker, PARTS, of):
        if not (folder / f"part-{part:03d}.safetensors").exists():
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
