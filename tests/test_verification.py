"""Greedy verification against the obvious oracle: walk the row, stop at the first disagreement."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specnb import verify_greedy
from specnb.verification import favourites


def oracle(draft: list[int], target: list[int]) -> tuple[int, int]:
    """Accepted count and next token of one row, by hand."""
    accepted = 0
    while accepted < len(draft) and draft[accepted] == target[accepted]:
        accepted += 1
    return accepted, target[accepted]


def logits_for(choices: torch.Tensor, vocab: int) -> torch.Tensor:
    """Random logits [B, T, V] whose argmax is choices [B, T]."""
    logits = torch.randn(*choices.shape, vocab)
    return logits.scatter(-1, choices[..., None], float(logits.max()) + 1)


@st.composite
def batches(draw):
    rows, k, vocab = draw(st.integers(1, 4)), draw(st.integers(0, 5)), draw(st.integers(2, 4))
    token = st.integers(0, vocab - 1)
    draft = draw(st.lists(st.lists(token, min_size=k, max_size=k), min_size=rows, max_size=rows))
    target = draw(st.lists(st.lists(token, min_size=k + 1, max_size=k + 1), min_size=rows, max_size=rows))
    lengths = draw(st.lists(st.integers(0, k), min_size=rows, max_size=rows))
    return draft, target, lengths, vocab


@settings(deadline=None, max_examples=300)
@given(batches())
def test_every_row_decides_as_if_walked_by_hand(batch):
    draft, target, lengths, vocab = batch
    tokens = torch.tensor(draft, dtype=torch.long).reshape(len(draft), -1)
    verdict = verify_greedy(tokens, logits_for(torch.tensor(target), vocab), torch.tensor(lengths))
    found = list(zip(verdict.num_accepted.tolist(), verdict.next_token.tolist()))
    assert found == [oracle(d[:n], t) for d, t, n in zip(draft, target, lengths)]


def test_a_match_after_the_rejection_is_dropped():
    verdict = verify_greedy(torch.tensor([[1, 2, 3]]), logits_for(torch.tensor([[1, 9, 3, 4]]), 10))
    assert (int(verdict.num_accepted), int(verdict.next_token)) == (1, 9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_ties_go_to_the_lowest_id_in_every_dtype(dtype):
    logits = torch.zeros(1, 3, 5, dtype=dtype)
    verdict = verify_greedy(torch.tensor([[0, 1]]), logits)
    assert (int(verdict.num_accepted), int(verdict.next_token)) == (1, 0)


def test_token_id_0_is_an_ordinary_token():
    verdict = verify_greedy(torch.tensor([[0, 0]]), logits_for(torch.tensor([[0, 0, 0]]), 3))
    assert (int(verdict.num_accepted), int(verdict.next_token)) == (2, 0)


def test_no_draft_at_all_is_plain_decoding():
    verdict = verify_greedy(torch.zeros(2, 0, dtype=torch.long), logits_for(torch.tensor([[4], [2]]), 5))
    assert verdict.num_accepted.tolist() == [0, 0]
    assert verdict.next_token.tolist() == [4, 2]


def test_nan_names_row_and_position():
    logits = torch.zeros(2, 3, 5)
    logits[1, 2, 4] = float("nan")
    with pytest.raises(ValueError, match="row 1 at position 2"):
        verify_greedy(torch.zeros(2, 2, dtype=torch.long), logits)


def test_nan_in_a_place_the_row_does_not_use_is_no_error():
    logits = logits_for(torch.tensor([[1, 2, 3]]), 5)
    logits[0, 2] = float("nan")
    verdict = verify_greedy(torch.tensor([[1, 0]]), logits, torch.tensor([1]))
    assert (int(verdict.num_accepted), int(verdict.next_token)) == (1, 2)


def test_minus_infinity_in_one_row_does_not_reach_another():
    logits = torch.zeros(2, 2, 4)
    logits[0, :, 1:] = float("-inf")
    logits[1, :, 2] = 1
    verdict = verify_greedy(torch.tensor([[0], [2]]), logits)
    assert verdict.num_accepted.tolist() == [1, 1]
    assert verdict.next_token.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("tokens", "logits", "lengths", "message"),
    [
        (torch.zeros(2, dtype=torch.long), torch.zeros(2, 1, 5), None, r"\[B, K\]"),
        (torch.zeros(1, 2), torch.zeros(1, 3, 5), None, "LongTensor"),
        (torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 2, 5), None, r"K \+ 1 places"),
        (torch.zeros(1, 2, dtype=torch.long), torch.zeros(2, 3, 5), None, r"expected \[1, 3, V\]"),
        (torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 3, 5), torch.tensor([3]), "0…2"),
        (torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 3, 5), torch.tensor([1, 1]), "draft_lengths"),
    ],
)
def test_shapes_that_do_not_fit_are_named(tokens, logits, lengths, message):
    with pytest.raises(ValueError, match=message):
        verify_greedy(tokens, logits, lengths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_favourites_are_the_first_of_the_highest(dtype):
    scores = torch.randint(0, 5, (40, 30)).to(dtype)  # many ties
    scores[3, 7] = scores[3, 20] = float("nan")
    scores[5], scores[6, 4] = float("-inf"), float("inf")
    scores[8, 2] = -scores[3, 7]  # a NaN with a minus
    scores[9:12] = -1 - scores[9:12]  # nothing above 0
    scores[12] = -scores[12]  # -0 and 0 are equal
    scores[12, :9] = 0
    best, tokens = favourites(scores)
    expected = scores.max(dim=-1)
    assert torch.equal(best.nan_to_num(-9), expected.values.nan_to_num(-9))
    sound = ~expected.values.isnan()
    first = (scores == expected.values[:, None]).int().argmax(dim=-1)
    assert torch.equal(tokens[sound], first[sound])
    assert torch.equal(favourites(scores[:, ::2])[1], favourites(scores[:, ::2].clone())[1])
    assert [len(found) for found in favourites(scores[:0])] == [0, 0]
