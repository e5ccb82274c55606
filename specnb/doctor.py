"""`specnb doctor`: what speculation buys on this machine with this model, and what to do.

    specnb doctor --model Qwen/Qwen3-0.6B --quick
    print(specnb.diagnose(model, tokenizer))

It measures memory, arithmetic and the cost of a pass, lets the model answer a few prompts of the suite, tries every
drafter and every draft length on these answers without further passes (`specnb.replay`), and recommends one, or none
(`specnb.advice`). The recommendation is then run for real and compared. Greedy decoding, one row.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from specnb import advice, checks, cli
from specnb.advice import Candidate, Recommendation
from specnb.cache import RaggedCache, context_size
from specnb.compiled import Twin, compiled_width, twin_for
from specnb.decoding import generate
from specnb.diagnosis import TOO_BUSY, Check, Diagnosis, LoopCost, doubt_about
from specnb.drafters import Drafter, DraftModel, EarlyExit, PromptLookup
from specnb.machine import describe_machine
from specnb.profiling import PassCost, Rate, arithmetic_peak, forward_cost, memory_bandwidth, roofline, synchronise
from specnb.progress import Progress, duration
from specnb.replay import replay
from specnb.workloads import Prompt, encode, load_prompts

SHORTEST_ANSWER = 24  # tokens; less tells little about a drafter
PREFILL = 2.0  # how much longer a prefill takes than its arithmetic alone


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        positions: the T whose passes are timed; ``repeats``: how often each.
        probes: readings of memory, and products, at each visit.
        per_group: prompts of each kind; ``new_tokens``: tokens of each answer, at most.
        checked: prompts the recommendation is run on.
        cost_seconds, answers_seconds: at most for passes and for answers; a slow model gets fewer of both.
        seconds: at most for the whole; what is left at the end goes into the check.
    """

    positions: tuple[int, ...]
    repeats: int
    probes: int
    per_group: int
    new_tokens: int
    checked: int
    cost_seconds: float
    answers_seconds: float
    seconds: float

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        return tuple(T - 1 for T in self.positions if T > 1)


FULL = Plan((1, 2, 3, 4, 5, 6, 8, 10, 12, 16), 11, 9, 2, 64, 4, 20.0, 25.0, 75.0)
QUICK = Plan((1, 2, 3, 5, 8, 12, 16), 5, 3, 1, 40, 0, 5.0, 10.0, 25.0)


@dataclass
class Written:
    """An answer of the model: the prompt's kind, its tokens, the answer's tokens."""

    group: str
    prompt: list[int]
    text: list[int]


# --- the examination ---


def diagnose(
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    drafters: Mapping[str, Drafter] | None = None,
    prompts: Sequence[Prompt] | None = None,
    quick: bool = False,
    compile: bool = False,
    name: str | None = None,
    progress: bool = True,
) -> Diagnosis:
    """Examine model and machine, and recommend a drafter and a number of drafted tokens, or none.

    Args:
        model: the target, on the device it is to run on.
        tokenizer: the model's.
        drafters: title → drafter to try; None means prompt lookup. `DraftModel` is tried with every k; any other
            with every k up to its ``num_draft_tokens``.
        prompts: questions to try them on; None means some of each kind from the suite (`specnb.load_prompts`).
        quick: fewer repetitions, prompts and tokens, and no check run: on the default model some 20 s instead of 60.
        compile: examine the passes that ``compile=True`` runs, as `generate` has it; they cost less, and other numbers
            of drafted tokens may be best. Where there can be none, a warning says why.
        name: of the model, in the report; None takes the one it was loaded by.
        progress: show how far it is.

    Returns:
        `Diagnosis`. After Ctrl-C, with what had been measured by then, and ``interrupted`` set.

    Raises:
        ValueError, TypeError: for a model that specnb cannot decode with, or drafters or prompts that do not fit it.

    Notebook 07 explains every number of the report.
    """
    started = time.perf_counter()
    checks.check_model(model)
    title = name or Path(model.config.name_or_path or type(model).__name__).name
    found = Diagnosis(title, str(model.dtype).removeprefix("torch."), describe_machine(model.device), quick=quick)
    plan = QUICK if quick else FULL
    twin = twin_for(model, compiled_width(max(plan.draft_lengths))) if compile else None
    found.compiled = twin is not None
    tried = {"prompt lookup": PromptLookup(max(plan.draft_lengths))} if drafters is None else dict(drafters)
    asked = _prompts_that_fit(model, tokenizer, prompts, plan)
    try:
        _examine(found, Subject(model, twin), tokenizer, tried, asked, plan, progress)
    except KeyboardInterrupt:
        found.interrupted = True
    found.seconds = time.perf_counter() - started
    return found


def _examine(
    found: Diagnosis, subject: Subject, tokenizer: Any, drafters: Mapping[str, Drafter],
    asked: list[tuple[str, list[int]]], plan: Plan, progress: bool,
) -> None:  # fmt: skip
    """Fill in the diagnosis, one measurement after the other; what is done stays if the next one is cut short."""
    model = subject.model
    stages = {"Memory and arithmetic": 3.0, "Cost of a pass": plan.cost_seconds, "Cost of the loop": 3.0,
              "Answers": plan.answers_seconds, "Drafters": 2.0, "Check": 3.0 * plan.checked}  # fmt: skip
    with _Course(progress, {label: seconds for label, seconds in stages.items() if seconds}) as course:
        until = time.perf_counter() + plan.seconds
        with course.stage("Memory and arithmetic"):
            _probe(found, model, plan)
        with course.stage("Cost of a pass") as tell:
            found.cost = _pass_cost(subject, asked, plan, tell)
        with course.stage("Cost of the loop"):
            _probe_again(found, model, plan)
            found.loop = _loop_cost(subject, asked[0][1], plan)
        with course.stage("Answers") as tell:
            seconds = min(plan.answers_seconds, (until - time.perf_counter()) / 2)
            written = _answers(model, asked, _affordable(found, asked, plan.new_tokens, seconds), tell)
        with course.stage("Drafters"):
            _try_drafters(found, model, tokenizer, drafters, written, plan)
        if plan.checked:
            with course.stage("Check") as tell:
                _check(found, subject, drafters, written, plan.checked, until, tell)


@dataclass(frozen=True)
class Subject:
    """What is examined: a model, and its compiled twin if the passes are to go through one."""

    model: PreTrainedModel
    twin: Twin | None = None

    @property
    def network(self) -> PreTrainedModel:
        """What the passes go through."""
        return self.model if self.twin is None else self.twin.network

    def target_pass(self, cache: RaggedCache, tokens: Tensor) -> Tensor:
        """A compiled pass over one row's tokens [1, T]."""
        assert self.twin is not None
        return self.twin.target_pass(cache, tokens, [0])


class _Course:
    """One bar over several stages of unequal length."""

    def __init__(self, show: bool, stages: Mapping[str, float]) -> None:
        self.stages, self.done = stages, 0.0
        self.bar = Progress("Examining", sum(stages.values()), "%") if show else None

    def __enter__(self) -> _Course:
        if self.bar is not None:
            self.bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.bar is not None:
            self.bar.label = "Examined"
            self.bar.__exit__(*error)

    @contextlib.contextmanager
    def stage(self, label: str) -> Iterator[Callable[[float], None]]:
        """Hands out a function that is told which share of the stage is done."""
        if self.bar is not None:
            self.bar.label = label
        self._tell(self.done)
        yield lambda share: self._tell(self.done + share * self.stages[label])
        self.done += self.stages[label]

    def _tell(self, done: float) -> None:
        if self.bar is not None:
            self.bar.update(min(done, 0.99 * sum(self.stages.values())))  # all is done only at the end


# --- what is measured ---


def _probe(found: Diagnosis, model: PreTrainedModel, plan: Plan) -> None:
    found.bandwidth = memory_bandwidth(model.device, repeats=plan.probes)
    for dtype in dict.fromkeys([model.dtype, *_alternatives(model)]):
        found.peaks[str(dtype).removeprefix("torch.")] = arithmetic_peak(dtype, model.device, repeats=plan.probes)


def _alternatives(model: PreTrainedModel) -> list[torch.dtype]:
    """The other dtype one would load the model in, on a CPU: which of them is faster differs between processors."""
    if model.device.type != "cpu":
        return []
    return [torch.float32 if model.dtype == torch.bfloat16 else torch.bfloat16]


def _probe_again(found: Diagnosis, model: PreTrainedModel, plan: Plan) -> None:
    """Bandwidth on both sides of the passes, since machines have better and worse moments; then the roofline."""
    assert found.bandwidth is not None and found.cost is not None
    again = memory_bandwidth(model.device, repeats=plan.probes)
    found.bandwidth = Rate([*found.bandwidth.samples, *again.samples], "B/s")
    context = found.cost.context or 0
    found.roofline = roofline(model, context=context, bandwidth=found.bandwidth, peak=found.peaks[found.dtype])


def _pass_cost(
    subject: Subject, asked: Sequence[tuple[str, list[int]]], plan: Plan, tell: Callable[[float], None]
) -> PassCost:
    """v(T) in the middle of a typical answer."""
    context = int(median(len(ids) for _, ids in asked)) + plan.new_tokens // 2
    context = min(context, context_size(subject.model.config) - max(plan.positions))
    return forward_cost(
        subject.model, plan.positions, context=context, repeats=plan.repeats, max_seconds=plan.cost_seconds,
        run=None if subject.twin is None else subject.target_pass, progress=tell,
    )  # fmt: skip


class _PassClock:
    """Notes when each pass of the model begins and ends."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.begun: list[float] = []
        self.ended: list[float] = []

    def __enter__(self) -> _PassClock:
        self.hooks = [
            self.model.register_forward_pre_hook(lambda *_: self.begun.append(self._now())),
            self.model.register_forward_hook(lambda *_: self.ended.append(self._now())),
        ]
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self.hooks:
            hook.remove()

    def _now(self) -> float:
        synchronise(self.model.device)
        return time.perf_counter()


@dataclass(frozen=True)
class _Decoded:
    """The decoding phase of one run, without the reading of the prompt. Times in ms.

    The first round's pass may also read the prompt: it counts as much as the others take.
    """

    text: list[int]
    passes_ms: list[float]
    between_ms: list[float]
    ms: float


def _decoded(subject: Subject, prompt: list[int], new: int, drafter: Drafter | None = None) -> _Decoded:
    ids = torch.tensor([prompt], device=subject.model.device)
    compile = subject.twin is not None
    with _PassClock(subject.network) as clock:
        out = generate(subject.model, ids, drafter, compile=compile, max_new_tokens=new, do_sample=False)
        ended = time.perf_counter()
    assert out.stats is not None
    passes = int(out.stats.target_passes)
    begun, done = clock.begun[-passes:], clock.ended[-passes:]
    times = [1000 * (b - a) for a, b in zip(begun, done)]
    times[0] = median(times[1:] or times)
    between = [1000 * (b - a) for a, b in zip(done, begun[1:])]
    before = times[0] + (median(between) if between else 0.0)  # … and its draft
    return _Decoded(out.sequences[0, len(prompt) :].tolist(), times, between, before + 1000 * (ended - done[0]))


def _loop_cost(subject: Subject, prompt: list[int], plan: Plan) -> LoopCost:
    run = _decoded(subject, prompt, max(plan.new_tokens // 2, 2))
    between = median(run.between_ms) if run.between_ms else 0.0
    return LoopCost(between, between / (between + median(run.passes_ms)))


# --- answers to try drafters on ---


def _prompts_that_fit(
    model: PreTrainedModel, tokenizer: Any, prompts: Sequence[Prompt] | None, plan: Plan
) -> list[tuple[str, list[int]]]:
    """(group, token ids) of the prompts that leave room for an answer."""
    chosen = load_prompts(limit=plan.per_group) if prompts is None else list(prompts)
    room = context_size(model.config) - plan.new_tokens - max(plan.positions)
    encoded = [(prompt.group, encode(tokenizer, prompt)[0].tolist()) for prompt in chosen]
    fitting = [(group, ids) for group, ids in encoded if len(ids) <= room]
    if not fitting:
        raise ValueError(
            f"None of the {len(chosen)} prompts leaves room for {plan.new_tokens} tokens in the model's context of "
            f"{context_size(model.config)}. Pass shorter prompts."
        )
    return fitting


def _answers(
    model: PreTrainedModel, asked: Sequence[tuple[str, list[int]]], size: tuple[int, int], tell: Callable[[float], None]
) -> list[Written]:
    """Greedy answers, all in one batch: rows share the reading of weights, so it takes a fraction of one by one.

    ``size``: how many prompts, spread over all of them, and how many new tokens each.
    """
    count, new = size
    chosen = [asked[i * len(asked) // count] for i in range(count)]  # spread over the groups
    width = max(len(ids) for _, ids in chosen)
    padded = torch.tensor([[0] * (width - len(ids)) + ids for _, ids in chosen], device=model.device)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for _, ids in chosen], device=model.device)
    ticker = StoppingCriteriaList([_Ticker(count * new, tell)])
    out = generate(
        model, padded, attention_mask=mask, max_new_tokens=new, do_sample=False, stopping_criteria=ticker
    )  # fmt: skip
    assert out.num_new_tokens is not None
    lengths = out.num_new_tokens.tolist()
    texts = [row[width : width + n] for row, n in zip(out.sequences.tolist(), lengths)]
    return [Written(group, ids, text) for (group, ids), text in zip(chosen, texts)]


def _affordable(found: Diagnosis, asked: Sequence[tuple[str, list[int]]], new: int, seconds: float) -> tuple[int, int]:
    """How many prompts and new tokens fit the time: shorter answers first, then fewer prompts, at least one."""
    assert found.cost is not None and found.roofline is not None
    cost, longest = found.cost, max(len(ids) for _, ids in asked)
    prefill_ms = PREFILL * found.roofline.compute_ms  # of one position

    def estimate(count: int, new: int) -> float:
        return (count * longest * prefill_ms + new * cost(count)) / 1000

    count = len(asked)
    while estimate(count, new) > seconds and new > SHORTEST_ANSWER:
        new = max(new * 3 // 4, SHORTEST_ANSWER)
    while estimate(count, new) > seconds and count > 1:
        count -= 1
    return count, new


class _Ticker(StoppingCriteria):
    """Stops nothing; is asked after every token of every row, and so knows how far the answers are."""

    def __init__(self, total: int, tell: Callable[[float], None]) -> None:
        self.total, self.tell, self.seen = total, tell, 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.seen += 1
        self.tell(self.seen / self.total)
        return torch.zeros(len(input_ids), dtype=torch.bool)


# --- drafters tried on them ---


def _try_drafters(
    found: Diagnosis, model: PreTrainedModel, tokenizer: Any, drafters: Mapping[str, Drafter],
    written: Sequence[Written], plan: Plan,
) -> None:  # fmt: skip
    assert found.cost is not None and found.loop is not None
    found.answers, found.tokens = len(written), sum(len(answer.text) for answer in written)
    for title, drafter in drafters.items():
        replays = [(w.group, replay(model, drafter, w.prompt, w.text, tokenizer)) for w in written]
        candidate = Candidate(title, *_code_of(drafter), tuple(replays))
        found.outcomes += [
            advice.outcome(candidate, k, found.cost, found.loop.ms) for k in _lengths(drafter, plan.draft_lengths)
        ]
        found.recommendation = advice.recommend(found.outcomes, found.cost)  # of those tried so far
        if (doubt := doubt_about(found.cost)) > TOO_BUSY:
            found.recommendation = advice.undecided(found.recommendation, doubt)
        if found.compiled:
            found.recommendation = advice.compiled(found.recommendation)


def _lengths(drafter: Drafter, lengths: Sequence[int]) -> list[int]:
    """The k to try: a chain of single guesses can be any length, other drafts at most their own."""
    if isinstance(drafter, (DraftModel, EarlyExit)):
        return list(lengths)
    longest = drafter.num_draft_tokens
    return [k for k in lengths if k < longest] + [min(longest, max(lengths))]


def _code_of(drafter: Drafter) -> tuple[str, str]:
    """(expression with {k}, line before it) that make such a drafter."""
    if isinstance(drafter, PromptLookup):
        return "specnb.PromptLookup(num_draft_tokens={k})", ""
    if isinstance(drafter, DraftModel):
        name = drafter.model.config.name_or_path or "…"
        return "specnb.DraftModel(draft, num_draft_tokens={k})", f"draft, _ = specnb.load_model({name!r})"
    if isinstance(drafter, EarlyExit):
        return f"specnb.EarlyExit(layer={drafter.layer}, num_draft_tokens={{k}})", ""
    return f"{type(drafter).__name__}(num_draft_tokens={{k}})", ""


def _check(
    found: Diagnosis, subject: Subject, drafters: Mapping[str, Drafter], written: Sequence[Written], wanted: int,
    until: float, tell: Callable[[float], None],
) -> None:  # fmt: skip
    """Run the recommendation beside plain decoding; if it is slower there, it is none."""
    advised = found.recommendation
    assert found.cost is not None and found.loop is not None
    if advised is None or advised.outcome is None or advised.verdict not in ("use", "use for some"):
        return
    o = advised.outcome
    places = _meant(advised, written, wanted)
    runs = _pairs(subject, [written[i] for i in places], _with_k(drafters[o.candidate.title], o.k), until, tell)
    chosen = replace(o.candidate, replays=tuple(o.candidate.replays[i] for i in places[: len(runs)]))
    found.check = Check(
        prompts=len(runs),
        predicted=advice.outcome(chosen, o.k, found.cost, found.loop.ms).speedup,
        measured=sum(plain.ms for plain, _ in runs) / sum(drafted.ms for _, drafted in runs),
        same_text=sum(plain.text == drafted.text for plain, drafted in runs),
    )
    if found.check.measured < 1:
        withdrawn = advice.withdraw(advised, found.check.measured)
        found.recommendation = advice.compiled(withdrawn) if found.compiled else withdrawn


def _meant(advised: Recommendation, written: Sequence[Written], wanted: int) -> list[int]:
    """Some places among the answers of the kinds that the drafter is recommended for, spread over them."""
    wants = advised.verdict == "use for some"  # then groups are those to use it for, otherwise those to leave out
    meant = [i for i, answer in enumerate(written) if (answer.group in advised.groups) == wants]
    return [meant[i] for i in _spread(len(meant), wanted)]


def _pairs(
    subject: Subject, answers: Sequence[Written], drafter: Drafter, until: float, tell: Callable[[float], None]
) -> list[tuple[_Decoded, _Decoded]]:
    """Plain and drafted in turn, for each answer; at least one, and no more than there is time for."""
    runs: list[tuple[_Decoded, _Decoded]] = []
    for answer in answers:
        started, new = time.perf_counter(), len(answer.text)
        runs.append((_decoded(subject, answer.prompt, new), _decoded(subject, answer.prompt, new, drafter)))
        tell(len(runs) / len(answers))
        now = time.perf_counter()
        if now + (now - started) > until:
            break
    return runs


def _with_k(drafter: Drafter, k: int) -> Drafter:
    """The same drafter with another k; the caller's own is left alone."""
    twin = copy.copy(drafter)
    twin.num_draft_tokens = k
    return twin


def _spread(count: int, wanted: int) -> list[int]:
    """Places spread evenly over 0 … count - 1."""
    wanted = min(count, wanted)
    return [(2 * i + 1) * count // (2 * wanted) for i in range(wanted)]


# --- the command ---


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `specnb doctor` takes."""
    parser.add_argument("--model", metavar="NAME", help="a Hub id or a folder; default: SmolLM2-135M-Instruct")
    parser.add_argument("--draft", metavar="NAME", help="try this model as drafter, too: a Hub id or a folder")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the weights; default: float32 on a CPU, bfloat16 elsewhere",
    )
    parser.add_argument("--device", help="where to run it; default: a GPU if there is one, otherwise the CPU")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and prompts, and no check run")
    parser.add_argument("--compile", action="store_true", help="examine the passes that compile=True runs")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON instead of a report")


def run(arguments: argparse.Namespace) -> int:
    """Do what `specnb doctor` was asked for."""
    from transformers.utils.logging import disable_progress_bar

    from specnb import fetch, models

    disable_progress_bar()  # of transformers, which loads weights in a second or two
    place = dict(dtype=arguments.dtype, device=arguments.device)
    model, tokenizer = models.load_model(arguments.model, **place)
    drafters: dict[str, Drafter] = {"prompt lookup": PromptLookup(max(FULL.draft_lengths))}
    if arguments.draft is not None:
        draft, draft_tokenizer = models.load_model(arguments.draft, **place)
        drafters[f"the draft model {Path(arguments.draft).name}"] = DraftModel(draft, tokenizer=draft_tokenizer)
    name = fetch.NAME if arguments.model is None else Path(arguments.model).name
    found = diagnose(model, tokenizer, drafters=drafters, quick=arguments.quick, compile=arguments.compile, name=name)
    print(json.dumps(found.as_dict(), indent=2, ensure_ascii=False) if arguments.json else found)
    if found.interrupted:
        print(f"specnb: stopped after {duration(found.seconds)}; above is what was measured by then.", file=sys.stderr)
    return cli.INTERRUPTED if found.interrupted else 0
