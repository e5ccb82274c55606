"""Accept or reject: pure tensor maths on a row of guesses and what the target says. No model, no loop, no cache.

p is the target, q the draft. K is the number of draft columns; a row uses the first ``draft_lengths[b]`` of them, the
rest is padding. The target has scored K + 1 places: one before each guess, and one after the last.

Greedy verification is derived in notebook 03, "Guess and check"; sampling in notebooks 05 and 06. Sources: Leviathan
et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

Generators = Generator | Sequence[Generator] | None


@dataclass(frozen=True, eq=False)
class Verdict:
    """What one target pass decides for every row.

    Attributes:
        num_accepted: LongTensor [B], how many of the row's guesses stand (a prefix).
        next_token: LongTensor [B], the token after them: the correction at the first rejection, or the bonus token
            when all of the row's guesses passed.
        invalid: LongTensor [B, K+1], 0 where all is well; `BAD_TARGET` or `BAD_DRAFT` where a place the row uses
            holds NaN. A row with such a place has no verdict.
        path: LongTensor [B, N], for a tree of guesses the numbers of the nodes that stand, from the root down, then
            -1; None for a chain, where they are the first ones.
    """

    num_accepted: Tensor
    next_token: Tensor
    invalid: Tensor
    path: Tensor | None = None


BAD_TARGET, BAD_DRAFT = 1, 2


def verify_greedy(draft_tokens: Tensor, target_logits: Tensor, draft_lengths: Tensor | None = None) -> Verdict:
    """Greedy verification: a guess stands while it is the token the target would have written itself.

    Args:
        draft_tokens: LongTensor [B, K] (K may be 0).
        target_logits: [B, K+1, V]; position i scores the token at draft place i.
        draft_lengths: LongTensor [B] in 0…K, how many guesses each row holds; default K.

    Returns:
        Verdict. Ties go to the lowest token id, as in ``torch.argmax``.

    Raises:
        ValueError: if shapes or lengths do not fit, or if a place the row uses holds NaN (row and position named).

    Derived in notebook 03.
    """
    lengths = _checked_lengths(draft_tokens, target_logits, draft_lengths)
    best, choice = (found.view(target_logits.shape[:2]) for found in favourites(target_logits.flatten(0, 1)))
    verdict = judge_greedy(draft_tokens, best, choice, lengths)
    raise_for_nan(verdict.invalid)
    return verdict


def judge_greedy(draft_tokens: Tensor, best: Tensor, choice: Tensor, draft_lengths: Tensor) -> Verdict:
    """`verify_greedy` without its checks, and so without waiting for the device: what the loop calls.

    Args:
        best, choice: [B, K+1], the highest score of each place (NaN if one is) and the token that has it: `favourites`.
    """
    num_accepted = accepted_prefix(draft_tokens == choice[:, :-1], draft_lengths)
    next_token = choice.gather(1, num_accepted[:, None]).squeeze(1)
    return Verdict(num_accepted, next_token, BAD_TARGET * (best.isnan() & _in_use(choice, draft_lengths)))


def favourites(scores: Tensor) -> tuple[Tensor, Tensor]:
    """``scores.max(dim=-1)`` of [N, V]: the highest score, or NaN if there is one, and the lowest token that has it."""
    if scores.device.type != "cpu" or not scores.is_floating_point():
        return scores.max(dim=-1)
    found = favourites_on_host(scores)
    tokens = torch.tensor([0 if token is None else token for token in found], dtype=torch.long)
    best = scores.gather(-1, tokens[:, None]).squeeze(-1)
    if None in found:
        best = best.masked_fill(torch.tensor([token is None for token in found]), float("nan"))
    return best, tokens


def favourites_on_host(scores: Tensor) -> list[int | None]:
    """The lowest token with the highest score, for each line of [N, V] on the CPU; None for a line that holds a NaN.

    By numpy, which is many times faster than torch in finding the place of a maximum.
    """
    if scores.dtype in _INFINITY:
        return _favourites_by_bits(scores.detach())
    return [_favourite(line) for line in scores.detach()]


def _favourite(line: Tensor) -> int | None:
    numbers = (line if line.dtype == torch.float64 else line.float()).numpy()
    token = int(numbers.argmax())  # a NaN's place, if there is one
    return None if numbers[token] != numbers[token] else token


_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}  # its bits; those of a NaN are larger
_MINUS = 0x8000


def _favourites_by_bits(scores: Tensor) -> list[int | None]:
    """Of scores in half precision, which numpy does not know: numbers above 0 are in the order of their bits."""
    infinity, bits = _INFINITY[scores.dtype], scores.view(torch.int16).numpy()
    tokens: list[int | None] = bits.argmax(-1).tolist()
    largest = bits.view("uint16").max(-1).tolist()
    for n, (token, most) in enumerate(zip(tokens, largest)):
        highest = int(bits[n, token])
        if highest > infinity or most > infinity + _MINUS:
            tokens[n] = None
        elif highest <= 0:  # none is above 0
            tokens[n] = _favourite(scores[n])
    return tokens


def verify_sample(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    draft_lengths: Tensor | None = None,
    generator: Generators = None,
) -> Verdict:
    """Speculative sampling: whatever the draft, the tokens a round writes follow the target's law exactly.

    A guess x is accepted with probability min(1, p(x)/q(x)). At the first rejection the next token is drawn from the
    residual, max(0, p − q) normalised; if every guess is accepted, from p at the place after the last.

    Args:
        draft_tokens: LongTensor [B, K] (K may be 0), each *drawn* from its row of ``draft_probs``.
        draft_probs: q [B, K, V]; None for a deterministic draft, whose q is one-hot at the drafted token.
        target_probs: p [B, K+1, V].
        draft_lengths: LongTensor [B] in 0…K, how many guesses each row holds; default K.
        generator: a ``torch.Generator`` on the probabilities' device, or one per row; default: torch's global one.

    Returns:
        Verdict. A token with p = 0 is never emitted.

    Raises:
        ValueError: if shapes or lengths do not fit, or if a place the row uses holds NaN or is no distribution.

    Computes in float32, or in float64 if that is what comes in. Derived in notebooks 05 and 06.
    """
    lengths = _checked_lengths(draft_tokens, target_probs, draft_lengths)
    if isinstance(generator, Sequence) and len(generator) != len(draft_tokens):
        raise ValueError(f"generator: one, or one per row; got {len(generator)} for {len(draft_tokens)} rows.")
    if draft_probs is not None:
        _check_draft_probs(draft_probs, draft_tokens, target_probs)
        _check_distributions("draft_probs", draft_probs, _in_use(target_probs, lengths - 1)[:, :-1])
    _check_distributions("target_probs", target_probs, _in_use(target_probs, lengths))
    return judge_sample(draft_tokens, draft_probs, target_probs, lengths, generator)


def judge_sample(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    draft_lengths: Tensor,
    generator: Generators,
    counts: Sequence[int] | None = None,
) -> Verdict:
    """`verify_sample` without its checks, and so without waiting for the device: what the loop calls.

    Args:
        counts: the draft lengths once more, on the host, where there is one generator per row.
    """
    p = _exact(target_probs)
    drafted = _in_use(p, draft_lengths - 1)[:, :-1]
    draft_tokens = draft_tokens.where(drafted, 0)  # whatever the padding of a shorter row says
    q = one_hot(draft_tokens, p) if draft_probs is None else draft_probs.to(p.dtype)
    p_of, q_of = (probs.gather(-1, draft_tokens[..., None]).squeeze(-1) for probs in (p[:, :-1], q))  # [B, K]
    r = uniform(draft_tokens.shape, p, generator, draft_lengths if counts is None else counts)
    # r < p/q, written without the division: p = 0 is rejected even at r = 0
    num_accepted = accepted_prefix(r * q_of < p_of, draft_lengths)
    rejected = num_accepted < draft_lengths
    p_next, q_next = at_place(p, num_accepted), at_place(_padded(q), num_accepted)
    law = torch.where(rejected[:, None], residual(p_next, q_next), p_next)
    invalid = BAD_TARGET * (p.isnan().any(-1) & _in_use(p, draft_lengths)).long()
    invalid[:, :-1] += BAD_DRAFT * (q.isnan().any(-1) & drafted & (invalid[:, :-1] == 0))
    return Verdict(num_accepted, draw(drawable(law), generator), invalid)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The law of the correction: max(0, p − q) normalised, [..., V]; p itself where p and q are equal.

    The part of p that accepted guesses have not covered. Derived in notebook 05.
    """
    p = _exact(p)
    left = (p - q.to(p.dtype)).clamp(min=0)
    mass = left.sum(dim=-1, keepdim=True)
    return torch.where(mass > 0, left / mass.where(mass > 0, 1), p)


def emitted_distribution(p: Tensor, q: Tensor) -> Tensor:
    """Exact law of the token one round writes at a drafted place, [..., V]: Σ over accepted and corrected = p.

    Args:
        p: target distribution [..., V].
        q: the distribution the guess is drawn from [..., V].

    Accepted mass min(p, q), plus the rejected mass Σ max(0, q − p) times the residual. Derived in notebook 05.
    """
    p = _exact(p)
    accepted = torch.minimum(p, q.to(p.dtype))
    rejected_mass = (q.to(p.dtype) - p).clamp(min=0).sum(dim=-1, keepdim=True)
    return accepted + rejected_mass * residual(p, q)


def accepted_prefix(matches: Tensor, draft_lengths: Tensor) -> Tensor:
    """How many guesses stand before the first that does not: matches [B, K] → [B]. Everything after it is dropped."""
    if matches.shape[1] == 0:
        return torch.zeros_like(draft_lengths)
    drafted = torch.arange(matches.shape[1], device=matches.device) < draft_lengths[:, None]
    return (matches & drafted).cumprod(dim=1).sum(dim=1)


def one_hot(tokens: Tensor, like: Tensor) -> Tensor:
    """q of a deterministic draft: [..., V] with all mass on ``tokens`` [...], in dtype and vocabulary of ``like``."""
    q = torch.zeros(*tokens.shape, like.shape[-1], dtype=like.dtype, device=like.device)
    return q.scatter_(-1, tokens[..., None], 1.0)


def at_place(probs: Tensor, place: Tensor) -> Tensor:
    """Row b's distribution at ``place[b]``: [B, T, V] → [B, V]."""
    return probs[torch.arange(len(place), device=place.device), place]


def uniform(
    shape: Sequence[int], like: Tensor, generator: Generators, counts: Tensor | Sequence[int] | None = None
) -> Tensor:
    """Random numbers in [0, 1), [B, K]; with one generator per row, row b draws its first ``counts[b]`` only."""
    if not isinstance(generator, Sequence):
        return torch.rand(*shape, dtype=like.dtype, device=like.device, generator=generator)
    r = torch.zeros(*shape, dtype=like.dtype, device=like.device)
    wanted = [shape[1]] * shape[0] if counts is None else counts
    wanted = wanted.tolist() if isinstance(wanted, Tensor) else wanted
    for row, n, row_generator in zip(r, wanted, generator):
        row[:n].uniform_(generator=row_generator)
    return r


def draw(probs: Tensor, generator: Generators = None, wanted: Sequence[bool] | None = None) -> Tensor:
    """One token per row, LongTensor [B], from probs [B, V]; a token of probability 0 never comes.

    With one generator per row, rows that are not ``wanted`` draw nothing (they get token 0).
    """
    if isinstance(generator, Sequence):
        tokens = torch.zeros(len(probs), dtype=torch.long, device=probs.device)
        for b, (row, row_generator) in enumerate(zip(probs, generator)):
            if wanted is None or wanted[b]:
                tokens[b] = torch.multinomial(row, 1, generator=row_generator)
        return tokens
    return torch.multinomial(probs, 1, generator=generator).squeeze(-1)


def drawable(probs: Tensor) -> Tensor:
    """Rows that hold NaN made uniform, so that drawing does not fail before `raise_for_nan` names them."""
    return torch.where(probs.isnan().any(dim=-1, keepdim=True), 1.0, probs)


def raise_for_nan(invalid: Tensor, rows: Sequence[int] | None = None) -> None:
    """Raise a ValueError that names the first row (of ``rows``, default all) and place marked in invalid [B, K+1]."""
    found = [(row, place) for row, place in invalid.nonzero().tolist() if rows is None or row in rows]
    if found:
        row, place = found[0]
        whose = "draft" if int(invalid[row, place]) == BAD_DRAFT else "target"
        raise ValueError(
            f"The {whose}'s scores hold NaN in row {row} at position {place} of the pass. Nothing was committed in "
            "this round. Check the model's weights and dtype (float16 overflows easily; try bfloat16 or float32) and "
            "any custom logits processor."
        )


def _exact(probs: Tensor) -> Tensor:
    """float64 stays; everything else becomes float32."""
    return probs if probs.dtype == torch.float64 else probs.float()


def _padded(q: Tensor) -> Tensor:
    """q with one more place, for rows whose every guess was accepted (they draw from p)."""
    return torch.cat([q, torch.zeros_like(q[:, :1]) if q.shape[1] else q.new_zeros(q.shape[0], 1, q.shape[2])], dim=1)


def _in_use(places: Tensor, draft_lengths: Tensor) -> Tensor:
    """Which of the K+1 places [B, K+1] a row uses: its guesses' and the one after the last."""
    return torch.arange(places.shape[1], device=places.device) <= draft_lengths[:, None]


def _check_distributions(name: str, probs: Tensor, in_use: Tensor) -> None:
    raise_for_nan((BAD_DRAFT if name == "draft_probs" else BAD_TARGET) * (probs.isnan().any(-1) & in_use))
    off = ((probs < 0).any(-1) | ((_exact(probs).sum(-1) - 1).abs() > 0.02)) & in_use
    if bool(off.any()):
        row, place = off.nonzero()[0].tolist()
        total, least = float(probs[row, place].sum()), float(probs[row, place].min())
        raise ValueError(
            f"{name}[{row}, {place}] is no distribution: it sums to {total:.4g}, its least entry is {least:.4g}. "
            "Pass probabilities, such as logits.softmax(-1), not logits."
        )


def _check_draft_probs(draft_probs: Tensor, draft_tokens: Tensor, target_probs: Tensor) -> None:
    expected = (*draft_tokens.shape, target_probs.shape[-1])
    if draft_probs.shape != expected:
        raise ValueError(
            f"draft_probs must be [B, K, V] = {list(expected)} as draft_tokens and target_probs have it, "
            f"got {list(draft_probs.shape)}. For a deterministic draft pass None."
        )


def _checked_lengths(draft_tokens: Tensor, target_scores: Tensor, draft_lengths: Tensor | None) -> Tensor:
    """The draft lengths [B] on the draft's device, once shapes, dtypes and ranges have been checked."""
    if draft_tokens.ndim != 2 or draft_tokens.dtype != torch.long:
        raise ValueError(
            f"draft_tokens must be a LongTensor [B, K], got {draft_tokens.dtype} {list(draft_tokens.shape)}."
        )
    rows, places = draft_tokens.shape
    if target_scores.ndim != 3 or target_scores.shape[:2] != (rows, places + 1):
        raise ValueError(
            f"The target must score K + 1 places of each row: expected [{rows}, {places + 1}, V] for draft_tokens "
            f"{list(draft_tokens.shape)}, got {list(target_scores.shape)}."
        )
    lengths = _lengths(draft_tokens, draft_lengths)
    drafted = torch.arange(places, device=lengths.device) < lengths[:, None]
    outside = drafted & ((draft_tokens < 0) | (draft_tokens >= target_scores.shape[-1]))
    if bool(outside.any()):
        raise ValueError(f"draft_tokens must lie in the vocabulary 0…{target_scores.shape[-1] - 1}.")
    return lengths


def _lengths(draft_tokens: Tensor, draft_lengths: Tensor | None) -> Tensor:
    rows, places = draft_tokens.shape
    if draft_lengths is None:
        return torch.full((rows,), places, device=draft_tokens.device)
    lengths = torch.as_tensor(draft_lengths, device=draft_tokens.device)
    if lengths.shape != (rows,) or bool(((lengths < 0) | (lengths > places)).any()):
        raise ValueError(f"draft_lengths must be [{rows}] with values 0…{places}, got {lengths.tolist()}.")
    return lengths
