"""What is not lossless: rules that accept more guesses than the target's law allows, for whoever asks by name.

    specnb.generate(model, ids, drafter, do_sample=True, lossy=specnb.TypicalAcceptance())

Such a text has another law than the target's. How far it is from it is measured in notebook 11.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specnb import trees, verification
from specnb.verification import Generators, Verdict


@dataclass(frozen=True)
class TypicalAcceptance:
    """Accept every guess that the target finds likely enough, without regard to how often it is guessed. Lossy.

    Guess x stands where p(x) > min(ε, δ · exp(−H(p))), H the entropy of p in nats, and its ancestors stand. Of a tree
    the longest path is taken, of equally long ones the first; the token after it is drawn from p.

    Args:
        epsilon: ε in 0…1, the probability that is enough in any case.
        delta: δ ≥ 0, how much less than e^−H is enough where the target is undecided.

    Raises:
        ValueError: for numbers outside their range.

    Source: Cai et al. 2024 (Medusa, arXiv 2401.10774), where δ = √ε. Judged in notebook 11.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon <= 1 or not 0 <= self.delta < float("inf"):
            raise ValueError(
                f"Typical acceptance wants 0 ≤ epsilon ≤ 1 and delta ≥ 0, got epsilon={self.epsilon!r}, "
                f"delta={self.delta!r}."
            )

    def threshold(self, p: Tensor) -> Tensor:
        """The probability above which a guess stands, [...] for p [..., V]."""
        entropy = torch.special.entr(p).sum(dim=-1)
        return (self.delta * (-entropy).exp()).clamp(max=self.epsilon)

    def judge(
        self,
        tokens: Tensor,
        parents: Tensor | None,
        target_probs: Tensor,
        lengths: Tensor,
        generator: Generators = None,
    ) -> Verdict:
        """The verdict over trees, or over chains (parents None): tokens [B, N], p [B, N + 1, V], lengths [B]."""
        chain = parents is None
        parents = trees.chain_parents(*tokens.shape) if parents is None else parents
        parents, p = parents.to(tokens.device), target_probs.float()
        deepest = self._deepest(tokens, parents, p, lengths)  # [B]: 0 the root, i + 1 node i
        next_token = verification.draw(verification.drawable(verification.at_place(p, deepest)), generator)
        invalid = verification.BAD_TARGET * (p.isnan().any(-1) & verification._in_use(p, lengths)).long()
        path = self._path(parents, deepest)
        return Verdict((path >= 0).sum(dim=1), next_token, invalid, None if chain else path)

    def _deepest(self, tokens: Tensor, parents: Tensor, p: Tensor, lengths: Tensor) -> Tensor:
        enough = self.threshold(p)  # [B, N + 1]
        used = verification._in_use(p, lengths)[:, 1:]
        depth = torch.zeros_like(enough)  # of places that stand; −1 for the others
        for i in range(tokens.shape[1]):
            above = parents[:, i] + 1
            x = tokens[:, i].where(used[:, i], 0)
            likely = verification.at_place(p, above).gather(1, x[:, None]).squeeze(1) > verification.at_place(
                enough, above
            )
            before = verification.at_place(depth, above)
            depth[:, i + 1] = torch.where(likely & used[:, i] & (before >= 0), before + 1, -1)
        return depth.argmax(dim=1)

    def _path(self, parents: Tensor, place: Tensor) -> Tensor:
        """The nodes that lead to each row's place, [B, N], then −1."""
        rows, nodes = parents.shape
        if nodes == 0:
            return parents
        taken = trees.ancestors(parents)[torch.arange(rows, device=place.device), (place - 1).clamp(min=0)]
        return trees.numbers_of(taken & (place > 0)[:, None])
