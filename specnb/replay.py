"""What a drafter would have done with a text that is already there: its rounds, without one pass of the target.

Greedy verification keeps a guess if and only if it is the target's own next token. Once the target has written a
text, every drafter and every draft length can be tried on it: at each place of the text the drafter guesses, and the
guesses are compared with what follows. From that, the rounds for any k are a walk: draft, skip what was right and
one token more, draft again.

    tried = replay(model, specnb.PromptLookup(16), prompt, text)
    tried.rounds(4)            # [(drafted, accepted), …] of the run that num_draft_tokens=4 would have made

Handles every drafter that looks at the tokens alone. Not for one that reads the target's hidden states, nor for
sampling, where a guess is accepted by chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from specnb import checks, compat
from specnb.drafters import Drafter, DraftModel
from specnb.drafters.base import Session
from specnb.processing import Processors
from specnb.profiling import synchronise
from specnb.rows import Rows


@dataclass(frozen=True)
class Replay:
    """A drafter's guesses along one text.

    Attributes:
        guessed: for each place of the text, how many tokens the drafter proposes there (at most its k).
        matched: how many of them, from the first on, are what follows in the text.
        start_ms: the drafter's own prefill of the prompt.
        call_ms: drafting one round, or one token of it if ``per_token``.
        per_token: whether the drafting time grows with the number of tokens drafted.
    """

    guessed: tuple[int, ...]
    matched: tuple[int, ...]
    start_ms: float = 0.0
    call_ms: float = 0.0
    per_token: bool = False

    def rounds(self, k: int) -> list[tuple[int, int]]:
        """(drafted, accepted) of each round with at most k drafted tokens, as `generate` would have made them."""
        return list(self._walk(k))

    def _walk(self, k: int) -> Iterator[tuple[int, int]]:
        place, end = 0, len(self.guessed)
        while place < end:
            drafted = min(self.guessed[place], k, end - place - 1)  # the token after the draft needs room, too
            accepted = min(self.matched[place], drafted)
            yield drafted, accepted
            place += accepted + 1

    def draft_ms(self, drafted: int) -> float:
        """What drafting so many tokens takes."""
        return self.call_ms * (drafted if self.per_token else bool(drafted))


@torch.no_grad()
def replay(
    model: PreTrainedModel, drafter: Drafter, prompt: Sequence[int], text: Sequence[int], tokenizer: Any = None
) -> Replay:
    """Let the drafter guess at every place of a text that the target has written greedily after the prompt.

    A `DraftModel` guesses one token per place: its longer greedy drafts are chains of these, as long as they are
    right. Any other drafter guesses its ``num_draft_tokens`` at once, and for fewer is taken to guess the first of
    them.

    Args:
        model: the target; only its configuration and device are used.
        drafter: a drafter that looks at tokens alone.
        prompt, text: token ids, at least one each.
        tokenizer: the target's, for drafters that want one.

    Raises:
        ValueError: for an empty prompt or text, and whatever the drafter raises.
    """
    if not prompt or not text:
        raise ValueError(f"A replay needs a prompt and a text; got {len(prompt)} and {len(text)} tokens.")
    rows = Rows([list(prompt)], [len(text)], [StoppingCriteriaList()])
    chained = isinstance(drafter, DraftModel)
    session = Session(model, rows, Processors([LogitsProcessorList()]), compat.vocab_size(model), tokenizer)
    started = perf_counter()
    drafter.start(session)
    start_ms = _since(started, model)
    guesses, seconds = _guesses_along(model, drafter, rows, text, 1 if chained else drafter.num_draft_tokens)
    call_ms = sum(seconds) / len(seconds) if seconds else 0.0
    matched = [_matching(guess, text[place:]) for place, guess in enumerate(guesses)]
    if not chained:
        return Replay(tuple(map(len, guesses)), tuple(matched), start_ms, call_ms)
    return Replay((len(text),) * len(text), tuple(_chained(matched)), start_ms, call_ms, per_token=True)


def _guesses_along(
    model: PreTrainedModel, drafter: Drafter, rows: Rows, text: Sequence[int], k: int
) -> tuple[list[list[int]], list[float]]:
    """The guesses at each place, and the ms of each call; the rows grow by the text's tokens one by one."""
    guesses: list[list[int]] = []
    times: list[float] = []
    for token in text:
        limits = [min(k, rows.room[0] - 1)]
        guess: list[int] = []
        if limits[0]:
            started = perf_counter()
            draft = checks.checked_draft(drafter.draft(rows, limits), limits, compat.vocab_size(model))
            times.append(_since(started, model))
            guess = draft.tokens[0, : int(draft.lengths[0])].tolist()
        guesses.append(guess)
        rows.commit([[]], [0], [token])
        drafter.observe(rows, [1])
    return guesses, times


def _since(started: float, model: PreTrainedModel) -> float:
    synchronise(model.device)
    return 1000 * (perf_counter() - started)


def _matching(guess: Sequence[int], text: Sequence[int]) -> int:
    """How many guesses, from the first on, are the text's tokens."""
    return next((i for i, pair in enumerate(zip(guess, text)) if pair[0] != pair[1]), min(len(guess), len(text)))


def _chained(right: Sequence[int]) -> list[int]:
    """From one-token guesses (1 right, 0 wrong): how many places in a row, from each place on, are right."""
    runs = [0]
    for one in reversed(right):
        runs.append(runs[-1] + 1 if one else 0)
    return runs[:0:-1]
