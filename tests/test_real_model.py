"""The default model, float32 and bfloat16: the text of plain generate, token for token, on prompts of every kind."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import specnb

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

PROMPTS = [
    "Write a Python function that reverses a linked list.",
    "Tell me a short story about a lighthouse keeper and a whale.",
    "What is 17 times 23? Show each step.",
    "Correct the spelling and repeat the text: The qick brown fox jumpd over the lazi dog, and the dog slept on.",
    "List ten fruits, one per line, with their colour.",
    "Translate into French: Where is the nearest railway station?",
    "Repeat exactly: alpha beta gamma delta alpha beta gamma delta alpha beta gamma delta.",
    'Turn into JSON with the keys "name" and "age": Ada is 36, Alan is 41, Grace is 85.',
    "Explain why the sky is blue to a child of six.",
    "Summarise: The river rose by two metres in the night. The river rose because the dam was opened. Nobody was hurt.",
    "def fibonacci(n):",
    "Once upon a time",
    "1, 1, 2, 3, 5, 8, 13,",
    "Name three differences between cats and dogs.",
    "Write a haiku about rain.",
    "SELECT name FROM users WHERE",
    "Who wrote Romeo and Juliet, and when?",
    "Give a recipe for pancakes with exact amounts.",
    "Continue the list: red, green, blue, red, green, blue, red,",
    "¿Cuál es la capital de España?",
]
NEW = 48


def encode(tokenizer, text: str) -> torch.Tensor:
    """A chat prompt for whole sentences, raw text for beginnings."""
    if text[-1] not in ".?":
        return tokenizer(text, return_tensors="pt").input_ids
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    return tokenizer(chat, return_tensors="pt", add_special_tokens=False).input_ids


def padded(tokenizer, rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts [1, n] of different length as one left-padded batch, and its mask."""
    longest = max(ids.shape[1] for ids in rows)
    batch = torch.full((len(rows), longest), tokenizer.pad_token_id)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for b, ids in enumerate(rows):
        batch[b, longest - ids.shape[1] :], mask[b, longest - ids.shape[1] :] = ids[0], 1
    return batch, mask


@pytest.fixture(scope="module")
def expected(real):
    """transformers' own greedy text of each prompt, all in one padded batch: (prompt [1, n], its new tokens)."""
    model, tokenizer = real
    prompts = [encode(tokenizer, text) for text in PROMPTS]
    ids, mask = padded(tokenizer, prompts)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)[:, ids.shape[1] :].tolist()
    end = tokenizer.eos_token_id
    return [(p, new[: new.index(end) + 1] if end in new else new) for p, new in zip(prompts, out)]


@pytest.fixture(scope="module")
def real_bfloat16():
    return specnb.load_model(dtype=torch.bfloat16)[0]


def test_prompt_lookup_writes_the_text_of_plain_generate(real, expected):
    """Each prompt alone."""
    for ids, text in expected:
        out = specnb.generate(real[0], ids, specnb.PromptLookup(), max_new_tokens=NEW)
        assert out.sequences[0, ids.shape[1] :].tolist() == text


def new_tokens(out: specnb.GenerateOutput, prompt_length: int) -> list[list[int]]:
    """What each row of a batch has got, without its padding."""
    return [row[: int(n)].tolist() for row, n in zip(out.sequences[:, prompt_length:], out.num_new_tokens)]


@pytest.mark.parametrize("part", [slice(0, 10), slice(10, 20)], ids=str)
def test_a_draft_model_writes_the_text_of_plain_generate(real, expected, real_bfloat16, part):
    """Ten prompts in a ragged batch. The draft is the target in bfloat16: often right, not always."""
    prompts, texts = zip(*expected[part])
    ids, mask = padded(real[1], prompts)
    draft = specnb.DraftModel(real_bfloat16)
    out = specnb.generate(real[0], ids, draft, attention_mask=mask, max_new_tokens=NEW)
    assert new_tokens(out, ids.shape[1]) == list(texts)
    assert bool((out.stats.tokens_per_pass > 1.5).all())
    assert int(out.stats.rejected.sum()) > 0


def test_a_copy_of_the_target_gives_five_tokens_a_pass(real):
    model, tokenizer = real
    ids = encode(tokenizer, PROMPTS[1])
    out = specnb.generate(model, ids, specnb.DraftModel(model, num_draft_tokens=4), max_new_tokens=45)
    assert out.stats.tokens_per_pass.tolist() == [5]


def test_one_pass_width_in_bfloat16_is_bit_identical_with_and_without_drafter(real, real_bfloat16):
    """All prompts in two batches with the drafter that costs nothing, a few and one alone with one that does."""
    rows = [encode(real[1], text) for text in PROMPTS]
    lookup = specnb.PromptLookup()
    draft = specnb.DraftModel.from_pretrained("smollm2-135m-draft", target=real_bfloat16, num_draft_tokens=7)
    for part, drafters in (
        (rows[:10], [lookup]),
        (rows[10:], [lookup]),
        (rows[3:6], [draft]),
        (rows[4:5], [draft, lookup]),
    ):
        ids, mask = padded(real[1], part)
        options = dict(attention_mask=mask, max_new_tokens=24, pass_width=8)
        plain, *drafted = (
            specnb.generate(real_bfloat16, ids, drafter, **options).sequences.tolist() for drafter in (None, *drafters)
        )
        for text in drafted:
            assert text == plain


def test_without_a_pass_width_bfloat16_differs_only_at_near_ties(real, real_bfloat16):
    """Where two widths first disagree, the two candidates' logits are a few units in the last place apart."""
    for text in PROMPTS[:2]:
        ids = encode(real[1], text)
        plain = specnb.generate(real_bfloat16, ids, max_new_tokens=NEW).sequences[0]
        drafted = specnb.generate(
            real_bfloat16, ids, specnb.DraftModel(real_bfloat16, 5), max_new_tokens=NEW
        ).sequences[0]
        n = min(len(plain), len(drafted))
        different = (plain[:n] != drafted[:n]).nonzero()
        if len(different):
            first = int(different[0])
            gap, unit = gap_at(real_bfloat16, plain[:first], plain[first], drafted[first])
            assert gap <= 6 * unit, f"{text!r}: gap {gap:.3g} at token {first} is {gap / unit:.1f} units"


def gap_at(model, context: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """How far apart the logits of tokens a and b are after the context, and bfloat16's spacing at that size."""
    with torch.no_grad():
        logits = model(input_ids=context[None]).logits[0, -1].float()
    spacing = 2.0 ** (int(torch.frexp(logits[a]).exponent) - 8)  # bfloat16 keeps 8 bits
    return abs(float(logits[a] - logits[b])), spacing


def test_ten_rejected_rounds_leave_the_cache_as_a_fresh_prefill(real):
    model, tokenizer = real
    ids = encode(tokenizer, PROMPTS[1])
    cache = specnb.RaggedCache(model.config, 1, 512)
    specnb.target_pass(model, cache, ids)
    for token in range(100, 110):
        specnb.target_pass(model, cache, torch.tensor([[token, 7, 7, 7, 7]]))
        cache.rollback(4)
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    after = specnb.target_pass(model, cache, torch.tensor([[200]]))
    with torch.no_grad():
        fresh = model(input_ids=torch.cat([ids, torch.tensor([[200]])], dim=1)).logits[:, -1:]
    torch.testing.assert_close(after, fresh, atol=1e-4, rtol=1e-4)


def test_prompt_lookup_in_a_padded_batch_too(real, expected):
    prompts, texts = zip(*(expected[i] for i in (0, 4, 10)))
    ids, mask = padded(real[1], prompts)
    out = specnb.generate(real[0], ids, specnb.PromptLookup(), attention_mask=mask, max_new_tokens=NEW)
    assert new_tokens(out, ids.shape[1]) == list(texts)
