"""Which drafter, how many tokens, or none: from replayed texts and the measured cost of a pass.

Speculation pays if a round writes more tokens than it costs, both in units of a plain pass. The tokens come from
replays (`specnb.replay`), the cost from v(T) (`specnb.forward_cost`), the drafter's own time and the loop's.
Pure arithmetic: nothing is measured here. Notebook 07 derives it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from specnb.replay import Replay
from specnb.theory import CostCurve, best_draft_length, break_even_alpha, speedup

WORTH = 1.05  # a smaller gain is not worth a second thought, nor surely told from noise
WORTH_IN_A_GROUP = 1.15  # a group is a handful of texts
CLOSE = 0.99  # draft lengths that come this near to the best are as good, and the shortest of them is taken
GOOD_ALPHA = 0.7  # what a good drafter reaches
DRAFT_STEP = 0.1  # and what one of its steps costs, in target passes
PLAIN = "out = specnb.generate(model, input_ids, max_new_tokens=256)"


@dataclass(frozen=True)
class Candidate:
    """A drafter to be judged.

    Attributes:
        title: in words, "prompt lookup".
        code: the expression that makes it, with ``{k}`` for the number of drafted tokens.
        setup: what must stand before it, or "".
        replays: (group, what it would have done) of each text.
    """

    title: str
    code: str
    setup: str
    replays: tuple[tuple[str, Replay], ...]


@dataclass(frozen=True)
class Outcome:
    """What a candidate with one k brings over all texts.

    Attributes:
        candidate, k: which.
        speedup: time of plain decoding over time with drafts = tokens_per_round / round_cost.
        by_group: the same for each group of texts.
        tokens_per_round: tokens a round writes.
        round_cost: what it takes, in units of plain decoding's rounds.
        alpha: share accepted of the drafted tokens that were reached; NaN if none was drafted.
        step_cost: c, time to draft a token over time of a plain pass.
    """

    candidate: Candidate
    k: int
    speedup: float
    by_group: dict[str, float]
    tokens_per_round: float
    round_cost: float
    alpha: float
    step_cost: float


@dataclass(frozen=True)
class Recommendation:
    """The answer.

    Attributes:
        verdict: "use", "use for some" (groups), "do not use", or "measure again" if the times tell nothing.
        headline: the answer in a sentence or two.
        reasons: the numbers behind it, in sentences.
        code: lines to copy.
        outcome: the recommended one; for "do not use" the best of those that are not worth it, if any was tried.
        groups: where to use it, for "use for some"; where it is slower, for "use".
    """

    verdict: str
    headline: str
    reasons: tuple[str, ...]
    code: str
    outcome: Outcome | None
    groups: tuple[str, ...] = ()


# --- what a draft length brings ---


def outcome(candidate: Candidate, k: int, cost: CostCurve, loop_ms: float = 0.0) -> Outcome:
    """Add up the rounds that the candidate would have made with at most k drafted tokens.

    Args:
        candidate, k: which.
        cost: v(T) of the target.
        loop_ms: what a round takes beside its pass and its drafts.
    """
    plain_ms, ms = _times(candidate, k, cost, loop_ms)
    one = cost(1) + loop_ms
    rounds = [r for _, tried in candidate.replays for r in tried.rounds(k)]
    tokens = sum(accepted + 1 for _, accepted in rounds)
    accepted, rejected = sum(a for _, a in rounds), sum(a < d for d, a in rounds)
    return Outcome(
        candidate,
        k,
        speedup=sum(plain_ms) / sum(ms),
        by_group=_by_group(candidate, plain_ms, ms),
        tokens_per_round=tokens / len(rounds),
        round_cost=sum(ms) / len(rounds) / one,
        alpha=accepted / (accepted + rejected) if accepted + rejected else math.nan,
        step_cost=_step_ms(candidate, k) / cost(1),
    )


def _times(candidate: Candidate, k: int, cost: CostCurve, loop_ms: float) -> tuple[list[float], list[float]]:
    """For each text, the ms of plain decoding and of decoding with drafts; the prompt's prefill belongs to neither."""
    plain_ms = [len(tried.guessed) * (cost(1) + loop_ms) for _, tried in candidate.replays]
    ms = [
        tried.start_ms + sum(cost(1 + drafted) + loop_ms + tried.draft_ms(drafted) for drafted, _ in tried.rounds(k))
        for _, tried in candidate.replays
    ]
    return plain_ms, ms


def _by_group(candidate: Candidate, plain_ms: Sequence[float], ms: Sequence[float]) -> dict[str, float]:
    groups: dict[str, tuple[float, float]] = {}
    for (group, _), before, after in zip(candidate.replays, plain_ms, ms):
        total = groups.get(group, (0.0, 0.0))
        groups[group] = (total[0] + before, total[1] + after)
    return {group: before / after for group, (before, after) in groups.items()}


def _step_ms(candidate: Candidate, k: int) -> float:
    """Mean ms of drafting one token in a full draft."""
    times = [tried.draft_ms(k) / k for _, tried in candidate.replays]
    return sum(times) / len(times)


def best(outcomes: Iterable[Outcome]) -> Outcome:
    """The fastest; of those as good as it, the one that drafts least."""
    tried = list(outcomes)
    enough = CLOSE * max(o.speedup for o in tried)
    return min((o for o in tried if o.speedup >= enough), key=lambda o: (o.k, -o.speedup))


# --- what to do ---


def recommend(outcomes: Sequence[Outcome], cost: CostCurve) -> Recommendation:
    """Choose among what was tried, nothing included, and say why."""
    if not outcomes:
        return _do_not(None, cost)
    chosen = best(outcomes)
    if chosen.speedup >= WORTH:
        return _use(chosen, cost)
    somewhere = max(outcomes, key=lambda o: max(o.by_group.values()))
    if max(somewhere.by_group.values()) >= WORTH_IN_A_GROUP:
        return _use_for_some(somewhere, cost)
    return _do_not(chosen, cost)


def _use(o: Outcome, cost: CostCurve) -> Recommendation:
    slower = tuple(group for group, gain in o.by_group.items() if gain < 1 / WORTH)
    headline = f"Use {o.candidate.title} with k = {o.k}: {o.speedup:.2f} times as fast as plain decoding."
    if slower:
        headline += f" Leave it out for {listed(slower)} prompts, where it is slower."
    reasons = (_cost_of(o.k, cost), _balance(o), *_extremes(o), *_mixed(o))
    return Recommendation("use", headline, reasons, _code(o), o, slower)


def _use_for_some(o: Outcome, cost: CostCurve) -> Recommendation:
    good = tuple(group for group, gain in o.by_group.items() if gain >= WORTH_IN_A_GROUP)
    gains = [o.by_group[group] for group in good]
    span = f"{min(gains):.2f}" if len(gains) == 1 else f"{min(gains):.2f} to {max(gains):.2f}"
    headline = (
        f"Use {o.candidate.title} with k = {o.k} only for {listed(good)} prompts: {span} times as fast as plain "
        "decoding there. For others do not use it."
    )
    over_all = f"Over all prompts: {_balance(o)[0].lower()}{_balance(o)[1:]}"
    reasons = (_cost_of(o.k, cost), over_all, *_extremes(o), *_mixed(o))
    return Recommendation("use for some", headline, reasons, _code(o), o, good)


def _do_not(o: Outcome | None, cost: CostCurve) -> Recommendation:
    headline = "Do not use speculative decoding here: plain decoding is as fast as anything that was tried."
    k = best_draft_length(GOOD_ALPHA, DRAFT_STEP, max(cost.positions[-1] - 1, 1), cost)
    possible = speedup(GOOD_ALPHA, k, DRAFT_STEP, cost)
    reasons = [_cost_of(4 if o is None else max(o.k, 4), cost)]
    if possible < WORTH:
        reasons.append(
            f"So even a good drafter (right {GOOD_ALPHA:.0%} of the time, each guess a tenth of a pass) would not be "
            "faster: this model is limited by arithmetic here, not by memory."
        )
    reasons += [] if o is None else [f"The best of those tried was {o.candidate.title} with k = {o.k}. {_balance(o)}"]
    if o is not None and possible >= WORTH:
        reasons.append(_too_seldom_right(o, cost))
    return Recommendation("do not use", headline, tuple(reasons), PLAIN, o)


def _too_seldom_right(o: Outcome, cost: CostCurve) -> str:
    needed = break_even_alpha(o.k, o.step_cost, cost)
    right = "it found nothing to draft" if math.isnan(o.alpha) else f"it was right {o.alpha:.0%} of the time"
    if needed > 1:
        return "Drafting itself takes so long that it would not pay if every guess were right."
    return f"A drafter that drafts {o.k} every round must be right {needed:.0%} of the time to break even; {right}."


def _cost_of(k: int, cost: CostCurve) -> str:
    """What the k extra positions of a pass cost, and what that tells about its bound."""
    T, relative = k + 1, cost.relative(k + 1)
    why = {
        "memory": "reading the weights takes most of the time, and all positions share it",
        "compute": "arithmetic takes most of the time, and each position has its own",
    }[bound(cost, T)]
    return f"A pass over {T} positions takes {relative:.2f} times as long as a pass over one: {why}."


def bound(cost: CostCurve, T: int) -> str:
    """ "memory" if the positions after the first cost less than half their price one by one, otherwise "compute"."""
    return "memory" if cost.relative(T) - 1 < (T - 1) / 2 else "compute"


def _balance(o: Outcome) -> str:
    return (
        f"A round writes {o.tokens_per_round:.2f} tokens and takes as long as {o.round_cost:.2f} plain ones: "
        f"{o.tokens_per_round:.2f} / {o.round_cost:.2f} = {o.speedup:.2f}."
    )


def _extremes(o: Outcome) -> list[str]:
    """The kinds of prompts that gain most and least, if there are several."""
    order = sorted(o.by_group.items(), key=lambda item: -item[1])
    if len(order) < 2:
        return []
    (most, high), (least, low) = order[0], order[-1]
    return [f"It helps most with {spoken(most)} ({high:.2f} times as fast), least with {spoken(least)} ({low:.2f})."]


def _mixed(o: Outcome) -> list[str]:
    """Where kinds of prompts differ so much that no single k suits them."""
    if min(o.by_group.values()) >= 0.98:
        return []
    longest = 2 * max(o.k, 4)
    wrapped = f"specnb.Adaptive({o.candidate.code.format(k=longest)})"
    return [f"For a mixture of prompts, drafter = {wrapped} chooses anew in every round how much to draft, or nothing."]


def withdraw(advised: Recommendation, measured: float) -> Recommendation:
    """Take a recommendation back, because it was slower than plain decoding when it was run."""
    assert advised.outcome is not None
    tried = f"{advised.outcome.candidate.title} with k = {advised.outcome.k}"
    headline = (
        f"Do not use speculative decoding here, or measure again: {tried} should have been "
        f"{advised.outcome.speedup:.2f} times as fast as plain decoding, but took longer when it was run "
        f"({measured:.2f} times as fast)."
    )
    return Recommendation("do not use", headline, advised.reasons, PLAIN, advised.outcome)


def compiled(advised: Recommendation) -> Recommendation:
    """The same advice for compiled passes: the lines to copy ask for them."""
    return replace(advised, code=advised.code.replace("max_new_tokens", "compile=True, max_new_tokens"))


def undecided(advised: Recommendation, doubt: float) -> Recommendation:
    """No recommendation: the times contradict each other by this share of themselves."""
    headline = (
        f"Measure again: times of the same pass differ by {doubt:.0%}, so that nothing can be recommended. Run this "
        "when nothing else is running."
    )
    return Recommendation("measure again", headline, (), PLAIN, advised.outcome)


def better_drafters(cost: CostCurve, alphas: Sequence[float] = (0.5, 0.7, 0.9)) -> list[tuple[float, int, float]]:
    """(α, best k, speed-up) of a drafter whose step costs a tenth of a pass: what one could hope for here."""
    longest = max(cost.positions[-1] - 1, 1)
    found = [(alpha, best_draft_length(alpha, DRAFT_STEP, longest, cost)) for alpha in alphas]
    return [(alpha, k, speedup(alpha, k, DRAFT_STEP, cost)) for alpha, k in found]


# --- words ---


def _code(o: Outcome) -> str:
    drafter = f"drafter = {o.candidate.code.format(k=o.k)}"
    lines = [o.candidate.setup, drafter, PLAIN.replace("input_ids", "input_ids, drafter=drafter")]
    return "\n".join(line for line in lines if line)


def spoken(group: str) -> str:
    """A group's name as words: copy_heavy_summary → "copy heavy summary"."""
    return group.replace("_", " ") or "prompts of no group"


def listed(groups: Sequence[str]) -> str:
    """Groups as a list in a sentence."""
    words = [spoken(group) for group in groups]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
