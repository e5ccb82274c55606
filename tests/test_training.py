"""Distilling a draft: lessons say what the target said, losses are what they are called, runs can be broken off."""

from __future__ import annotations

import functools
import json
import math
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

import specnb
from specnb import curriculum, recipe, teaching, trainer, training
from specnb.drafters import hints
from specnb.drafters.small_model import load_small_model, own_parameters, save_small_model, small_model
from specnb.resources import data_path
from tests.tiny import FAMILIES, VOCAB, fresh_logits, plain, prompt, tiny_model

NEW = 20
FEW = torch.arange(1, VOCAB - 1)  # a head that lacks the first and the last token


@functools.cache
def trained() -> training.Distilled:
    """One draft for the tests that need some draft."""
    return distilled()


@functools.cache
def lessons(family: str = "llama", count: int = 60) -> list[teaching.Lesson]:
    prompts = [prompt(8, seed=i)[0].tolist() for i in range(count)]
    return list(teaching.lessons(tiny_model(family), prompts, top=8, max_new_tokens=NEW, progress=False))


def distilled(**changes) -> training.Distilled:
    options = dict(lessons=lessons(), epochs=2, batch_tokens=128, save_every=4, progress=False)
    return specnb.distill_draft(tiny_model(), **{**options, **changes})


def same_weights(a, b) -> bool:
    return all(torch.equal(p, q) for p, q in zip(own_parameters(a).values(), own_parameters(b).values()))


# --- lessons ---


def test_lessons_hold_the_targets_greedy_text_and_its_law(llama):
    """The oracle: transformers' greedy search, and p from scratch at every token."""
    ids = [prompt(n, seed=n) for n in (3, 9, 14)]
    made = list(teaching.lessons(llama, [x[0].tolist() for x in ids], top=VOCAB, max_new_tokens=NEW, progress=False))
    for x, lesson in zip(ids, made):
        assert torch.equal(lesson.tokens, plain(llama, x, max_new_tokens=NEW)[0])
        assert lesson.answer == x.shape[1]
        p = fresh_logits(llama, lesson.tokens[None])[0, lesson.answer - 1 : -1].softmax(-1)
        found = torch.zeros(NEW, VOCAB).scatter(1, lesson.ids, lesson.logp.exp())
        torch.testing.assert_close(found, p, atol=2e-3, rtol=2e-3)
        assert torch.equal(lesson.ids[:, 0], lesson.tokens[lesson.answer :])


def test_lessons_drawn_are_reproducible_and_noted_at_their_temperature(llama):
    ids = [prompt(6, seed=i)[0].tolist() for i in range(4)]
    options = dict(top=VOCAB, max_new_tokens=8, temperature=[0.0, 0.7, 0.7, 0.7], top_k=0, progress=False)
    once, again, other = (list(teaching.lessons(llama, ids, seed=s, **options)) for s in (5, 5, 6))
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(once, again))
    assert torch.equal(once[0].tokens, other[0].tokens)
    assert any(not torch.equal(a.tokens, b.tokens) for a, b in zip(once[1:], other[1:]))
    lesson = once[2]
    p = (fresh_logits(llama, lesson.tokens[None])[0, lesson.answer - 1 : -1] / 0.7).softmax(-1)
    found = torch.zeros(8, VOCAB).scatter(1, lesson.ids, lesson.logp.exp())
    torch.testing.assert_close(found, p, atol=2e-3, rtol=2e-3)


def test_lessons_come_in_the_order_of_the_prompts_whatever_the_batch(llama):
    ids = [prompt(4 + i, seed=i)[0].tolist() for i in range(7)]
    ways = [list(teaching.lessons(llama, ids, max_batch=b, top=4, max_new_tokens=6, progress=False)) for b in (1, 3)]
    assert [x.tokens.tolist() for x in ways[0]] == [x.tokens.tolist() for x in ways[1]]
    assert [x.tokens[: x.answer].tolist() for x in ways[0]] == ids


def test_lessons_survive_a_file(tmp_path):
    teaching.save(lessons(), tmp_path / "part.safetensors")
    for a, b in zip(lessons(), teaching.load(tmp_path / "part.safetensors"), strict=True):
        assert a.answer == b.answer
        assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("tokens", "ids", "logp"))
    assert [path.name for path in tmp_path.iterdir()] == ["part.safetensors"]


@pytest.mark.parametrize(("options", "message"), [
    ({"top": 0}, "top must lie between 1 and"), ({"top": VOCAB + 1}, "top must lie between 1 and"),
    ({"temperature": [0.0, 0.5]}, "got 2 for 1"), ({"temperature": float("nan")}, "temperature"),
])  # fmt: skip
def test_bad_lessons_are_refused(llama, options, message):
    with pytest.raises(ValueError, match=message):
        list(teaching.lessons(llama, [[1, 2]], **options, max_new_tokens=2, progress=False))


# --- losses, against sums written out ---


def slowly(name: str, p: list[float], q: list[float]) -> float:
    if name == "total_variation":
        return sum(abs(a - b) for a, b in zip(p, q)) / 2
    if name == "forward_kl":
        return sum(a * math.log(a / max(b, math.exp(-60))) for a, b in zip(p, q) if a > 0)
    return sum(b * math.log(b / max(a, 1e-6)) for a, b in zip(p, q) if b > 0)


def lumped_slowly(p, q, favourites, known):
    """Favourites the draft knows, then all the others as one."""
    kept = [token for token in favourites if token in known]
    return [[law[t] for t in kept] + [sum(law) - sum(law[t] for t in kept)] for law in (p, q)]


@pytest.mark.parametrize("top", [1, 3, 7], ids="top {}".format)
@pytest.mark.parametrize("name", training.LOSSES)
def test_losses_are_the_divergences_of_the_lumped_laws(name, top):
    generator = torch.Generator().manual_seed(top)
    known = [0, 2, 3, 5, 6]  # of seven tokens
    column = torch.tensor([0, 5, 1, 2, 5, 3, 4])
    for _ in range(20):
        p = (3 * torch.randn(7, generator=generator)).softmax(-1)
        logits = 3 * torch.randn(5, generator=generator)
        q = torch.zeros(7).index_copy(0, torch.tensor(known), logits.softmax(-1))
        probs, ids = p.topk(top)
        small_p, logq = training.lump(logits[None], column[ids][None], probs.log()[None])
        expected = slowly(name, *lumped_slowly(p.tolist(), q.tolist(), ids.tolist(), known))
        assert float(training.LOSSES[name](small_p, logq)) == pytest.approx(expected, rel=2e-3, abs=2e-4)


def test_with_all_tokens_the_losses_are_the_divergences_themselves():
    p, logits = torch.rand(6, 9).softmax(-1), torch.randn(6, 9)
    q = logits.softmax(-1)
    small_p, logq = training.lump(logits, torch.arange(9).expand(6, 9), p.log())
    expected = torch.nn.functional.kl_div(q.log(), p, reduction="none").sum(-1)
    torch.testing.assert_close(training.forward_kl(small_p, logq), expected, atol=1e-5, rtol=1e-4)
    accepted = torch.minimum(p, q).sum(-1)
    torch.testing.assert_close(1 - training.total_variation(small_p, logq), accepted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", training.LOSSES)
def test_losses_have_finite_gradients_where_a_law_is_extreme(name):
    logits = torch.tensor([[80.0, 0.0, -80.0], [0.0, 0.0, 0.0]], requires_grad=True)
    logp = torch.tensor([[-60.0, 0.0], [0.0, -60.0]])
    loss = training.LOSSES[name](*training.lump(logits, torch.tensor([[0, 3], [2, 1]]), logp)).sum()
    loss.backward()
    assert bool(loss.isfinite()) and bool(logits.grad.isfinite().all())


# --- training ---


@pytest.mark.parametrize("loss", training.LOSSES)
def test_a_draft_learns(loss):
    """One of the target's layers, on 44 answers; measured on 16 others."""
    found = distilled(loss=loss, epochs=6, learning_rate=5e-3)
    assert found.history[-1].alpha > found.history[0].alpha + 0.05
    assert found.history[0].tokens == 0 and found.history[-1].tokens == sum(len(x.ids) for x in lessons()[:-16]) * 6


def test_the_target_is_not_touched():
    target = tiny_model()
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    config = target.config.to_json_string()
    specnb.distill_draft(target, lessons=lessons(), epochs=1, batch_tokens=256, progress=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    assert target.config.to_json_string() == config and not target.training
    assert all(p.grad is None for p in target.parameters())


class Stopped(Exception):
    pass


@pytest.mark.parametrize("at", [1, 4, 7], ids="step {}".format)
def test_a_run_that_was_broken_off_goes_on_bit_for_bit(tmp_path, at, monkeypatch):
    whole = trained()

    def breaking(self):
        if self.step == at:
            raise Stopped
        original(self)

    original = training.Trainer.one_step
    monkeypatch.setattr(training.Trainer, "one_step", breaking)
    with pytest.raises(Stopped):
        distilled(folder=tmp_path, save_every=3)
    monkeypatch.setattr(training.Trainer, "one_step", original)
    assert (tmp_path / trainer.STATE).exists() == (at >= 3)
    resumed = distilled(folder=tmp_path, save_every=3)
    assert same_weights(whole.draft, resumed.draft)
    assert whole.history == resumed.history
    assert same_weights(whole.draft, distilled(folder=tmp_path, save_every=3).draft)  # from the last state: no step


def test_a_state_of_other_settings_is_refused(tmp_path):
    distilled(folder=tmp_path, epochs=1)
    with pytest.raises(ValueError, match=r"learning_rate = 0.001, now it is 0.002.*another folder"):
        distilled(folder=tmp_path, epochs=1, learning_rate=0.002)


def test_a_draft_can_be_gone_on_with():
    first = distilled(epochs=2, head_rows=40)
    more = distilled(epochs=2, start=first.draft)
    assert more.history[0].alpha > distilled(epochs=1).history[0].alpha
    assert more.settings["layers"] == [0] and more.draft.get_output_embeddings().linear.out_features > 40
    assert not same_weights(more.draft, first.draft)


def test_the_seed_decides():
    assert same_weights(distilled(epochs=1).draft, distilled(epochs=1).draft)
    assert not same_weights(distilled(epochs=1).draft, distilled(epochs=1, seed=1).draft)


def test_prompts_are_answered_first(llama):
    scores = []
    ids = [prompt(8, seed=i)[0].tolist() for i in range(12)]
    found = specnb.distill_draft(
        llama, prompts=ids, held_out=4, epochs=1, max_new_tokens=6, top=4, callback=scores.append, progress=False
    )
    assert scores == found.history
    assert [x.tokens[:8].tolist() for x in found.held_out] == ids[-4:]
    assert found.settings["lessons"] == 8 and found.settings["tokens"] == 48


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"loss": "hinge"}, ValueError, "loss must be one of 'forward_kl'"),
    ({"prompts": [[1, 2]]}, ValueError, "either prompts"),
    ({"lessons": None}, ValueError, "either prompts"),
    ({"lessons": None, "prompts": ["a text"]}, TypeError, "need the target's tokenizer"),
    ({"max_new_tokens": 5}, TypeError, "max_new_tokens: the lessons are answered already"),
    ({"held_out": 60}, ValueError, "held_out must leave some of the 60 lessons"),
    ({"layers": [2]}, ValueError, "layers must name some of the target's layers 0…1"),
    ({"layers": []}, ValueError, "layers must name"),
])  # fmt: skip
def test_bad_training_is_refused(changes, error, message):
    with pytest.raises(error, match=message):
        distilled(**changes)


def test_what_agreement_predicts_is_what_decoding_does(llama):
    """α and tokens per pass from one look at known answers, against decoding with the draft."""
    found = trained()
    few = found.held_out[:4]
    hits = training.agreement(found.draft, few)
    for k in (1, 4):
        stats = [
            specnb.generate(
                llama, lesson.tokens[None, : lesson.answer], specnb.DraftModel(found.draft, k), max_new_tokens=NEW
            ).stats.total()
            for lesson in few
        ]
        passes = sum(int(s.target_passes) for s in stats)
        assert training.tokens_per_pass(hits, k) == pytest.approx(NEW * len(hits) / passes)
    everywhere = training.agreement(found.draft, found.held_out)
    assert found.history[-1].alpha == pytest.approx(float(torch.cat(everywhere).float().mean()))
    assert training.tokens_per_pass([torch.tensor([True] * 12)], 3) == 4.0
    assert math.isnan(training.tokens_per_pass([], 3))


@pytest.mark.parametrize("steps", [2, 7, 100])
def test_the_learning_rate_rises_then_falls_to_nothing(steps):
    rates = [trainer.schedule(step, steps) for step in range(steps)]
    assert max(rates) == 1.0 and min(rates) > 0 and trainer.schedule(steps, steps) == pytest.approx(0, abs=1e-9)


def test_batches_hold_every_lesson_once_and_are_not_too_wide():
    groups = training.batches(lessons(), 200, seed=3)
    assert sorted(i for group in groups for i in group) == list(range(60))
    assert all(len(group) * max(len(lessons()[i].tokens) for i in group) <= 200 for group in groups)
    assert groups != training.batches(lessons(), 200, seed=4)


# --- the small model ---


@pytest.mark.parametrize("family", FAMILIES)
def test_all_layers_and_tokens_make_the_target_again(family):
    target = tiny_model(family)
    draft = small_model(target, range(2), torch.arange(VOCAB))
    torch.nn.init.eye_(draft.get_output_embeddings().bridge.weight)  # what is left are the target's own parts
    torch.testing.assert_close(fresh_logits(draft, prompt()), fresh_logits(target, prompt()))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_survives_a_folder_and_changes_no_text(family, tmp_path):
    target = tiny_model(family)
    draft = small_model(target, [1], FEW)
    with torch.no_grad():
        for parameter in own_parameters(draft).values():
            parameter.add_(0.01)
    read = specnb.DraftModel.from_pretrained(save_small_model(draft, target, tmp_path), target=target)
    assert torch.equal(fresh_logits(read.model, prompt()), fresh_logits(draft, prompt()))
    assert read.model.get_input_embeddings().embedding is target.get_input_embeddings()
    out = specnb.generate(target, prompt(), read, max_new_tokens=NEW)
    assert torch.equal(out.sequences, specnb.generate(target, prompt(), max_new_tokens=NEW).sequences)


def slow_hint(tokens: list[int]) -> tuple[int, int]:
    """The longest suffix of at most four tokens that has occurred before, and what followed it the last time."""
    for size in range(min(hints.LONGEST, len(tokens)), 0, -1):
        for begin in range(len(tokens) - size - 1, -1, -1):
            if tokens[begin : begin + size] == tokens[-size:]:
                return tokens[begin + size], size
    return 0, 0


@pytest.mark.parametrize("seed", range(5))
def test_hints_are_what_prompt_lookup_would_guess(seed):
    rng = random.Random(seed)
    tokens = [rng.randrange(4) for _ in range(60)]
    expected = [(token, *slow_hint(tokens[: i + 1])) for i, token in enumerate(tokens)]
    assert list(zip(*(part.tolist() for part in hints.decoded(hints.hinted(torch.tensor(tokens)))))) == expected
    read = hints.Hints()
    for n in range(1, 50):  # the same, when the last tokens are only guesses
        codes = read.extend(tokens[:n])
        assert codes == [hints.encoded(*known) for known in expected[:n]]
        for guessed in range(1, 8):
            assert read.after(tokens[n : n + guessed]) == hints.encoded(*expected[n + guessed - 1])


def test_a_hint_that_is_not_there_changes_nothing(llama):
    embedding = small_model(llama, [0], FEW).get_input_embeddings()
    assert torch.equal(embedding(prompt()), llama.get_input_embeddings()(prompt()))
    assert not torch.equal(embedding(torch.tensor([[hints.encoded(3, 5, 1)]])), embedding(torch.tensor([[3]])))


def test_in_a_batcher_each_text_has_its_own_hints(llama):
    """Five texts in two slots: each drafts and accepts exactly as alone."""
    drafter, drafter_alone = (specnb.DraftModel(trained().draft, 3) for _ in range(2))
    ids = [prompt(6 + 3 * i, seed=i) for i in range(5)]
    batcher = specnb.Batcher(llama, drafter, max_batch=2, max_new_tokens=NEW)
    jobs = [batcher.submit(x) for x in ids]
    for x, job in zip(ids, jobs):
        alone = specnb.generate(llama, x, drafter_alone, max_new_tokens=NEW)
        assert job.result().tokens == alone.sequences[0, x.shape[1] :].tolist()
        counts = [(int(stats.drafted), int(stats.accepted)) for stats in (job.stats, alone.stats)]
        assert counts[0] == counts[1]


@pytest.mark.slow
def test_where_the_target_is_compiled_the_draft_is_too(llama):
    drafter = specnb.DraftModel(trained().draft)
    options = dict(max_new_tokens=NEW, pass_width=8, seed=1)
    for rows in (1, 3):
        plainly = specnb.generate(llama, prompt(batch=rows), drafter, **options)
        out = specnb.generate(llama, prompt(batch=rows), drafter, compile=True, **options)
        assert torch.equal(out.sequences, plainly.sequences)
        assert drafter._twin is not None and drafter._twin.widths == {4, 32}  # a position a row; the prompts
        assert torch.equal(out.stats.accepted, plainly.stats.accepted)


@pytest.mark.parametrize("family", ["llama", "phi"])  # without and with a bias
def test_the_head_scores_its_own_tokens_and_the_hinted_one(family):
    """Against a head for all tokens: the same scores where there are any."""
    target = tiny_model(family)
    whole, short = small_model(target, [0], torch.arange(VOCAB)), small_model(target, [0], FEW)
    codes = hints.hinted(torch.tensor([0, 5, 0, 7, 0, 60, 3, 0, 60, 0, 9, 9]))[None]
    expected, logits = fresh_logits(whole, codes), fresh_logits(short, codes)
    _, hint, size = hints.decoded(codes)
    told = torch.zeros(1, 12, VOCAB, dtype=torch.bool).scatter(2, hint[..., None], (size > 0)[..., None])
    told[..., FEW] = True
    torch.testing.assert_close(logits[told], expected[told])
    assert torch.isneginf(logits[~told]).all() and 0 < int(told[..., [0, 60]].sum()) < 24
    batch = short.get_output_embeddings()
    batch.places = torch.tensor([[True, False] * 6])
    narrow = short(codes).logits
    torch.testing.assert_close(narrow[:, :-1], logits[0, ::2][:, FEW])
    outside = ((hint == 0) | (hint == 60)) & (size > 0)
    assert torch.equal(narrow[:, -1].isfinite(), outside[0, ::2])


def test_targets_whose_tokens_are_not_in_the_head_can_be_learnt(llama):
    """A favourite without a row of its own counts where it is hinted, and as "any other token" elsewhere."""
    rows = torch.arange(20)
    settings = dict(epochs=1, batch_tokens=99, learning_rate=1.0, seed=0)
    loop = training.Trainer(small_model(llama, [0], rows), lessons(), [], settings, None, 9, 9, None)
    batch = training.Batch.of(lessons())
    p, _ = loop.compare(batch)
    has_row, hinted = torch.isin(batch.ids, rows), batch.ids == batch.hints[:, None]
    torch.testing.assert_close(p[:, :-1], batch.logp.exp() * (has_row | hinted))
    assert bool((hinted & ~has_row).any()) and not bool((hinted | has_row).all())


@pytest.mark.parametrize("ids", [[], [-1], [VOCAB], [[1, 2]]], ids=str)
def test_impossible_heads_are_refused(llama, ids):
    with pytest.raises(ValueError, match=f"ids must be a list of tokens 0…{VOCAB - 1}"):
        small_model(llama, [0], torch.tensor(ids))


def test_a_draft_of_another_dtype(llama, tmp_path):
    found = distilled(epochs=1)
    read = specnb.DraftModel.from_pretrained(found.save(tmp_path), target=llama, num_draft_tokens=2, dtype="bfloat16")
    assert read.model.dtype == torch.bfloat16 and read.num_draft_tokens == 2 and llama.dtype == torch.float32
    out = specnb.generate(llama, prompt(), read, max_new_tokens=NEW)
    assert torch.equal(out.sequences, specnb.generate(llama, prompt(), max_new_tokens=NEW).sequences)
    told = json.loads((tmp_path / "training.json").read_text())
    assert [training.Score(**score) for score in told["history"]] == found.history
    with pytest.raises(ValueError, match="dtype must be a floating-point"):
        specnb.DraftModel.from_pretrained(tmp_path, target=llama, dtype="int8")


def test_a_draft_for_another_target_is_refused(llama, tmp_path):
    save_small_model(small_model(llama, [0], FEW), llama, tmp_path)
    others = (tiny_model(vocab_size=70), "vocab_size 61, not 70"), (tiny_model("gpt2"), "model_type 'llama'")
    for other, told in others:
        with pytest.raises(ValueError, match=told):
            specnb.DraftModel.from_pretrained(tmp_path, target=other)
    for nothing in (None, "SmolLM2"):
        with pytest.raises(TypeError, match=r"uses its target's embedding.*target=model"):
            specnb.DraftModel.from_pretrained(tmp_path, target=nothing)


def test_damaged_drafts_are_refused(llama, tmp_path):
    save_small_model(small_model(llama, [0], FEW), llama, tmp_path)
    weights = load_file(tmp_path / "draft.safetensors")
    name = next(name for name in weights if name.endswith("norm.weight"))
    save_file({key: value for key, value in weights.items() if key != name}, tmp_path / "draft.safetensors")
    with pytest.raises(ValueError, match=f"does not hold the weights.*{name}"):
        load_small_model(tmp_path, llama)
    save_file({key: value for key, value in weights.items() if key != "head_ids"}, tmp_path / "draft.safetensors")
    with pytest.raises(ValueError, match="lacks 'head_ids'"):
        load_small_model(tmp_path, llama)
    (tmp_path / "draft.safetensors").write_bytes(b"0" * 100)
    with pytest.raises(ValueError, match="missing or damaged"):
        load_small_model(tmp_path, llama)
    told = json.loads((tmp_path / "draft.json").read_text())
    (tmp_path / "draft.json").write_text(json.dumps({**told, "format": "specnb draft 9"}))
    with pytest.raises(ValueError, match="this release reads 'specnb draft 1'"):
        load_small_model(tmp_path, llama)
    (tmp_path / "draft.json").write_text("{")
    with pytest.raises(ValueError, match=r"draft\.json is damaged"):
        load_small_model(tmp_path, llama)


# --- questions ---


def test_no_question_is_held_out():
    """The suite that measures is never trained on: no question equals, contains or borrows from one of its ninety."""
    asked = [question for _, question in curriculum.questions(3000, seed=1)]
    held_out = [turn for p in specnb.load_prompts() for turn in p.turns]
    runs = curriculum.held_out_runs(held_out)
    assert len(set(asked)) == 3000
    assert not any(question == turn or turn in question for question in asked for turn in held_out)
    assert not any(curriculum.overlaps(question, runs) for question in asked)


def test_a_leak_would_be_seen():
    leak = specnb.load_prompts(limit=1)[3].turns[0]
    for text in (leak, f"Please: {leak.upper()} Thanks!", " ".join(leak.split()[2:12])):
        assert curriculum.overlaps(text, curriculum.held_out_runs())
    assert not curriculum.overlaps("Write a poem about a heron.", curriculum.held_out_runs())
    short = "one two three"
    assert curriculum.overlaps(short, curriculum.held_out_runs([short]))


def test_questions_depend_on_the_seed_alone():
    asked = list(curriculum.questions(200, seed=7))
    assert asked == list(curriculum.questions(200, seed=7)) and asked[:50] == list(curriculum.questions(50, seed=7))
    assert asked != list(curriculum.questions(200, seed=8))
    assert {kind for kind, _ in asked} == set(curriculum.KINDS)
    assert set(specnb.workloads.GROUPS) <= set(curriculum.KINDS)


def test_answers_become_tasks():
    code = "```python\ndef double(number):\n    result = number * 2\n    return result  # twice as much\n```"
    prose = "The heron stood in the cold river. " * 8
    held_out = specnb.load_prompts(group="copy_heavy_summary")[0].turns[0]
    answers = [("maths", "4"), ("open_story", prose), ("open_story", held_out)] + [("code_completion", code)] * 12
    made = list(curriculum.further(answers, seed=0))
    assert 1 < len(made) < 10
    kind, question = made[0]
    assert kind in ("copy_heavy_summary", "retrieval_answer", "translation") and "heron stood" in question
    assert all(kind == "code_edit" and "return result" in question for kind, question in made[1:])


# --- the recipe ---


class Words:
    """As much of a tokenizer as the recipe needs: a token is a word."""

    vocabulary = ("<|im_start|>user " + " ".join(f"word{i}" for i in range(VOCAB - 1))).split()

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(self.vocabulary[i] for i in ids)


def lesson_of(question: list[int], answer: list[int]) -> teaching.Lesson:
    favourites = torch.tensor(answer)[:, None]
    return teaching.Lesson(torch.tensor(question + answer), len(question), favourites, torch.zeros(len(answer), 1))


def test_tasks_about_held_out_answers_are_not_learnt_from(tmp_path, monkeypatch):
    """Part 4 asks about the answers of part 0, of which the first are held out."""
    monkeypatch.setattr(recipe, "HELD_OUT", 2)
    monkeypatch.setattr(recipe, "PART", 3)
    parts = [[lesson_of([n, 1], [2 + n, *range(20 + i, 32 + i)]) for i in range(4)] for n in range(5)]
    leak, fair = lesson_of([1, *range(22, 30)], [3]), lesson_of([1, *range(40, 50)], [3])
    for number, made in enumerate(parts):
        teaching.save([*made[:3], leak, fair] if number == recipe.LAG else made, recipe.path_of(number, tmp_path))
    learnt, held_out = recipe.lessons_of(tmp_path, range(5), Words())
    assert [x.tokens.tolist() for x in held_out] == [x.tokens.tolist() for x in parts[0][:2]]
    assert len(learnt) == 2 + 3 * 4 + 3 + 1
    assert learnt[-1].tokens.tolist() == fair.tokens.tolist()
    assert len(recipe.lessons_of(tmp_path, (3, 0, 1, 2), Words())[0]) == 2 + 3 * 4


def test_invented_questions_touch_no_held_out_one():
    held_out = specnb.load_prompts(limit=1)[0].turns[0]

    class Says:
        def decode(self, ids, skip_special_tokens=False):
            return {1: held_out, 2: "short", 3: "What do herons eat in the winter months?"}[int(ids[0])]

    turns = [lesson_of([0], [i]) for i in (1, 2, 3)]
    assert list(recipe.invented(Says(), turns)) == [("invented", "What do herons eat in the winter months?")]


def test_questions_that_the_target_finishes_begin_as_they_should():
    begun = curriculum.starts(80, seed=3)
    assert begun == curriculum.starts(80, seed=3) and len(set(begun)) == sum(map(len, curriculum.STARTS.values()))
    assert {kind for kind, _ in begun} <= set(curriculum.KINDS)
    assert not any(curriculum.overlaps(start, curriculum.held_out_runs()) for _, start in begun)

    class Says:
        def decode(self, ids, skip_special_tokens=False):
            return [" table of rivers.", "."][int(ids[0])]

    kinds, starts = ["structured_output", "code_edit"], ["Make a", "Shorten it"]
    made = recipe.finished(Says(), kinds, starts, [lesson_of([7], [i]) for i in (0, 1)])
    assert list(made) == [("structured_output", "Make a table of rivers.")]


def test_parts_are_disjoint_and_scores_go_on():
    parts = [recipe.questions_of(n) for n in (0, 1)]
    assert len(set(parts[0]) | set(parts[1])) == 2 * recipe.PART
    scores = [training.Score(step, 10 * step, None, 0.5, 1.5) for step in (0, 4, 8)]
    assert [(s.step, s.tokens) for s in recipe.continued(scores, scores)] == [(12, 120), (16, 160)]
    assert recipe.continued([], scores) == scores


def test_the_recipe_makes_a_draft_and_measures_it(tmp_path, monkeypatch):
    """Its steps after the lessons, on the tiny model: two rounds, the second over other parts too."""
    target, folder, draft = tiny_model(), tmp_path / "lessons", tmp_path / "draft"
    folder.mkdir()
    rounds = [dict(parts=range(1), epochs=1.0, seed=0), dict(parts=(0, recipe.FORM_PARTS[0]), epochs=1.0, seed=1)]
    monkeypatch.setattr(recipe, "load_model", lambda **_: (target, Words()))
    monkeypatch.setattr(recipe, "ROUNDS", rounds)
    monkeypatch.setattr(recipe, "TRAINING", dict(batch_tokens=128, scores=2))
    monkeypatch.setattr(recipe, "HELD_OUT", 6)
    monkeypatch.setattr(recipe, "ANSWER_TOKENS", NEW)
    monkeypatch.setattr(recipe, "DRAFT_TREES", (8,))
    monkeypatch.setattr(recipe, "encode", lambda tokenizer, prompt_: prompt())
    for i, part in enumerate((0, recipe.FORM_PARTS[0])):
        teaching.save(lessons()[i * 20 : i * 20 + 20], recipe.path_of(part, folder))
    teaching.save(lessons()[:9] * 10, folder / "suite.safetensors")
    recipe.main(["train", str(folder), str(draft)])
    settings = json.loads((draft / "training.json").read_text())["settings"]
    assert settings["lessons"] == 14 + 20 and [one["parts"] for one in settings["rounds"]] == [[0], [0, 64]]

    recipe.main(["evaluate", str(folder), str(draft)])
    recipe.main(["evaluate-trees", str(folder), str(draft)])
    told = json.loads((draft / "evaluation.json").read_text())
    assert told["all"]["tokens"] == 90 * NEW
    assert list(told["trees"]) == list(recipe.FORMAL)
    drafter = specnb.DraftModel.from_pretrained(draft, target=target, tree_nodes=8)
    out = specnb.generate(target, prompt(), drafter, max_new_tokens=NEW, do_sample=False)
    assert told["trees"]["code_edit"]["8"] == round(float(out.stats.tokens_per_pass), 3)


# --- the one that ships ---


@functools.cache
def shipped():
    return data_path("drafts") / "smollm2-135m-draft"


def test_the_shipped_draft_is_small_and_told_about():
    files = {path.name for path in shipped().iterdir()}
    data = {"draft.json", "draft.safetensors", "training.json", "evaluation.json", "held_out.jsonl"}
    assert files == data | {"README.md"}
    assert sum(path.stat().st_size for path in shipped().iterdir()) <= 20e6
    history = json.loads((shipped() / "training.json").read_text())["history"]
    assert history[-1]["alpha"] > history[0]["alpha"]
    held_out = [json.loads(line) for line in (shipped() / "held_out.jsonl").read_text().splitlines()]
    assert [(q["category"], *q["turns"]) for q in held_out] == recipe.questions_of(0)[: recipe.HELD_OUT]
    groups = json.loads((shipped() / "evaluation.json").read_text())["groups"]
    assert list(groups) == list(specnb.workloads.GROUPS)


def test_the_card_says_what_was_measured():
    """The table of the card, line by line, against evaluation.json."""
    told = json.loads((shipped() / "evaluation.json").read_text())
    card = (shipped() / "README.md").read_text()
    for name, group in {**told["groups"], "all": told["all"]}.items():
        assert f"| {name} | {group['alpha']:.2f} | {group['tokens_per_pass']:.2f} |" in card
    for group, by_nodes in told["trees"].items():
        assert f"| {group} | " + " | ".join(f"{passes:.2f}" for passes in by_nodes.values()) + " |" in card


@pytest.mark.real_model
def test_the_shipped_draft_guesses_well_on_questions_it_has_never_seen(real):
    """Two groups of the suite, one question each; over all of it the card says more."""
    model, tokenizer = real
    drafter = specnb.DraftModel.from_pretrained("smollm2-135m-draft", target=model)
    passes = 0
    for p in specnb.load_prompts(group=["code_edit", "list"], limit=1):
        out = specnb.generate(model, specnb.encode(tokenizer, p), drafter, max_new_tokens=32, do_sample=False)
        passes += int(out.stats.target_passes) / int(out.stats.emitted)
    assert passes / 2 < 1 / 1.5
    other = tiny_model(vocab_size=100)
    with pytest.raises(ValueError, match="vocab_size 49152, not 100"):
        specnb.DraftModel.from_pretrained("smollm2-135m-draft", target=other)
