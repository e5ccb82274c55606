"""What cannot work is refused before the first pass, with the reason and what to do; nothing is lost."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import nn

import specnb
import specnb.decoding
from tests.tiny import CONTEXT, VOCAB, plain, prompt, tiny_model

IDS = prompt(12)
_SMALL = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
              intermediate_size=48, initializer_range=0.3)  # fmt: skip
_NO_SPECIAL = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
_NEO = dict(vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
            max_position_embeddings=128, initializer_range=0.3)  # fmt: skip

# model that cannot work → (its configuration, what the message must say)
UNSUITABLE = {
    "recurrent": (hf.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2), "mamba: .*rolled back"),
    "hybrid": (hf.JambaConfig(**_SMALL, num_experts=2, attn_layer_period=2, attn_layer_offset=1,
                              use_mamba_kernels=False), "jamba: .*rolled back"),
    "convolutional hybrid": (hf.Lfm2Config(**_SMALL, layer_types=["conv", "full_attention"]), "lfm2: .*rolled back"),
    "chunked attention": (hf.Llama4TextConfig(**_SMALL, head_dim=8, intermediate_size_mlp=48, num_local_experts=2,
                                              attention_chunk_size=8), "llama4_text: .*rolled back"),
    "positions by ALiBi": (hf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4), "Bloom.*cannot run"),
    "window of its own": (hf.GPTNeoConfig(**_NEO, window_size=8), "GPTNeo.*other scores on a rolled-back cache"),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNSUITABLE)
def test_models_that_cannot_roll_back_are_refused_with_the_reason(kind):
    config, reason = UNSUITABLE[kind]
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match=reason):
        specnb.generate(model, IDS, specnb.PromptLookup(), max_new_tokens=4)
    with pytest.raises(ValueError, match=reason):
        specnb.DraftModel(model)


@pytest.mark.parametrize(
    "config",
    [
        hf.Gemma2Config(**_SMALL, **_NO_SPECIAL),
        hf.Olmo2Config(**_SMALL, **_NO_SPECIAL),
        hf.Starcoder2Config(**_SMALL, **_NO_SPECIAL, sliding_window=8),
        hf.GPTJConfig(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, rotary_dim=8, **_NO_SPECIAL),
        hf.GraniteConfig(**_SMALL, **_NO_SPECIAL),
    ],
    ids=lambda config: config.model_type,
)
def test_families_outside_the_tested_list_are_tried_once_and_then_used(config):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    out = specnb.generate(model, IDS, specnb.DraftModel(model, 3), max_new_tokens=17)
    assert out.sequences.tolist() == plain(model, IDS, max_new_tokens=17).tolist()


def test_an_encoder_decoder_model_is_refused():
    config = hf.T5Config(vocab_size=VOCAB, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
    with pytest.raises(ValueError, match="encoder-decoder"):
        specnb.generate(hf.T5ForConditionalGeneration(config).eval(), IDS)


def test_a_model_without_a_head_is_refused(llama):
    with pytest.raises(ValueError, match="AutoModelForCausalLM"):
        specnb.generate(llama.model, IDS)


def test_a_model_in_training_mode_is_refused():
    model = tiny_model().train()
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        specnb.generate(model, IDS)
    with pytest.raises(ValueError, match=r"draft model is in training mode.*model\.eval\(\)"):
        specnb.DraftModel(model)


@pytest.mark.parametrize("attention", ["flash_attention_2", "flex_attention"])
def test_attention_that_takes_no_4d_mask_is_refused(attention):
    model = tiny_model()
    model.config._attn_implementation_internal = attention
    with pytest.raises(ValueError, match=rf"{attention}.*set_attn_implementation\('sdpa'\)"):
        specnb.generate(model, IDS)


def test_a_wrapper_with_adapters_is_refused(llama):
    class PeftModel(nn.Module):
        def merge_and_unload(self):
            return llama

    with pytest.raises(TypeError, match=r"PeftModel.*merge_and_unload\(\)"):
        specnb.generate(PeftModel(), IDS)
    with pytest.raises(TypeError, match="expected a transformers causal language model"):
        specnb.generate(nn.Linear(2, 2), IDS)


def test_a_model_spread_over_devices_is_refused():
    model = tiny_model()
    model.hf_device_map = {"model.layers.0": "cpu", "model.layers.1": "disk"}
    with pytest.raises(ValueError, match="spread over cpu, disk"):
        specnb.generate(model, IDS)


def test_draft_and_target_on_different_devices(llama):
    drafter = specnb.DraftModel(tiny_model())
    drafter.model.to("meta")
    with pytest.raises(ValueError, match=r"draft\.to\('cpu'\)"):
        specnb.generate(llama, IDS, drafter)


# --- options ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_beams=3), "num_beams=3"),
        (dict(num_beams=2, num_return_sequences=2), "num_beams=2"),
        (dict(penalty_alpha=0.6, top_k=4), "penalty_alpha|contrastive"),
        (dict(prompt_lookup_num_tokens=5), r"drafter=specnb\.PromptLookup"),
        (dict(cache_implementation="static"), "its own cache"),
        (dict(guidance_scale=1.5), "guidance_scale"),
        (dict(output_attentions=True, return_dict_in_generate=True), "output_attentions"),
        (dict(output_hidden_states=True, return_dict_in_generate=True), "output_hidden_states"),
        (dict(max_new_tokens=0), "max_new_tokens"),
        (dict(max_new_tokens=-3), "max_new_tokens"),
        (dict(num_draft_tokens=3), "num_draft_tokens"),
        (dict(inputs_embeds=torch.zeros(1, 12, 32)), "inputs_embeds"),
        (dict(pass_width=0), "pass_width"),
        (dict(pass_width=2.5), "pass_width"),
        (dict(drafter="lookup"), r"specnb\.Drafter or None"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused_before_the_first_pass(llama, monkeypatch, options, message):
    drafter = options.pop("drafter", None) if "drafter" in options else specnb.PromptLookup()
    passes = []
    monkeypatch.setattr(specnb.decoding, "prefill", lambda *args, **kwargs: passes.append(1))
    with pytest.raises((ValueError, TypeError), match=message):
        specnb.generate(llama, IDS, drafter, **options)
    assert not passes


def test_a_model_as_drafter_says_how_to_wrap_it(llama):
    with pytest.raises(TypeError, match=r"specnb\.DraftModel\(model\)"):
        specnb.generate(llama, IDS, llama)


# --- input ---


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.long), "empty"),
        (torch.zeros(0, 3, dtype=torch.long), "empty"),
        (torch.tensor([1, 2, 3]), r"input_ids\[None\]"),
        (torch.zeros(1, 1, 3, dtype=torch.long), r"\[B, n\]"),
        (torch.tensor([[1.0, 2.0]]), "token ids"),
        ([[1, 2, 3]], "LongTensor"),
        ("Hello", "tokenizer"),
        (torch.tensor([[1, VOCAB]]), r"input_ids\[0, 1\] = 61 is outside the vocabulary 0…60"),
        (torch.tensor([[1, 2], [-1, 3]]), r"input_ids\[1, 0\] = -1"),
        (torch.ones(1, CONTEXT + 1, dtype=torch.long), "context holds 512"),
    ],
)
def test_bad_prompts_are_named(llama, ids, message):
    with pytest.raises((ValueError, TypeError), match=message):
        specnb.generate(llama, ids, specnb.PromptLookup(), max_new_tokens=4)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(1, 3), "shape of input_ids"),
        (torch.tensor([[0] * 12]), "row 0 must mark"),
        (torch.tensor([[1] * 5 + [0] + [1] * 6]), "unbroken stretch"),
    ],
)
def test_bad_masks_are_named(llama, mask, message):
    with pytest.raises(ValueError, match=message):
        specnb.generate(llama, IDS, attention_mask=mask, max_new_tokens=4)


@pytest.mark.parametrize("k", [0, -1, 2.0, "4", None, True])
@pytest.mark.parametrize("make", [specnb.PromptLookup, lambda k: specnb.DraftModel(tiny_model(), k)])
def test_a_draft_length_that_is_no_positive_number(make, k):
    with pytest.raises(ValueError, match="num_draft_tokens must be a whole number of at least 1"):
        make(k)


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama"])
def test_a_row_stops_with_a_warning_where_the_context_ends(family, make_drafter):
    model = tiny_model(family, **{"n_positions" if family == "gpt2" else "max_position_embeddings": 24})
    with pytest.warns(UserWarning, match="context holds 24 tokens"):
        out = specnb.generate(model, IDS, make_drafter(model), max_new_tokens=40)
    assert out.sequences.tolist() == plain(model, IDS, max_new_tokens=13).tolist()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([[1, 2]], "must return a specnb.Draft"),
        (specnb.Draft.from_lists([[1], [2]]), "must have 1 rows"),
        (specnb.Draft.from_lists([[1, VOCAB]]), r"proposed token 61 in row 0 at place 1"),
        (specnb.Draft.from_lists([[-1]]), "proposed token -1"),
    ],
)
def test_a_drafter_that_breaks_the_protocol_is_told_how(llama, answer, message):
    class Odd(specnb.Drafter):
        def draft(self, rows, limits):
            return answer

    with pytest.raises((ValueError, TypeError), match=message):
        specnb.generate(llama, IDS, Odd(4), max_new_tokens=8)


def test_a_drafter_without_a_method_is_told_which(llama):
    class Empty(specnb.Drafter):
        pass

    with pytest.raises(NotImplementedError, match="Empty must define propose"):
        specnb.generate(llama, IDS, Empty(4), max_new_tokens=8)


# --- what others' runs brought to light ---


@pytest.mark.parametrize("drafter", [None, specnb.PromptLookup()], ids=["none", "lookup"])
def test_longrope_is_refused_where_a_pass_would_change_its_rotation(drafter):
    rope = dict(rope_type="longrope", rope_theta=10000.0, short_factor=[1.0] * 4, long_factor=[4.0] * 4,
                original_max_position_embeddings=32, factor=16.0)  # fmt: skip
    model = tiny_model(rope_parameters=rope)
    with pytest.raises(ValueError, match="longrope"):
        specnb.generate(model, IDS, drafter, max_new_tokens=30)
    out = specnb.generate(model, IDS, drafter, max_new_tokens=8)
    assert out.sequences.tolist() == plain(model, IDS, max_new_tokens=8).tolist()


@pytest.mark.parametrize("name", ["position_ids", "token_type_ids", "assistant_model", "negative_prompt_ids"])
def test_inputs_that_would_be_dropped_in_silence_are_refused(llama, name):
    with pytest.raises(ValueError, match=name):
        specnb.generate(llama, IDS, max_new_tokens=4, **{name: torch.ones_like(IDS)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(seed=1.5), "seed"),
        (dict(seed="a"), "seed"),
        (dict(seed=[1, 2]), "2 for 1 rows"),
        (dict(return_trace="all"), "return_trace"),
        (dict(attention_mask=[[1] * 12]), "attention_mask must be a tensor"),
    ],
)
def test_arguments_of_the_wrong_kind_are_named(llama, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        specnb.generate(llama, IDS, max_new_tokens=4, do_sample=True, **options)


@pytest.mark.parametrize(
    "draft",
    [
        specnb.Draft(torch.tensor([[1.0]]), torch.tensor([1])),
        specnb.Draft(torch.tensor([[1]]), torch.tensor([-1])),
        specnb.Draft(torch.tensor([[1]]), torch.tensor([1.0])),
        specnb.Draft(torch.tensor([[1]]), torch.tensor([1]), torch.ones(1, 1, VOCAB + 1) / VOCAB),
    ],
)
def test_drafts_that_are_no_drafts(llama, draft):
    class Odd(specnb.Drafter):
        def draft(self, rows, limits):
            return draft

    with pytest.raises(ValueError, match=r"whole numbers|probs must be"):
        specnb.generate(llama, IDS, Odd(4), max_new_tokens=8, do_sample=True)


@pytest.mark.parametrize("answer", [3, "word", [3.7], [[1, 2]]])
def test_proposals_that_are_no_list_of_tokens(llama, answer):
    drafter = specnb.Scripted([[1]])
    drafter.propose = lambda context, limit: answer
    with pytest.raises(TypeError, match=r"Scripted\.propose must return a list of token ids"):
        specnb.generate(llama, IDS, drafter, max_new_tokens=8)


@pytest.mark.parametrize("answer", [None, (), iter([4, 5]), torch.tensor([4, 5])])
def test_proposals_of_other_kinds_are_taken_as_they_are_meant(llama, answer):
    drafter = specnb.Scripted([[1]])
    drafter.propose = lambda context, limit: answer
    out = specnb.generate(llama, IDS, drafter, max_new_tokens=8)
    assert out.sequences.tolist() == plain(llama, IDS, max_new_tokens=8).tolist()


@pytest.mark.parametrize("count", [1.9, [1, 2, 3]])
def test_rollback_counts_that_are_no_counts(llama, count):
    with pytest.raises(ValueError, match="rollback takes a whole number"):
        specnb.RaggedCache(llama.config, 2, 8).rollback(count)
