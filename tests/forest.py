"""A drafter of random trees, for tests: every row another shape each round, siblings drawn without replacement."""

from __future__ import annotations

import functools
import random

import torch

import specnb
from specnb import verification
from tests.tiny import perturbed


@functools.cache
def _shape(number, nodes, most):
    order, parents, depths = random.Random(number), [], []
    wide = order.random()
    for i in range(nodes):
        fits = [j for j in range(i) if depths[j] < most]
        parent = order.choice([-1, *fits]) if not fits or order.random() < wide else fits[-1]
        parents.append(parent)
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return parents, order.randint(nodes // 2, nodes)


class Forest(specnb.Drafter):
    """Guesses by what a noisy copy of the target says after the parent's token alone; where nobody samples, now and
    then right ones.

    Args:
        model: the target.
        nodes: of a tree, at most.
        depth: of a tree, at most.
    """

    trees = True

    def __init__(self, model, nodes=6, depth=4):
        super().__init__(nodes)
        self.noisy, self.depth = perturbed(model), depth

    def start(self, session):
        self.session, self.known = session, {}
        with torch.no_grad():
            ids = torch.arange(session.vocab_size)[:, None].to(session.model.device)
            self.laws = self.noisy.to(session.model.device)(ids).logits[:, -1].softmax(-1).float()  # [V, V]

    def shape(self, context):
        """Parents of a tree that depends on the text alone: chains and bushes, not too deep, some cut short."""
        return _shape((context[-1] * 7 + len(context)) % 64, self.num_draft_tokens, self.depth)

    def draft(self, rows, limits):
        shapes = [self.shape(rows.view(b)) for b in range(len(rows))]
        parents = torch.tensor([parents for parents, _ in shapes])
        lengths = torch.tensor([min(limit, length) for limit, (_, length) in zip(limits, shapes)])
        newest = torch.tensor([rows.view(b)[-1] for b in range(len(rows))])
        tokens, left, laws = [], [self.laws[newest]], []
        right = [] if self.samples else [self.continuation(b) if n else [0] * 9 for b, n in enumerate(limits)]
        depths = torch.zeros(len(rows), 1, dtype=torch.long)  # of places; 99 off the right path
        for i in range(parents.shape[1]):
            places = torch.stack(left, dim=1)  # [B, i + 1, V], what is left to draw after the root and each node
            here = parents[:, i] + 1
            q = verification.at_place(places, here)
            q = q / q.sum(-1, keepdim=True)
            x = self.chosen(q, (i < lengths).tolist())
            if right:
                depth = verification.at_place(depths, here)
                good = torch.tensor([line[min(d, 8)] for line, d in zip(right, depth.tolist())])
                x = torch.where((depth < 9) & ((newest * 5 + i * 3) % 10 < 7), good, x)
                depths = torch.cat([depths, torch.where(x == good, depth + 1, 99)[:, None]], dim=1)
            for place in range(i + 1):
                left[place] = torch.where(
                    (here == place)[:, None], left[place].scatter(1, x[:, None], 0.0), left[place]
                )
            tokens.append(x)
            laws.append(q)
            left.append(self.laws[x])
        probs = torch.stack(laws, dim=1) if self.samples else None
        return specnb.drafters.Draft(torch.stack(tokens, dim=1), lengths, probs, parents=parents)

    def continuation(self, b):
        """Nine tokens that the target would write."""
        tokens = self.session.rows.tokens(b)
        known = self.known.get(b, [])
        if known[: len(tokens)] != tokens or len(known) < len(tokens) + 9:
            ids = torch.tensor([tokens]).to(self.session.model.device)
            known = specnb.generate(self.session.model, ids, max_new_tokens=40, do_sample=False).sequences[0].tolist()
            self.known[b] = known = known + [0] * 9
        return known[len(tokens) :][:9]

    @property
    def samples(self):
        sampling = self.session.sampling
        return self.session.do_sample if sampling is None else any(sampling)

    def chosen(self, q, wanted):
        return verification.draw(q, self.session.generators, wanted) if self.samples else q.argmax(-1)
