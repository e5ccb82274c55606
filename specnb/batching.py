"""Many requests, few slots: continuous batching around the loop of `decoding`.

    batcher = specnb.Batcher(model, specnb.PromptLookup(), max_batch=8, max_new_tokens=64)
    jobs = [batcher.submit(ids) for ids in prompts]
    for job, tokens in batcher.stream():
        print(job.number, tokens)

Requests wait in a queue, first come first served; a free slot takes the next one; its prompt is read in chunks between
the rounds of the others; its tokens are handed out as they are committed. What fails, fails alone.

Nothing runs in the background: whoever waits for a result (`Job.result`, iterating over a job, `stream`, `run`) drives
the rounds for all. Several threads may do so at once; one of them at a time plays a round.

Source: Yu et al. 2022 (Orca, OSDI '22); chunks of prompts between rounds: Agrawal et al. 2023 (Sarathi, arXiv
2308.16369). Derived in notebook 08.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb import checks, compat
from specnb.cache import context_size
from specnb.compiled import compiled_run
from specnb.drafters.base import Drafter
from specnb.preparation import Request, prepare
from specnb.report import Round, Stats
from specnb.slots import Slots


class QueueFull(RuntimeError):
    """As many requests are waiting as the `Batcher` lets wait."""


@dataclass(frozen=True)
class Completion:
    """What became of one request.

    Attributes:
        number: the request's, counted from 0 in order of submission (for `generate_many`, the prompt's place).
        prompt, tokens: the prompt's token ids, and the new ones.
        finish_reason: "length" (its ``max_new_tokens``), "stop" (end of sequence or another stop rule), "cancelled",
            or "error".
        error: what went wrong; None if nothing did.
        target_passes, drafted, accepted: as in `Stats`.
        seconds: from submission to the end. ``seconds_waiting`` of them until it got a slot.
        time_to_first_token: seconds from submission to the first new token; None if there is none.
    """

    number: int
    prompt: list[int]
    tokens: list[int]
    finish_reason: str
    error: Exception | None = None
    target_passes: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    seconds_waiting: float = 0.0
    time_to_first_token: float | None = None

    @property
    def tokens_per_pass(self) -> float:
        """New tokens per target pass; NaN if there was no pass."""
        return len(self.tokens) / self.target_passes if self.target_passes else float("nan")


class Job:
    """A request under way: what `Batcher.submit` returns.

    Attributes:
        number: counted from 0 in order of submission.
        prompt: its token ids.
        tokens: the new ones so far.
        stats: `Stats` of this one row.
        status: "waiting", "reading" (its prompt is being prefilled), "writing" or "done".
        finish_reason: see `Completion`; None while it is under way.
        error: the exception it failed with, if it did.

    Iterating over a job yields its tokens as they come, and drives the batcher meanwhile.
    """

    def __init__(
        self, batcher: Batcher, number: int, request: Request, seed: int, on_tokens: Callable[[list[int]], Any] | None
    ) -> None:
        self._batcher, self._seed, self._on_tokens = batcher, seed, on_tokens
        self._request: Request | None = request  # let go once it has a slot: a server keeps many jobs
        self.number, self.prompt, self.tokens = number, request.prompt, list[int]()
        self.stats, self.status, self.slot = Stats(1), "waiting", -1
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self.cancelled = False
        self._submitted = time.perf_counter()
        self._joined: float | None = None
        self._first_token: float | None = None
        self._ended: float | None = None

    @property
    def done(self) -> bool:
        return self.status == "done"

    def cancel(self) -> None:
        """Give the request up: it leaves the queue or its slot, and what it has written stays. Once done: no effect."""
        self._batcher._cancel(self)

    def result(self) -> Completion:
        """Wait for the end, playing rounds meanwhile.

        Raises:
            the request's own error, if it failed. A cancelled one is no error: see ``finish_reason``.
        """
        while not self.done:
            self._batcher.step()
        if self.error is not None:
            raise self.error
        return self.completion()

    def completion(self) -> Completion:
        """The account so far; of a failed request as well."""
        end = time.perf_counter() if self._ended is None else self._ended
        first = None if self._first_token is None else self._first_token - self._submitted
        return Completion(
            number=self.number,
            prompt=self.prompt,
            tokens=list(self.tokens),
            finish_reason=self.finish_reason or self.status,
            error=self.error,
            target_passes=int(self.stats.target_passes),
            drafted=int(self.stats.drafted),
            accepted=int(self.stats.accepted),
            seconds=end - self._submitted,
            seconds_waiting=(end if self._joined is None else self._joined) - self._submitted,
            time_to_first_token=first,
        )

    def __iter__(self) -> Iterator[int]:
        told = 0
        while True:
            while told < len(self.tokens):
                told += 1
                yield self.tokens[told - 1]
            if self.done:
                break
            self._batcher.step()
        if self.error is not None:
            raise self.error

    def __repr__(self) -> str:
        state = self.finish_reason or self.status
        return f"Job(number={self.number}, {state}, {len(self.prompt)} + {len(self.tokens)} tokens)"


class Batcher:
    """Decode many requests in few slots, with drafts, as `generate` would decode each of them alone.

    Args:
        model: the target, as for `generate`.
        drafter: as for `generate`; it drafts for all slots.
        max_batch: slots, the most rows of one target pass.
        max_waiting: requests that may wait for a slot; None: any number.
        pass_width: as for `generate`: one width for all passes, and in bfloat16 the same tokens bit for bit whatever
            the other slots hold.
        compile: as for `generate`: passes through the model's compiled twin; implies a pass width.
        tokenizer: for prompts given as text, and for ``stop_strings``.
        prefill_chunk: positions of prompts read between two rounds while others write: more brings new requests to
            their first token sooner, fewer keep the others' rounds short. With ``pass_width`` it is rounded down to
            whole chunks of 32, at least one.
        **generation_kwargs: as for `generate`; the default of every request.

    Raises:
        ValueError, TypeError: for a model, drafter or number that cannot be used.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter | None = None,
        *,
        max_batch: int = 8,
        max_waiting: int | None = None,
        pass_width: int | None = None,
        compile: bool = False,
        tokenizer: Any = None,
        prefill_chunk: int = 128,
        **generation_kwargs: Any,
    ) -> None:
        checks.check_model(model)
        checks.check_drafter(drafter)
        checks.check_pass_width(pass_width)
        checks.check_compile(compile)
        for name, value in (("max_batch", max_batch), ("prefill_chunk", prefill_chunk)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
        self.model, self.tokenizer, self.prefill_chunk = model, tokenizer, prefill_chunk
        self.max_waiting, self._defaults = max_waiting, generation_kwargs
        pass_width, twin = compiled_run(model, drafter, pass_width, compile)
        self._slots = Slots(model, max_batch, drafter, tokenizer, pass_width, twin)
        self._slots.listeners = [self]
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}  # slot → job
        self._fresh: deque[tuple[Job, list[int]]] = deque()  # tokens that `stream` has not yielded
        self._streams = 0
        self._submitted = 0
        self._lock, self._in_step = threading.RLock(), False

    # --- requests come and go ---

    def submit(
        self,
        prompt: Sequence[int] | Tensor | str,
        *,
        seed: int | None = None,
        on_tokens: Callable[[list[int]], Any] | None = None,
        wait: bool = False,
        **generation_kwargs: Any,
    ) -> Job:
        """Put a request into the queue.

        Args:
            prompt: token ids (a list, or a tensor [n] or [1, n]), or a text if the batcher has a tokenizer.
            seed: makes its sampling reproducible; it draws as it would alone with `generate`.
            on_tokens: called with each round's new tokens of this request. If it raises, the request fails with that.
            wait: with a full queue, play rounds until there is room instead of raising.
            **generation_kwargs: as for `generate`, before the batcher's defaults.

        Raises:
            QueueFull: if ``max_waiting`` requests are waiting already.
            ValueError, TypeError: for a request that cannot be honoured. Nothing else is touched.
        """
        options = {**self._defaults, **generation_kwargs}
        request = self._prepared(prompt, options)
        seed = torch.seed() if seed is None else int(seed)
        with self._lock:
            while self.max_waiting is not None and len(self._waiting) >= self.max_waiting:
                if not wait or self._in_step:
                    raise QueueFull(
                        f"{len(self._waiting)} requests are waiting, and max_waiting is {self.max_waiting}. Play some "
                        "rounds first, with step() or by taking results, or submit(..., wait=True)."
                    )
                self.step()
            job = Job(self, self._submitted, request, seed, on_tokens)
            self._submitted += 1
            self._waiting.append(job)
        return job

    @torch.no_grad()
    def _prepared(self, prompt: Sequence[int] | Tensor | str, options: dict[str, Any]) -> Request:
        ids = prompt_ids(prompt, self.tokenizer)
        checks.check_input_ids(ids[None], compat.vocab_size(self.model), context_size(self.model.config))
        if options.get("streamer") is not None:
            raise ValueError("streamer: a request of a Batcher tells its tokens to on_tokens=..., or iterate over it.")
        requests = prepare(self.model, ids.tolist(), self.tokenizer, options)
        if len(requests) > 1:
            raise ValueError("num_return_sequences: submit the prompt as often, each time with another seed.")
        return self._within_limits(requests[0])

    def _within_limits(self, request: Request) -> Request:
        config, n = request.config, len(request.prompt)
        if config.return_dict_in_generate and (config.output_scores or config.output_logits):
            raise ValueError("output_scores and output_logits are kept by specnb.generate, not by a Batcher.")
        (budget,) = checks.context_budgets([n], [request.budget], self.model.config)
        drafter = self._slots.drafter
        ahead = self._slots.pass_width or (drafter.num_draft_tokens if drafter is not None else 0)
        checks.check_rope(self.model.config, n + budget + ahead)
        return replace(request, budget=budget)

    def _cancel(self, job: Job) -> None:
        with self._lock:
            job.cancelled = not job.done
            if job.status == "waiting":
                self._waiting.remove(job)
                self._end(job, "cancelled")
            elif not self._in_step:  # a callback may cancel in the middle of a step: then it takes effect at its end
                self._drop_cancelled()

    def _drop_cancelled(self) -> None:
        for job in [job for job in self._running.values() if job.cancelled]:
            self._end(job, "cancelled")

    def close(self) -> None:
        """Cancel whatever is waiting or running."""
        for job in [*self._waiting, *self._running.values()]:
            job.cancel()

    def __enter__(self) -> Batcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- rounds ---

    @property
    def pass_width(self) -> int | None:
        """Positions of every pass; None where that varies."""
        return self._slots.pass_width

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests in a slot."""
        return len(self._running)

    @torch.no_grad()
    def step(self) -> bool:
        """Let requests in, read at most one chunk of prompts, play at most one round, hand out what was written.

        Returns:
            whether anything is left to do.

        Raises:
            what the model or the drafter raised: then every request that was in a slot fails with the same error, and
            those in the queue go on with the next step. After Ctrl-C all can go on.
        """
        with self._lock:
            self._in_step = True
            try:
                self._play()
            except Exception as error:
                for job in list(self._running.values()):
                    self._end(job, "error", error)
                raise
            except BaseException:
                self._slots.mend()
                raise
            finally:
                self._in_step = False
            return bool(self._waiting or self._running)

    def _play(self) -> None:
        self._admit()
        self._slots.read([job.slot for job in self._running.values() if job.status == "reading"], self.prefill_chunk)
        self._begin()
        if self._slots.rows.active:
            self._slots.round()
        for job in list(self._running.values()):
            if job.status == "writing":
                self._hand_out(job)
        self._drop_cancelled()

    def _admit(self) -> None:
        free = [b for b in range(len(self._slots.rows)) if b not in self._running]
        for slot in free[: len(self._waiting)]:
            job = self._waiting.popleft()
            job.slot, job.status, job._joined = slot, "reading", time.perf_counter()
            self._running[slot] = job
            request, job._request = job._request, None
            assert request is not None
            self._slots.join(slot, request)

    def _begin(self) -> None:
        for job in self._running.values():
            if job.status == "reading" and not self._slots.unread(job.slot):
                job.status = "writing"
                self._slots.begin(job.slot, job._seed)

    def on_commit(self, rounds: list[Round]) -> None:
        """Count a round; called by the run."""
        for r in rounds:
            self._running[r.row].stats.on_commit([replace(r, row=0)])

    def _hand_out(self, job: Job) -> None:
        """Give the job what its row has got; end it where its row has ended."""
        rows = self._slots.rows
        new = rows.new_tokens(job.slot)[len(job.tokens) :]
        error = rows.errors.get(job.slot)
        if new:
            job._first_token = job._first_token or time.perf_counter()
            job.tokens.extend(new)
            error = error or self._tell(job, new)
        if error is not None:
            self._end(job, "error", error)
            forget_locals(error)
        elif rows.finished[job.slot]:
            self._end(job, "length" if len(job.tokens) >= rows.budgets[job.slot] else "stop")

    def _tell(self, job: Job, new: list[int]) -> Exception | None:
        if self._streams:
            self._fresh.append((job, new))
        try:
            if job._on_tokens is not None:
                job._on_tokens(new)
        except Exception as error:
            return error
        return None

    def _end(self, job: Job, reason: str, error: Exception | None = None) -> None:
        if job.status != "waiting":
            del self._running[job.slot]
            self._slots.leave(job.slot)
        job.status, job.finish_reason, job.error, job._ended = "done", reason, error, time.perf_counter()
        job._request = job._on_tokens = None

    # --- for whoever waits ---

    def run(self) -> None:
        """Play rounds until every request is done."""
        while self.step():
            pass

    def stream(self) -> Iterator[tuple[Job, list[int]]]:
        """Play rounds until every request is done; yield (job, its new tokens) as they are committed.

        Requests may be submitted and cancelled meanwhile. One that ends without a token is not seen here.
        """
        self._streams += 1
        try:
            busy = True
            while busy or self._fresh:
                while self._fresh:
                    yield self._fresh.popleft()
                busy = self.step()
        finally:
            self._streams -= 1

    def __repr__(self) -> str:
        return f"Batcher({self.running} of {len(self._slots.rows)} slots in use, {self.waiting} waiting)"


def prompt_ids(prompt: Sequence[int] | Tensor | str, tokenizer: Any) -> Tensor:
    """The prompt as a LongTensor [n]."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise TypeError("A prompt given as text needs the model's tokenizer: tokenizer=...")
        return tokenizer(prompt, return_tensors="pt").input_ids[0]
    try:
        ids = torch.as_tensor(prompt if len(prompt) else torch.zeros(0, dtype=torch.long))
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"A prompt is a list or tensor of token ids, or a text, got {prompt!r:.60}.") from None
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1:
        raise ValueError(f"A prompt is one row of token ids, [n] or [1, n], got {list(ids.shape)}; submit rows apart.")
    return ids


def forget_locals(error: BaseException) -> None:
    """Let go what the functions that raised and their callers held; the traceback still says where that was.

    Whoever keeps a failed job would otherwise keep the scores of its last round, megabytes of them.
    """
    traceback.clear_frames(error.__traceback__)
    frame = error.__traceback__.tb_frame.f_back if error.__traceback__ is not None else None
    while frame is not None:
        try:
            frame.clear()
        except RuntimeError:  # still running, and so are its callers
            return
        frame = frame.f_back
