"""The exact law of a small model's next tokens, by writing out every text; and the decoding loop as a sampler.

    law = specnb.exact_law(model, input_ids, 2, do_sample=True, top_k=5)
    sampler = loop_sampler(model, input_ids, drafter, 2, top_k=5)
    specnb.audit(sampler, law)

The law is slow and obvious on purpose: no cache, no rounds, no batch tricks that the decoding loop could share. Every
context goes through the model whole, and transformers' own processors see that context and nothing else. Derived in
notebook 06.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.decoding import Run, start
from specnb.drafters.base import Drafter
from specnb.lossy import TypicalAcceptance
from specnb.preparation import Request, prepare


@torch.no_grad()
def exact_law(
    model: PreTrainedModel, input_ids: Tensor, m: int, *, tokenizer: Any = None, **generation_kwargs: Any
) -> Tensor:
    """The joint law of the next m tokens, P(x₁ … x_m) = Π p(x_i | prompt, x₁ … x_{i−1}).

    Args:
        model: a causal LM with a small vocabulary: V^m probabilities are computed, from V^(m−1) contexts.
        input_ids: LongTensor [1, n] or [n], one prompt without padding.
        m: tokens.
        tokenizer: as for `specnb.generate`.
        **generation_kwargs: as for `specnb.generate`: do_sample, temperature, top_k, top_p, min_p, typical_p,
            repetition_penalty, logits_processor, …; greedy search gives a law of zeros and a one.

    Returns:
        float64 [V]*m, summing to 1.

    Raises:
        ValueError: for m < 1, for several prompts, for more than 2^24 texts, or for a stop rule that could end the text
            before m tokens (pass eos_token_id=None).
    """
    prompt = _one_prompt(input_ids)
    options = {"max_new_tokens": m, **generation_kwargs}
    request = prepare(model, prompt, tokenizer, options)[0]
    _check_size(model, m, request)
    law = torch.ones((), dtype=torch.float64)
    for _ in range(m):
        law = law[..., None] * _next_laws(model, prompt, request, law)
    return law


def _next_laws(model: PreTrainedModel, prompt: list[int], request: Request, law: Tensor) -> Tensor:
    """p after every text so far: law [V]*d → [V]*d + [V]; texts of probability 0 are passed over."""
    possible = law.nonzero()  # [C, d], the texts themselves
    contexts = torch.cat([torch.tensor(prompt).expand(len(possible), -1), possible], dim=1).to(model.device)
    chunks = contexts.split(1024)
    laws = torch.cat([conditional_law(model, chunk, request) for chunk in chunks])
    following = torch.zeros(*law.shape, laws.shape[-1], dtype=torch.float64)
    following[tuple(possible.T)] = laws
    return following


def conditional_law(model: PreTrainedModel, contexts: Tensor, request: Request) -> Tensor:
    """The law of the one next token of each context [C, n], float64 [C, V], under a request's processors."""
    logits = model(input_ids=contexts, use_cache=False).logits[:, -1].float()
    # one context at a time, as if each were alone: some processors count the rows of what they are given
    scores = torch.cat([request.processors(c[None], s[None].clone()) for c, s in zip(contexts, logits)]).double().cpu()
    if request.config.do_sample:
        return scores.softmax(dim=-1)
    return torch.zeros_like(scores).scatter_(1, scores.argmax(dim=-1, keepdim=True), 1.0)


def _one_prompt(input_ids: Tensor) -> list[int]:
    rows = input_ids[None] if input_ids.ndim == 1 else input_ids
    if rows.ndim != 2 or len(rows) != 1:
        raise ValueError(f"input_ids must hold one prompt, [1, n], got {list(input_ids.shape)}: its law is one tensor.")
    return rows[0].tolist()


def _check_size(model: PreTrainedModel, m: int, request: Request) -> None:
    vocab = model.get_output_embeddings().weight.shape[0]
    if vocab**m > 2**24:
        raise ValueError(f"{vocab}^{m} texts are too many to write out; take fewer tokens or a smaller model.")
    if m > 1 and len(request.criteria):
        raise ValueError(
            "A stop rule could end the text before its m tokens, and then it is no text of m tokens: pass "
            "eos_token_id=None and no stop strings, here and to the sampler."
        )


def loop_sampler(
    model: PreTrainedModel,
    input_ids: Tensor,
    drafter: Drafter | None,
    m: int,
    *,
    spoil: Callable[[Run], None] | None = None,
    lossy: TypicalAcceptance | None = None,
    **generation_kwargs: Any,
) -> Callable[[int, int], Tensor]:
    """The whole decoding loop as a sampler for `specnb.audit`: n texts at once, as n rows of one batch.

    Args:
        model, input_ids: as for `exact_law`.
        drafter: as for `specnb.generate`.
        m: tokens of each text that are handed out.
        spoil: called with the run before its first round: where a planted bug of the whole run goes in.
        lossy: as for `specnb.generate`: then the audit should fail.
        **generation_kwargs: as for `specnb.generate`, and the same as for the law. ``do_sample`` is True by default,
            ``max_new_tokens`` is k + 1: the first round then drafts all its k tokens. No round more is played than m
            tokens of every text need.

    Returns:
        ``sampler(n, seed) -> LongTensor [n, m]``.
    """
    prompt = _one_prompt(input_ids)
    k = drafter.num_draft_tokens if drafter is not None else 0
    options = {"do_sample": True, "max_new_tokens": max(k + 1, m), **generation_kwargs}

    @torch.no_grad()
    def sampler(n: int, seed: int) -> Tensor:
        torch.manual_seed(seed)
        run = start(model, prepare(model, prompt, None, options) * n, drafter, None, None, False, None)
        run.lossy = lossy
        if spoil is not None:
            spoil(run)
        while min(run.rows.lengths) < len(prompt) + m:
            run.round()
        return torch.tensor([run.rows.new_tokens(b)[:m] for b in range(n)])

    return sampler
