"""The loop: draft, one target pass, verify, commit, roll back.

`generate` is the front door; `decode` is the same thing behind ``model.generate(custom_generate=specnb.decode)``.
transformers prepares both: its `GenerationConfig` becomes its own processors and stopping criteria.

Sources: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318); notebooks 03 and 04.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from specnb import checks, compat
from specnb.cache import RaggedCache, bucket_size, context_size, for_all_rows, hearing, target_pass
from specnb.compiled import Twin, compiled_run
from specnb.drafters.base import Draft, Drafter, Session
from specnb.lossy import TypicalAcceptance
from specnb.prefill import CHUNK, prefill, same_bucket
from specnb.preparation import Request, check_inputs, prepare, requests_of
from specnb.processing import Processors, share_context_free
from specnb.report import GenerateOutput, Round, Stats, StreamerListener, Trace
from specnb.reuse import Remembered, cache_for
from specnb.rows import Rows
from specnb.scores import Scores
from specnb.trees import ROOT, judge_tree_greedy, judge_tree_sample
from specnb.verification import Verdict, favourites_on_host, judge_greedy, judge_sample, raise_for_nan


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    drafter: Drafter | None = None,
    *,
    attention_mask: Tensor | None = None,
    tokenizer: Any = None,
    seed: int | Sequence[int] | None = None,
    return_trace: bool | str = False,
    pass_width: int | None = None,
    compile: bool = False,
    streamer: Any = None,
    cache: RaggedCache | None = None,
    return_cache: bool = False,
    lossy: TypicalAcceptance | None = None,
    **generation_kwargs: Any,
) -> GenerateOutput:
    """Decode with guesses: the target's own text, in fewer target passes.

    Args:
        model: the target, a causal LM of transformers in eval mode. It is not modified.
        input_ids: LongTensor [B, n], the prompts; padding (either side) is told by ``attention_mask``.
        drafter: a `Drafter`, such as `PromptLookup()` or `DraftModel(small)`; None decodes plainly, in the same loop.
        attention_mask: [B, n], 1 for tokens and 0 for padding.
        tokenizer: needed for ``stop_strings``.
        seed: makes sampling reproducible: one number (row b draws with seed + b), or one per row.
        return_trace: True keeps every round in ``out.trace``; ``"probs"`` also p (and q) of its places.
        pass_width: W; every decoding pass then has W positions, filler included, and the prompt is prefilled in
            chunks of a fixed size. Same width, same machine: the same tokens bit for bit with any drafter or none,
            also in bfloat16 (in float32 take a multiple of 4). Drafts are cut to W - 1. A row of a batch equals its
            prompt alone bit for bit in bfloat16, and up to rounding in float32. Rows in different buckets of positions
            (256, 512, 1024, …) go through the model in passes of their own.
        compile: passes through the model's compiled twin (`specnb.compiled`), on a CPU in float32 or bfloat16.
            Compiled once per model and number of positions, in seconds; where that is not possible a warning says why,
            and the pass runs uncompiled. Implies a pass width: by default num_draft_tokens + 1, rounded up to a
            multiple of 4.
        streamer: a transformers streamer, for one row; sees the prompt first, then every new token once.
        cache: the ``out.cache`` of an earlier call with this model and as many rows: what its rows and the prompts
            have in common at the beginning is not read again. It is used up, and continued in ``out.cache``. With
            ``pass_width`` only whole prefill chunks of its prompt are kept: the text stays the same bit for bit.
        return_cache: keep the cache in ``out.cache`` for the next call.
        lossy: a rule that accepts more than is right, `specnb.TypicalAcceptance()`: faster when sampling, and no
            longer the target's own distribution.
        **generation_kwargs: as for ``model.generate``: max_new_tokens, eos_token_id, stop_strings,
            repetition_penalty, generation_config, logits_processor, stopping_criteria, … Lengths count a row's own
            tokens, without padding; processors and criteria are called with one unpadded row at a time.

    Returns:
        `GenerateOutput` with ``sequences`` [B, n + new], ``num_new_tokens`` [B], ``stats`` and ``trace``.

    Raises:
        ValueError, TypeError: for bad input, or a model or option that cannot be honoured; before the first pass.

    Introduced in notebook 00, built in notebooks 03 and 04.
    """
    checks.check_model(model)
    checks.check_input_ids(input_ids, compat.vocab_size(model), context_size(model.config))
    if attention_mask is None:
        attention_mask = inferred_mask(model, input_ids, generation_kwargs)
    prompts = checks.unpadded_rows(input_ids, attention_mask)
    requests = []
    for b, prompt in enumerate(prompts):
        requests += prepare(model, prompt, tokenizer, for_row(b, generation_kwargs))
    share_context_free(requests)
    return decode_requests(
        model, input_ids, requests, drafter, tokenizer=tokenizer, pass_width=pass_width, compile=compile,
        streamer=streamer, return_trace=return_trace, seed=seed, show_prompt=True, cache=cache,
        return_cache=return_cache, lossy=lossy,
    )  # fmt: skip


@torch.no_grad()
def decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Drafter | None = None,
    pass_width: int | None = None,
    compile: bool = False,
    return_trace: bool | str = False,
    streamer: Any = None,
    seed: int | Sequence[int] | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateOutput:
    """The decoding loop for ``model.generate(**inputs, custom_generate=specnb.decode, drafter=specnb.PromptLookup())``.

    Called by transformers, which hands over processors, criteria and configuration; `generate` explains the rest.
    (transformers passes no tokenizer on: for stop strings use `generate`, or a ``StopStringCriteria``.)

    Returns:
        LongTensor [B, n + new], or a `GenerateOutput` with ``return_dict_in_generate=True``.
    """
    checks.check_model(model)
    checks.check_input_ids(input_ids, compat.vocab_size(model), context_size(model.config))
    check_inputs(model_kwargs)
    prompts = checks.unpadded_rows(input_ids, model_kwargs.get("attention_mask"))
    requests = requests_of(prompts, input_ids.shape[1], logits_processor, stopping_criteria, generation_config)
    out = decode_requests(
        model, input_ids, requests, drafter, pass_width=pass_width, compile=compile, return_trace=return_trace,
        streamer=streamer or compat.calling_streamer(), seed=seed,
    )  # fmt: skip
    return out if generation_config.return_dict_in_generate else out.sequences


def decode_requests(
    model: PreTrainedModel,
    input_ids: Tensor,
    requests: list[Request],
    drafter: Drafter | None,
    *,
    tokenizer: Any = None,
    pass_width: int | None = None,
    compile: bool = False,
    streamer: Any = None,
    return_trace: bool | str = False,
    seed: int | Sequence[int] | None = None,
    show_prompt: bool = False,
    cache: RaggedCache | None = None,
    return_cache: bool = False,
    lossy: TypicalAcceptance | None = None,
) -> GenerateOutput:
    """Decode prepared rows together and report."""
    started = time.perf_counter()
    checks.check_drafter(drafter)
    checks.check_pass_width(pass_width)
    checks.check_compile(compile)
    checks.check_return_trace(return_trace)
    checks.check_streamer(streamer, len(requests))
    checks.check_lossy(lossy, requests[0].config.do_sample)
    if show_prompt and streamer is not None:
        streamer.put(input_ids.cpu())
    try:
        run = start(model, requests, drafter, tokenizer, pass_width, return_trace, seed, cache, compile)
        run.lossy = lossy
        if streamer is not None:
            run.listeners.append(StreamerListener(streamer))
        while run.rows.active:
            run.round()
    finally:
        if streamer is not None:
            streamer.end()
    run.stats.seconds = time.perf_counter() - started
    out = run.output(input_ids.repeat_interleave(len(requests) // len(input_ids), dim=0))
    if return_cache or cache is not None:
        out.cache = run.remembering_cache()
    return out


def start(
    model: PreTrainedModel,
    requests: list[Request],
    drafter: Drafter | None,
    tokenizer: Any,
    pass_width: int | None,
    return_trace: bool | str,
    seed: int | Sequence[int] | None,
    cache: RaggedCache | None = None,
    compile: bool = False,
) -> Run:
    """Rows, caches and drafter as they stand after the prompts' prefill."""
    config, prompts = requests[0].config, [r.prompt for r in requests]
    budgets = checks.context_budgets([len(p) for p in prompts], [r.budget for r in requests], model.config)
    pass_width, twin = compiled_run(model, drafter, pass_width, compile)
    drafted = drafter.num_draft_tokens if drafter is not None else 0
    checks.check_rope(model.config, max(len(p) + new for p, new in zip(prompts, budgets)) + (pass_width or drafted))
    rows = Rows(prompts, budgets, [r.criteria for r in requests])
    processors = Processors([r.processors for r in requests])
    cache = cache_for(prompts, model, cache, fixed=pass_width is not None, by_twin=twin is not None)
    generators = row_generators(seed, len(rows), model.device)
    run = Run(model, rows, cache, drafter, processors, config, pass_width, return_trace, generators, twin)
    run.lead = run.possible_lead()
    if drafter is not None:  # before the prefill: a drafter that does not fit says so at once
        drafter.start(run.session(tokenizer))
    run.read_prompts()
    return run


def inferred_mask(model: PreTrainedModel, input_ids: Tensor, options: dict[str, Any]) -> Tensor | None:
    """transformers' rule for a missing mask: pad tokens are padding, unless padding is also an end of sequence."""
    config = options.get("generation_config") or model.generation_config
    pad, eos = (options.get(name, getattr(config, name, None)) for name in ("pad_token_id", "eos_token_id"))
    if pad is None or pad in (eos if isinstance(eos, list) else [eos]) or not bool((input_ids == pad).any()):
        return None
    return (input_ids != pad).long()


def for_row(b: int, options: dict[str, Any]) -> dict[str, Any]:
    """Options as row b has them: a function of the batch's row number is told the right one."""
    allowed = options.get("prefix_allowed_tokens_fn")
    if allowed is None:
        return options
    return {**options, "prefix_allowed_tokens_fn": lambda _, tokens: allowed(b, tokens)}


def row_generators(
    seed: int | Sequence[int] | None, batch_size: int, device: torch.device
) -> list[torch.Generator] | None:
    """One random stream per row, so that what a row draws does not depend on its neighbours; None: torch's own."""
    if seed is None:
        return None
    if not isinstance(seed, (Integral, Sequence)) or isinstance(seed, str):
        raise TypeError(f"seed must be a whole number, or one per row, got {seed!r}.")
    seeds = [int(seed) + b for b in range(batch_size)] if isinstance(seed, Integral) else [int(s) for s in seed]
    if len(seeds) != batch_size:
        raise ValueError(f"seed must be one number, or one per row: got {len(seeds)} for {batch_size} rows.")
    return [torch.Generator(device).manual_seed(s) for s in seeds]


class Run:
    """One call under way: the target, the rows, the cache, the drafter, and who listens to commits."""

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Rows,
        cache: RaggedCache,
        drafter: Drafter | None,
        processors: Processors,
        config: GenerationConfig,
        pass_width: int | None = None,
        return_trace: bool | str = False,
        generators: list[torch.Generator] | None = None,
        twin: Twin | None = None,
    ) -> None:
        self.generators, self.twin = generators, twin
        self.lossy: TypicalAcceptance | None = None  # a rule in place of the lossless one
        self.network = model if twin is None else twin.network  # what the passes go through
        self.model, self.rows, self.cache, self.drafter, self.processors = model, rows, cache, drafter, processors
        self.config, self.pass_width = config, pass_width
        self.lead = 0  # tokens of each prompt before its last one that go through the model with the next round's pass
        self.sampling = [bool(config.do_sample)] * len(rows)
        self.stats, self.trace = Stats(len(rows)), Trace() if return_trace else None
        self.listeners: list[Any] = [self.stats] if self.trace is None else [self.stats, self.trace]
        self.keep_probs = return_trace == "probs"
        self.raw_logits: list[list[Tensor]] = [[] for _ in rows.lengths]

    def session(self, tokenizer: Any) -> Session:
        """What the drafter is told of this run."""
        return Session(
            self.model, self.rows, self.processors, compat.vocab_size(self.model), tokenizer, any(self.sampling),
            self.generators, self.sampling, self._told_cache(), self.twin, bool(self.lead),
        )  # fmt: skip

    def _told_cache(self) -> RaggedCache | None:
        return self.cache if self.drafter is not None and self.drafter.needs_cache else None

    def possible_lead(self) -> int:
        """How much of the prompts the first round's pass can read: it spares a pass, and is as exact.

        Nothing if passes have a fixed width, if the drafter wants to find the prompts in the cache, or if the model
        would score all those positions.
        """
        waits = self.drafter is not None and self.drafter.needs_cache
        unread = [n - held for n, held in zip(self.rows.lengths, self.cache.lengths.tolist())]
        if self.pass_width is not None or waits or any(self.rows.finished):
            return 0
        return min(CHUNK, *unread) - 1 if compat.accepts(self.model, "logits_to_keep") else 0

    def read_prompts(self) -> None:
        """Prefill: all but the last token of each prompt, and but what goes in with the next round."""
        end = -1 - self.lead
        unread = [self.rows.view(b)[n:end] for b, n in enumerate(self.cache.lengths.tolist())]
        prefill(self.network, self.cache, unread, fixed=self.pass_width is not None, twin=self.twin)

    def round(self) -> None:
        """One round for all rows: each one writes 1 to k + 1 tokens, from one target pass."""
        draft = self.propose()
        if draft.parents is not None and self.lead:  # a tree grows from the pass's first token
            self.lead = 0
            self.read_prompts()
        before = [n + self.lead for n in self.cache.lengths.tolist()]
        logits = self.target_pass(draft)  # [N, V], of every position
        self.lead = 0
        p = self.processors(self.rows, draft.tokens, draft.lengths, logits, draft.parents)  # the same, as scores
        rounds = self.commit(draft, self.decide(draft, p), p)
        self.roll_back(before, rounds)
        if self.drafter is not None:
            self.inform(self.drafter, rounds, logits)
        self.tell(rounds, draft, logits, p)

    def propose(self) -> Draft:
        """The round's guesses on the target's device; none at all if no row can use one."""
        limits = self.limits()
        if self.drafter is None or not any(limits):
            draft = Draft.empty(len(self.rows))
        else:
            draft = checks.checked_draft(self.drafter.draft(self.rows, limits), limits, compat.vocab_size(self.model))
        return draft.to(self.model.device)

    def limits(self) -> list[int]:
        """How many guesses each row can use: its budget must hold one token more, the pass and its bucket too."""
        k = self.drafter.num_draft_tokens if self.drafter is not None else 0
        depth = 1 if self.drafter is not None and self.drafter.trees else k  # a tree's limit counts nodes
        limits = [k if room > depth else max(0, room - 1) for room in self.rows.room]
        if self.pass_width is None:
            return limits
        ahead = [bucket_size(n) - 1 - n for n in self.cache.lengths.tolist()]
        return [min(limit, self.pass_width - 1, edge) for limit, edge in zip(limits, ahead)]

    def target_pass(self, draft: Draft) -> Scores:
        """The pass over newest tokens and guesses of the rows that still grow.

        As wide for all of them as the longest draft, or as the pass width; a fixed width also fixes how many slots a
        row attends to: then it is one pass for each bucket that rows lie in. A twin's rows stand side by side, each
        with its own number of positions, since what it says of one does not depend on the others.
        """
        active, before, places = self.rows.active, self.cache.lengths, 1 + draft.tokens.shape[1]
        counts = [places if self.pass_width is None else self.pass_width] * len(active)
        if self.twin is not None:
            drafted = draft.lengths.tolist()
            counts = [1 + drafted[b] for b in active]
        tokens = self.rows.pass_tokens(draft, max(counts))  # [B, T]
        if self.lead:
            tokens = torch.cat([self.rows.before_newest(self.lead).to(tokens.device), tokens], dim=1)
        groups = same_bucket(self.cache, active) if self.pass_width is not None and self.twin is None else [active]
        heard: list[Tensor] = []
        try:
            with hearing(self.network, self.cache, heard if self.drafter and self.drafter.needs_hidden else None):
                parts = [self.pass_over(rows, tokens, counts, draft.parents) for rows in groups]
        except BaseException:
            self.cache.rollback(self.cache.lengths - before)
            raise
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        scores = Scores.of_pass(logits, [b for rows in groups for b in rows], counts, len(self.rows), places)
        return replace(scores, hidden=torch.cat(heard)) if heard else scores

    def pass_over(self, rows: list[int], tokens: Tensor, counts: list[int], parents: Tensor | None) -> Tensor:
        """One pass over these rows of tokens [B, T]; they share a bucket if the width is fixed; logits [N, V]."""
        held, width = self.cache.lengths.tolist(), tokens.shape[1]
        longest = max(held[b] for b in rows)
        tokens = tokens if len(rows) == len(tokens) else tokens[rows]
        attended = None if self.pass_width is None else bucket_size(longest)
        self.cache.reserve((attended or longest) + width)
        filled = None if parents is None else pad(parents[rows], (0, width - 1 - parents.shape[1]), value=ROOT).tolist()
        if self.twin is not None and self.pass_width is not None:
            return self.twin.packed_pass(self.cache, tokens, rows, counts, self.pass_width, parents=filled)
        kept = width - self.lead if self.lead else 0
        logits = target_pass(
            self.model, self.cache, tokens, rows=rows, attended=attended, logits_to_keep=kept, parents=filled
        )  # fmt: skip
        return logits.flatten(0, 1)

    def decide(self, draft: Draft, p: Scores) -> list[Round]:
        """What stands of each row's guesses, ended rows too, and the token after them; raises for a NaN."""
        if p.flat.device.type == "cpu" and not any(self.sampling):
            rounds = decided_on_host(draft, p)
            if rounds is not None:
                self.refuse(None)
                return rounds
        rounds, invalid = on_host(draft, self.judge(draft, p))
        self.refuse(invalid)
        return rounds

    def judge(self, draft: Draft, p: Scores) -> Verdict:
        """Greedy or sampling verification on the device; of rows that have ended it says nothing of use."""
        lengths = draft.lengths.to(p.flat.device)
        if not any(self.sampling):
            return self.judge_greedy(draft, p, lengths)
        sampled = self.judge_sample(draft, p, lengths)
        if all(self.sampling):
            return sampled
        return either(self.sampling, sampled, self.judge_greedy(draft, p, lengths))

    def judge_greedy(self, draft: Draft, p: Scores, lengths: Tensor) -> Verdict:
        if draft.parents is None:
            return judge_greedy(draft.tokens, *p.favourites(), lengths)
        return judge_tree_greedy(draft.tokens, draft.parents, *p.favourites(), lengths)

    def judge_sample(self, draft: Draft, p: Scores, lengths: Tensor) -> Verdict:
        """The rows that still grow and sample draw; the others cost nothing, and use up no random numbers."""
        rows = [b for b in self.rows.active if self.sampling[b]]
        q = None if draft.probs is None else draft.probs[rows]
        generators = None if self.generators is None else [self.generators[b] for b in rows]
        law = p.flat[p.where[rows]].float().softmax(dim=-1)
        counts = draft.lengths[rows].tolist()
        if self.lossy is not None:
            parents = None if draft.parents is None else draft.parents[rows]
            verdict = self.lossy.judge(draft.tokens[rows], parents, law, lengths[rows], generators)
        elif draft.parents is None:
            verdict = judge_sample(draft.tokens[rows], q, law, lengths[rows], generators, counts)
        else:
            guesses = (draft.tokens[rows], draft.parents[rows])
            verdict = judge_tree_sample(*guesses, q, law, lengths[rows], generators, counts)
        return spread(verdict, rows, len(self.rows))

    def commit(self, draft: Draft, verdicts: list[Round], p: Scores) -> list[Round]:
        """Write what stands."""
        scores = p.table() if self.config.return_dict_in_generate and self.config.output_scores else None
        return explained(self.rows.commit(verdicts, scores), draft)

    def refuse(self, invalid: Tensor | None) -> None:
        """Raise if a row that still grows has scores that decide nothing. None: all of them do."""
        if invalid is not None:
            raise_for_nan(invalid, self.rows.active)

    def roll_back(self, before: list[int], rounds: list[Round]) -> None:
        """Keep of the pass the entries of what it wrote: all that each row now holds but its newest token."""
        kept: list[list[int]] = [[] for _ in range(len(self.rows))]
        for r in rounds:
            kept[r.row] = r.places
        if any(r.path is not None for r in rounds):
            self.cache.keep(torch.tensor(before), kept)
        else:  # a chain's are the first ones
            held = self.cache.lengths.tolist()
            self.cache.rollback([now - then - len(places) for now, then, places in zip(held, before, kept)])

    def inform(self, drafter: Drafter, rounds: list[Round], logits: Scores) -> None:
        """Tell the drafter what became of its guesses, and what the target had in mind at the newest tokens."""
        growing = [r for r in rounds if not self.rows.finished[r.row]]
        if logits.hidden is not None and growing:
            rows, last = [r.row for r in growing], [r.places[-1] for r in growing]
            drafter.look(logits.hidden[logits.where[rows, last]], rows)
        kept = [0] * len(self.rows)
        for r in rounds:
            kept[r.row] = len(r.emitted)
        drafter.observe(self.rows, kept)

    def tell(self, rounds: list[Round], draft: Draft, logits: Scores, p: Scores) -> None:
        """Hand the round to the listeners, with p and q if they were asked for."""
        if self.config.return_dict_in_generate and self.config.output_logits:
            for r in rounds:
                self.raw_logits[r.row].extend(logits.at(r.row, r.places).float())
        if self.keep_probs:
            rounds = [with_probs(r, draft, p) for r in rounds]
        for listener in self.listeners:
            listener.on_commit(rounds)

    def remembering_cache(self) -> RaggedCache:
        """The cache, with what the next call has to know of it."""
        read = [0 if self.pass_width is None else n - 1 for n in self.rows.prompt_lengths]
        tokens = [self.rows.tokens(b) for b in range(len(self.rows))]
        self.cache.remembered = Remembered(self.model, tokens, read, self.twin is not None)
        return self.cache

    def output(self, input_ids: Tensor) -> GenerateOutput:
        """The report; ``input_ids`` [B, n] are the prompts as the caller gave them, padding included."""
        pad = getattr(self.config, "_pad_token_tensor", None)
        new = self.rows.padded(0 if pad is None else int(pad))
        return GenerateOutput(
            sequences=torch.cat([input_ids, new.to(input_ids.device)], dim=1),
            scores=by_step(self.rows.chosen_from),
            logits=by_step(self.raw_logits),
            num_new_tokens=torch.tensor([len(self.rows.new_tokens(b)) for b in range(len(self.rows))]),
            stats=self.stats,
            trace=self.trace,
        )


def decided_on_host(draft: Draft, p: Scores) -> list[Round] | None:
    """Greedy verification in plain numbers, where scores are on the host: so few take longer to judge as tensors.

    What `judge_greedy` and `judge_tree_greedy` say, for a chain is a tree without branches. None if there is a NaN.
    """
    choice = favourites_on_host(p.flat)
    if None in choice:
        return None
    rounds = []
    for b, (guesses, n, lines) in enumerate(zip(draft.tokens.tolist(), draft.lengths.tolist(), p.where.tolist())):
        own = [choice[line] for line in lines]
        parents = list(range(ROOT, n - 1)) if draft.parents is None else draft.parents[b, :n].tolist()
        here, path = ROOT, []
        for node in range(n):
            if parents[node] == here and guesses[node] == own[here + 1]:
                here = node
                path.append(node)
        r = Round(b, guesses[:n], len(path), own[here + 1], is_bonus=here not in parents)
        rounds.append(r if draft.parents is None else replace(r, parents=parents, path=path))
    return rounds


def on_host(draft: Draft, verdict: Verdict) -> tuple[list[Round], Tensor]:
    """What was decided for each row, and which of its places decide nothing [B, K+1]: by the round's one copy."""
    k, path = draft.tokens.shape[1], draft.tokens[:, :0] if verdict.path is None else verdict.path
    parts = [verdict.num_accepted[:, None], verdict.next_token[:, None], draft.tokens, verdict.invalid, path]
    if path.device.type != "cpu":
        parts = list(torch.cat(parts, 1).cpu().split([1, 1, k, k + 1, path.shape[1]], 1))
    accepted, following, tokens, invalid, path = parts
    rounds = []
    for b, (n, guesses, [stand], [token]) in enumerate(
        zip(draft.lengths.tolist(), tokens.tolist(), accepted.tolist(), following.tolist())
    ):
        r = Round(b, guesses[:n], stand, token, is_bonus=stand == n)
        if draft.parents is not None:
            parents, nodes = draft.parents[b, :n].tolist(), path[b, :stand].tolist()
            at_leaf = (nodes[-1] if nodes else ROOT) not in parents
            r = replace(r, parents=parents, path=nodes, is_bonus=at_leaf)
        rounds.append(r)
    return rounds, invalid


def either(sampling: list[bool], sampled: Verdict, greedy: Verdict) -> Verdict:
    """The verdict of a batch in which some rows sample and the others do not."""
    first = torch.tensor(sampling, device=sampled.next_token.device)
    return Verdict(
        num_accepted=torch.where(first, sampled.num_accepted, greedy.num_accepted),
        next_token=torch.where(first, sampled.next_token, greedy.next_token),
        invalid=torch.where(first[:, None], sampled.invalid, greedy.invalid),
        path=None if sampled.path is None else torch.where(first[:, None], sampled.path, greedy.path),  # type: ignore[arg-type]
    )


def spread(verdict: Verdict, rows: list[int], batch_size: int) -> Verdict:
    """The verdict over these rows as one over all of them."""
    parts = (verdict.num_accepted, verdict.next_token, verdict.invalid)
    path = None if verdict.path is None else for_all_rows(verdict.path, rows, batch_size)
    return replace(Verdict(*[for_all_rows(part, rows, batch_size) for part in parts]), path=path)


def explained(rounds: list[Round], draft: Draft) -> list[Round]:
    """The rounds with what the drafter tells about its guesses: how many it planned, and of what kind they are."""
    told: dict[str, Sequence[Any]] = {}
    told |= {"planned": draft.planned} if draft.planned is not None else {}
    told |= {"kind": draft.kinds} if draft.kinds is not None else {}
    return [replace(r, **{name: of_row[r.row] for name, of_row in told.items()}) for r in rounds] if told else rounds


def with_probs(r: Round, draft: Draft, p: Scores) -> Round:
    """The round with p [k+1, V] and, if the draft has one, q [k, V]."""
    k = len(r.drafted)
    q = None if draft.probs is None else draft.probs[r.row, :k]
    return replace(r, p=p.of_row(r.row, k + 1).float().softmax(dim=-1), q=q)


def by_step(rows: list[list[Tensor]]) -> tuple[Tensor, ...] | None:
    """Per-row lists of [V] as one [B, V] per new token, as transformers reports them; ended rows repeat their last."""
    if not rows[0]:
        return None
    steps = range(max(len(row) for row in rows))
    return tuple(torch.stack([row[min(t, len(row) - 1)] for row in rows]) for t in steps)
