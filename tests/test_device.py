"""No GPU is needed to see that a round waits for it once: the loop runs with tensors that count as being on one."""

from __future__ import annotations

import pytest
import torch

import specnb
from specnb.decoding import Run
from tests.card import CARD, Card, OnCard, marked, unmarked
from tests.tiny import perturbed, plain, prompt, tiny_model


@pytest.fixture
def rounds(monkeypatch):
    """Every round plays on a card; the list of them."""
    played, original = [], Run.round
    model_class = type(tiny_model("llama"))
    forward, device = model_class.forward, model_class.device

    def round_on_card(run):
        with Card() as card:
            played.append(card)
            original(run)

    def forward_on_card(self, **arguments):
        if not played or not isinstance(arguments["input_ids"], OnCard):
            return forward(self, **arguments)
        played[-1].in_model = True
        try:
            out = forward(self, **{name: unmarked(value) for name, value in arguments.items()})
        finally:
            played[-1].in_model = False
        out.logits = marked(out.logits)
        return out

    def device_now(self):
        modes = torch.overrides._get_current_function_mode_stack()
        return CARD if any(isinstance(mode, Card) and not mode.in_model for mode in modes) else device.fget(self)

    monkeypatch.setattr(Run, "round", round_on_card)
    monkeypatch.setattr(model_class, "forward", forward_on_card)
    monkeypatch.setattr(model_class, "device", property(device_now))
    return played


DRAFTERS = {
    "none": lambda model: None,
    "lookup": lambda model: specnb.PromptLookup(),
    "draft model": lambda model: specnb.DraftModel(perturbed(model), 3),
    "trees": lambda model: specnb.PromptLookup(branches=3),
    "adaptive": lambda model: specnb.Adaptive(specnb.PromptLookup()),
}
RULES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20, "seed": 3},
    "penalty": {"repetition_penalty": 1.3},
    "one width": {"pass_width": 12},
}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_round_copies_its_verdict_and_waits_for_nothing_else(name, rules, rounds, llama):
    ids = prompt(20, batch=2)
    out = specnb.generate(llama, ids, DRAFTERS[name](llama), max_new_tokens=8, **RULES[rules])
    assert [card.copies for card in rounds] == [1] * len(rounds)
    assert [card.waits for card in rounds] == [[]] * len(rounds)
    assert [card.mixed for card in rounds] == [[]] * len(rounds)
    if rules == "greedy" and name != "draft model":
        assert out.sequences.tolist() == [plain(llama, row[None], max_new_tokens=8)[0].tolist() for row in ids]


def test_so_does_a_round_of_a_batcher(rounds, llama):
    batcher = specnb.Batcher(llama, specnb.PromptLookup(), max_batch=2, max_new_tokens=9)
    jobs = [batcher.submit(prompt(n, seed=n), do_sample=n % 2 == 0, seed=n) for n in (5, 30, 12)]
    batcher.run()
    assert all(len(job.tokens) == 9 for job in jobs)
    assert {(card.copies, *card.waits, *card.mixed) for card in rounds} == {(1,)}


@pytest.mark.parametrize(
    ("look", "seen"),
    [
        (lambda x: int(x.argmax()), "__int__"),
        (lambda x: bool((x > 0).any()), "__bool__"),
        (lambda x: x[x > 0], "__getitem__"),
        (lambda x: x.tolist(), "tolist"),
        (lambda x: torch.zeros(4).__setitem__(slice(0, 4), x[0]), "__setitem__"),
    ],
)
def test_whoever_looks_is_seen(look, seen):
    with Card() as card:
        look(torch.rand(3, 4, device=CARD))
    assert (card.waits, card.copies) == ([seen], 0)


def test_devices_that_would_not_meet_are_seen():
    with Card() as card:
        x = torch.rand(3, device=CARD)
        (x + 1) * x.to(CARD)
        assert (x.device, x.cpu().device.type, card.mixed) == (CARD, "cpu", [])
        x + torch.rand(3)
    assert (card.mixed, card.copies) == (["add"], 1)
