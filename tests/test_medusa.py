"""Medusa: heads look at the right place and learn the right token, files hold them, and drafts are as described."""

from __future__ import annotations

import functools
import hashlib
import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

import specnb
from specnb import medusa_training, recipe, teaching, training, trees
from specnb.drafters import medusa
from specnb.drafters.hints import Hints
from specnb.medusa_training import BEST, Places
from specnb.oracle import exact_law, loop_sampler
from specnb.resources import data_path
from tests.tiny import FAMILIES, VOCAB, fresh_logits, plain, prompt, tiny_model

NEW = 20


@functools.cache
def lessons(family: str = "llama", count: int = 24) -> list[teaching.Lesson]:
    prompts = [prompt(8, seed=i)[0].tolist() for i in range(count)]
    return list(teaching.lessons(tiny_model(family), prompts, top=8, max_new_tokens=NEW, progress=False))


def heads_for(**changes) -> medusa_training.TrainedHeads:
    """Heads that know some answers by heart: so small a model says nothing that could be learnt from others."""
    options = dict(lessons=lessons(), held_out=lessons(), heads=3, head_rows=40, epochs=30, learning_rate=3e-2,
                   batch_places=128, scores=2, progress=False)  # fmt: skip
    return specnb.train_medusa(tiny_model(), **{**options, **changes})


@functools.cache
def trained(hinted: bool = False) -> medusa_training.TrainedHeads:
    return heads_for(hinted=hinted)


def random_heads(size: int = 32, count: int = 3, hinted: bool = True, ids=None, seed: int = 0) -> specnb.MedusaHeads:
    torch.manual_seed(seed)
    heads = specnb.MedusaHeads(size, count, ids, hinted=hinted).requires_grad_(False)
    for parameter in heads.parameters():
        parameter.normal_(std=0.3)
    return heads


def same_weights(a: specnb.MedusaHeads, b: specnb.MedusaHeads) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


both = pytest.mark.parametrize("hinted", [False, True], ids=["plain", "hinted"])


# --- what heads learn from ---


@pytest.mark.parametrize("family", FAMILIES)
def test_a_place_holds_the_state_that_predicted_its_token_and_the_tokens_after_it(family):
    """The oracle: the output head makes of the state what the model says at that place, seen from scratch."""
    target, some = tiny_model(family), lessons(family, 5)
    places = Places.of(target, some, heads=3, hinted=True, progress=False)
    labels, j = places.labels(torch.arange(len(places.newest))), 0
    for lesson in some:
        logits, tokens = fresh_logits(target, lesson.tokens[None])[0], lesson.tokens.tolist()
        for place in range(lesson.answer, len(tokens)):
            said = target.get_output_embeddings()(places.hidden[j])
            torch.testing.assert_close(said, logits[place - 1], atol=1e-4, rtol=1e-4)
            assert int(places.newest[j]) == tokens[place]
            expected = (tokens + [-1] * 3)[place + 1 : place + 4]
            assert labels[j].tolist() == expected
            j += 1
    assert j == len(labels) == sum(places.sizes)


def slow_hints(tokens: list[int], count: int) -> list[tuple[int, int]]:
    """Token after token, what followed the longest suffix that has occurred before."""
    tokens, found = list(tokens), []
    for _ in range(count):
        text = Hints()
        text.extend(tokens)
        found.append(text._hint(text.tokens[-4:], {}))
        tokens += [found[-1][0]] if found[-1][1] else []
    return found


def test_hints_go_on_as_the_text_did():
    rng = random.Random(0)
    for n in range(1, 40):
        tokens, text = [rng.randrange(4) for _ in range(n)], Hints()
        text.extend(tokens)
        assert medusa.hints_ahead(text, 3) == slow_hints(tokens, 3)
        assert text.tokens == tokens
    lesson = lessons()[0]
    found = medusa_training.hints_of(lesson, 2).tolist()
    for j, hints in enumerate(found):
        assert hints == [list(hint) for hint in slow_hints(lesson.tokens[: lesson.answer + j + 1].tolist(), 2)]


def shifted(sizes, heads, original=medusa_training.places_ahead):
    """The classic mistake: each head learns the token after its own."""
    return original(sizes, heads + 1)[:, 1:]


def promised_and_kept(found: medusa_training.TrainedHeads, shape=None) -> tuple[float, float]:
    """Tokens per pass that training promises on some answers, and what decoding really reaches on them."""
    drafter, some = found.drafter(shape), found.held_out[:5]
    places = Places.of(found.target, some, len(found.heads), found.heads.hinted, progress=False)
    ranks, chances = medusa_training.judged(medusa.Attached(found.heads, found.target), places)
    passes = 0
    for lesson in some:
        out = specnb.generate(found.target, lesson.tokens[None, : lesson.answer], drafter, max_new_tokens=NEW)
        assert torch.equal(out.sequences[0], lesson.tokens)
        passes += int(out.stats.target_passes)
    promised = medusa_training.tree_tokens_per_pass(ranks, places.sizes, shape or drafter.shape, chances)
    return promised, NEW * len(some) / passes


@pytest.mark.parametrize("shape", [None, 6], ids=["one tree", "grown anew"])
@both
def test_what_training_promises_is_what_decoding_does(hinted, shape):
    promised, kept = promised_and_kept(trained(hinted), shape)
    assert kept > 1.5
    assert promised == pytest.approx(kept)


def test_heads_trained_one_place_off_are_noticed(monkeypatch):
    monkeypatch.setattr(medusa_training, "places_ahead", shifted)
    promised, kept = promised_and_kept(heads_for())
    assert promised > 1.5
    assert kept < 0.8 * promised


# --- training ---


@both
def test_heads_learn(hinted):
    first, *_, last = trained(hinted).history
    assert first.tokens == 0 and last.tokens > 20 * len(lessons()) * NEW * 0.9
    for before, after in zip(first.accuracy, last.accuracy):
        assert after[0] > before[0] + 0.1
        assert after == sorted(after)
    assert last.loss < trained(hinted).history[1].loss


def test_heads_begin_as_the_target():
    """Untrained, each says what the target said at its place, whatever it is told."""
    heads, hidden = specnb.MedusaHeads(32, 2, hinted=True), torch.randn(5, 32)
    out = heads(hidden, torch.randn(5, 32), torch.randn(5, 2, 32), torch.randint(0, 5, (5, 2)))
    torch.testing.assert_close(out, hidden[:, None].expand(5, 2, 32))
    torch.testing.assert_close(specnb.MedusaHeads(32, 2)(hidden), hidden[:, None].expand(5, 2, 32))


def test_a_plain_head_is_the_published_block():
    heads, hidden = random_heads(hinted=False), torch.randn(4, 32)
    for i, block in enumerate(heads.blocks):
        x = hidden @ block.linear.weight.T + block.linear.bias
        torch.testing.assert_close(heads(hidden)[:, i], hidden + x / (1 + (-x).exp()))


class Stopped(Exception):
    pass


@pytest.mark.parametrize("at", [1, 4, 7], ids="step {}".format)
def test_a_run_that_was_broken_off_goes_on_bit_for_bit(tmp_path, at, monkeypatch):
    options = dict(epochs=3, save_every=3, hinted=True)
    whole, original = heads_for(**options), medusa_training.MedusaTrainer.one_step

    def breaking(self):
        if self.step == at:
            raise Stopped
        original(self)

    monkeypatch.setattr(medusa_training.MedusaTrainer, "one_step", breaking)
    with pytest.raises(Stopped):
        heads_for(folder=tmp_path, **options)
    monkeypatch.setattr(medusa_training.MedusaTrainer, "one_step", original)
    assert any(tmp_path.iterdir()) == (at >= 3)
    resumed = heads_for(folder=tmp_path, **options)
    assert same_weights(whole.heads, resumed.heads)
    assert whole.history == resumed.history and whole.chances == resumed.chances


def test_a_state_of_other_settings_is_refused(tmp_path):
    heads_for(folder=tmp_path, epochs=1)
    with pytest.raises(ValueError, match=r"hinted = False, now it is True.*another folder"):
        heads_for(folder=tmp_path, epochs=1, hinted=True)


def test_the_seed_decides():
    assert same_weights(heads_for(epochs=1).heads, heads_for(epochs=1).heads)
    assert not same_weights(heads_for(epochs=1).heads, heads_for(epochs=1, seed=1).heads)


def test_every_place_with_a_token_after_it_is_learnt_from_once_an_epoch():
    found = trained()
    places = Places.of(found.target, lessons(), 3, False, progress=False)
    settings = dict(epochs=2, batch_places=24, learning_rate=1.0, seed=0)
    trainer = medusa_training.MedusaTrainer(
        medusa.Attached(specnb.MedusaHeads(32, 3), found.target), places, places, settings
    )
    orders = []
    for epoch in range(2):
        order = []
        for step in range(trainer.each):
            trainer.step = epoch * trainer.each + step
            order += trainer.next_batch().tolist()
        assert sorted(order) == [j for j in range(len(places.newest)) if (j + 1) % NEW]
        orders.append(order)
    assert orders[0] != orders[1]


def test_the_target_is_not_touched():
    target = tiny_model()
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    found = specnb.train_medusa(target, lessons=lessons(), held_out=4, epochs=1, hinted=True, progress=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    assert all(p.grad is None for p in target.parameters()) and not target.training
    assert not target.get_output_embeddings()._forward_pre_hooks
    assert all(not p.requires_grad for p in found.heads.parameters())


def test_prompts_are_answered_first(llama):
    assert training.train_medusa is specnb.train_medusa
    scores = []
    ids = [prompt(8, seed=i)[0].tolist() for i in range(8)]
    found = specnb.train_medusa(
        llama, prompts=ids, held_out=3, epochs=1, max_new_tokens=6, top=4, callback=scores.append, progress=False
    )
    assert scores == found.history and len(found.heads) == 3 and not found.heads.hinted
    assert [x.tokens[:8].tolist() for x in found.held_out] == ids[-3:]
    assert found.settings["lessons"] == 5 and found.settings["tokens"] == 30


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"prompts": [[1, 2]]}, ValueError, "either prompts"),
    ({"lessons": None, "prompts": ["a text"]}, TypeError, "need the target's tokenizer"),
    ({"max_new_tokens": 5}, TypeError, "max_new_tokens: the lessons are answered already"),
    ({"held_out": 24}, ValueError, "held_out must leave some of the 24 lessons"),
    ({"heads": 0}, ValueError, "at least one head, got 0"),
])  # fmt: skip
def test_bad_training_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        heads_for(**changes)


# --- the tree ---


def random_ranks(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.randint(0, BEST + 1, (200, 3), generator=generator) // torch.randint(1, 9, (200, 3))
    ranks[-1, 0] = ranks[-2:, 1] = ranks[-3:, 2] = -1
    return ranks


def test_the_most_frequent_paths_are_a_tree_of_every_size():
    ranks = random_ranks()
    chances = medusa_training.path_chances(ranks)
    for n in range(1, len(chances) + 1):
        trees.shape_parents([path for path, _ in chances[:n]])  # raises for a hole
    for path, chance in chances:
        right = [tuple(row[: len(path)]) == path for row in ranks.tolist()]
        assert chance == pytest.approx(sum(right) / 199)
    assert [chance for _, chance in chances] == sorted((chance for _, chance in chances), reverse=True)


def slow_rounds(rows: list[list[int]], shape: list[tuple[int, ...]]) -> int:
    """One text, written token by token."""
    written, passes = 1, 1
    while written < len(rows):
        row, depth = rows[written - 1], 0
        while depth < len(row) and tuple(row[: depth + 1]) in shape:
            depth += 1
        written, passes = written + depth + 1, passes + 1
    return passes


def test_tokens_per_pass_are_counted_round_by_round():
    ranks = random_ranks()
    shape = [path for path, _ in medusa_training.path_chances(ranks, 12)]
    texts = ranks[:-3].split([60, 60, 77])
    texts = [torch.cat([text[:-2], replace_end(text[-2], 1), replace_end(text[-1], 0)]) for text in texts]
    passes = sum(slow_rounds(text.tolist(), shape) for text in texts)
    found = medusa_training.tree_tokens_per_pass(torch.cat(texts), [60, 60, 77], shape)
    assert found == pytest.approx(197 / passes)


def replace_end(row: torch.Tensor, known: int) -> torch.Tensor:
    """A row near the end of a text: only so many heads have a token to guess."""
    return torch.where(torch.arange(3) < known, row, -1)[None]


@pytest.mark.parametrize("slope", [0.0, 0.02, 0.2, 5.0])
def test_the_chosen_tree_is_the_best_of_all_sizes(slope):
    chances = medusa_training.path_chances(random_ranks())
    found = medusa.medusa_shape(chances, lambda T: 1 + slope * T, max_nodes=40, drafting=0.1)
    worth = {
        n: (1 + sum(chance for _, chance in chances[:n])) / (1 + slope * (n + 1) + (0.1 if n else 0)) for n in range(41)
    }
    assert worth[len(found)] == max(worth.values())
    assert found == [path for path, _ in chances[: len(found)]]
    assert (found == []) == (slope == 5.0)


def test_heads_that_were_never_measured_have_no_best_tree():
    with pytest.raises(ValueError, match="have not been measured"):
        specnb.medusa_shape(specnb.Medusa(random_heads()), lambda T: 1.0)


@pytest.mark.parametrize(("shape", "message"), [
    ([(0,), (1, 0)], r"\(1, 0\), has no parent"), ([(0,), (0,)], "there twice"), ([()], "empty"),
    ([(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)], "4 guesses deep, and there are 3 heads"),
    ([(-1,)], "below 0"), (0, "at least 1, got 0"), (True, "at least 1, got True"),
])  # fmt: skip
def test_malformed_trees_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        specnb.Medusa(random_heads(), shape)


def test_a_tree_wider_than_what_heads_can_guess_is_refused(llama):
    drafter = specnb.Medusa(random_heads(hinted=False, ids=torch.arange(4)), [(0,), (4,)])
    with pytest.raises(ValueError, match="the 5 best tokens of a head that can guess 4"):
        specnb.generate(llama, prompt(), drafter, max_new_tokens=4)


# --- drafts ---

BRANCHED = [(0,), (1,), (0, 0), (2,), (0, 1), (1, 0), (0, 0, 0)]


def rounds_of(out) -> list:
    return [(r.row, r.drafted, r.emitted) for r in out.trace]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_the_targets_own(family):
    target = tiny_model(family)
    drafter = specnb.Medusa(random_heads(), BRANCHED)
    out = specnb.generate(target, prompt(), drafter, max_new_tokens=NEW, return_trace=True)
    assert torch.equal(out.sequences, plain(target, prompt(), max_new_tokens=NEW))
    assert [len(r.drafted) for r in out.trace][:3] == [0, 7, 7]


@both
def test_guesses_are_the_heads_favourites(hinted, llama):
    """The oracle: from scratch, at every round, the heads' logits over all tokens, and the tree written out."""
    heads = random_heads(hinted=hinted, ids=torch.arange(0, VOCAB, 2))
    out = specnb.generate(llama, prompt(), specnb.Medusa(heads, BRANCHED), max_new_tokens=NEW, return_trace=True)
    tokens, checked = prompt()[0].tolist(), 0
    rows = llama.get_output_embeddings().weight
    words = rows / rows.pow(2).mean(-1, keepdim=True).sqrt()
    for r in out.trace:
        if r.drafted:
            hidden = llama.model(torch.tensor([tokens[:-1]])).last_hidden_state[0, -1:]
            hints = torch.tensor(slow_hints(tokens, 3)) if hinted else torch.zeros(3, 2, dtype=torch.long)
            vectors = words[hints[:, 0]] * (hints[:, 1:] > 0)
            states = heads(hidden, words[tokens[-1]][None], vectors[None], hints[None, :, 1])[0]
            logits = states @ rows.T
            known = torch.arange(VOCAB) % 2 == 0
            for i in range(3):
                allowed = known | ((torch.arange(VOCAB) == hints[i, 0]) & (hints[i, 1] > 0))
                logits[i, ~allowed] = float("-inf")
            best = logits.topk(3).indices.tolist()
            assert list(r.drafted) == [best[len(path) - 1][path[-1]] for path in BRANCHED[: len(r.drafted)]]
            checked += 1
        tokens += r.emitted
    assert checked > 5


@pytest.mark.slow
@pytest.mark.parametrize("ids", [None, torch.arange(5, 45)], ids=["all tokens", "some"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@both
def test_where_passes_are_compiled_so_are_the_heads(hinted, dtype, ids):
    """The same logits for one text; planted: a compiler that fails."""
    model = tiny_model().to(dtype)
    drafter = specnb.Medusa(random_heads(hinted=hinted, ids=ids), [(0,), (1,), (0, 0)])
    options = dict(compile=True, pass_width=4, max_new_tokens=NEW)
    out = specnb.generate(model, prompt(), drafter, **options)
    assert drafter._graph is not None and int(out.stats.drafted) > 0
    hints = torch.tensor([[[50, 2], [7, 1], [0, 0]]]) if hinted else None
    given = [torch.randn(1, 32).to(dtype), torch.tensor([9])]
    found, expected = drafter._logits(*given, hints), drafter._attached(*given, hints)
    torch.testing.assert_close(found, expected, atol=0.05 if dtype == torch.bfloat16 else 1e-4, rtol=0.05)

    drafter._known, other = [], specnb.generate(model, prompt(), **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(medusa.frames, "compiled", None)
        again = specnb.generate(model, prompt(), drafter, **options)
    assert drafter._graph is None and int(again.stats.drafted) > 0
    assert out.sequences.tolist() == again.sequences.tolist() == other.sequences.tolist()


def test_a_tree_that_grows_is_the_likeliest_of_its_size(llama):
    """The oracle: all paths and their chances, written out."""
    heads = random_heads(hinted=False)
    drafter = specnb.Medusa(heads, 9)
    out = specnb.generate(llama, prompt(), drafter, max_new_tokens=NEW, return_trace=True)
    assert torch.equal(out.sequences, plain(llama, prompt(), max_new_tokens=NEW))
    tokens, sizes = prompt()[0].tolist(), []
    for r in out.trace:
        if r.drafted:
            hidden = llama.model(torch.tensor([tokens[:-1]])).last_hidden_state[0, -1:]
            p = (heads(hidden)[0] @ llama.get_output_embeddings().weight.T).softmax(-1).detach()
            a, b, c = (row.topk(9) for row in p)
            joint = [
                a.values,
                torch.outer(a.values, b.values),
                a.values[:, None, None] * torch.outer(b.values, c.values),
            ]
            likeliest = torch.cat([part.flatten() for part in joint]).topk(9).values[: len(r.drafted)].sum()
            path, chances = [], []
            for node, token in enumerate(r.drafted):
                above = r.parents[node]
                depth, chance = (0, 1.0) if above < 0 else path[above]
                path.append((depth + 1, chance * float(p[depth, token])))
                chances.append(path[-1][1])
            assert sum(chances) == pytest.approx(float(likeliest), rel=1e-4)
            sizes.append(len(chances))
        tokens += r.emitted
    assert sizes.count(9) > 5


@pytest.mark.parametrize("shape", [BRANCHED, 6], ids=["one tree", "grown anew"])
@both
def test_drafts_are_the_same_each_time_in_a_batch_and_alone(hinted, shape, llama):
    drafter = specnb.Medusa(random_heads(hinted=hinted), shape)
    ids = torch.cat([prompt(seed=i) for i in range(3)])
    options = dict(max_new_tokens=NEW, return_trace=True)
    together = specnb.generate(llama, ids, drafter, **options)
    assert rounds_of(together) == rounds_of(specnb.generate(llama, ids, drafter, **options))
    for b in range(3):
        alone = specnb.generate(llama, ids[b : b + 1], drafter, **options)
        assert [(0, *r[1:]) for r in rounds_of(together) if r[0] == b] == rounds_of(alone)


def test_in_a_batcher_texts_do_not_mix(llama):
    found = trained(True)
    prompts = [lesson.tokens[: lesson.answer].tolist() for lesson in lessons()[:5]]
    with specnb.Batcher(llama, max_batch=2, drafter=found.drafter(), max_new_tokens=NEW) as batcher:
        jobs = [batcher.submit(ids) for ids in prompts]
        while not all(job.done for job in jobs):
            batcher.step()
    for ids, job in zip(prompts, jobs):
        alone = specnb.generate(llama, torch.tensor([ids]), found.drafter(), max_new_tokens=NEW)
        assert job.tokens == alone.sequences[0, len(ids) :].tolist()
        assert int(job.stats.drafted) == int(alone.stats.drafted)
        assert int(job.stats.accepted) == int(alone.stats.accepted)


def test_a_chain_is_a_tree_of_width_one(llama):
    found = trained()
    chain = specnb.Medusa(found.heads)
    assert chain.shape == [(0,), (0, 0), (0, 0, 0)]
    out = specnb.generate(llama, prompt(), chain, max_new_tokens=NEW, return_trace=True)
    guesses = [list(r.drafted) for r in out.trace]
    assert torch.equal(out.sequences, plain(llama, prompt(), max_new_tokens=NEW))

    class Same(specnb.Drafter):
        def propose(self, context, limit):
            return guesses.pop(0)

    as_chain = specnb.generate(llama, prompt(), Same(3), max_new_tokens=NEW, return_trace=True)
    assert [r.emitted for r in as_chain.trace] == [r.emitted for r in out.trace]


def test_a_small_limit_cuts_the_tree(llama):
    drafter = specnb.Medusa(random_heads(), BRANCHED)
    out = specnb.generate(llama, prompt(), drafter, max_new_tokens=NEW, pass_width=4, return_trace=True)
    assert max(len(r.drafted) for r in out.trace) == 3
    assert torch.equal(out.sequences, specnb.generate(llama, prompt(), max_new_tokens=NEW, pass_width=4).sequences)


def test_without_a_tree_it_is_plain_decoding(llama):
    out = specnb.generate(llama, prompt(), specnb.Medusa(random_heads(), []), max_new_tokens=NEW)
    assert out.stats.drafted.tolist() == [0]
    assert torch.equal(out.sequences, plain(llama, prompt(), max_new_tokens=NEW))


def test_heads_serve_a_target_of_another_dtype(llama):
    heads = random_heads()
    half = tiny_model().to(torch.bfloat16)
    out = specnb.generate(half, prompt(), specnb.Medusa(heads, BRANCHED), max_new_tokens=8, pass_width=8)
    assert torch.equal(out.sequences, specnb.generate(half, prompt(), max_new_tokens=8, pass_width=8).sequences)
    assert next(heads.parameters()).dtype == torch.float32  # they themselves stay as they were


def test_heads_that_have_changed_since_the_last_run_are_looked_at_again(llama):
    heads = random_heads()
    drafter = specnb.Medusa(heads, BRANCHED)
    options = dict(max_new_tokens=8, return_trace=True)
    before = rounds_of(specnb.generate(llama, prompt(), drafter, **options))
    attached = drafter._attached
    assert rounds_of(specnb.generate(llama, prompt(), drafter, **options)) == before
    assert drafter._attached is attached
    heads.load_state_dict(random_heads(seed=1).state_dict())
    after = rounds_of(specnb.generate(llama, prompt(), drafter, **options))
    assert after == rounds_of(specnb.generate(llama, prompt(), specnb.Medusa(heads, BRANCHED), **options)) != before
    half = tiny_model().to(torch.bfloat16)
    specnb.generate(half, prompt(), drafter, max_new_tokens=4)
    assert drafter._attached.matrix.dtype == torch.bfloat16


# --- files, and other targets ---


@both
def test_heads_survive_a_folder(hinted, tmp_path, llama):
    found = trained(hinted)
    read = specnb.Medusa.from_pretrained(found.save(tmp_path / "heads", dtype=torch.float32))
    assert same_weights(read.heads, found.heads) and torch.equal(read.heads.ids, found.heads.ids)
    assert read.shape == found.drafter().shape and read.chances == found.chances
    outs = [
        specnb.generate(llama, prompt(), drafter, max_new_tokens=NEW, return_trace=True)
        for drafter in (found.drafter(), read)
    ]
    assert rounds_of(outs[0]) == rounds_of(outs[1])
    told = json.loads((tmp_path / "heads" / "training.json").read_text())
    assert [medusa_training.MedusaScore(**score) for score in told["history"]] == found.history
    assert told["settings"] == found.settings
    chosen = specnb.medusa_shape(read, lambda T: 1 + 0.05 * T)
    assert specnb.Medusa.from_pretrained(tmp_path / "heads", chosen).shape == chosen != read.shape


@pytest.mark.parametrize("shape", [BRANCHED, 6, []], ids=["one tree", "grown anew", "none"])
def test_heads_for_all_tokens_survive_a_folder(tmp_path, llama, shape):
    drafter = specnb.Medusa(random_heads(), shape)
    read = specnb.Medusa.from_pretrained(drafter.save(tmp_path, llama, torch.float32))
    assert read.heads.ids is None and same_weights(read.heads, drafter.heads)
    assert (read.shape, read.grows) == (drafter.shape, drafter.grows)
    assert read.num_draft_tokens == drafter.num_draft_tokens


def test_heads_that_ship_are_found_by_name(tmp_path, monkeypatch):
    trained().save(tmp_path / "some-heads")
    monkeypatch.setattr(medusa, "data_path", lambda name: tmp_path)
    assert len(specnb.Medusa.from_pretrained("some-heads").heads) == 3
    with pytest.raises(ValueError, match=r"no Medusa heads at 'other'.*\(some-heads\)"):
        specnb.Medusa.from_pretrained("other")


@pytest.mark.parametrize(("changes", "message"), [
    ({"hidden_size": 16}, "hidden size of 32, and the target's output head takes 16.*specnb.train_medusa"),
    ({"vocab_size": 20}, "guess tokens up to 60, and the target has 20"),
])  # fmt: skip
def test_another_target_is_refused(changes, message):
    drafter = specnb.Medusa(random_heads(ids=torch.arange(VOCAB)))
    with pytest.raises(ValueError, match=message):
        specnb.generate(tiny_model(**changes), torch.ones(1, 4, dtype=torch.long), drafter, max_new_tokens=4)


def damage(folder, how: str) -> None:
    description = folder / "medusa.json"
    if how == "format":
        description.write_text(description.read_text().replace("specnb medusa 1", "specnb medusa 9"))
    elif how == "description":
        description.write_text("{")
    elif how == "cut":
        (folder / "medusa.safetensors").write_bytes(b"nothing")
    else:
        weights = load_file(folder / "medusa.safetensors")
        weights.pop("blocks.0.linear.bias")
        save_file(weights, folder / "medusa.safetensors")


@pytest.mark.parametrize(("how", "message"), [
    ("format", "this release reads 'specnb medusa 1'"), ("description", "medusa.json is damaged"),
    ("cut", "missing or damaged"), ("lacking", "does not hold the weights"),
])  # fmt: skip
def test_damaged_files_are_refused(tmp_path, how, message):
    trained().save(tmp_path)
    damage(tmp_path, how)
    with pytest.raises(ValueError, match=message):
        specnb.Medusa.from_pretrained(tmp_path)


# --- the recipe ---


class Words:
    """As much of a tokenizer as the recipe needs."""

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(f"word{int(i)}" for i in ids)


def test_the_recipe_makes_heads_measures_them_and_chooses_their_tree(tmp_path, monkeypatch):
    """All its steps for heads, on the tiny model; passes that cost nothing get the largest tree, dear ones a small."""
    target, folder, heads = tiny_model(), tmp_path / "lessons", tmp_path / "heads"
    folder.mkdir()
    monkeypatch.setattr(recipe, "load_model", lambda **_: (target, Words()))
    monkeypatch.setattr(recipe, "MEDUSA_PARTS", (0, 2))
    monkeypatch.setattr(recipe, "HELD_OUT", 6)
    monkeypatch.setitem(recipe.MEDUSA, "learning_rate", 3e-2)
    for part in (0, 2):
        teaching.save(lessons()[part * 6 : part * 6 + 12], recipe.path_of(part, folder))
    teaching.save(lessons()[:9] * 10, folder / "suite.safetensors")
    recipe.main(["states", str(folder)])
    recipe.main(["medusa", str(folder), str(heads)])
    settings = json.loads((heads / "training.json").read_text())["settings"]
    assert settings["lessons"] == 18 and settings["parts"] == [0, 2]

    generate = specnb.generate
    monkeypatch.setattr(recipe, "generate", lambda *a, compile, **options: generate(*a, **options))
    monkeypatch.setattr(recipe, "encode", lambda tokenizer, prompt_: prompt())
    sizes = []
    for slope in (0.0, 1.0):
        curve = specnb.CostCurve((1, 32), (10.0, 10.0 + 31 * slope))
        monkeypatch.setattr(recipe, "compiled_cost", lambda model, curve=curve: curve)
        recipe.main(["medusa-tree", str(folder), str(heads)])
        drafter = specnb.Medusa.from_pretrained(heads)
        sizes.append(len(drafter.shape))
        assert json.loads((heads / "tree.json").read_text())["nodes"] == sizes[-1]
    assert sizes[0] == len(drafter.chances) > sizes[1]

    recipe.main(["evaluate-medusa", str(folder), str(heads)])
    told = json.loads((heads / "evaluation.json").read_text())
    assert list(told["groups"]) == list(specnb.workloads.GROUPS)
    assert told["all"]["tokens"] == 90 * NEW == sum(group["tokens"] for group in told["groups"].values())
    assert told["shape"] == [list(path) for path in drafter.shape]


# --- the ones that ship ---


@functools.cache
def shipped():
    return data_path("drafts") / "smollm2-135m-medusa"


def test_the_shipped_heads_are_small_and_told_about():
    data = {"medusa.json", "medusa.safetensors", "training.json", "evaluation.json", "tree.json"}
    assert {path.name for path in shipped().iterdir()} == data | {"README.md"}
    assert sum(path.stat().st_size for path in shipped().iterdir()) <= 10e6
    drafter = specnb.Medusa.from_pretrained("smollm2-135m-medusa")
    assert len(drafter.chances) == 63 and drafter.shape == [path for path, _ in drafter.chances[: len(drafter.shape)]]
    history = json.loads((shipped() / "training.json").read_text())["history"]
    assert history[-1]["tokens_per_pass"] > history[0]["tokens_per_pass"]


def test_the_card_says_what_was_measured():
    """The tables of the card, line by line, against evaluation.json."""
    told, card = json.loads((shipped() / "evaluation.json").read_text()), (shipped() / "README.md").read_text()
    for name, group in {**told["groups"], "all": told["all"]}.items():
        top1 = " / ".join(f"{row[0]:.2f}" for row in group["accuracy"])
        assert f"| {name} | {top1} | {group['tokens_per_pass_of_chain']:.2f} | {group['tokens_per_pass']:.2f} |" in card
    for head, row in enumerate(told["all"]["accuracy"]):
        assert f"| {head} | {head + 1} | " + " | ".join(f"{share:.2f}" for share in row) in card
    assert list(told["groups"]) == list(specnb.workloads.GROUPS)
    assert told["all"]["tokens_per_pass"] >= 2.0
    assert hashlib.sha256((shipped() / "medusa.safetensors").read_bytes()).hexdigest() in card


@pytest.mark.real_model
def test_the_shipped_heads_guess_well_on_questions_they_have_never_seen(real):
    """Two groups of the suite, one question each; over all of it the card says more."""
    model, tokenizer = real
    drafter = specnb.Medusa.from_pretrained("smollm2-135m-medusa")
    passes = 0.0
    for p in specnb.load_prompts(group=["code_edit", "list"], limit=1):
        out = specnb.generate(model, specnb.encode(tokenizer, p), drafter, max_new_tokens=32, do_sample=False)
        passes += int(out.stats.target_passes) / int(out.stats.emitted)
    assert passes / 2 < 1 / 1.5
    with pytest.raises(ValueError, match="the target's output head takes 32"):
        specnb.generate(tiny_model(), prompt(), drafter, max_new_tokens=4)


# --- the law ---


@pytest.mark.statistical
def test_sampling_keeps_the_targets_law():
    """Three tokens: the first round has no guesses, the next ones try the heads' favourites in turn."""
    target = tiny_model(vocab_size=7, initializer_range=0.15, seed=2)
    drafter, ids = specnb.Medusa(random_heads(hinted=False), BRANCHED), torch.tensor([[1, 2, 3, 1, 2, 4, 1, 2]])
    law = exact_law(target, ids, 3, do_sample=True, top_k=0)
    assert specnb.audit(loop_sampler(target, ids, drafter, 3, top_k=0), law, n=3000).passed
