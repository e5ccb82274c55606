"""The loop: stop rules, processors, streaming, statistics and trace, always beside transformers' own greedy search."""

from __future__ import annotations

import string

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

import specnb
from tests.tiny import VOCAB, plain, prompt, tiny_model

IDS = prompt(12)
LETTERS = (string.ascii_letters + string.digits)[:VOCAB]


@pytest.fixture(scope="module")
def tokenizer():
    """One letter or digit per token id."""
    letters = Tokenizer(models.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=letters)


class Ban(LogitsProcessor):
    """A custom processor that depends on the context: the last token may not come again."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -1:], float("-inf"))


class StopAfter(StoppingCriteria):
    """A custom criterion: stop once this token has been written."""

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


def third_token(model):
    return int(plain(model, IDS)[0, IDS.shape[1] + 2])


# options of GenerationConfig that change greedy search; a function of the model where they depend on its output
OPTIONS = {
    "eos at the third token": lambda m: {"eos_token_id": third_token(m)},
    "a list of eos tokens": lambda m: {"eos_token_id": [VOCAB - 1, third_token(m)]},
    "no eos": lambda m: {"eos_token_id": None},
    "min_new_tokens beyond the eos": lambda m: {"eos_token_id": third_token(m), "min_new_tokens": 15},
    "repetition penalty": lambda m: {"repetition_penalty": 1.7},
    "no repeated bigram": lambda m: {"no_repeat_ngram_size": 2},
    "suppressed tokens": lambda m: {"suppress_tokens": [third_token(m)]},
    "suppressed at the beginning": lambda m: {"begin_suppress_tokens": [int(plain(m, IDS)[0, IDS.shape[1]])]},
    "bad words": lambda m: {"bad_words_ids": [[third_token(m)], [3, 4]]},
    "sequence bias": lambda m: {"sequence_bias": [[[third_token(m)], -9.0]]},
    "forced eos": lambda m: {"forced_eos_token_id": 5, "eos_token_id": 5},
    "length penalty towards eos": lambda m: {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 5},
    "max_length": lambda m: {"max_length": IDS.shape[1] + 9, "max_new_tokens": None},
    "custom processor": lambda m: {"logits_processor": LogitsProcessorList([Ban()])},
    "custom criterion": lambda m: {"stopping_criteria": StoppingCriteriaList([StopAfter(third_token(m))])},
    "allowed tokens by function": lambda m: {"prefix_allowed_tokens_fn": lambda _, ids: [int(ids[-1]), 3, 4, 5]},
    "sampling options that greedy ignores": lambda m: {"top_k": None, "top_p": None, "temperature": None},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_gives_what_plain_generate_gives(llama, option, make_drafter):
    options = {"max_new_tokens": 24, **OPTIONS[option](llama)}
    expected = plain(llama, IDS, **options)
    out = specnb.generate(llama, IDS, make_drafter(llama), **options)
    assert out.sequences.tolist() == expected.tolist()
    assert out.num_new_tokens.tolist() == [expected.shape[1] - IDS.shape[1]]
    assert out.stats.emitted.tolist() == out.num_new_tokens.tolist()


@pytest.mark.parametrize("new", range(1, 8))
def test_max_new_tokens_is_exact(llama, new, make_drafter):
    out = specnb.generate(llama, IDS, make_drafter(llama), max_new_tokens=new)
    assert out.sequences.tolist() == plain(llama, IDS, max_new_tokens=new).tolist()


def test_one_new_token_needs_no_draft(llama):
    def refuse(context):
        raise AssertionError("drafted for a single token")

    out = specnb.generate(llama, IDS, specnb.Scripted(refuse), max_new_tokens=1)
    assert out.stats.drafted.tolist() == [0]


def test_eos_inside_an_accepted_block_ends_the_row_and_its_counts_there(llama):
    eos = third_token(llama)
    out = specnb.generate(
        llama, IDS, specnb.DraftModel(llama, 6), max_new_tokens=24, eos_token_id=eos, return_trace=True
    )
    assert out.sequences.tolist() == plain(llama, IDS, eos_token_id=eos).tolist()
    assert out.sequences[0, -1] == eos
    assert out.stats.accepted.tolist() == [3]
    assert out.trace == [specnb.Round(0, out.trace[0].drafted, 3, None, False)]
    assert len(out.trace[0].drafted) == 6


def test_stop_string_cuts_text_ids_and_statistics_at_the_same_place(llama, tokenizer, make_drafter):
    options = {"stop_strings": [LETTERS[third_token(llama)]], "tokenizer": tokenizer}
    expected = plain(llama, IDS, **options)
    assert expected.shape[1] == IDS.shape[1] + 3
    out = specnb.generate(llama, IDS, make_drafter(llama), max_new_tokens=24, return_trace=True, **options)
    assert out.sequences.tolist() == expected.tolist()
    assert out.stats.emitted.tolist() == [3]
    assert [token for r in out.trace for token in r.emitted] == expected[0, -3:].tolist()


def test_stop_strings_of_a_generation_config(llama, tokenizer):
    config = GenerationConfig(stop_strings=[LETTERS[third_token(llama)]], max_new_tokens=24, do_sample=False)
    out = specnb.generate(llama, IDS, specnb.PromptLookup(), tokenizer=tokenizer, generation_config=config)
    assert out.num_new_tokens.tolist() == [3]
    with pytest.raises(ValueError, match="tokenizer=tokenizer"):
        specnb.generate(llama, IDS, specnb.PromptLookup(), generation_config=config)


def test_prompt_lookup_without_eos(llama):
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 7, 8]])
    out = specnb.generate(llama, ids, specnb.PromptLookup(), eos_token_id=None, max_new_tokens=10)
    assert out.sequences.tolist() == plain(llama, ids, eos_token_id=None, max_new_tokens=10).tolist()


def test_the_same_drafter_object_twice_is_as_good_as_new(llama, make_drafter):
    drafter, other = make_drafter(llama), prompt(7, seed=5)
    first = specnb.generate(llama, IDS, drafter, max_new_tokens=20, return_trace=True)
    specnb.generate(llama, other, drafter, max_new_tokens=9)
    again = specnb.generate(llama, IDS, drafter, max_new_tokens=20, return_trace=True)
    assert again.sequences.tolist() == first.sequences.tolist()
    if not isinstance(drafter, specnb.Adaptive):  # which knows by now what drafts are worth
        assert again.trace == first.trace


# --- decode, behind model.generate ---


def test_decode_behind_generate(llama, make_drafter):
    expected = plain(llama, IDS)
    tokens = plain(llama, IDS, custom_generate=specnb.decode, drafter=make_drafter(llama))
    assert tokens.tolist() == expected.tolist()


def test_decode_takes_a_padded_batch(llama, make_drafter):
    ids = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 1, 2]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    options = dict(max_new_tokens=9, do_sample=False, custom_generate=specnb.decode, drafter=make_drafter(llama))
    tokens = llama.generate(ids, attention_mask=mask, **options)
    assert tokens[0, 5:].tolist() == plain(llama, ids[:1, 2:], max_new_tokens=9)[0, 3:].tolist()
    assert tokens[1, 5:].tolist() == plain(llama, ids[1:], max_new_tokens=9)[0, 5:].tolist()


def test_decode_returns_a_dictionary_with_scores_as_transformers_does(llama, make_drafter):
    options = dict(return_dict_in_generate=True, output_scores=True, output_logits=True, repetition_penalty=1.3)
    expected = plain(llama, IDS, **options)
    out = plain(llama, IDS, custom_generate=specnb.decode, drafter=make_drafter(llama), **options)
    assert out.sequences.tolist() == expected.sequences.tolist()
    for name in ("scores", "logits"):
        torch.testing.assert_close(torch.stack(out[name]), torch.stack(expected[name]), atol=1e-4, rtol=1e-4)
    assert int(out.stats.emitted) == 24


# --- streaming ---


class Recorder:
    def __init__(self):
        self.puts, self.ends = [], 0

    def put(self, value):
        self.puts.append(value.flatten().tolist())

    def end(self):
        self.ends += 1


def test_streamer_sees_the_prompt_then_each_new_token_once(llama, make_drafter):
    recorder = Recorder()
    out = specnb.generate(llama, IDS, make_drafter(llama), streamer=recorder, max_new_tokens=20)
    assert recorder.puts == [IDS[0].tolist()] + [[token] for token in out.sequences[0, 12:].tolist()]
    assert recorder.ends == 1


def test_streamer_given_to_model_generate_reaches_decode(llama, make_drafter):
    recorder = Recorder()
    tokens = plain(llama, IDS, custom_generate=specnb.decode, drafter=make_drafter(llama), streamer=recorder)
    assert recorder.puts == [IDS[0].tolist()] + [[token] for token in tokens[0, 12:].tolist()]
    assert recorder.ends == 1


def test_text_streamer_prints_the_text(llama, tokenizer):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    out = specnb.generate(llama, IDS, specnb.PromptLookup(), streamer=streamer, max_new_tokens=20)
    assert "".join(streamer) == "".join(LETTERS[i] for i in out.sequences[0, 12:].tolist())


def test_a_streamer_ends_when_the_run_breaks(llama):
    recorder = Recorder()

    def broken(context):
        raise RuntimeError("no idea")

    with pytest.raises(RuntimeError, match="no idea"):
        specnb.generate(llama, IDS, specnb.Scripted(broken), streamer=recorder, max_new_tokens=20)
    assert recorder.ends == 1


def test_a_streamer_follows_one_row_only(llama):
    with pytest.raises(ValueError, match="follows one row"):
        specnb.generate(llama, IDS.repeat(2, 1), streamer=Recorder(), max_new_tokens=4)


# --- statistics and trace ---


def test_a_copy_of_the_target_gives_k_plus_1_tokens_a_pass(llama):
    out = specnb.generate(llama, IDS, specnb.DraftModel(llama, 4), max_new_tokens=25)
    assert out.stats.tokens_per_pass.tolist() == [5]
    assert out.stats.alpha.tolist() == [1]
    assert out.stats.acceptance_by_position.tolist() == [1] * 4


def test_plain_decoding_is_one_token_a_pass_and_drafts_nothing(llama):
    stats = specnb.generate(llama, IDS, max_new_tokens=10).stats
    assert stats.tokens_per_pass.tolist() == [1]
    assert stats.alpha.isnan().all()
    assert stats.acceptance_rate.isnan().all()
    assert stats.acceptance_by_position.tolist() == []


def test_statistics_are_the_sums_of_the_trace(llama, make_drafter):
    ids = torch.cat([prompt(12), prompt(12, seed=4)])
    out = specnb.generate(llama, ids, make_drafter(llama), max_new_tokens=20, return_trace=True, eos_token_id=7)
    for b in range(2):
        rounds = [r for r in out.trace if r.row == b]
        assert int(out.stats.target_passes[b]) == len(rounds)
        assert int(out.stats.drafted[b]) == sum(len(r.drafted) for r in rounds)
        assert int(out.stats.accepted[b]) == sum(r.num_accepted for r in rounds)
        assert int(out.stats.emitted[b]) == sum(len(r.emitted) for r in rounds) == int(out.num_new_tokens[b])
        assert int(out.stats.rejected[b]) == sum(r.next_token is not None and not r.is_bonus for r in rounds)
        n = int(out.num_new_tokens[b])
        assert [t for r in rounds for t in r.emitted] == out.sequences[b, 12 : 12 + n].tolist()
    assert int(out.stats.total().emitted) == int(out.stats.emitted.sum())
    assert out.stats.row(1).emitted.tolist() == out.stats.emitted[1:].tolist()


def test_acceptance_by_position_counts_the_rounds_that_reached_it(llama):
    text = plain(llama, IDS, max_new_tokens=12)[0, 12:].tolist()
    wrong = (text[3] + 1) % VOCAB
    script = [[text[0], text[1]], [wrong, text[4]], [text[4], (text[5] + 1) % VOCAB]]
    out = specnb.generate(llama, IDS, specnb.Scripted(script), max_new_tokens=12)
    assert out.stats.acceptance_by_position.tolist() == pytest.approx([2 / 3, 1 / 2])
    assert (int(out.stats.accepted), int(out.stats.rejected), int(out.stats.drafted)) == (3, 2, 6)


def test_trace_holds_p_and_the_rounds_on_request(llama):
    out = specnb.generate(llama, IDS, specnb.PromptLookup(), max_new_tokens=12, return_trace="probs")
    for r in out.trace:
        assert r.p.shape == (len(r.drafted) + 1, VOCAB)
        torch.testing.assert_close(r.p.sum(-1), torch.ones(len(r.p)))
        assert r.p.argmax(-1)[: len(r.emitted)].tolist() == r.emitted
    assert specnb.generate(llama, IDS, max_new_tokens=3).trace is None


# --- interruption and failure ---


@pytest.mark.parametrize("when", ["pass", "draft"])
def test_ctrl_c_leaves_model_and_drafter_usable(llama, monkeypatch, when):
    draft_model = tiny_model("llama", seed=3)
    drafter, target = specnb.DraftModel(draft_model, 3), llama if when == "pass" else draft_model
    expected = specnb.generate(llama, IDS, drafter, max_new_tokens=20, return_trace=True)
    calls, forward = [], target.forward

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    monkeypatch.setattr(target, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        specnb.generate(llama, IDS, drafter, max_new_tokens=20)
    monkeypatch.undo()
    again = specnb.generate(llama, IDS, drafter, max_new_tokens=20, return_trace=True)
    assert again.trace == expected.trace


def test_nan_logits_name_row_and_position(monkeypatch):
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with pytest.raises(ValueError, match="row 0 at position 0"):
        specnb.generate(model, IDS, specnb.PromptLookup(), max_new_tokens=5)


def test_the_model_is_as_it_was(llama, make_drafter):
    before = (llama.config.to_dict(), llama.generation_config.to_dict(), llama.training)
    specnb.generate(llama, IDS, make_drafter(llama), max_new_tokens=6, pass_width=8)
    assert (llama.config.to_dict(), llama.generation_config.to_dict(), llama.training) == before


# --- batches and options, row by row ---


def test_padding_without_a_mask_is_found_as_transformers_finds_it():
    model = tiny_model("llama")
    model.generation_config.pad_token_id = 0
    ids = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 1, 2]])
    out = specnb.generate(model, ids, specnb.PromptLookup(), max_new_tokens=9)
    assert out.sequences.tolist() == model.generate(ids, max_new_tokens=9, do_sample=False).tolist()


def test_a_function_of_the_batch_row_is_told_the_right_one(llama):
    def allowed(row, tokens):
        return [10 + row, 20 + row]

    ids = torch.cat([prompt(12), prompt(12, seed=4)])
    out = specnb.generate(llama, ids, specnb.PromptLookup(), max_new_tokens=5, prefix_allowed_tokens_fn=allowed)
    assert [set(row) <= {10 + b, 20 + b} for b, row in enumerate(out.sequences[:, 12:].tolist())] == [True, True]


def test_criteria_see_scores_as_transformers_shows_them(llama):
    shapes = []

    class Look(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            shapes.append({tuple(step.shape) for step in scores})
            return torch.zeros(len(input_ids), dtype=torch.bool)

    options = dict(return_dict_in_generate=True, output_scores=True, stopping_criteria=StoppingCriteriaList([Look()]))
    specnb.generate(llama, IDS, specnb.PromptLookup(), max_new_tokens=5, **options)
    assert shapes == [{(1, VOCAB)}] * 5


def test_stop_strings_can_be_switched_off(tokenizer):
    model = tiny_model("llama")
    model.generation_config.stop_strings = [LETTERS[third_token(model)]]
    assert int(specnb.generate(model, IDS, tokenizer=tokenizer, max_new_tokens=9).num_new_tokens) == 3
    assert int(specnb.generate(model, IDS, stop_strings=None, max_new_tokens=9).num_new_tokens) == 9


@pytest.mark.parametrize("wrong", [dict(drafter="x"), dict(pass_width=0), dict(return_trace="all")])
def test_a_refused_run_shows_the_streamer_nothing(llama, wrong):
    recorder = Recorder()
    with pytest.raises((ValueError, TypeError)):
        specnb.generate(llama, IDS, streamer=recorder, max_new_tokens=4, **wrong)
    assert (recorder.puts, recorder.ends) == ([], 0)


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"repetition_penalty": 1.4}], ids=str)
def test_a_rows_draws_do_not_depend_on_its_neighbours(llama, make_drafter, options):
    if isinstance(make_drafter(llama), specnb.Adaptive):
        pytest.skip("rows share the width of a pass, so how much an adaptive drafter drafts depends on the neighbours")
    ids = torch.tensor([[0] * 5 + IDS[0, :7].tolist(), IDS[0].tolist(), prompt(12, seed=3)[0].tolist()])
    mask = (torch.arange(12) >= torch.tensor([5, 0, 0])[:, None]).long()
    options = dict(options, do_sample=True, max_new_tokens=12)
    out = specnb.generate(llama, ids, make_drafter(llama), attention_mask=mask, seed=7, **options)
    for b in range(3):
        row = ids[b, mask[b].bool()][None]
        alone = specnb.generate(llama, row, make_drafter(llama), seed=7 + b, **options)
        assert out.sequences[b, 12:].tolist() == alone.sequences[0, row.shape[1] :].tolist()


@pytest.mark.parametrize("option", ["repetition_penalty", "no_repeat_ngram_size", "encoder_repetition_penalty"])
def test_several_samples_of_one_prompt_with_processors_that_look_at_the_prompt(llama, option):
    options = {
        option: 2 if option == "no_repeat_ngram_size" else 2.0,
        "do_sample": True,
        "seed": 3,
        "max_new_tokens": 6,
    }
    out = specnb.generate(llama, IDS, specnb.PromptLookup(), num_return_sequences=3, **options)
    for b in range(3):
        alone = specnb.generate(llama, IDS, specnb.PromptLookup(), **{**options, "seed": 3 + b})
        assert out.sequences[b].tolist() == alone.sequences[0].tolist()


def test_decode_takes_an_unpadded_batch_with_a_repetition_penalty(llama):
    ids = torch.cat([IDS, prompt(12, seed=4)])
    options = dict(max_new_tokens=9, do_sample=False, repetition_penalty=1.5)
    tokens = llama.generate(ids, custom_generate=specnb.decode, drafter=specnb.PromptLookup(), **options)
    assert tokens.tolist() == llama.generate(ids, **options).tolist()


def test_decode_refuses_processors_built_from_padding(llama):
    ids, mask = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 1, 2]]), torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    with pytest.raises(ValueError, match=r"RepetitionPenalty.*Use specnb\.generate"):
        llama.generate(
            ids, attention_mask=mask, custom_generate=specnb.decode, repetition_penalty=1.5, max_new_tokens=3
        )
