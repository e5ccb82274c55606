"""Who takes part in a benchmark: transformers' own ways to decode, specnb's, and anything else that answers.

A contestant is a name and a function ``(ids, max_new_tokens, temperature, seed) -> Answer``; a function of your own may
return just the new tokens. Every one gets the same prompt tokens and reports only tokens that stand in the answer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.compiled import compiled_width
from specnb.decoding import generate
from specnb.drafters import Drafter, DraftModel, PromptLookup
from specnb.profiling import synchronise
from specnb.report import Round

BASELINE = "transformers"  # plain generate of transformers: what every speed-up is measured against
LOOKUP_TOKENS = 10

clock = time.perf_counter


@dataclass(frozen=True)
class Answer:
    """What a contestant wrote, and what it tells about how.

    Attributes:
        tokens: the new tokens, an end token included.
        seconds: wall time of the whole answer, if the contestant has its own clock; None: the benchmark's counts.
        first_seconds: until the first new token was there.
        passes: target passes, if known; transformers' first pass (over the prompt) counts, since it yields a token.
        rounds: (drafted, accepted, emitted) of each round, if known.
        start_seconds, draft_seconds: spent in the drafter before and during the rounds.
    """

    tokens: Sequence[int]
    seconds: float | None = None
    first_seconds: float | None = None
    passes: int | None = None
    rounds: Sequence[tuple[int, int, int]] | None = None
    start_seconds: float = 0.0
    draft_seconds: float = 0.0


Ask = Callable[[Tensor, int, float, int], Any]


@dataclass(frozen=True)
class Way:
    """How specnb's passes are made; contestants of one way share their pass cost and their greedy text.

    Attributes:
        pass_width: W, or None for passes as wide as the round needs.
        compiled: whether the pass is compiled.
    """

    pass_width: int | None = None
    compiled: bool = False


@dataclass(frozen=True)
class Contestant:
    """One that takes part.

    Attributes:
        name: as in reports and on the command line.
        ask: the function that answers.
        reference: the contestant whose greedy text it must repeat.
        way: how its passes are made, if it is specnb's loop.
        plain: plain decoding of that way, for specnb's; its own name for plain decoding itself.
        max_drafted: most tokens drafted in a round.
        peer: whether it is another engine, in a process of its own.
        about: what a reader of the report should know, in a line.
    """

    name: str
    ask: Ask
    reference: str
    way: Way | None = None
    plain: str | None = None
    max_drafted: int = 0
    peer: bool = False
    about: str = field(default="", kw_only=True)


def everyone(
    model: PreTrainedModel,
    drafters: Mapping[str, Drafter],
    *,
    pass_width: int | None = None,
    compile: bool = False,
    others: Mapping[str, Ask] | None = None,
) -> dict[str, Contestant]:
    """All that can take part, by name, in the order of the reports; arguments as in `specnb.run_benchmark`."""
    found = transformers_contestants(model, drafters)
    found += specnb_contestants(model, drafters, Way(pass_width))
    if compile:
        found += specnb_contestants(model, drafters, Way(pass_width or common_width(drafters), compiled=True))
    found += [Contestant(name, ask, BASELINE, about="given by the caller") for name, ask in (others or {}).items()]
    names = [contestant.name for contestant in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"Two contestants are named {min(twice)!r}; rename the drafter or the function you gave.")
    return {contestant.name: contestant for contestant in found}


def common_width(drafters: Mapping[str, Drafter]) -> int:
    """One pass width for all compiled ones: it holds every drafter's longest draft."""
    longest = max((drafter.num_draft_tokens for drafter in drafters.values()), default=LOOKUP_TOKENS)
    return compiled_width(longest)


def named_drafters(drafters: Drafter | Sequence[Drafter] | Mapping[str, Drafter] | None) -> dict[str, Drafter]:
    """The drafters by name: None means prompt lookup; those without a name get a short one after their class."""
    if drafters is None:
        return {"lookup": PromptLookup(LOOKUP_TOKENS)}
    if isinstance(drafters, Mapping):
        named = dict(drafters)
    else:
        several = [drafters] if isinstance(drafters, Drafter) else list(drafters)
        named = {_short_name(drafter): drafter for drafter in several}
        if len(named) < len(several):
            raise ValueError("Two drafters are of one class: give a dict, name → drafter, so that reports can tell.")
    for name, drafter in named.items():
        if not isinstance(drafter, Drafter):
            raise TypeError(f"drafters[{name!r}] must be a specnb.Drafter, got {type(drafter).__name__}.")
    return named


def _short_name(drafter: Any) -> str:
    kind = type(drafter).__name__
    return {"PromptLookup": "lookup", "DraftModel": "draft"}.get(kind, kind.lower())


# --- transformers ---


def transformers_contestants(model: PreTrainedModel, drafters: Mapping[str, Drafter]) -> list[Contestant]:
    """Plain generate, prompt lookup, and assisted generation if one of the drafters is a model; all as they come."""
    lookup = f"transformers' own prompt lookup, {LOOKUP_TOKENS} tokens"
    found = [
        _transformers(BASELINE, model, "transformers' plain generate"),
        _transformers(f"{BASELINE}-lookup", model, lookup, prompt_lookup_num_tokens=LOOKUP_TOKENS),
    ]
    draft = next((drafter.model for drafter in drafters.values() if isinstance(drafter, DraftModel)), None)
    if draft is not None:
        about = "transformers' own assisted generation, with its settings"
        found.append(_transformers(f"{BASELINE}-assisted", model, about, assistant_model=draft))
    return found


def _transformers(name: str, model: PreTrainedModel, about: str, **options: Any) -> Contestant:
    def ask(ids: Tensor, max_new_tokens: int, temperature: float, seed: int) -> Answer:
        torch.manual_seed(seed)
        first = FirstToken()
        given = dict(attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, **sampling(temperature))
        with _counted_passes(model) as count:
            out = model.generate(ids, streamer=first, **given, **options)
        return Answer(out[0, ids.shape[1] :].tolist(), first_seconds=first.seconds, passes=count.passes)

    return Contestant(name, ask, BASELINE, about=about)


def sampling(temperature: float) -> dict[str, Any]:
    """Options of ``generate``: greedy at temperature 0, else plain sampling, with neither top-k nor top-p."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


@contextlib.contextmanager
def _counted_passes(model: PreTrainedModel) -> Iterator[SimpleNamespace]:
    """Count the calls of the model."""
    count = SimpleNamespace(passes=0)

    def one_more(*_: Any) -> None:
        count.passes += 1

    hook = model.register_forward_pre_hook(one_more)
    try:
        yield count
    finally:
        hook.remove()


class FirstToken:
    """A streamer that notes when the first new token arrives; transformers and specnb put the prompt before it."""

    def __init__(self) -> None:
        self.started = clock()
        self.seconds: float | None = None
        self._puts = 0

    def put(self, _: Tensor) -> None:
        self._puts += 1
        if self._puts == 2:
            self.seconds = clock() - self.started

    def end(self) -> None:
        """Nothing to do."""


# --- specnb ---


def specnb_contestants(model: PreTrainedModel, drafters: Mapping[str, Drafter], way: Way) -> list[Contestant]:
    """Plain decoding, each drafter, and each drafter of chains under a controller that chooses their length."""
    from specnb.adaptive import Adaptive

    suffix = "+compile" if way.compiled else ""
    plain = f"plain{suffix}"
    found = [_specnb(plain, model, None, way, plain)]
    found += [_specnb(name + suffix, model, drafter, way, plain) for name, drafter in drafters.items()]
    for name, drafter in drafters.items():
        if not (isinstance(drafter, Adaptive) or drafter.trees or drafter.needs_hidden):
            found.append(_specnb(f"adaptive-{name}{suffix}", model, Adaptive(drafter), way, plain))
    return found


def _specnb(name: str, model: PreTrainedModel, drafter: Drafter | None, way: Way, plain: str) -> Contestant:
    how: dict[str, Any] = dict(pass_width=way.pass_width, return_trace=True)
    how |= {"compile": True} if way.compiled else {}

    def ask(ids: Tensor, max_new_tokens: int, temperature: float, seed: int) -> Answer:
        first = FirstToken()
        with _timed(drafter, model.device) as spent:
            out = generate(model, ids, drafter, max_new_tokens=max_new_tokens, seed=seed, streamer=first,
                           **how, **sampling(temperature))  # fmt: skip
        assert out.trace is not None
        return Answer(
            out.sequences[0, ids.shape[1] :].tolist(),
            first_seconds=first.seconds,
            passes=len(out.trace),
            rounds=[counts(r) for r in out.trace],
            start_seconds=spent["start"],
            draft_seconds=spent["draft"] + spent["observe"],
        )

    most = drafter.num_draft_tokens if drafter is not None else 0
    reference = BASELINE if drafter is None else plain
    return Contestant(name, ask, reference, way, plain, most, about=_about(drafter, way))


def _about(drafter: Drafter | None, way: Way) -> str:
    width = f", every pass {way.pass_width} positions wide" if way.pass_width else ""
    compiled = ", compiled" if way.compiled else ""
    return f"specnb, {type(drafter).__name__ if drafter is not None else 'no drafter'}{width}{compiled}"


def counts(r: Round) -> tuple[int, int, int]:
    """(drafted, accepted, emitted) of a round."""
    return len(r.drafted), r.num_accepted, len(r.emitted)


@contextlib.contextmanager
def _timed(drafter: Drafter | None, device: torch.device) -> Iterator[dict[str, float]]:
    """Seconds spent in the drafter's methods, by method, while it decodes."""
    spent = dict.fromkeys(("start", "draft", "observe"), 0.0)
    if drafter is None:
        yield spent
        return
    before = dict(vars(drafter))
    # on the object itself, not in a wrapper: whatever else the loop asks of a drafter stays as it is
    for method in spent:
        setattr(drafter, method, _stopwatch(getattr(drafter, method), method, spent, device))
    try:
        yield spent
    finally:
        for method in spent:
            delattr(drafter, method)
            if method in before:
                setattr(drafter, method, before[method])


def _stopwatch(work: Callable, method: str, spent: dict[str, float], device: torch.device) -> Callable:
    def timed(*args: Any) -> Any:
        started = clock()
        result = work(*args)
        synchronise(device)
        spent[method] += clock() - started
        return result

    return timed
