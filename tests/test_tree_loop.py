"""Trees in the loop: the target's text whatever grows, the path kept in the cache, chains as trees of width 1."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specnb
from specnb import cache, decoding, trees
from specnb.drafters import Draft, Drafter
from specnb.oracle import exact_law, loop_sampler
from specnb.preparation import prepare
from tests.conftest import distilled
from tests.forest import Forest
from tests.test_losslessness import PROMPT, target
from tests.tiny import FAMILIES, VOCAB, perturbed, prompt, tiny_model

NEW = 24


def greedy(model, ids, drafter=None, **options):
    return specnb.generate(model, ids, drafter, do_sample=False, max_new_tokens=NEW, **options)


class Told(Drafter):
    """Proposes the same kind of tree each round, made by a function of the row's tokens: (tokens, parents)."""

    trees = True

    def __init__(self, grow, num_draft_tokens=32):
        super().__init__(num_draft_tokens)
        self.grow = grow

    def draft(self, rows, limits):
        return Draft.from_trees([self.grow(rows.tokens(b)) if n else ([], []) for b, n in enumerate(limits)])


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_texts_of_mixed_trees_in_a_batch(family):
    """Rows of other lengths beside each other, up to 32 nodes of depth 4; with a window of 8 in two families."""
    model = tiny_model(family)
    drafter = Forest(model, nodes=32)
    rows = [prompt(n, seed=n) for n in (1, 9, 20)]
    ids = torch.zeros(3, 20, dtype=torch.long)
    for b, row in enumerate(rows):
        ids[b, 20 - row.shape[1] :] = row
    mask = torch.tensor([[0] * (20 - row.shape[1]) + [1] * row.shape[1] for row in rows])
    out = greedy(model, ids, drafter, attention_mask=mask, return_trace=True)
    for b, row in enumerate(rows):
        assert torch.equal(out.sequences[b, 20:], greedy(model, row).sequences[0, row.shape[1] :])
    assert any(r.path not in (None, [*range(r.num_accepted)]) for r in out.trace), "no path was ever moved"
    assert float(out.stats.total().tokens_per_pass) > 1.1


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(-1, 30), min_size=0, max_size=31), min_size=1, max_size=3), st.integers(0, 99))
def test_greedy_texts_of_any_trees(llama, shapes, seed):
    """Right guesses at random nodes, wrong ones elsewhere: a parent's child is right half of the time."""
    shapes = [[parent if parent < i else -1 for i, parent in enumerate(row)] for row in shapes]
    ids = prompt(9, seed=seed)
    text = greedy(llama, ids).sequences[0].tolist()

    def grow(context):
        shape = shapes[len(context) % len(shapes)]
        depth, tokens = trees.depths(torch.tensor([shape], dtype=torch.long))[0].tolist(), []
        for i in range(len(shape)):
            place = len(context) + depth[i] - 1
            right = (i * 7 + seed + len(context)) % 2 and place < len(text)
            tokens.append(text[place] if right else (i * 11 + seed) % VOCAB)
        return tokens, shape

    out = greedy(llama, ids, Told(grow), return_trace=True)
    assert out.sequences[0].tolist() == text
    for r in out.trace:
        assert r.emitted == [r.drafted[i] for i in r.accepted] + ([] if r.next_token is None else [r.next_token])
        assert all(r.parents[child] == parent for parent, child in zip([-1, *r.accepted], r.accepted))


@pytest.mark.parametrize(
    "options", [{}, {"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2}, {"bad_words_ids": [[3]]}]
)
def test_processors_see_the_path_that_leads_to_a_node(llama, options):
    ids = prompt(11)
    expected = specnb.generate(llama, ids, do_sample=False, max_new_tokens=NEW, output_scores=True,
                               return_dict_in_generate=True, output_logits=True, **options)  # fmt: skip
    found = specnb.generate(llama, ids, Forest(llama), do_sample=False, max_new_tokens=NEW, output_scores=True,
                            return_dict_in_generate=True, output_logits=True, **options)  # fmt: skip
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.scores), torch.stack(expected.scores), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("options", [{"pass_width": 8}, {"compile": True}], ids=str)
def test_fixed_and_compiled_passes(family, options):
    model = tiny_model(family)
    ids = prompt(9, batch=2)
    drafter = Forest(model, nodes=7)
    assert torch.equal(greedy(model, ids, drafter, **options).sequences, greedy(model, ids).sequences)


@pytest.mark.parametrize("compile", [False, True])
def test_a_tree_that_is_a_chain_gives_the_chains_result(llama, compile):
    """In bfloat16, where another order of sums would show."""
    model = tiny_model("llama").to(torch.bfloat16)
    ids = prompt(12)

    def guess(context):
        return [context[-2], context[-1], (context[-1] + 1) % VOCAB, 4]

    chain = greedy(model, ids, specnb.Scripted(guess), compile=compile, pass_width=8, return_trace=True)
    tree = greedy(
        model, ids, Told(lambda c: (guess(c), [-1, 0, 1, 2]), 4), compile=compile, pass_width=8, return_trace=True
    )
    assert torch.equal(chain.sequences, tree.sequences)
    account = [[(r.drafted[: r.num_accepted], r.next_token, r.rejected) for r in out.trace] for out in (chain, tree)]
    assert account[0] == account[1]
    assert chain.stats.alpha == tree.stats.alpha


def test_the_cache_holds_the_accepted_path(llama):
    """After each round the cache scores the text as a fresh one does."""
    ids = prompt(10)
    request = prepare(llama, ids[0].tolist(), None, dict(max_new_tokens=NEW, do_sample=False))
    run = decoding.start(llama, request, Forest(llama, nodes=12), None, None, True, None)
    while run.rows.active:
        with torch.no_grad():
            run.round()
        text = run.rows.context(0)
        fresh = cache.RaggedCache(llama.config, 1, 64)
        cache.target_pass(llama, fresh, text[None, :-1])
        assert fresh.lengths.tolist() == run.cache.lengths.tolist()
        n = len(text) - 1
        for mine, theirs in zip(run.cache.layers, fresh.layers):
            torch.testing.assert_close(mine.keys[:, :, :n], theirs.keys[:, :, :n], atol=1e-4, rtol=1e-3)
            torch.testing.assert_close(mine.values[:, :, :n], theirs.values[:, :, :n], atol=1e-4, rtol=1e-3)


def test_planted_faults_are_caught(llama, monkeypatch):
    """A mask that lets siblings leak; a cache that keeps the first nodes instead of the path."""
    ids, text = prompt(9), greedy(llama, prompt(9)).sequences

    sight = cache.sight

    def leaking(parents):
        bits, depths = sight(parents)
        return [(1 << i + 1) - 1 for i in range(len(bits))], depths

    def first_ones(run, before, rounds):
        kept = [[] for _ in before]
        for r in rounds:
            kept[r.row] = range(len(r.emitted))
        run.cache.keep(torch.tensor(before), kept)

    assert torch.equal(greedy(llama, ids, Forest(llama, 12)).sequences, text)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "sight", leaking)
        assert not torch.equal(greedy(llama, ids, Forest(llama, 12)).sequences, text)
    with monkeypatch.context() as patch:
        patch.setattr(decoding.Run, "roll_back", first_ones)
        assert not torch.equal(greedy(llama, ids, Forest(llama, 12)).sequences, text)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (([1, 2], [-1, 1]), "Node 1 of row 0 cannot have parent 1"),
        (([1, 2], [1, -1]), "Node 0 of row 0 cannot have parent 1"),
        (([1, 2], [-1, -2]), "cannot have parent -2"),
        (([1, 2], [-1]), "differ in length"),
        (([1, 99], [-1, -1]), "proposed token 99"),
    ],
)
def test_a_malformed_tree_is_refused(llama, tree, message):
    with pytest.raises(ValueError, match=message):
        greedy(llama, prompt(9), Told(lambda context: tree))


def test_a_tree_of_too_many_nodes_is_refused(llama):
    with pytest.raises(ValueError, match="62 at most"):
        greedy(llama, prompt(9), Told(lambda context: ([1] * 63, [-1] * 63), 70))


class Listening(Forest):
    """Keeps what it is told of the target's hidden states."""

    needs_hidden = True

    def start(self, session):
        super().start(session)
        self.heard = []

    def look(self, hidden, rows):
        self.heard += [(b, self.session.rows.tokens(b), h) for b, h in zip(rows, hidden)]


@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {}), ("opt", {}), ("gemma3", {}), ("llama", {"pass_width": 8}), ("llama", {"compile": True})],
    ids=str,
)
def test_hidden_states_are_those_that_predicted_the_newest_token(family, options):
    model = tiny_model(family)
    drafter = Listening(model, nodes=5)
    greedy(model, prompt(9, batch=2), drafter, **options)
    assert len(drafter.heard) > 8
    head = model.get_output_embeddings()
    for _, text, hidden in drafter.heard:
        seen = []
        with head.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0])), torch.no_grad():
            model(torch.tensor([text[:-1]]))
        torch.testing.assert_close(hidden, seen[0][0, -1], atol=1e-3, rtol=1e-3)
        assert int(head(hidden).argmax()) == text[-1]
    assert not head._forward_pre_hooks


# --- drafters that grow trees ---

GROWN = {
    "lookup": lambda model: specnb.PromptLookup(10, branches=3),
    "lookup, longest": lambda model: specnb.PromptLookup(8, branches=2, policy="longest"),
    "draft model": lambda model: specnb.DraftModel(perturbed(model), 3, tree_nodes=9),
    "distilled": lambda model: specnb.DraftModel(distilled(model).model, 2, tree_nodes=5),
}


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in GROWN), ("distilled", {"compile": True, "pass_width": 8})], ids=str
)
def test_grown_trees_write_the_targets_text(name, options, llama):
    ids = torch.tensor([[1, 2, 3, 4, 1, 2, 5, 6, 1, 2, 7, 1, 2]])
    out = greedy(llama, ids, GROWN[name](llama), return_trace=True, **options)
    assert torch.equal(out.sequences, greedy(llama, ids).sequences)
    assert any(r.parents not in (None, [*range(-1, len(r.drafted) - 1)]) for r in out.trace), "only chains"
    batcher = specnb.Batcher(llama, GROWN[name](llama), max_batch=2, max_new_tokens=NEW, do_sample=False, **options)
    jobs = [batcher.submit(prompt(n, seed=n)) for n in (9, 3, 12)]
    batcher.run()
    for n, job in zip((9, 3, 12), jobs):
        assert job.tokens == greedy(llama, prompt(n, seed=n)).sequences[0, n:].tolist()


@pytest.mark.statistical
@pytest.mark.parametrize("name", GROWN)
def test_grown_trees_follow_the_targets_law(name):
    """False alarms 1e-6 each; power 0.99 against a law with w² = 0.1. Under typical acceptance the same audit fails."""
    options = dict(do_sample=True, top_k=0, temperature=0.8)
    law = exact_law(target(), PROMPT, 2, **options)
    result = specnb.audit(loop_sampler(target(), PROMPT, GROWN[name](target()), 2, **options), law, alternative=0.1)
    assert result.passed, result
    assert result.power >= 0.99


@pytest.mark.statistical
@pytest.mark.parametrize(
    "drafter", [specnb.PromptLookup(4), specnb.PromptLookup(10, branches=3)], ids=["chain", "tree"]
)
def test_typical_acceptance_fails_the_audit(drafter):
    """Missed with probability 0.01 if its law is at least w² = 0.1 away."""
    options = dict(do_sample=True, top_k=0)
    law = exact_law(target(), PROMPT, 2, **options)
    lossy = loop_sampler(target(), PROMPT, drafter, 2, lossy=specnb.TypicalAcceptance(), **options)
    assert not specnb.audit(lossy, law, alternative=0.1).passed
    none = loop_sampler(target(), PROMPT, drafter, 2, lossy=specnb.TypicalAcceptance(epsilon=1.0, delta=1e9), **options)
    assert specnb.audit(none, law, alternative=0.1).passed, "nothing is likelier than 1: nothing is accepted"


def test_typical_acceptance_by_hand():
    """A tree of two branches: the longest path of likely nodes stands; the token after it is drawn from p."""
    p = torch.tensor([[0.5, 0.4, 0.1], [0.0, 0.0, 1.0], [0.9, 0.05, 0.05], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])[None]
    tokens, parents = torch.tensor([[0, 1, 0, 2]]), torch.tensor([[-1, -1, 1, 0]])
    rule = specnb.TypicalAcceptance(epsilon=0.3, delta=0.3)
    entropy = -sum(x * math.log(x) for x in (0.5, 0.4, 0.1))
    assert float(rule.threshold(p)[0, 0]) == pytest.approx(min(0.3, 0.3 * math.exp(-entropy)))
    for count, path, following in ((4, [1, 2], 1), (3, [1, 2], 1), (1, [0], 2), (0, [], None)):
        verdict = rule.judge(tokens, parents, p, torch.tensor([count]), torch.Generator().manual_seed(0))
        assert verdict.path[0].tolist() == path + [-1] * (4 - len(path))
        assert int(verdict.num_accepted) == len(path)
        assert following in (None, int(verdict.next_token))


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "epsilon", lambda model: specnb.TypicalAcceptance(epsilon=2)),
        (ValueError, "do_sample=True", lambda model: greedy(model, prompt(5), lossy=specnb.TypicalAcceptance())),
        (TypeError, "TypicalAcceptance", lambda model: greedy(model, prompt(5), lossy=True)),
        (ValueError, "drafts trees", lambda model: specnb.Adaptive(specnb.PromptLookup(branches=2))),
        (ValueError, "drafts trees", lambda model: specnb.Cascade(specnb.PromptLookup(), Forest(model))),
        (ValueError, "branches", lambda model: specnb.PromptLookup(branches=0)),
    ],
)
def test_what_is_refused(llama, error, message, call):
    with pytest.raises(error, match=message):
        call(llama)
