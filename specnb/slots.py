"""Slots: a run of the loop whose rows are places that texts come to and go from.

`generate` fills all rows at once and runs until the last one ends. Here a row's text ends, and the next one takes its
place between two rounds, while the others go on. What a text's own rules raise is kept as that row's error.

Source: iteration-level scheduling, Yu et al. 2022 (Orca, OSDI '22). Derived in notebook 08.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from specnb.cache import RaggedCache
from specnb.compiled import Twin
from specnb.decoding import Run
from specnb.drafters.base import Drafter
from specnb.prefill import CHUNK, FIXED_CHUNK, read, same_bucket
from specnb.preparation import Request
from specnb.processing import Processors, same_rules
from specnb.rows import Rows, only_ending_tokens
from specnb.verification import raise_for_nan


class SlotRows(Rows):
    """Rows whose texts change. One without a text, or whose prompt is still being read, counts as finished.

    Attributes:
        errors: what the rules of a row's text have raised.
    """

    def __init__(self, size: int) -> None:
        super().__init__([[0]] * size, [0] * size, [StoppingCriteriaList()] * size)
        self.errors: dict[int, Exception] = {}

    def put(self, b: int, prompt: list[int], budget: int, criteria: StoppingCriteriaList) -> None:
        """Row b holds this prompt from now on; it does not grow before `begin`."""
        self._tokens[b], self._ids[b] = list(prompt), torch.tensor(prompt, dtype=torch.long)
        self._known[b] = len(prompt)
        self.prompt_lengths[b], self.budgets[b], self.criteria[b] = len(prompt), budget, criteria
        self._ends[b], self.chosen_from[b], self.finished[b] = only_ending_tokens(criteria), [], True
        self.errors.pop(b, None)

    def begin(self, b: int) -> None:
        """The prompt has been read: row b takes part in rounds."""
        self.finished[b] = self.budgets[b] <= 0

    def stop_failed(self) -> None:
        """Rows with an error write nothing more."""
        for b in self.errors:
            self.finished[b] = True

    def _has_ended(self, b: int) -> bool:
        try:
            return super()._has_ended(b)
        except Exception as error:
            self.errors[b] = error
            return True


class SlotProcessors(Processors):
    """Processors of rows whose texts change. One that raises fails its own row."""

    def __init__(self, size: int) -> None:
        super().__init__([LogitsProcessorList()] * size)
        self._occupied: set[int] = set()

    def put(self, b: int, processors: LogitsProcessorList) -> None:
        """Row b's rules from now on; rules equal to those of another row become one list, and then one call."""
        others = (self.per_row[other] for other in self._occupied)
        self.per_row[b] = next((rules for rules in others if same_rules(rules, processors)), processors)
        self._occupied.add(b)
        self._look()

    def drop(self, b: int) -> None:
        self.per_row[b] = LogitsProcessorList()
        self._occupied.discard(b)
        self._look()

    def _look(self) -> None:
        self.look_at([self.per_row[b] for b in sorted(self._occupied)] or self.per_row)

    def score(self, rows: Rows, b: int, guesses: Tensor, scores: Tensor, first: int = 0) -> Tensor:
        assert isinstance(rows, SlotRows)
        try:
            return super().score(rows, b, guesses, scores.clone(), first)
        except Exception as error:
            rows.errors.setdefault(b, error)
            return scores


class Slots(Run):
    """A run over ``size`` rows, empty at first. Between rounds texts `join` and `leave`, and prompts are read."""

    rows: SlotRows
    processors: SlotProcessors
    generators: list[torch.Generator]

    def __init__(
        self,
        model: PreTrainedModel,
        size: int,
        drafter: Drafter | None,
        tokenizer: Any,
        pass_width: int | None,
        twin: Twin | None = None,
    ) -> None:
        cache, generators = RaggedCache(model.config, size, 1), [torch.Generator(model.device) for _ in range(size)]
        super().__init__(
            model, SlotRows(size), cache, drafter, SlotProcessors(size), GenerationConfig(), pass_width, False,
            generators, twin,
        )  # fmt: skip
        if drafter is not None:
            drafter.start(replace(self.session(tokenizer), do_sample=True))

    def join(self, b: int, request: Request) -> None:
        """A text enters row b; its prompt is read by `read` before it takes part in rounds."""
        self.rows.put(b, request.prompt, request.budget, request.criteria)
        self.processors.put(b, request.processors)
        self.sampling[b] = bool(request.config.do_sample)
        if self.drafter is not None:
            self.drafter.join(b)

    def begin(self, b: int, seed: int) -> None:
        """Row b's prompt has been read: it takes part in rounds, and draws as if it were alone."""
        self.generators[b].manual_seed(seed)
        self.rows.begin(b)

    def leave(self, b: int) -> None:
        """Row b is empty again, and nothing of its text is left."""
        self.rows.put(b, [0], 0, StoppingCriteriaList())
        self.processors.drop(b)
        self.sampling[b] = False
        self.cache.clear(b)
        if self.drafter is not None:
            self.drafter.leave(b)

    def unread(self, b: int) -> list[int]:
        """What of row b's prompt has not been through the model; its last token goes in with the first round."""
        return self.rows.view(b)[int(self.cache.lengths[b]) : -1]

    def read(self, joining: list[int], most: int) -> None:
        """One pass over pieces of prompts, the first row's in any case, ``most`` positions in all if that will do."""
        pieces = self._pieces([b for b in joining if self.unread(b)], most if self.rows.active else CHUNK)
        if pieces:
            read(self.network, self.cache, pieces, fixed=self.pass_width is not None, twin=self.twin)
        if self.drafter is not None:
            for b in pieces:
                self.drafter.prefill(b, int(self.cache.lengths[b]))

    def _pieces(self, joining: list[int], most: int) -> dict[int, list[int]]:
        if not joining:
            return {}
        fixed = self.pass_width is not None
        size = FIXED_CHUNK if fixed else most
        pieces: dict[int, list[int]] = {}
        for b in same_bucket(self.cache, joining)[0] if fixed else joining:
            piece = self.unread(b)[:size]
            width = size if fixed else max(len(p) for p in (piece, *pieces.values()))
            if pieces and (len(pieces) + 1) * width > most:
                break
            pieces[b] = piece
        return pieces

    def refuse(self, invalid: Tensor | None) -> None:
        """Rows whose scores decide nothing fail alone, as do those whose rules have raised."""
        if invalid is not None:
            for b in self.rows.active:
                try:
                    raise_for_nan(invalid, [b])
                except ValueError as error:
                    self.rows.errors.setdefault(b, error)
        self.rows.stop_failed()

    def mend(self) -> None:
        """After a round that broke off: no cache holds more than the text but its newest token."""
        lengths = torch.tensor(self.rows.lengths)
        self.cache.rollback((self.cache.lengths - lengths + 1).clamp(min=0))
        if self.drafter is not None:
            self.drafter.observe(self.rows, [0] * len(self.rows))
