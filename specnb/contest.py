"""One run of a benchmark: who is asked what and when, and what becomes of the answers. See `specnb.run_benchmark`."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb import contestants
from specnb.cache import context_size
from specnb.contestants import BASELINE, Answer, Contestant, Way
from specnb.measurements import Measurement
from specnb.peer_weights import weights_for
from specnb.peers import Peer, PeerError
from specnb.prediction import PassSampler, buckets
from specnb.profiling import synchronise
from specnb.progress import Progress, say
from specnb.results import BenchmarkResult, described, machine
from specnb.workloads import Prompt, encode

SAMPLER_VISITS = 10  # how often in a run the cost of passes is sampled, beside start and end
WARM_UP_TOKENS = 6


@dataclass(frozen=True)
class Slot:
    """One prompt, once: all contestants follow each other in it."""

    prompt: Prompt
    temperature: float
    repeat: int


class Bench:
    """One run under way."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        prompts: Sequence[Prompt],
        chosen: Mapping[str, Contestant],
        numbers: dict[str, Any],
        progress: bool,
    ) -> None:
        self.model, self.tokenizer, self.prompts, self.progress = model, tokenizer, prompts, progress
        self.contestants = dict(chosen)
        self.order = random.Random(numbers["seed"])
        self.new, self.seed = numbers["max_new_tokens"], numbers["seed"]
        self.slots = list(slots(prompts, numbers["temperatures"], numbers["repeats"]))
        self.shortest = min(encode(tokenizer, prompt).shape[1] for prompt in prompts)
        self.longest = max(most_tokens(tokenizer, prompt, self.new) for prompt in prompts)
        self.sample_passes = PassSampler(model, ways(chosen), self.shortest, self.longest)
        self.result = BenchmarkResult(
            [],
            {**numbers, "prompts": len(prompts), "questions": fingerprint(prompts)},
            machine(model.device),
            {name: described(contestant) for name, contestant in chosen.items()},
            list(self.sample_passes.times.values()),
        )

    def check_lengths(self) -> None:
        """Refuse prompts that leave no room for their answers in the model's context."""
        room = context_size(self.model.config)
        for prompt in self.prompts if self.longest > room else ():
            if (needed := most_tokens(self.tokenizer, prompt, self.new)) > room:
                raise ValueError(
                    f"Prompt {prompt.id} needs up to {needed} tokens with its answers, and the model's context holds "
                    f"{room}. Leave it out, or lower max_new_tokens."
                )

    def take_over(self, earlier: BenchmarkResult) -> None:
        """Go on from an earlier result: its whole slots count as measured."""
        refuse_other_settings(self.result, earlier)
        dtype = dtype_name(self.model)
        self.result.measurements += [m for m in earlier.measurements if m.dtype == dtype]
        for times in earlier.passes:
            mine = self.sample_passes.times.get(times.way)
            if mine is not None and times.dtype == dtype:
                mine.samples = times.samples
        done = {m.slot for m in self.result.measurements}
        self.slots = [s for s in self.slots if (dtype, s.temperature, s.prompt.id, s.repeat) not in done]

    @contextlib.contextmanager
    def with_peers(self, peers: Sequence[Peer]) -> Iterator[None]:
        """Let the peers that can run take part."""
        eos = self.model.generation_config.eos_token_id
        ends = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        with contextlib.ExitStack() as stack:
            for peer in peers if self.slots else ():
                stack.callback(peer.close)
                try:
                    about = stack.enter_context(started(peer, self.model, self.longest))
                except PeerError as problem:
                    self.result.absent[peer.name] = str(problem)
                    continue
                ask = partial(ask_peer, peer, ends)
                self.contestants[peer.name] = Contestant(peer.name, ask, BASELINE, peer=True, about=about)
                self.result.contestants[peer.name] = described(self.contestants[peer.name])
            yield

    def run(self, after_each: Callable[[BenchmarkResult], Any] | None = None) -> BenchmarkResult:
        """All slots; after Ctrl-C, those that were finished before."""
        try:
            if self.slots:
                self._run(after_each or (lambda _: None))
        except KeyboardInterrupt:
            if not self.result.measurements:
                raise
            self.result.complete = False
            say(f"Stopped: the report holds the {len(self.result.measurements)} answers so far.")
        return self.result

    def _run(self, after_each: Callable[[BenchmarkResult], Any]) -> None:
        with self._bar("Warming up", len(self.contestants), "contestants") as tell:
            self.warm_up(tell)
            self.sample_passes()
        total = sum(len(slot.prompt.turns) for slot in self.slots) * len(self.contestants)
        every = max(1, len(self.slots) // SAMPLER_VISITS)
        with self._bar(f"Benchmark, {dtype_name(self.model)}", total, "answers") as tell:
            for number, slot in enumerate(self.slots, start=1):
                self.result.measurements += list(self.answers(slot, tell))
                last = number == len(self.slots)
                if number % every == 0 or last:
                    self.sample_passes()
                after_each(replace(self.result, complete=last))

    @contextlib.contextmanager
    def _bar(self, label: str, total: int, unit: str) -> Iterator[Callable[[], None]]:
        """A function to call after each step."""
        if not self.progress:
            yield lambda: None
            return
        done = itertools.count(1)
        with Progress(label, total, unit) as bar:
            yield lambda: bar.update(next(done))

    def warm_up(self, tell: Callable[[], None]) -> None:
        """A few tokens by everyone, at every size of the attended buffer for those whose passes depend on it."""
        ids = encode(self.tokenizer, self.prompts[0])
        for contestant in list(self.contestants.values()):
            fixed = contestant.way is not None and contestant.way.pass_width is not None
            sizes = buckets(self.shortest, self.longest) if fixed else [0]
            for size in sizes:
                length = max(self.shortest, size // 2 + 1 if size > sizes[0] else 0)
                known = ids.repeat(1, -(-length // ids.shape[1]))[:, :length].to(self.model.device)
                self.try_to(contestant, partial(contestant.ask, known, min(WARM_UP_TOKENS, self.new), 0.0, self.seed))
            tell()

    def try_to(self, contestant: Contestant, work: Callable[[], Any]) -> Any:
        """The result of the work; a peer that fails at it is out, and the run goes on."""
        try:
            return work()
        except PeerError as problem:
            self.result.absent[contestant.name] = str(problem)
            del self.contestants[contestant.name]

    def answers(self, slot: Slot, tell: Callable[[], None]) -> Iterator[Measurement]:
        """Everyone's answers to all turns of the slot's prompt."""
        said: list[str] = []
        for turn in range(len(slot.prompt.turns)):
            ids = encode(self.tokenizer, slot.prompt, said).to(self.model.device)
            for contestant in self.order.sample(list(self.contestants.values()), len(self.contestants)):
                measured = self.try_to(contestant, partial(self.measure, contestant, slot, turn, ids))
                tell()
                if measured is None:
                    continue
                yield measured
                if contestant.name == BASELINE:
                    said.append(self.tokenizer.decode(measured.tokens, skip_special_tokens=True))

    def measure(self, contestant: Contestant, slot: Slot, turn: int, ids: Tensor) -> Measurement:
        """One answer and its time."""
        synchronise(self.model.device)
        began = contestants.clock()
        answer = as_answer(contestant, contestant.ask(ids, self.new, slot.temperature, self.seed + slot.repeat))
        synchronise(self.model.device)
        seconds = contestants.clock() - began
        return Measurement(
            contestant.name, dtype_name(self.model), slot.temperature, slot.prompt.group, slot.prompt.id, turn,
            slot.repeat, ids.shape[1], tuple(answer.tokens), answer.seconds or seconds, answer.first_seconds,
            answer.passes, None if answer.rounds is None else tuple(answer.rounds), answer.start_seconds,
            answer.draft_seconds,
        )  # fmt: skip


# --- what a run is made of ---


def slots(prompts: Sequence[Prompt], temperatures: Sequence[float], repeats: int) -> Iterator[Slot]:
    """Repeat by repeat, one prompt of each group in turn: a run that is cut short has something of every group."""
    by_group: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_group.setdefault(prompt.group, []).append(prompt)
    in_turn = [prompt for several in zip_longest(*by_group.values()) for prompt in several if prompt is not None]
    for repeat in range(repeats):
        for prompt in in_turn:
            for temperature in temperatures:
                yield Slot(prompt, temperature, repeat)


def ways(chosen: Mapping[str, Contestant]) -> dict[Way, int]:
    """Each way to make passes, with the most tokens that any of its contestants drafts."""
    found: dict[Way, int] = {}
    for contestant in chosen.values():
        if contestant.way is not None:
            found[contestant.way] = max(found.get(contestant.way, 0), contestant.max_drafted)
    return found


def most_tokens(tokenizer: Any, prompt: Prompt, new: int) -> int:
    """Tokens of the whole conversation if every answer is as long as it may be."""
    turns = len(prompt.turns)
    return encode(tokenizer, prompt, [""] * (turns - 1)).shape[1] + turns * new


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Tells whether two runs asked the same."""
    return hashlib.sha256(repr([(prompt.id, prompt.turns) for prompt in prompts]).encode()).hexdigest()[:16]


def refuse_other_settings(mine: BenchmarkResult, earlier: BenchmarkResult) -> None:
    """Times of different machines or settings must not be mixed."""
    same = ("device", "name", "threads", "torch", "transformers")
    pairs = [(f"machine's {name}", mine.machine.get(name), earlier.machine.get(name)) for name in same]
    pairs += [(name, mine.settings[name], earlier.settings.get(name)) for name in mine.settings]
    pairs += [("contestants", entrants(mine), entrants(earlier))]
    for name, now, then in pairs:
        if now != then:
            raise ValueError(f"Cannot go on from that result: the {name} was {then!r} and is now {now!r}.")


def entrants(result: BenchmarkResult) -> list[str]:
    """Names of the contestants, peers left out: those may be missing at times."""
    return sorted(name for name, known in result.contestants.items() if not known["peer"])


def model_name(model: PreTrainedModel) -> str:
    """The Hub id, or the last part of a folder's name; the class if it has neither."""
    name = str(getattr(model, "name_or_path", "") or "")
    return (Path(name).name if Path(name).is_dir() else name) or type(model).__name__


def dtype_name(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def as_answer(contestant: Contestant, given: Any) -> Answer:
    """What a contestant returned, as an answer of at least one token."""
    answer = given if isinstance(given, Answer) else Answer(torch.as_tensor(given).flatten().tolist())
    if not answer.tokens:
        raise ValueError(f"{contestant.name} returned no tokens; it should return the new ones, at least one.")
    return answer


# --- peers ---


def ask_peer(peer: Peer, ends: list[int], ids: Tensor, max_new_tokens: int, temperature: float, seed: int) -> Answer:
    reply = peer.ask(ids[0].tolist(), max_new_tokens, temperature, seed, ends)
    return Answer(reply["tokens"], reply["seconds"], reply.get("first_seconds"))


def peer_context(longest: int) -> int:
    """Room for the longest answer and drafts beyond its end; a round number, for which compiled passes may be kept."""
    return 512 * -(-(longest + 64) // 512)


@contextlib.contextmanager
def started(peer: Peer, model: PreTrainedModel, longest: int) -> Iterator[str]:
    """The peer, ready to answer; what the report says of it."""
    with weights_for(peer, model) as (weights, which):
        peer.start(weights, dtype_name(model), peer_context(longest), torch.get_num_threads())
        yield f"{peer.name} is {peer.version} with {which}"
