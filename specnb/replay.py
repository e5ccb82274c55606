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
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from specnb import checks, compat
from specnb.adaptive import Adaptive
from specnb.cache import context_size, target_pass
from specnb.drafters import Drafter, DraftModel, EarlyExit
from specnb.drafters.base import Session
from specnb.processing import Processors
from specnb.profiling import synchronise
from specnb.report import Round
from specnb.rows import Rows

TIMED = 6  # guesses of a draft model that are made one by one


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

    A `DraftModel` guesses one token per place, nearly all in one pass: its longer greedy drafts are chains of these,
    as long as they are right. So does an `EarlyExit`, with a cache of its own here, since the target makes no pass. Any
    other drafter guesses its ``num_draft_tokens`` at every place, and is taken to guess the first of them if asked for
    fewer.

    Args:
        model: the target; only its configuration and device are used, and its first layers by an `EarlyExit`.
        drafter: a drafter that looks at tokens alone.
        prompt, text: token ids, at least one each.
        tokenizer: the target's, for drafters that want one.

    Raises:
        ValueError: for an empty prompt or text, for `Adaptive` and drafters of trees, and whatever the drafter raises.
    """
    if not prompt or not text:
        raise ValueError(f"A replay needs a prompt and a text; got {len(prompt)} and {len(text)} tokens.")
    if isinstance(drafter, Adaptive):
        raise ValueError(
            "Adaptive chooses by the times of a real run, which a replay lacks. Replay the drafter inside it."
        )
    checks.check_chains(drafter, "A replay follows chains")
    prefills = True
    if isinstance(drafter, EarlyExit):
        drafter, prefills = drafter.alone(model), False
    rows = Rows([list(prompt)], [len(text)], [StoppingCriteriaList()])
    session = Session(model, rows, Processors([LogitsProcessorList()]), compat.vocab_size(model), tokenizer)
    started = perf_counter()
    drafter.start(session)
    start_ms = _since(started, model) if prefills else 0.0
    if isinstance(drafter, DraftModel):
        right, call_ms = _chain_along(model, drafter, rows, text)
        room = context_size(drafter.model.config) - len(prompt) + 1
        guessed = (max(room - place, 0) for place in range(len(text)))  # a shorter context stops drafting
        return Replay(tuple(guessed), tuple(_runs(right)), start_ms, call_ms, per_token=True)
    guesses, times = _guesses_along(model, drafter, rows, text, drafter.num_draft_tokens)
    matched = [_matching(guess, text[place:]) for place, guess in enumerate(guesses)]
    return Replay(tuple(map(len, guesses)), tuple(matched), start_ms, sum(times) / len(times) if times else 0.0)


def _guesses_along(
    model: PreTrainedModel, drafter: Drafter, rows: Rows, text: Sequence[int], k: int
) -> tuple[list[list[int]], list[float]]:
    """The guesses before each token of this part of the text, and the ms of each call; the rows grow by it."""
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
        rows.commit([Round(0, [], 0, token, is_bonus=True)])
        drafter.observe(rows, [1])
    return guesses, times


def _chain_along(
    model: PreTrainedModel, drafter: DraftModel, rows: Rows, text: Sequence[int]
) -> tuple[list[bool], float]:
    """For each place of the text, whether a draft model guesses its token; and the ms of one guess.

    The first few guesses are made one by one, for the time they take. The rest come out of one pass over the rest of
    the text: each of its positions guesses the token after it, from the true tokens before.
    """
    first, times = _guesses_along(model, drafter, rows, text[:TIMED], 1)
    right = [guess == [token] for guess, token in zip(first, text)]
    newest = rows.view(0)[int(drafter.cache.lengths[0]) :]  # not seen yet; the last of them guesses the rest's first
    rest = text[TIMED:]
    guesses = _next_tokens(drafter, [*rows.view(0), *rest[:-1]], compat.vocab_size(model)) if rest else []
    right += [guess == token for guess, token in zip(guesses[len(newest) - 1 :], rest)]
    return right + [False] * (len(text) - len(right)), median(times) if times else 0.0


def _next_tokens(drafter: DraftModel, text: list[int], vocab_size: int) -> list[int]:
    """The draft model's greedy guess after each token of the text that its cache does not hold but its context does."""
    held = int(drafter.cache.lengths[0])
    unread = drafter.as_read(0, text)[held : context_size(drafter.model.config)]
    if not unread:
        return []
    drafter.cache.reserve(held + len(unread))
    ids = torch.tensor([unread])
    return target_pass(drafter.model, drafter.cache, ids)[0, :, :vocab_size].argmax(dim=-1).tolist()


def _since(started: float, model: PreTrainedModel) -> float:
    synchronise(model.device)
    return 1000 * (perf_counter() - started)


def _matching(guess: Sequence[int], text: Sequence[int]) -> int:
    """How many guesses, from the first on, are the text's tokens."""
    return next((i for i, pair in enumerate(zip(guess, text)) if pair[0] != pair[1]), min(len(guess), len(text)))


def _runs(right: Sequence[bool]) -> list[int]:
    """How many places in a row, from each place on, are right."""
    runs = [0]
    for one in reversed(right):
        runs.append(runs[-1] + 1 if one else 0)
    return runs[:0:-1]
