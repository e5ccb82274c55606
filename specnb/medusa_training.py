"""Train Medusa heads: the target stays as it is, and extra heads on it learn which tokens come after the next one.

    found = specnb.train_medusa(model, tokenizer, prompts)
    drafter = found.drafter()                  # and for the tree that suits this machine:
    drafter = found.drafter(specnb.medusa_shape(found, specnb.forward_cost(model)))
    found.save("my-heads")                     # and then: specnb.Medusa.from_pretrained("my-heads")

The target answers prompts, as for `distill_draft`. Its hidden states along the answers are computed once; then it is no
longer needed, which makes this training so quick. Source: Cai et al. 2024 (arXiv 2401.10774), "Medusa-1".
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specnb import compat
from specnb.drafters.hints import Hints
from specnb.drafters.medusa import Attached, Medusa, MedusaHeads, Ranks, hints_ahead
from specnb.progress import Progress
from specnb.teaching import Lesson, Silent, answers_or_lessons, favourites, split
from specnb.trainer import TrainingLoop
from specnb.trees import grow_shape
from specnb.workloads import Prompt

BEST = 10  # ranks that are told apart
NO_TOKEN = -1  # in place of a rank where the answer has ended
NODES = 15  # of the tree that a score speaks of
READ_TOGETHER = 8  # answers


# --- what heads learn from ---


@dataclass(frozen=True, eq=False)
class Places:
    """All places of answers, one after another, N of them: place j is where an answer's token j has been chosen.

    Attributes:
        hidden: [N, H], what went into the target's output head when it predicted the token: what heads look at.
        newest: LongTensor [N], the token.
        hints: LongTensor [N, heads, 2], what followed such a text before and the suffix's length; None for plain heads.
        ahead: LongTensor [N, heads], which place's token each head has to guess; -1 beyond the answer's end.
        sizes: tokens of each answer.
    """

    hidden: Tensor
    newest: Tensor
    hints: Tensor | None
    ahead: Tensor
    sizes: list[int]

    @classmethod
    def of(cls, target: PreTrainedModel, lessons: Sequence[Lesson], heads: int, hinted: bool, progress: bool) -> Places:
        hidden = hidden_states(target, lessons, progress)
        return cls.around(hidden, lessons, heads, hinted)

    @classmethod
    def around(cls, hidden: Tensor, lessons: Sequence[Lesson], heads: int, hinted: bool) -> Places:
        """The same from hidden states [N, H] that are at hand."""
        sizes = [len(lesson.tokens) - lesson.answer for lesson in lessons]
        newest = torch.cat([lesson.tokens[lesson.answer :] for lesson in lessons])
        hints = torch.cat([hints_of(lesson, heads) for lesson in lessons]) if hinted else None
        return cls(hidden, newest, hints, places_ahead(sizes, heads), sizes)

    def labels(self, some: Tensor) -> Tensor:
        """The tokens that heads have to guess at some places, LongTensor [n, heads]; -1 beyond the answer's end."""
        ahead = self.ahead[some]
        return self.newest[ahead].where(ahead >= 0, NO_TOKEN)

    def hints_at(self, some: Tensor) -> Tensor | None:
        return None if self.hints is None else self.hints[some]


def places_ahead(sizes: Sequence[int], heads: int) -> Tensor:
    """Head i guesses the token i + 1 places after the newest one: LongTensor [N, heads], -1 beyond an answer's end."""
    ends = torch.tensor(sizes).cumsum(0).repeat_interleave(torch.tensor(sizes))
    ahead = torch.arange(len(ends))[:, None] + 1 + torch.arange(heads)
    return ahead.where(ahead < ends[:, None], NO_TOKEN)


def hints_of(lesson: Lesson, heads: int) -> Tensor:
    """The hints at each token of an answer, LongTensor [m, heads, 2]."""
    text, tokens, found = Hints(), lesson.tokens.tolist(), []
    for end in range(lesson.answer + 1, len(tokens) + 1):
        text.extend(tokens[:end])
        found.append(hints_ahead(text, heads))
    return torch.tensor(found)


@torch.no_grad()
def hidden_states(target: PreTrainedModel, lessons: Sequence[Lesson], progress: bool = True) -> Tensor:
    """What goes into the target's output head where it predicts each token of the answers: [N, H], in their order."""
    found: dict[int, Tensor] = {}
    order = sorted(range(len(lessons)), key=lambda i: len(lessons[i].tokens))
    groups = [order[i : i + READ_TOGETHER] for i in range(0, len(order), READ_TOGETHER)]
    with Progress("reading", len(lessons), "answers") if progress else Silent() as bar:
        for group in groups:
            hidden = _hidden_states(target, [lessons[i].tokens[:-1] for i in group])
            for i, states in zip(group, hidden):
                found[i] = states[lessons[i].answer - 1 : len(lessons[i].tokens) - 1].clone()
            bar.update(len(found))
    return torch.cat([found[i] for i in range(len(lessons))])


def _hidden_states(target: PreTrainedModel, texts: Sequence[Tensor]) -> Tensor:
    """The same for whole texts at once, [B, T, H], with anything behind a text's end."""
    heard: list[Tensor] = []

    def listen(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        heard.append(inputs[0])
        return (inputs[0][:, :1],)  # the logits are not wanted, and would be most of the work

    hook = target.get_output_embeddings().register_forward_pre_hook(listen)
    try:
        tokens = nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
        target(input_ids=tokens.to(target.device), use_cache=False)
    finally:
        hook.remove()
    return heard[0]


# --- how good heads are ---


def ranks(attached: Attached, places: Places) -> Tensor:
    """The rank of the true token among each head's guesses, LongTensor [N, heads]: `BEST` if it is not among so many
    best, -1 beyond the answer's end."""
    return judged(attached, places)[0]


@torch.no_grad()
def judged(attached: Attached, places: Places) -> tuple[Tensor, Tensor]:
    """`ranks`, and the chances that heads give to their best guesses, [N, heads, ≤ BEST]."""
    found, chances = [], []
    for some in torch.arange(len(places.newest)).split(512):
        hints = places.hints_at(some)
        logits = attached(places.hidden[some], places.newest[some], hints)
        best = logits.softmax(dim=-1).topk(min(BEST, logits.shape[-1]), dim=-1)
        right = best.indices.cpu() == attached.columns(places.labels(some).clamp(min=0)[..., None], hints)
        found.append(right.int().argmax(-1).where(right.any(-1), BEST))
        chances.append(best.values.cpu())
    return torch.cat(found).where(places.ahead >= 0, NO_TOKEN), torch.cat(chances)


def accuracies(found: Tensor, best: int = 5) -> list[list[float]]:
    """For each head how often the true token was among its 1, 2, … best guesses."""
    known = [column[column != NO_TOKEN] for column in found.T]
    return [[float((column < n).float().mean()) for n in range(1, best + 1)] for column in known]


def path_chances(found: Tensor, most: int = 63) -> list[tuple[Ranks, float]]:
    """How often each path of ranks was right, of all places with a token after them: the most frequent ones first.

    A path is not more frequent than its beginning and comes after it, so the first n are a tree for every n.
    """
    count = Counter[Ranks](path for row in found.tolist() for path in _right_paths(row))
    order = sorted(count, key=lambda path: (-count[path], len(path), path))
    places = int((found[:, 0] != NO_TOKEN).sum())
    return [(path, count[path] / places) for path in order[:most]]


def _right_paths(row: Sequence[int]) -> Iterator[Ranks]:
    for depth, rank in enumerate(row):
        if not 0 <= rank < BEST:
            return
        yield tuple(row[: depth + 1])


def tree_tokens_per_pass(
    found: Tensor, sizes: Sequence[int], shape: Sequence[Ranks] | int, chances: Tensor | None = None
) -> float:
    """Tokens per pass of greedy decoding with this tree, from the ranks along known answers of these sizes.

    Args:
        shape: a tree; or a number of nodes, of trees grown anew from the ``chances`` (`judged`).
    """
    always = None if isinstance(shape, int) else set(shape)

    def tree(place: int) -> set[Ranks]:
        if always is not None:
            return always
        assert chances is not None and isinstance(shape, int)
        return set(grow_shape(chances[place].tolist(), shape))

    passes, first, rows = 0, 0, found.tolist()
    for size in sizes:
        passes += _rounds(rows, first, first + size, tree)
        first += size
    return first / passes if passes else float("nan")


def _rounds(rows: Sequence[Sequence[int]], first: int, end: int, tree: Callable[[int], set[Ranks]]) -> int:
    """Passes that an answer takes. The first drafts nothing: no hidden state is known."""
    newest, count = first, 1
    while newest < end - 1:
        shape = tree(newest)
        right = sum(path in shape for path in _right_paths(rows[newest]))
        newest, count = newest + right + 1, count + 1
    return count


@dataclass(frozen=True)
class MedusaScore:
    """How good heads were at one point of their training.

    Attributes:
        step, tokens: optimizer steps so far, and places learnt from, counted again in every epoch.
        loss: mean loss since the score before, summed over heads; None before the first step.
        accuracy: of each head, how often the true token of held-out answers was among its 1, 2, … 5 best guesses.
        tokens_per_pass: that greedy decoding would reach on them with the best tree of 15 nodes.
    """

    step: int
    tokens: int
    loss: float | None
    accuracy: list[list[float]]
    tokens_per_pass: float


# --- the result ---


@dataclass(frozen=True)
class TrainedHeads:
    """What `train_medusa` returns.

    Attributes:
        heads: the trained heads.
        history: the scores on held-out answers along the way.
        chances: of paths of ranks, most frequent first, how often they were right on held-out answers: the first n of
            them are the best tree of n nodes, and `medusa_shape` chooses how many suit a machine.
        held_out: the lessons that were kept for measuring.
        settings: what determines the result.
    """

    heads: MedusaHeads
    history: list[MedusaScore]
    chances: list[tuple[Ranks, float]] = field(repr=False)
    held_out: list[Lesson] = field(repr=False)
    settings: dict[str, Any] = field(repr=False)
    target: PreTrainedModel = field(repr=False)

    def drafter(self, shape: Sequence[Ranks] | int | None = None) -> Medusa:
        """The drafter, with a tree as `Medusa` takes it; the default is the best one of 15 nodes."""
        tree = [path for path, _ in self.chances[:NODES]] if shape is None else shape
        return Medusa(self.heads, tree, chances=self.chances)

    def save(
        self,
        folder: str | os.PathLike[str],
        dtype: torch.dtype = torch.bfloat16,
        shape: Sequence[Ranks] | int | None = None,
    ) -> Path:
        """Write a folder for `Medusa.from_pretrained`; ``training.json`` in it has settings and history."""
        folder = self.drafter(shape).save(folder, self.target, dtype)
        told = {"settings": self.settings, "history": [asdict(score) for score in self.history]}
        (folder / "training.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        return folder


# --- the front door ---


def train_medusa(
    target: PreTrainedModel,
    tokenizer: Any = None,
    prompts: Sequence[Prompt | str | Sequence[int]] | None = None,
    *,
    lessons: Sequence[Lesson] | None = None,
    heads: int = 3,
    hinted: bool = False,
    head_rows: int | None = 8192,
    epochs: float = 4.0,
    batch_places: int = 256,
    learning_rate: float = 2e-3,
    held_out: int | Sequence[Lesson] = 16,
    scores: int = 10,
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    save_every: int = 100,
    callback: Callable[[MedusaScore], Any] | None = None,
    progress: bool = True,
    **answer_kwargs: Any,
) -> TrainedHeads:
    """Train extra heads on a target, on the target's own answers. Head i learns the token i + 1 places after the next.

    Args:
        target: the model to be guessed; it is not modified.
        tokenizer: its tokenizer; needed for prompts that are texts, which go through its chat template.
        prompts: what the target is asked: texts, prompts of `load_prompts`, or lists of token ids.
        lessons: answers made before (`specnb.teaching.lessons`), in place of prompts.
        heads: how many; each looks one token further.
        hinted: whether heads are told the newest token, and what followed such a text before. Plain Medusa is not.
        head_rows: how many tokens the heads can guess: those with the largest share in the answers. None: all.
        epochs: how often the answers are gone through.
        batch_places: places of answers in a step.
        learning_rate: AdamW's largest; it rises for a twentieth of the steps, then falls to 0 along a cosine.
        held_out: how many lessons at the end are not learnt from but measured with, or other lessons to measure with.
        scores: how often the heads are measured on them, evenly; the beginning comes on top.
        seed: of the order of the places, and of answers that are drawn.
        folder: where the state is kept; a run that was broken off goes on there, to the same weights bit for bit.
        save_every: steps between two savings of the state.
        callback: called with each new `MedusaScore`.
        progress: show how far it is.
        **answer_kwargs: for `specnb.teaching.lessons`: max_batch, temperature, max_new_tokens, …

    Returns:
        `TrainedHeads`, with the drafter in ``drafter()`` and the accuracies along the way in ``history``.

    Raises:
        ValueError, TypeError: for bad input, or a folder that holds another run.

    Built in notebook 11.
    """
    lessons = answers_or_lessons(target, tokenizer, prompts, lessons, seed, progress, answer_kwargs)
    learnt, kept = split(lessons, held_out)
    settings: dict[str, Any] = dict(
        heads=heads, hinted=hinted, head_rows=head_rows, epochs=epochs, batch_places=batch_places,
        learning_rate=learning_rate, seed=seed, lessons=len(learnt), tokens=sum(len(x.ids) for x in learnt),
    )  # fmt: skip
    both = [Places.of(target, some, heads, hinted, progress) for some in (learnt, kept)]
    options = dict(folder=folder, save_every=save_every, scores=scores, callback=callback)
    return train_on(target, learnt, kept, both[0], both[1], settings, progress=progress, **options)


def train_on(
    target: PreTrainedModel, learnt: list[Lesson], kept: list[Lesson], places: Places, kept_places: Places,
    settings: dict[str, Any], *, progress: bool = True, **options: Any,
) -> TrainedHeads:  # fmt: skip
    """`train_medusa` where the hidden states are at hand."""
    rows = settings["head_rows"]
    ids = None if rows is None else favourites(learnt, rows, compat.vocab_size(target))
    size = places.hidden.shape[1]
    own = MedusaHeads(size, settings["heads"], ids, hinted=settings["hinted"]).to(target.device)
    trainer = MedusaTrainer(Attached(own, target), places, kept_places, settings, **options)
    trainer.run(progress)
    own.requires_grad_(False).eval()
    return TrainedHeads(own, trainer.history, path_chances(trainer.ranks()), kept, settings, target)


class MedusaTrainer(TrainingLoop[MedusaScore]):
    """Trains heads on places of answers: each head's loss is the cross-entropy of the token that came."""

    label, score_type = "training heads", MedusaScore

    def __init__(
        self, attached: Attached, places: Places, kept: Places, settings: dict[str, Any], *,
        folder: str | os.PathLike[str] | None = None, save_every: int = 100, scores: int = 10,
        callback: Callable[[MedusaScore], Any] | None = None,
    ) -> None:  # fmt: skip
        self.attached, self.places, self.kept = attached, places, kept
        self.useful = (places.ahead[:, 0] >= 0).nonzero().flatten()
        self.each = max(1, len(self.useful) // settings["batch_places"])
        self.epoch: tuple[int, Tensor] = (-1, self.useful)
        steps = max(1, round(settings["epochs"] * self.each))
        own = dict(attached.heads.named_parameters())
        super().__init__(own, settings, steps, folder, save_every, scores, callback)

    def next_loss(self) -> tuple[Tensor, int]:
        batch = self.next_batch()
        hints = self.places.hints_at(batch)
        logits = self.attached(self.places.hidden[batch], self.places.newest[batch], hints)
        labels = self.places.labels(batch)
        columns = self.attached.columns(labels.clamp(min=0)[..., None], hints)[..., 0]
        columns = columns.where(labels >= 0, -1).to(logits.device)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), columns.flatten(), ignore_index=-1, reduction="sum")
        return loss / len(batch), len(batch)

    def next_batch(self) -> Tensor:
        """Numbers of places, in an order that only the seed and the epoch decide."""
        epoch, step = divmod(self.step, self.each)
        if self.epoch[0] != epoch:
            generator = torch.Generator().manual_seed(self.settings["seed"] + 1000 * epoch)
            self.epoch = epoch, self.useful[torch.randperm(len(self.useful), generator=generator)]
        size = self.settings["batch_places"]
        return self.epoch[1][step * size : (step + 1) * size]

    def ranks(self) -> Tensor:
        return ranks(self.attached, self.kept)

    def measure(self, loss: float | None) -> MedusaScore:
        """The heads on the held-out answers."""
        found = self.ranks()
        tree = [path for path, _ in path_chances(found, NODES)]
        per_pass = tree_tokens_per_pass(found, self.kept.sizes, tree)
        return MedusaScore(self.step, self.tokens, loss, accuracies(found), per_pass)
