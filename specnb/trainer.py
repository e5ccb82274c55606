"""The loop that trains a draft or heads: AdamW, a state that can be saved at any step and gone on with, bit for bit."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import Field, asdict
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from specnb.progress import Progress
from specnb.teaching import Silent

STATE = "training.safetensors"


class Measured(Protocol):
    """A score, whatever it measures: a frozen dataclass of plain numbers."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


S = TypeVar("S", bound=Measured)


class TrainingLoop(Generic[S]):
    """AdamW over steps, with scores along the way. Subclasses say what a step's loss is, and how good the result is.

    Args:
        own: the parameters to be trained, by name.
        settings: what determines the result; "learning_rate" is among them.
        steps: how many.
        folder: where the state is kept; None: nowhere.
        save_every: steps between two savings of it.
        scores: how often the result is measured, evenly; the beginning comes on top.
        callback: called with each score.
    """

    label = "training"
    score_type: type[S]

    def __init__(
        self, own: dict[str, nn.Parameter], settings: dict[str, Any], steps: int, folder: str | os.PathLike[str] | None,
        save_every: int, scores: int, callback: Callable[[S], Any] | None,
    ) -> None:  # fmt: skip
        self.own, self.settings, self.steps = own, settings, steps
        self.path = None if folder is None else Path(folder) / STATE
        self.save_every, self.callback = save_every, callback
        for parameter in own.values():
            parameter.requires_grad_(True)
        rate = settings["learning_rate"]
        self.optimizer = torch.optim.AdamW(own.values(), rate, betas=(0.9, 0.95), weight_decay=0.01)
        self.score_every = max(1, steps // scores)
        self.step = self.tokens = 0
        self.losses: list[float] = []
        self.history: list[S] = []

    def next_loss(self) -> tuple[Tensor, int]:
        """The loss of step ``self.step``, and how many tokens it has learnt from."""
        raise NotImplementedError

    def measure(self, loss: float | None) -> S:
        """A score of what has been reached; ``loss`` is the mean since the score before."""
        raise NotImplementedError

    def run(self, progress: bool = True) -> None:
        """Train to the end, from the beginning or from the state that was saved."""
        self.resume()
        if not self.history:
            self.score()
        with Progress(self.label, self.steps, "steps") if progress else Silent() as bar:
            while self.step < self.steps:
                self.one_step()
                bar.update(self.step)
                if self.step % self.score_every == 0 or self.step == self.steps:
                    self.score()
                if self.path is not None and (self.step % self.save_every == 0 or self.step == self.steps):
                    self.save()
        for parameter in self.own.values():
            parameter.requires_grad_(False)

    def one_step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings["learning_rate"] * schedule(self.step, self.steps)
        loss, tokens = self.next_loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.own.values(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))
        self.step, self.tokens = self.step + 1, self.tokens + tokens

    def score(self) -> None:
        """Measure, and tell who wants to know."""
        loss = sum(self.losses) / len(self.losses) if self.losses else None
        self.losses = []
        self.history.append(self.measure(loss))
        if self.callback is not None:
            self.callback(self.history[-1])

    # --- the state in a file ---

    def save(self) -> None:
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: p.detach() for name, p in self.own.items()}
        for name, p in self.own.items():
            tensors |= {f"{key} {name}": value for key, value in self.optimizer.state[p].items()}
        told = dict(settings=self.settings, step=self.step, tokens=self.tokens, losses=self.losses)
        told["history"] = [asdict(score) for score in self.history]
        unfinished = self.path.with_suffix(".part")
        save_file({name: t.contiguous() for name, t in tensors.items()}, unfinished, {"state": json.dumps(told)})
        unfinished.replace(self.path)

    def resume(self) -> None:
        """Go on where the saved state is, if there is one.

        Raises:
            ValueError: if it is of a run with other settings.
        """
        if self.path is None or not self.path.exists():
            return
        with safe_open(self.path, "pt") as file:
            told = json.loads(file.metadata()["state"])
            if told["settings"] != json.loads(json.dumps(self.settings)):
                raise ValueError(_other_run(self.path, told["settings"], self.settings))
            for name, parameter in self.own.items():
                parameter.data.copy_(file.get_tensor(name))
                keys = ("step", "exp_avg", "exp_avg_sq")
                self.optimizer.state[parameter] = {key: file.get_tensor(f"{key} {name}") for key in keys}
        self.step, self.tokens, self.losses = told["step"], told["tokens"], told["losses"]
        self.history = [self.score_type(**score) for score in told["history"]]


def _other_run(path: Path, before: dict[str, Any], now: dict[str, Any]) -> str:
    name = next(name for name in {**before, **now} if before.get(name) != now.get(name))
    return (
        f"{path} is the state of a run with {name} = {before.get(name)!r}, now it is {now.get(name)!r}. Go on with the "
        "settings it was begun with, or take another folder."
    )


def schedule(step: int, steps: int) -> float:
    """The learning rate's share of its largest: a rise over a twentieth of the steps, then a cosine down to 0."""
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
