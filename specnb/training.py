"""Distil a draft: a few of the target's own layers learn to guess what the target writes.

    found = specnb.distill_draft(model, tokenizer, prompts, layers=(0, 29))
    drafter = specnb.DraftModel(found.draft)
    found.save("my-draft")                   # and then: specnb.DraftModel.from_pretrained("my-draft", target=model)

The target answers the prompts; at every token of its answers the draft's q is pulled towards the target's p. Nothing
else is needed: no text from outside, and no second model.

Sources: sequence-level distillation, Kim & Rush 2016 (arXiv 1606.07947); which divergence to choose when the draft is
to be accepted, Zhou et al. 2023 (DistillSpec, arXiv 2310.08461). Derived in notebook 10.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb import compat
from specnb.drafters.hints import decoded
from specnb.drafters.small_model import own_parameters, save_small_model, small_model
from specnb.medusa_training import TrainedHeads, train_medusa  # noqa: F401 - heads are trained here, too
from specnb.teaching import Lesson, answers_or_lessons, favourites, split
from specnb.trainer import TrainingLoop
from specnb.workloads import Prompt

# --- how far q is from p ---
# Both are laws over a lesson's favourites and one outcome more, "any other token" (in the last column).


def forward_kl(p: Tensor, logq: Tensor) -> Tensor:
    """KL(p ‖ q) of each row, in nats: q must cover whatever p may do. p, logq [N, n] → [N]."""
    return (torch.xlogy(p, p) - torch.where(p > 0, p * logq, 0.0)).sum(-1)


def reverse_kl(p: Tensor, logq: Tensor) -> Tensor:
    """KL(q ‖ p) of each row, in nats: q keeps to where p is large (taken as 1e-6 at least). p, logq [N, n] → [N]."""
    q = logq.exp()
    return (q * (logq.clamp(min=-60.0) - p.clamp(min=1e-6).log())).sum(-1)


def total_variation(p: Tensor, logq: Tensor) -> Tensor:
    """½ Σ |p − q| of each row: the chance that a token drawn from q is turned down. p, logq [N, n] → [N]."""
    return 0.5 * (p - logq.exp()).abs().sum(-1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": forward_kl, "reverse_kl": reverse_kl, "total_variation": total_variation,
}  # fmt: skip


def lump(logits: Tensor, columns: Tensor, logp: Tensor) -> tuple[Tensor, Tensor]:
    """p and log q over the favourites and "any other token".

    Args:
        logits: [N, V'], the draft's, over the tokens it knows.
        columns: LongTensor [N, n], the favourites among them; V' for one the draft does not know.
        logp: [N, n], the target's; what they leave to 1 belongs to the others, and so do favourites nobody drafts.

    Returns:
        p [N, n + 1], log q [N, n + 1].
    """
    unknown = columns == logits.shape[-1]
    p = logp.exp().masked_fill(unknown, 0.0)
    p = torch.cat([p, (1 - p.sum(-1, keepdim=True)).clamp(min=0.0)], dim=-1)
    nothing = torch.full_like(logits[:, :1], -60.0)
    logq = torch.cat([logits.log_softmax(-1), nothing], dim=-1)
    rest = logq.scatter(-1, columns, float("-inf"))[:, :-1].logsumexp(-1, keepdim=True)
    return p, torch.cat([logq.gather(-1, columns), rest.clamp(min=-60.0)], dim=-1)


# --- the result ---


@dataclass(frozen=True)
class Score:
    """How good the draft was at one point of its training.

    Attributes:
        step, tokens: optimizer steps so far, and tokens of answers learnt from, counted again in every epoch.
        loss: mean loss since the score before; None before the first step.
        alpha: share of places of held-out answers at which the draft's favourite is the target's: α of greedy decoding.
        tokens_per_pass: that greedy decoding would reach on the held-out greedy answers with k = 4.
    """

    step: int
    tokens: int
    loss: float | None
    alpha: float
    tokens_per_pass: float


@dataclass(frozen=True)
class Distilled:
    """What `distill_draft` returns.

    Attributes:
        draft: the trained model, in eval mode; `specnb.DraftModel` takes it as it is.
        history: the scores on held-out answers along the way.
        held_out: the lessons that were kept for them.
        settings: what determines the result.
    """

    draft: PreTrainedModel
    history: list[Score]
    held_out: list[Lesson] = field(repr=False)
    settings: dict[str, Any] = field(repr=False)
    target: PreTrainedModel = field(repr=False)

    def save(self, folder: str | os.PathLike[str], dtype: torch.dtype | None = torch.bfloat16) -> Path:
        """Write a folder for `DraftModel.from_pretrained`; ``training.json`` in it has settings and history."""
        folder = save_small_model(self.draft, self.target, folder, dtype)
        told = {"settings": self.settings, "history": [asdict(score) for score in self.history]}
        (folder / "training.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        return folder


# --- the front door ---


def distill_draft(
    target: PreTrainedModel,
    tokenizer: Any = None,
    prompts: Sequence[Prompt | str | Sequence[int]] | None = None,
    *,
    lessons: Sequence[Lesson] | None = None,
    layers: Sequence[int] = (0,),
    start: PreTrainedModel | None = None,
    head_rows: int = 8192,
    loss: str = "forward_kl",
    epochs: float = 3.0,
    batch_tokens: int = 2048,
    learning_rate: float = 1e-3,
    held_out: int | Sequence[Lesson] = 16,
    scores: int = 10,
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    save_every: int = 50,
    callback: Callable[[Score], Any] | None = None,
    progress: bool = True,
    **answer_kwargs: Any,
) -> Distilled:
    """Train a small draft for a target, on the target's own answers.

    Args:
        target: the model to be guessed; it is not modified.
        tokenizer: its tokenizer; needed for prompts that are texts, which go through its chat template.
        prompts: what the target is asked: texts, prompts of `load_prompts`, or lists of token ids. Nobody's favourite
            answers are needed, only questions of the kinds that will come.
        lessons: answers made before (`specnb.teaching.lessons`), in place of prompts.
        layers: the target's layers that the draft begins with, in order; their number is its depth.
        start: a draft of this target, from an earlier call, to go on with: its weights in place of the layers'.
        head_rows: how many tokens the draft can guess: those with the largest share in the answers. Fewer are cheaper.
        loss: "forward_kl", "reverse_kl" or "total_variation".
        epochs: how often the answers are gone through.
        batch_tokens: positions of a step, prompts and padding included.
        learning_rate: AdamW's largest; it rises for a twentieth of the steps, then falls to 0 along a cosine.
        held_out: how many lessons at the end are not learnt from but measured with, or other lessons to measure with.
        scores: how often the draft is measured on them, evenly; the beginning comes on top.
        seed: of the order of the lessons, and of answers that are drawn.
        folder: where the state is kept; a run that was broken off goes on there, to the same weights bit for bit.
        save_every: steps between two savings of the state.
        callback: called with each new `Score`.
        progress: show how far it is.
        **answer_kwargs: for `specnb.teaching.lessons`: max_batch, temperature, max_new_tokens, …

    Returns:
        `Distilled`, with the draft in ``draft`` and α along the way in ``history``.

    Raises:
        ValueError, TypeError: for bad input, or a folder that holds another run.

    Built in notebook 10.
    """
    if loss not in LOSSES:
        raise ValueError(f"loss must be one of {', '.join(map(repr, LOSSES))}, got {loss!r}.")
    lessons = answers_or_lessons(target, tokenizer, prompts, lessons, seed, progress, answer_kwargs)
    learnt, kept = split(lessons, held_out)
    settings: dict[str, Any] = dict(
        layers=list(layers if start is None else start.config.grown_from), started=start is not None,
        head_rows=head_rows, loss=loss, epochs=epochs, batch_tokens=batch_tokens, learning_rate=learning_rate,
        seed=seed, lessons=len(learnt), tokens=sum(len(lesson.ids) for lesson in learnt),
    )  # fmt: skip
    draft = small_model(target, settings["layers"], favourites(learnt, head_rows, compat.vocab_size(target)))
    if start is not None:
        take_over(draft, start)
    trainer = Trainer(draft, learnt, kept, settings, folder, save_every, scores, callback)
    trainer.run(progress)
    return Distilled(draft, trainer.history, kept, settings, target)


def take_over(draft: PreTrainedModel, start: PreTrainedModel) -> None:
    """The weights of one draft in another of the same layers; their heads may be for different tokens."""
    with torch.no_grad():
        for parameter, before in zip(own_parameters(draft).values(), own_parameters(start).values(), strict=True):
            parameter.copy_(before)


# --- batches ---


@dataclass(frozen=True, eq=False)
class Batch:
    """Lessons side by side, [B, T]: tokens with their hints, padding behind; places whose next token is an answer's."""

    tokens: Tensor
    places: Tensor
    ids: Tensor
    logp: Tensor

    @property
    def hints(self) -> Tensor:
        """The hints at the places, LongTensor [N]; −1 where there is none."""
        _, hints, sizes = decoded(self.tokens[self.places])
        return hints.where(sizes > 0, -1)

    @classmethod
    def of(cls, lessons: Sequence[Lesson]) -> Batch:
        width = max(len(lesson.tokens) for lesson in lessons) - 1  # the last token is only predicted
        tokens, places = torch.zeros(len(lessons), width, dtype=torch.long), torch.zeros(len(lessons), width).bool()
        for b, lesson in enumerate(lessons):
            end = len(lesson.tokens) - 1
            tokens[b, :end], places[b, lesson.answer - 1 : end] = lesson.codes[:-1], True
        return cls(tokens, places, torch.cat([x.ids for x in lessons]), torch.cat([x.logp for x in lessons]))


def batches(lessons: Sequence[Lesson], batch_tokens: int, seed: int) -> list[list[int]]:
    """Numbers of lessons, grouped so that a batch has about so many positions; neighbours in length share one."""
    shuffled = torch.randperm(len(lessons), generator=torch.Generator().manual_seed(seed)).tolist()
    order = sorted(shuffled, key=lambda i: len(lessons[i].tokens) // 16)  # alike, but not the same company each time
    groups: list[list[int]] = [[]]
    for i in order:
        if groups[-1] and len(lessons[i].tokens) * (len(groups[-1]) + 1) > batch_tokens:
            groups.append([])
        groups[-1].append(i)
    mixed = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed + 1)).tolist()
    return [groups[i] for i in mixed]


# --- training ---


class Trainer(TrainingLoop[Score]):
    """Trains a draft on batches of lessons."""

    label, score_type = "distilling", Score

    def __init__(
        self, draft: PreTrainedModel, learnt: list[Lesson], kept: list[Lesson], settings: dict[str, Any],
        folder: str | os.PathLike[str] | None, save_every: int, scores: int, callback: Callable[[Score], Any] | None,
    ) -> None:  # fmt: skip
        self.draft, self.learnt, self.kept, self.settings = draft, learnt, kept, settings
        self.column = columns_of(draft)
        self.epoch: tuple[int, list[list[int]]] = (-1, [])
        self.each = len(self.groups(0))  # steps of an epoch; later ones may have a batch more or less
        steps = max(1, round(settings["epochs"] * self.each))
        super().__init__(own_parameters(draft), settings, steps, folder, save_every, scores, callback)

    def next_loss(self) -> tuple[Tensor, int]:
        batch = Batch.of([self.learnt[i] for i in self.next_group()])
        p, logq = self.compare(batch)
        return LOSSES[self.settings["loss"]](p, logq).mean(), len(batch.ids)

    def compare(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = answer_logits(self.draft, batch)
        columns = self.column[batch.ids]
        new = columns == logits.shape[-1]  # without a row of its own: drafted only where it is hinted
        columns = columns.where(~(new & (batch.ids == batch.hints[:, None])), logits.shape[-1] - 1)
        return lump(logits, columns.to(logits.device), batch.logp.to(logits.device))

    def next_group(self) -> list[int]:
        epoch, place = divmod(self.step, self.each)
        groups = self.groups(epoch)
        return groups[place % len(groups)]

    def groups(self, epoch: int) -> list[list[int]]:
        if self.epoch[0] != epoch:
            seed = self.settings["seed"] + 1000 * epoch
            self.epoch = epoch, batches(self.learnt, self.settings["batch_tokens"], seed)
        return self.epoch[1]

    def measure(self, loss: float | None) -> Score:
        """The draft on the held-out lessons."""
        hits = agreement(self.draft, self.kept)
        greedy = [h for h, lesson in zip(hits, self.kept) if lesson.is_greedy]
        alpha = float(torch.cat(hits).float().mean())
        return Score(self.step, self.tokens, loss, alpha, tokens_per_pass(greedy, 4))


def columns_of(draft: PreTrainedModel) -> Tensor:
    """LongTensor [V]: a token's column in the draft's head; V' + 1 for tokens it does not have (V' is the hint's)."""
    head: Any = draft.get_output_embeddings()
    column = torch.full((head.vocab_size,), len(head.ids) + 1)
    column[head.ids.cpu()] = torch.arange(len(head.ids))
    return column


def answer_logits(draft: PreTrainedModel, batch: Batch) -> Tensor:
    """The draft's logits [N, V' + 1] at the places of a batch; the last column is the hint's."""
    head: Any = draft.get_output_embeddings()
    head.places = batch.places.to(draft.device)
    try:
        return draft(input_ids=batch.tokens.to(draft.device), use_cache=False).logits.float()
    finally:
        head.places = None


# --- measuring ---


@torch.no_grad()
def agreement(draft: PreTrainedModel, lessons: Sequence[Lesson]) -> list[Tensor]:
    """For each lesson, at which places of the answer the draft's favourite is the target's: BoolTensors [m]."""
    head: Any = draft.get_output_embeddings()
    hits: dict[int, Tensor] = {}
    order = sorted(range(len(lessons)), key=lambda i: len(lessons[i].tokens))
    for some in (order[i : i + 16] for i in range(0, len(order), 16)):
        batch = Batch.of([lessons[i] for i in some])
        columns = answer_logits(draft, batch).argmax(-1).cpu()
        tokens = torch.cat([head.ids.cpu(), head.ids.new_zeros(1).cpu()])[columns]
        right = tokens.where(columns < len(head.ids), batch.hints) == batch.ids[:, 0]
        hits |= dict(zip(some, right.split([len(lessons[i].ids) for i in some])))
    return [hits[i] for i in range(len(lessons))]


def tokens_per_pass(hits: Sequence[Tensor], k: int) -> float:
    """Tokens per target pass of greedy decoding with drafts of k, if these are the places where the draft is right."""
    passes = sum(rounds(h.tolist(), k) for h in hits)
    return sum(len(h) for h in hits) / passes if passes else float("nan")


def rounds(hits: Sequence[bool], k: int) -> int:
    """Target passes that an answer takes; the last round ends with the answer."""
    place = count = 0
    while place < len(hits):
        run = next((j for j, hit in enumerate(hits[place : place + k]) if not hit), min(k, len(hits) - place))
        place, count = place + run + 1, count + 1
    return count
