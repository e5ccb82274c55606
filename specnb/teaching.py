"""Lessons for a draft model: the target's own answers, and at every token of them the favourites of its distribution.

    lessons = list(specnb.teaching.lessons(model, prompts, max_new_tokens=128))

The answers are decoded by a `Batcher`; p is noted while they are written, so that nothing is computed twice. Only the
``top`` most probable tokens are kept: for 32 of them that is 99 % of the probability of a small chat model's answers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from specnb.batching import Batcher, Job
from specnb.drafters.hints import hinted
from specnb.prefill import CHUNK
from specnb.progress import Progress
from specnb.report import Round
from specnb.workloads import Prompt, encode


@dataclass(frozen=True, eq=False)
class Lesson:
    """One prompt and the target's answer.

    Attributes:
        tokens: LongTensor [n + m], prompt and answer.
        answer: n, where the answer begins.
        ids: LongTensor [m, top], for each token of the answer the most probable tokens at its place, best first.
        logp: FloatTensor [m, top], their log-probabilities under the law that the token was drawn from.
    """

    tokens: Tensor
    answer: int
    ids: Tensor
    logp: Tensor

    @cached_property
    def codes(self) -> Tensor:
        """The tokens with their hints, as a draft reads them: LongTensor [n + m]."""
        return hinted(self.tokens)

    @property
    def is_greedy(self) -> bool:
        """Whether every token of the answer is the favourite."""
        return torch.equal(self.ids[:, 0], self.tokens[self.answer :])


class Notes:
    """Listens to a batcher's rounds and keeps the favourites of p for each job."""

    def __init__(self, batcher: Batcher, top: int) -> None:
        self.batcher, self.top = batcher, top
        self.of: dict[int, list[tuple[Tensor, Tensor]]] = {}
        batcher._slots.keep_probs = True
        batcher._slots.listeners.append(self)

    def on_commit(self, rounds: list[Round]) -> None:
        emitted = [(r, p[r.places]) for r in rounds if (p := r.p) is not None and r.emitted]
        if not emitted:
            return
        probs, ids = torch.cat([p for _, p in emitted]).topk(self.top, dim=-1)
        logp = probs.log().clamp(min=-60.0).half()
        done = 0
        for r, p in emitted:
            job = self.batcher._running[r.row]
            self.of.setdefault(job.number, []).append((ids[done : done + len(p)].int(), logp[done : done + len(p)]))
            done += len(p)


def lessons(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    top: int = 32,
    max_batch: int = 32,
    seed: int = 0,
    temperature: float | Sequence[float] = 0.0,
    progress: bool = True,
    **generation_kwargs: Any,
) -> Iterator[Lesson]:
    """Let the target answer, many prompts at a time, and yield the lessons in the order of the prompts.

    Args:
        model: the target.
        prompts: lists of token ids.
        top: how many tokens of each distribution are kept.
        max_batch: answers written at the same time; on a CPU float32 gains up to about a hundred.
        seed: prompt i, if sampled, draws with seed + i.
        temperature: answers are drawn at this temperature; 0 is greedy. One for all, or one per prompt (which costs
            a quarter more time than the same prompts apart).
        progress: show how many are done.
        **generation_kwargs: as for `generate`.

    Raises:
        ValueError: if ``top`` is out of range or there are not as many temperatures as prompts; and what `Batcher`
            raises.
    """
    if not 0 < top <= model.config.get_text_config().vocab_size:
        raise ValueError(f"top must lie between 1 and the vocabulary's size, got {top!r}.")
    temperatures = [temperature] * len(prompts) if isinstance(temperature, int | float) else list(temperature)
    if len(temperatures) != len(prompts):
        raise ValueError(f"temperature: one for all prompts or one each; got {len(temperatures)} for {len(prompts)}.")
    batcher = Batcher(model, max_batch=max_batch, prefill_chunk=CHUNK, **generation_kwargs)
    notes = Notes(batcher, top)
    jobs = [
        batcher.submit(prompt, seed=seed + i, **_law(t)) for i, (prompt, t) in enumerate(zip(prompts, temperatures))
    ]
    with batcher, Progress("answers", len(jobs), "answers") if progress else Silent() as bar:
        for i, job in enumerate(jobs):
            while not job.done:
                batcher.step()
            bar.update(i + 1)
            yield _lesson(job, notes)


def _law(temperature: float) -> dict[str, Any]:
    return {"do_sample": True, "temperature": float(temperature)} if temperature else {"do_sample": False}


def _lesson(job: Job, notes: Notes) -> Lesson:
    if job.error is not None:
        raise job.error
    ids, logp = zip(*notes.of.pop(job.number))
    tokens = torch.tensor(list(job.prompt) + job.tokens)
    return Lesson(tokens, len(job.prompt), torch.cat(ids).long(), torch.cat(logp).float())


def answers_or_lessons(
    target: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[Prompt | str | Sequence[int]] | None,
    made: Sequence[Lesson] | None,
    seed: int,
    progress: bool,
    options: dict[str, Any],
) -> Sequence[Lesson]:
    """What to learn from: lessons that were made before, or the target's answers to prompts.

    Raises:
        ValueError, TypeError: unless it is one of the two.
    """
    if (prompts is None) == (made is None):
        raise ValueError("Give either prompts, which the target will answer, or lessons, which it has answered.")
    if made is None:
        ids = [token_ids(prompt, tokenizer) for prompt in prompts or ()]
        return list(lessons(target, ids, **{"seed": seed, "progress": progress, **options}))
    if options:
        raise TypeError(f"{next(iter(options))}: the lessons are answered already; leave it out.")
    return made


def token_ids(prompt: Prompt | str | Sequence[int], tokenizer: Any) -> list[int]:
    if not isinstance(prompt, Prompt | str):
        return list(prompt)
    if tokenizer is None:
        raise TypeError("Prompts given as text need the target's tokenizer: (target, tokenizer, prompts).")
    return encode(tokenizer, prompt)[0].tolist()


def split(lessons: Sequence[Lesson], held_out: int | Sequence[Lesson]) -> tuple[list[Lesson], list[Lesson]]:
    """Lessons to learn from, and lessons to measure with."""
    if not isinstance(held_out, int):
        return list(lessons), list(held_out)
    if not 0 < held_out < len(lessons):
        raise ValueError(f"held_out must leave some of the {len(lessons)} lessons to learn from, got {held_out}.")
    return list(lessons[:-held_out]), list(lessons[-held_out:])


def favourites(lessons: Sequence[Lesson], count: int, vocab_size: int) -> Tensor:
    """The tokens with the most probability in the lessons, LongTensor [≤ count], in the order of their ids."""
    mass = torch.zeros(vocab_size, dtype=torch.float64)
    for lesson in lessons:
        mass.index_add_(0, lesson.ids.flatten(), lesson.logp.double().exp().flatten())
    return mass.topk(min(count, int((mass > 0).sum()))).indices.sort().values


class Silent:
    """A progress bar that shows nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, done: float) -> None:
        pass


def save(lessons: Sequence[Lesson], path: str | os.PathLike[str]) -> None:
    """Write lessons to a safetensors file, at once: a file that is there is whole."""
    path = Path(path)
    numbers = {
        "tokens": torch.cat([lesson.tokens for lesson in lessons]).int(),
        "sizes": torch.tensor([[len(lesson.tokens), lesson.answer] for lesson in lessons]),
        "ids": torch.cat([lesson.ids for lesson in lessons]).int(),
        "logp": torch.cat([lesson.logp for lesson in lessons]).half(),
    }
    unfinished = path.with_suffix(".part")
    save_file(numbers, unfinished)
    unfinished.replace(path)


def load(path: str | os.PathLike[str]) -> list[Lesson]:
    """Read what `save` has written."""
    numbers = load_file(path)
    lengths, answers = numbers["sizes"].T.tolist()
    counts = [n - answer for n, answer in zip(lengths, answers)]
    parts = zip(numbers["tokens"].split(lengths), answers, numbers["ids"].split(counts), numbers["logp"].split(counts))
    return [Lesson(tokens.long(), answer, ids.long(), logp.float()) for tokens, answer, ids, logp in parts]
