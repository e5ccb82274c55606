"""One vocabulary or two? Padding is let through in both directions, another tokenizer is not."""

from __future__ import annotations

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

import specnb
from specnb.vocabularies import difference, same_but_for_padding
from tests.tiny import VOCAB, plain, prompt, tiny_model

IDS = prompt(12) % (VOCAB - 3)
SAMPLING = dict(do_sample=True, max_new_tokens=20, seed=0, return_trace="probs")


def tokenizer(words, special=(), kind=PreTrainedTokenizerFast):
    made = kind(tokenizer_object=Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)})))
    made.add_tokens([AddedToken(word, special=True) for word in special], special_tokens=True)
    return made


def words(n, prefix="word"):
    return [f"{prefix}{i}" for i in range(n)]


def loving(ids, vocab_size):
    """A draft that would guess these ids above all."""
    model = tiny_model(vocab_size=vocab_size, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[ids] *= 50
    return model


# --- padding ---


def test_ids_that_only_the_target_has_are_never_drafted(llama):
    out = specnb.generate(llama, IDS, specnb.DraftModel(tiny_model(vocab_size=VOCAB - 3), 3), **SAMPLING)
    laws = torch.cat([r.q for r in out.trace if r.drafted])
    assert laws.shape[1] == VOCAB and float(laws[:, VOCAB - 3 :].abs().max()) == 0
    torch.testing.assert_close(laws.sum(-1), torch.ones(len(laws)))


def test_ids_that_only_the_draft_has_are_never_drafted(llama):
    """Even by a draft that would like them best: greedy, and in the law it draws from."""
    beyond = loving(range(VOCAB, VOCAB + 3), VOCAB + 3)
    logits = beyond(IDS).logits[0].detach().abs()
    assert float(logits[:, VOCAB:].max()) > float(logits[:, :VOCAB].max())  # it would indeed
    out = specnb.generate(llama, IDS, specnb.DraftModel(beyond, 3), **SAMPLING)
    laws = torch.cat([r.q for r in out.trace if r.drafted])
    assert laws.shape[1] == VOCAB
    torch.testing.assert_close(laws.sum(-1), torch.ones(len(laws)))
    out = specnb.generate(llama, IDS, specnb.DraftModel(beyond, 3), max_new_tokens=20, return_trace=True)
    assert max(token for r in out.trace for token in r.drafted) < VOCAB
    assert out.sequences.tolist() == plain(llama, IDS, max_new_tokens=20).tolist()


@pytest.mark.parametrize("sizes", [(151_936, 152_064), (152_064, 151_936)])
def test_a_vocabulary_padded_to_151936_and_to_152064(sizes):
    narrow = dict(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1)
    target, draft = (tiny_model(vocab_size=size, seed=i, **narrow) for i, size in enumerate(sizes))
    out = specnb.generate(target, IDS, specnb.DraftModel(draft, 2), max_new_tokens=6)
    assert out.sequences.tolist() == plain(target, IDS, max_new_tokens=6).tolist()
    assert int(out.stats.drafted) > 0


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (151_936, 152_064, True),
        (32_000, 32_001, True),
        (50_257, 50_304, True),
        (50_257, 50_257, True),
        (32_000, 32_768, False),
        (49_152, 151_936, False),
        (64, 128, False),  # small ones are not forgiven more than a tenth
    ],
)
def test_what_passes_for_padding(one, other, same):
    assert same_but_for_padding(one, other) is same_but_for_padding(other, one) is same


# --- other tokenizers ---


def named(model, name):
    model.config._name_or_path = name
    return model


def no_pass(*args, **kwargs):
    raise AssertionError("a pass was made")


def test_sizes_that_differ_by_more_than_padding_are_enough_to_ask(monkeypatch):
    """Both models are named, and what to do is said, before the prompt is read."""
    target, draft = named(tiny_model(), "me/target"), named(tiny_model(vocab_size=2 * VOCAB), "you/draft")
    drafter = specnb.DraftModel(draft)
    monkeypatch.setattr(target, "forward", no_pass)
    told = (
        r"'me/target' \(61 tokens\) and the draft 'you/draft' \(122 tokens\) do not share a vocabulary: their sizes "
        r"differ by more than padding.*DraftModel\(\.\.\., tokenizer=\.\.\.\) and generate\(\.\.\., tokenizer=\.\.\.\)"
    )
    with pytest.raises(ValueError, match=told):
        specnb.generate(target, IDS, drafter)
    with pytest.raises(ValueError, match=told):
        specnb.Batcher(target, drafter)


def test_tokenizers_of_one_class_and_size_that_differ_in_content(llama):
    drafter = specnb.DraftModel(named(tiny_model(), "you/draft"), tokenizer=tokenizer(words(VOCAB, "wort")))
    message = r"assign different ids\. 61 of 61 ids mean another token, such as 0, which is 'word0' .* 'wort0'"
    with pytest.raises(ValueError, match=message) as caught:
        specnb.generate(llama, IDS, drafter, tokenizer=tokenizer(words(VOCAB)), max_new_tokens=4)
    assert "LlamaForCausalLM" in str(caught.value) and "you/draft" in str(caught.value)
    with pytest.raises(ValueError, match=message):
        specnb.Batcher(llama, drafter, tokenizer=tokenizer(words(VOCAB)))


def test_two_swapped_words_are_enough(llama):
    swapped = words(VOCAB)
    swapped[7], swapped[9] = swapped[9], swapped[7]
    with pytest.raises(ValueError, match="2 of 61 ids mean another token, such as 7"):
        specnb.generate(
            llama, IDS, specnb.DraftModel(tiny_model(), tokenizer=tokenizer(swapped)), tokenizer=tokenizer(words(VOCAB))
        )


class Another(PreTrainedTokenizerFast):
    """A tokenizer by another name."""


@pytest.mark.parametrize("size", [VOCAB, VOCAB // 2, 2 * VOCAB])
def test_tokenizers_of_other_classes_that_agree_in_content_decide_whatever_the_sizes(llama, size):
    """One may have tokens that the other lacks: where both have an id, it means the same."""
    drafter = specnb.DraftModel(tiny_model(vocab_size=size), tokenizer=tokenizer(words(size), kind=Another))
    ids = IDS % (VOCAB // 2)
    out = specnb.generate(llama, ids, drafter, tokenizer=tokenizer(words(VOCAB)), max_new_tokens=20)
    assert out.sequences.tolist() == plain(llama, ids, max_new_tokens=20).tolist()


def test_special_tokens_may_be_renamed():
    one = tokenizer(words(9), special=["<reserved 1>", "<end>"])
    assert difference(one, tokenizer(words(9), special=["<tool>", "<end>"])) is None
    assert "8 of 9" in difference(one, tokenizer(["word0", *words(8, "wort")], special=["<tool>", "<end>"]))


def test_tokenizers_without_a_common_id():
    assert "no id in common" in difference(tokenizer(words(3)), tokenizer([]))


def test_a_pair_found_to_agree_is_not_gone_through_again_until_it_changes():
    looked = []

    class Watched(PreTrainedTokenizerFast):
        def get_vocab(self):
            looked.append(1)
            return super().get_vocab()

    one, other = tokenizer(words(9), kind=Watched), tokenizer(words(9))
    looked.clear()
    for _ in range(3):
        assert difference(one, other) is None
    assert len(looked) == 1
    one.add_tokens(["more"])
    other.add_tokens(["wort"])
    looked.clear()
    assert difference(one, other) is None  # added tokens are names, see above
    assert len(looked) == 1
    assert "different ids" in difference(one, tokenizer(words(9, "wort")))


def test_something_that_is_no_tokenizer():
    with pytest.raises(TypeError, match=r"which has get_vocab\(\), got str"):
        specnb.DraftModel(tiny_model(), tokenizer="gpt2")
