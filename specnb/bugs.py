"""The zoo: acceptance rules, drafting steps and runs as they are got wrong, each a small function of its own.

The right rule is `specnb.verify_sample`; it has no switches, and nothing here is used outside lessons and tests.
Every entry has the signature of the piece it stands in for:

* a *rule*: that of `specnb.verify_sample`;
* a *draft* step: (logits [B, V], temperature, top_k, generator) → guesses [B], and the q [B, V] they are scored with;
* a *target* step: (logits [..., V], temperature, top_k) → p [..., V];
* a *run* is spoilt in place, before its first round (``spoil=`` of `specnb.oracle.loop_sampler`).

    tables = random_tables()
    specnb.audit(sampler(ZOO["resample from p"], tables), tables.law(3))

Most are lossy: what they write no longer follows p. Some are lossless but slow: they pass the audit, and α tells.
Discussed in notebook 06.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specnb import verification
from specnb.verification import Generators as Rng
from specnb.verification import Verdict, accepted_prefix, at_place, draw, one_hot, residual, verify_sample

Maybe = Tensor | None


@dataclass(frozen=True)
class Bug:
    """One entry of the zoo.

    Attributes:
        name: what people do.
        function: the wrong piece itself.
        place: which piece it stands in for: ``"rule"``, ``"draft"``, ``"target"`` or ``"run"``.
        effect: ``"lossy"``; ``"slow"``, lossless with a lower α; or ``"edge"``, wrong only at a random number of 0,
            which no sample is large enough to show.
        explanation: who does it, and what it does to the law.
    """

    name: str
    function: Callable[..., Any]
    place: str
    effect: str
    explanation: str

    @property
    def lossy(self) -> bool:
        return self.effect != "slow"


ZOO: dict[str, Bug] = {}


def _planted(place: str, effect: str = "lossy") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function into the zoo under its own name."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__.replace("_", " ")
        ZOO[name] = Bug(name, function, place, effect, inspect.getdoc(function) or "")
        return function

    return enter


# --- what every rule starts from and ends with; each bug swaps one piece ---


class _Round:
    """p [B, K+1, V], q [B, K, V], and both at the guesses, p_of and q_of [B, K]."""

    def __init__(self, guesses: Tensor, q: Tensor | None, p: Tensor, lengths: Tensor | None, generator: Rng) -> None:
        self.guesses, self.p, self.generator = guesses, p, generator
        self.q = one_hot(guesses, p) if q is None else q
        self.lengths = torch.full((len(p),), guesses.shape[1], device=p.device) if lengths is None else lengths
        self.p_of, self.q_of = (x.gather(-1, guesses[..., None]).squeeze(-1) for x in (p[:, :-1], self.q))

    def uniform(self) -> Tensor:
        return verification.uniform(self.guesses.shape, self.p, self.generator)

    def num_accepted(self) -> Tensor:
        """The right count: r < p/q up to the first guess that fails."""
        return accepted_prefix(self.uniform() * self.q_of < self.p_of, self.lengths)

    def verdict(
        self,
        num_accepted: Tensor,
        correction: Callable[[Tensor, Tensor], Tensor] = residual,
        bonus: Tensor | None = None,
    ) -> Verdict:
        """The right end: the correction from the residual after a rejection, else the bonus from p."""
        q = torch.cat([self.q, torch.zeros_like(self.p[:, :1])], dim=1)
        p_next, q_next = at_place(self.p, num_accepted), at_place(q, num_accepted)
        after_rejection = (num_accepted < self.lengths)[:, None]
        law = torch.where(after_rejection, correction(p_next, q_next), p_next if bonus is None else bonus)
        return self.write(num_accepted, draw(law, self.generator))

    def write(self, num_accepted: Tensor, next_token: Tensor) -> Verdict:
        return Verdict(num_accepted, next_token, torch.zeros_like(self.p[..., 0], dtype=torch.long))


# --- rules: which guesses stand ---


@_planted("rule")
def always_accept(
    draft_tokens: Tensor, draft_probs: Maybe, target_probs: Tensor, draft_lengths: Maybe = None, generator: Rng = None
) -> Verdict:
    """Every guess is kept; only the bonus comes from the target. The text of the draft model, at its best speed.

    Benchmarks that never compare the text do not notice. Drafted places follow q instead of p.
    """
    now = _Round(draft_tokens, draft_probs, target_probs, draft_lengths, generator)
    return now.verdict(now.lengths)


@_planted("rule")
def p_and_q_swapped(
    draft_tokens: Tensor, draft_probs: Maybe, target_probs: Tensor, draft_lengths: Maybe = None, generator: Rng = None
) -> Verdict:
    """Accepts with min(1, q/p): papers disagree about which letter is the draft, and code copied from two of them does.

    Guesses the draft overrates always pass, those it underrates are turned down.
    """
    now = _Round(draft_tokens, draft_probs, target_probs, draft_lengths, generator)
    return now.verdict(accepted_prefix(now.uniform() * now.p_of < now.q_of, now.lengths))


@_planted("rule")
def one_random_number_for_all(
    draft_tokens: Tensor, draft_probs: Maybe, target_probs: Tensor, draft_lengths: Maybe = None, generator: Rng = None
) -> Verdict:
    """One r per row, drawn outside the loop over places, decides every guess of the round.

    The first guess is judged rightly; the second is reached only if r was small, so it passes too often, and so on.
    Tests of single tokens see nothing; pairs and triples do.
    """
    now = _Round(draft_tokens, draft_probs, target_probs, draft_lengths, generator)
    r = now.uniform()[:, :1]
    return now.verdict(accepted_prefix(r * now.q_of < now.p_of, now.lengths))


@_planted("rule")
def tokens_kept_after_a_rejection(
    draft_tokens: Tensor, draft_probs: Maybe, target_probs: Tensor, draft_lengths: Maybe = None, generator: Rng = None
) -> Verdict:
    """Counts the guesses that pass, ``matches.sum()``, instead of those before the first that does not (``cumprod``).

    A rejected guess stays in the text whenever a later one passes, which was scored after a token that should be gone.
    """
    now = _Round(draft_tokens, draft_probs, target_probs, draft_lengths, generator)
    passes = now.uniform() * now.q_of < now.p_of
    places = torch.arange(passes.shape[1], device=passes.device)
    return now.verdict((passes & (places < now.lengths[:, None])).sum(dim=1))


@_planted("rule", "edge")
def r_at_most_the_ratio(
    draft_tokens: Tensor, draft_probs: Maybe, target_probs: Tensor, draft_lengths: Maybe = None, generator: Rng = None
) -> Verdict:
    """Accepts with r ≤ p/q. A random number in [0, 1) can be 0, and then a guess with p = 0 passes.

    Once in 2^24 float32 draws, when the guess lies outside the target's top-k: too rare for any audit, and enough for
    one impossible token in a long night. Show it with r forced to 0.
    """
    now = _Round(draft_tokens, draft_probs, target_probs, draft_lengths, generator)
    return now.verdict(accepted_prefix(now.uniform() * now.q_of <= now.p_of, now.lengths))


# --- rules: the correction after a rejection ---


@_planted("rule")
def resample_from_p(
    draft_tokens: Tensor, draft_probs: Maybe, target_probs: Tensor, draft_lengths: Maybe = None, generator: Rng = None
) -> Verdict:
    """The correction is drawn from p itself: the rejected guess's turn, played again from the start.

    The most natural slip. What accepted guesses have covered already is paid a second time, so tokens that the draft
    likes come out too often.
    """
    now = _Round(draft_tokens, draft_probs, target_probs, draft_lengths, generator)
    return now.verdict(now.num_accepted(), correction=lambda p, q: p)


@_planted("rule")
def no_residual(
    draft_tokens: Tensor, draft_probs: Maybe, target_probs: Tensor, draft_lengths: Maybe = None, generator: Rng = None
) -> Verdict:
    """The correction is drawn from q: the draft is asked once more, as if its second guess needed no check."""
    now = _Round(draft_tokens, draft_probs, target_probs, draft_lengths, generator)
    return now.verdict(now.num_accepted(), correction=lambda p, q: torch.where(q.sum(-1, keepdim=True) > 0, q, p))


@_planted("rule")
def residual_without_the_clamp(
    draft_tokens: Tensor, draft_probs: Maybe, target_probs: Tensor, draft_lengths: Maybe = None, generator: Rng = None
) -> Verdict:
    """The residual is |p − q| normalised: ``abs`` where ``clamp(min=0)`` belongs, since both get rid of the minus sign.

    Tokens the draft overrates, which accepted guesses cover in full, come again as corrections.
    """
    now = _Round(draft_tokens, draft_probs, target_probs, draft_lengths, generator)
    return now.verdict(now.num_accepted(), correction=lambda p, q: (p - q).abs() + 1e-12 * p)


@_planted("rule")
def residual_not_normalised(
    draft_tokens: Tensor, draft_probs: Maybe, target_probs: Tensor, draft_lengths: Maybe = None, generator: Rng = None
) -> Verdict:
    """max(0, p − q) as it is, drawn from by running sums: the first token whose sum exceeds a number in [0, 1).

    The sums end at 1 − α, not at 1; larger numbers fall off the end and become the last token of the vocabulary.
    ``torch.multinomial`` forgives this, a sampler of one's own does not.
    """
    now = _Round(draft_tokens, draft_probs, target_probs, draft_lengths, generator)
    right = now.verdict(now.num_accepted())
    sums = at_place(now.p[:, :-1] - now.q, right.num_accepted.clamp(max=now.q.shape[1] - 1)).clamp(min=0).cumsum(-1)
    r = verification.uniform((len(sums), 1), now.p, generator)
    fallen = torch.searchsorted(sums, r).squeeze(1).clamp(max=sums.shape[1] - 1)
    return now.write(right.num_accepted, torch.where(right.num_accepted < now.lengths, fallen, right.next_token))


@_planted("rule")
def lists_subtracted_by_place(
    draft_tokens: Tensor, draft_probs: Maybe, target_probs: Tensor, draft_lengths: Maybe = None, generator: Rng = None
) -> Verdict:
    """p and q are kept as sorted top-k lists and subtracted entry by entry, whatever token stands at that place.

    The best token of p loses the best probability of q, even where they are different tokens.
    """
    now = _Round(draft_tokens, draft_probs, target_probs, draft_lengths, generator)

    def by_place(p: Tensor, q: Tensor) -> Tensor:
        listed, tokens = p.sort(dim=-1, descending=True)
        left = residual(listed, q.sort(dim=-1, descending=True).values)
        return torch.zeros_like(p).scatter(-1, tokens, left)

    return now.verdict(now.num_accepted(), correction=by_place)


# --- rules: the bonus token ---


@_planted("rule")
def the_bonus_is_the_favourite(
    draft_tokens: Tensor, draft_probs: Maybe, target_probs: Tensor, draft_lengths: Maybe = None, generator: Rng = None
) -> Verdict:
    """After a fully accepted draft the bonus is p's argmax: a line left over from greedy decoding.

    Right in every drafted place, so tests of the first token pass; the last token of a full round is not drawn at all.
    """
    now = _Round(draft_tokens, draft_probs, target_probs, draft_lengths, generator)
    favourite = at_place(now.p, now.lengths).argmax(dim=-1)
    return now.verdict(now.num_accepted(), bonus=one_hot(favourite, now.p))


@_planted("rule")
def the_bonus_from_one_place_early(
    draft_tokens: Tensor, draft_probs: Maybe, target_probs: Tensor, draft_lengths: Maybe = None, generator: Rng = None
) -> Verdict:
    """The bonus is drawn at the place of the last guess instead of after it: ``logits[:, -2]``, off by one."""
    now = _Round(draft_tokens, draft_probs, target_probs, draft_lengths, generator)
    return now.verdict(now.num_accepted(), bonus=at_place(now.p, (now.lengths - 1).clamp(min=0)))


@_planted("rule")
def the_last_guess_redrawn(
    draft_tokens: Tensor, draft_probs: Maybe, target_probs: Tensor, draft_lengths: Maybe = None, generator: Rng = None
) -> Verdict:
    """After a fully accepted draft the last guess is dropped and drawn afresh from p, to keep the draft's cache simple.

    It looks harmless, p is p. But rejected guesses are still corrected from the residual, which is right only together
    with the accepted ones it completes.
    """
    now = _Round(draft_tokens, draft_probs, target_probs, draft_lengths, generator)
    right = now.verdict(now.num_accepted())
    full = (right.num_accepted == now.lengths) & (now.lengths > 0)
    place = right.num_accepted - full.long()
    return now.write(place, torch.where(full, draw(at_place(now.p, place), generator), right.next_token))


# --- rules: lossless, but slow ---


@_planted("rule", "slow")
def the_bonus_not_taken(
    draft_tokens: Tensor, draft_probs: Maybe, target_probs: Tensor, draft_lengths: Maybe = None, generator: Rng = None
) -> Verdict:
    """A fully accepted draft ends the round at its last guess; the bonus, already paid for, is thrown away.

    Lossless: the text is cut, not changed. k tokens a round instead of k + 1, and the last guess counts as written by
    the target.
    """
    right = verify_sample(draft_tokens, draft_probs, target_probs, draft_lengths, generator)
    now = _Round(draft_tokens, draft_probs, target_probs, draft_lengths, generator)
    full = (right.num_accepted == now.lengths) & (now.lengths > 0)
    last = now.guesses.gather(1, (now.lengths - 1).clamp(min=0)[:, None]).squeeze(1)
    return now.write(right.num_accepted - full.long(), torch.where(full, last, right.next_token))


@_planted("rule", "slow")
def accepted_only_if_drawn(
    draft_tokens: Tensor, draft_probs: Maybe, target_probs: Tensor, draft_lengths: Maybe = None, generator: Rng = None
) -> Verdict:
    """The target draws its own token at each place, and a guess stands if it is the same one.

    Lossless whatever the draft, since every token written is the target's own draw; several engines work so. But a
    guess is accepted with probability Σ p·q instead of Σ min(p, q): low where p is spread out.
    """
    now = _Round(draft_tokens, draft_probs, target_probs, draft_lengths, generator)
    own = torch.stack([draw(now.p[:, i], generator) for i in range(now.p.shape[1])], dim=1)
    num_accepted = accepted_prefix(now.guesses == own[:, :-1], now.lengths)
    return now.write(num_accepted, own.gather(1, num_accepted[:, None]).squeeze(1))


@_planted("rule", "slow")
def accepted_half_as_often(
    draft_tokens: Tensor, draft_probs: Maybe, target_probs: Tensor, draft_lengths: Maybe = None, generator: Rng = None
) -> Verdict:
    """Accepts with min(1, p/q) / 2 and corrects from what that leaves, p − min(p, q)/2.

    Lossless: any acceptance works with the residual that belongs to it; min(1, p/q) is the largest, and so the fastest.
    """
    now = _Round(draft_tokens, draft_probs, target_probs, draft_lengths, generator)
    r = 2 * now.uniform()
    num_accepted = accepted_prefix((r < 1) & (r * now.q_of < now.p_of), now.lengths)
    return now.verdict(num_accepted, correction=lambda p, q: p - torch.minimum(p, q) / 2)


# --- draft and target steps ---


def processed(logits: Tensor, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
    """The law of a row of logits [..., V] under temperature and top-k."""
    scores = logits / temperature
    if top_k is not None:
        scores = scores.masked_fill(scores < scores.topk(top_k).values[..., -1:], float("-inf"))
    return scores.softmax(dim=-1)


def draw_and_score(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, generator: Rng = None
) -> tuple[Tensor, Tensor]:
    """The right drafting step: the guess is drawn from the very q [B, V] it is scored with."""
    q = processed(logits, temperature, top_k)
    return draw(q, generator), q


@_planted("draft")
def argmax_draft_scored_as_softmax(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, generator: Rng = None
) -> tuple[Tensor, Tensor]:
    """The draft's favourite token is taken, without a draw, and scored with its softmax probability.

    Fast greedy drafts next to a rule that was written for drawn ones. A guess that is certain to come has q = 1; scored
    lower it is accepted too often. With p = (0.6, 0.4) and q = (0.8, 0.2) token 0 comes out 0.75 of the time.
    """
    q = processed(logits, temperature, top_k)
    return q.argmax(dim=-1), q


@_planted("draft")
def q_scored_before_top_k(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, generator: Rng = None
) -> tuple[Tensor, Tensor]:
    """Drawn after top-k, scored with the probabilities from before it: q was saved one line too early.

    Every guess was in truth likelier than its q says, so guesses are accepted too often, and the residual still
    subtracts tokens that were never going to be guessed.
    """
    return draw(processed(logits, temperature, top_k), generator), processed(logits, temperature)


@_planted("draft")
def q_scored_from_raw_logits(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, generator: Rng = None
) -> tuple[Tensor, Tensor]:
    """Drawn with temperature and top-k, scored with the softmax of the raw logits, as the model returns them.

    Both halves of the rule go wrong: guesses pass too often or too seldom, and the residual subtracts the wrong law.
    """
    return draw(processed(logits, temperature, top_k), generator), processed(logits)


@_planted("draft")
def q_scored_at_the_wrong_temperature(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, generator: Rng = None
) -> tuple[Tensor, Tensor]:
    """Drawn at the run's temperature, scored at temperature 1: the draft's own loop divided, the verifier did not.

    Below 1 the draft's favourites are likelier than their q says and pass too often; above 1, too seldom.
    """
    return draw(processed(logits, temperature, top_k), generator), processed(logits, 1.0, top_k)


@_planted("draft")
def temperature_applied_twice(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, generator: Rng = None
) -> tuple[Tensor, Tensor]:
    """Drawn at the run's temperature; then the scores, already divided by it, go through the processors once more."""
    return draw(processed(logits, temperature, top_k), generator), processed(logits, temperature**2, top_k)


@_planted("draft", "slow")
def a_draft_at_its_own_temperature(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, generator: Rng = None
) -> tuple[Tensor, Tensor]:
    """The draft is drawn at half the temperature of the run, and scored so.

    Lossless: q may be any law, if it is the law that was drawn from. It only agrees less with p.
    """
    return draw_and_score(logits, temperature / 2, top_k, generator)


@_planted("target")
def processors_forgotten_on_the_target(logits: Tensor, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
    """p is the softmax of the target's raw logits, while the run asks for a temperature and top-k.

    Verification was written before the options were. The text follows the target at temperature 1.
    """
    return processed(logits)


# --- runs ---


@_planted("run")
def forgotten_rollback(run: Any) -> None:
    """Rejected guesses stay in the target's cache, and every later pass attends to them.

    No error, no warning: the text reads well, and is the answer to a context nobody wrote.
    """
    run.cache.rollback = lambda n: None


@_planted("run")
def rollback_one_short(run: Any) -> None:
    """Rolls back one entry too few: off by one between tokens written and tokens the cache has seen.

    The first rejected guess stays in the cache, one in every round that had a rejection.
    """
    rollback = run.cache.rollback
    run.cache.rollback = lambda n: rollback((torch.as_tensor(n) - 1).clamp(min=0))


# --- a world small enough to print, where the bugs can be seen ---


@dataclass(frozen=True, eq=False)
class Tables:
    """A target and a draft that look at the last token only: row t of each holds the logits of what follows token t.

    Attributes:
        target, draft: logits [V, V].
        temperature, top_k: the processors of the run, for both. Texts start after token 0.
    """

    target: Tensor
    draft: Tensor
    temperature: float = 0.7
    top_k: int = 3

    @property
    def p(self) -> Tensor:
        """[V, V], the target's law after each token, processed."""
        return processed(self.target, self.temperature, self.top_k)

    def law(self, m: int) -> Tensor:
        """The exact law of the first m tokens, float64 [V]*m."""
        p = processed(self.target.double(), self.temperature, self.top_k)
        law = p[0]
        for _ in range(m - 1):
            law = law[..., None] * p
        return law


def random_tables(vocab_size: int = 6, seed: int = 0, temperature: float = 0.7, top_k: int = 3) -> Tables:
    """A random target, and a draft that agrees with it in part."""
    generator = torch.Generator().manual_seed(seed)
    target, noise = torch.randn(2, vocab_size, vocab_size, generator=generator)
    return Tables(target, target + 0.8 * noise, temperature, top_k)


@dataclass(frozen=True, eq=False)
class Played:
    """What was written: ``tokens`` LongTensor [n, m]; and ``alpha``, the accepted share of the guesses judged."""

    tokens: Tensor
    alpha: float


def play(bug: Bug | None, tables: Tables, n: int, m: int = 3, k: int = 2, seed: int = 0) -> Played:
    """Write n texts of m tokens in rounds of k guesses, with one piece replaced by ``bug`` (None: all pieces right).

    Raises:
        ValueError: for a bug of a whole run, which needs a model: see `specnb.oracle.loop_sampler`.
    """
    rule, draft_step, target_step = _pieces(bug)
    generator = torch.Generator().manual_seed(seed)
    text, length = torch.zeros(n, m + k + 2, dtype=torch.long), torch.ones(n, dtype=torch.long)
    accepted = judged = 0
    while bool((length <= m).any()):
        newest = text.gather(1, length[:, None] - 1)  # [n, 1]
        guesses, q = _guess(draft_step, tables, newest[:, 0], k, generator)
        p = target_step(tables.target[torch.cat([newest, guesses], dim=1)], tables.temperature, tables.top_k)
        verdict = rule(guesses, q, p, generator=generator)
        accepted += int(verdict.num_accepted.sum())
        judged += int((verdict.num_accepted + 1).clamp(max=k).sum())
        text, length = _write(text, length, guesses, verdict, m)
    return Played(text[:, 1 : m + 1], accepted / judged)


def sampler(bug: Bug | None, tables: Tables, m: int = 3, k: int = 2) -> Callable[[int, int], Tensor]:
    """`play` as a sampler for `specnb.audit`."""
    return lambda n, seed: play(bug, tables, n, m, k, seed).tokens


def _pieces(bug: Bug | None) -> tuple[Callable[..., Any], ...]:
    pieces: dict[str, Callable[..., Any]] = {"rule": verify_sample, "draft": draw_and_score, "target": processed}
    if bug is not None and bug.place not in pieces:
        raise ValueError(f"{bug.name!r} spoils a whole run and needs a model: loop_sampler(..., spoil=bug.function).")
    if bug is not None:
        pieces[bug.place] = bug.function
    return tuple(pieces.values())


def _guess(
    step: Callable[..., Any], tables: Tables, newest: Tensor, k: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """k guesses after each newest token, LongTensor [n, k], and their q [n, k, V]."""
    guesses, laws = [newest], []
    for _ in range(k):
        guess, q = step(tables.draft[guesses[-1]], tables.temperature, tables.top_k, generator)
        guesses.append(guess)
        laws.append(q)
    return torch.stack(guesses[1:], dim=1), torch.stack(laws, dim=1)


def _write(text: Tensor, length: Tensor, guesses: Tensor, verdict: Verdict, m: int) -> tuple[Tensor, Tensor]:
    """The round's tokens into text [n, m+k+2]; what lies beyond the new length is overwritten later."""
    row = torch.cat([guesses, guesses[:, :1]], dim=1)
    row = row.scatter(1, verdict.num_accepted[:, None], verdict.next_token[:, None])
    places = length[:, None] + torch.arange(row.shape[1])
    return text.scatter(1, places, row), (length + verdict.num_accepted + 1).clamp(max=m + 1)
