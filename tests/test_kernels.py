"""The kernels of the compiled pass against float64 oracles, and what a row may depend on: nothing but itself."""

from __future__ import annotations

import random
import shutil
import subprocess

import pytest
import torch

from specnb import kernels
from specnb.cache import sight
from specnb.packed import PackedLinear

pytestmark = pytest.mark.skipif(kernels.compiler() is None, reason="no C++ compiler")
DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8}  # relative to the sum of the products' sizes


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


# ── linear ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (31, 7), (32, 32), (33, 65), (100, 129), (192, 64)], ids=str)
def test_linear_layers_are_right(n, k, bias, dtype):
    weight, b = normal(n, k, dtype=dtype), normal(n, dtype=dtype, seed=1) if bias else None
    layer = PackedLinear(weight, b)
    for m in range(1, 41):
        x = normal(m, k, dtype=dtype, seed=m)
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
        size = expected.abs() + torch.nn.functional.linear(x.double().abs(), weight.double().abs()) + 1e-3
        got = layer(x)
        assert got.dtype == dtype and got.shape == (m, n)
        assert bool(((got.double() - expected).abs() <= ROUNDING[dtype] * size).all())


def test_a_bfloat16_result_is_rounded_once(dtype):
    """Sums are kept in float32: a result is the float32 one, rounded to nearest."""
    weight, x = normal(64, 300, dtype=torch.bfloat16), normal(5, 300, dtype=torch.bfloat16, seed=1)
    rounded = PackedLinear(weight)(x)
    assert torch.equal(rounded, PackedLinear(weight.float())(x.float()).bfloat16())


def test_linear_takes_any_layout_of_x(dtype):
    layer, x = PackedLinear(normal(40, 24, dtype=dtype)), normal(3, 5, 24, dtype=dtype, seed=1)
    expected = layer(x)
    assert expected.shape == (3, 5, 40)
    assert torch.equal(layer(x.transpose(0, 1)), expected.transpose(0, 1))
    assert torch.equal(layer(x[:, ::2]), expected[:, ::2])
    wide = torch.stack([x, -x], dim=-1)
    assert torch.equal(layer(wide[..., 0]), expected)
    assert torch.equal(layer(x[:1].expand(4, -1, -1)), expected[:1].expand(4, -1, -1))
    assert layer(x[:0]).shape == (0, 5, 40)


def test_a_row_of_a_linear_layer_depends_on_nothing_else(dtype, two_threads):
    """Bit for bit: neither on the number of rows, nor on its place among them, nor on the number of threads."""
    layer, x = PackedLinear(normal(100, 77, dtype=dtype), normal(100, dtype=dtype)), normal(40, 77, dtype=dtype, seed=1)
    whole = layer(x)
    for m in (1, 2, 3, 11, 12, 13, 24, 25, 39):
        assert torch.equal(layer(x[:m]), whole[:m])
        assert torch.equal(layer(x[-m:]), whole[-m:])
    torch.set_num_threads(1)
    assert torch.equal(layer(x), whole)


def test_weights_side_by_side_are_the_same_weights(dtype):
    """Whatever their sizes, each begins where a line of the cache begins, and none reaches into the next."""
    weights = [kernels.pack(normal(*shape, dtype=dtype, seed=i)) for i, shape in enumerate([(40, 3), (1, 1), (64, 9)])]
    weights.append(torch.arange(3, dtype=torch.uint8))
    stretch = kernels.Stretch(sum(weight.nbytes + 64 for weight in weights))
    moved = [stretch.take_in(weight) for weight in weights]
    assert all(map(torch.equal, moved, weights)) and all(weight.is_contiguous() for weight in moved)
    starts = [weight.data_ptr() for weight in moved]
    assert starts == sorted(starts) and all(start % 64 == 0 for start in starts)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_number_stays_in_its_row(bad, dtype):
    layer, x = PackedLinear(normal(50, 20, dtype=dtype)), normal(14, 20, dtype=dtype, seed=1)
    good = layer(x)
    x[13, 3] = bad
    got = layer(x)
    assert torch.equal(got[:13], good[:13])
    assert not bool(got[13].isfinite().any())
    assert bool(got[13].isnan().all()) == (bad != bad)


@pytest.mark.parametrize("value", [3e38, -3.4e38, 1e-40, 0.0, -0.0, 1.00390625, 1.01171875])
def test_rounding_to_bfloat16_is_torchs(value):
    layer = PackedLinear(torch.zeros(1, 1, dtype=torch.bfloat16), torch.tensor([value]))
    assert layer(torch.zeros(1, 1, dtype=torch.bfloat16)).item() == torch.tensor(value).bfloat16().item()


def test_linear_refuses_another_dtype(dtype):
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    with pytest.raises(TypeError, match="dtype"):
        PackedLinear(normal(32, 8, dtype=dtype))(normal(2, 8, dtype=other))


# ── attention ───────────────────────────────────────────────────────────────────────────────────────────────────────


def places_of(lengths, rows, t):
    """[R, 1, T, 4]: T tokens after so many in each row, the row's number, and what they see: all up to themselves."""
    slots = torch.tensor(lengths)[:, None] + torch.arange(t)
    rows = torch.tensor(rows)[:, None].expand_as(slots)
    return torch.stack([slots, rows, slots + 1, torch.zeros_like(slots)], dim=-1)[:, None]


def oracle(q, keys, values, places, scale, window):
    """Attention in float64, [R, T, H, D], from the definition: a softmax over the slots that are seen."""
    group = q.shape[1] // keys.shape[1]
    out = []
    for query, tokens_places in zip(q.double(), places.flatten(1, -2).tolist()):
        tokens = []
        for t, (_, row, before, bits) in enumerate(tokens_places):
            k, v = (x[row].double().repeat_interleave(group, dim=0) for x in (keys, values))
            seen = [*range(before), *(before + i for i in range(64) if bits >> i & 1)][-window if window else 0 :]
            weights = (torch.einsum("hd,hsd->hs", query[:, t], k[:, seen]) * scale).softmax(dim=-1)
            tokens.append(torch.einsum("hs,hsd->hd", weights, v[:, seen]))
        out.append(torch.stack(tokens))
    return torch.stack(out)


def tree_places(length, row, parents):
    bits, _ = sight(tuple(parents))
    return torch.tensor([[length + t, row, length, seen] for t, seen in enumerate(bits)])[None, None]


def attend(q, keys, values, places, scale=0.3, window=0):
    return torch.ops.specnb.ragged_attention(q, keys, values, places, scale, window)


def check_attention(q, keys, values, places, scale=0.3, window=0):
    expected, got = oracle(q, keys, values, places, scale, window), attend(q, keys, values, places, scale, window)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2}[q.dtype]
    assert got.dtype == q.dtype and got.shape == expected.shape
    assert float((got.double() - expected).abs().max()) <= tolerance * float(values.double().abs().max())


@pytest.mark.parametrize("window", [0, 1, 5, 64], ids="window {}".format)
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(1, 1, 8), (4, 2, 16), (9, 3, 64), (3, 3, 80), (8, 1, 33)])
def test_attention_is_right(heads, kv_heads, d, window, dtype):
    """Several rows at different lengths, in any order, over different numbers of tokens."""
    keys, values = normal(4, kv_heads, 70, d, dtype=dtype), normal(4, kv_heads, 70, d, dtype=dtype, seed=1)
    for t in (1, 2, 4, 7, 32):
        places = places_of([0, 38, 13], [2, 0, 3], t)
        check_attention(normal(3, heads, t, d, dtype=dtype, seed=t), keys, values, places, d**-0.5, window)


def test_tokens_of_several_rows_side_by_side(dtype, two_threads):
    """A pass may hold 5 tokens of one row, 1 of the next and 3 of a third: each as if it were alone, bit for bit."""
    keys, values = normal(6, 2, 70, 16, dtype=dtype), normal(6, 2, 70, 16, dtype=dtype, seed=1)
    runs = [(12, 3, 5), (0, 0, 1), (40, 5, 3), (7, 3, 2), (60, 1, 1), (9, 2, 1)]  # length, row, tokens
    places = torch.cat([places_of([length], [row], t) for length, row, t in runs], dim=2)
    q = normal(1, 4, places.shape[2], 16, dtype=dtype, seed=2)
    check_attention(q, keys, values, places)
    together, start = attend(q, keys, values, places), 0
    for length, row, t in runs:
        part = attend(q[:, :, start : start + t], keys, values, places_of([length], [row], t))
        assert torch.equal(part, together[:, start : start + t])
        start += t
    assert torch.equal(attend(q[:, :, :4], keys, values, places[:, :, :4]), together[:, :4]), "threads share one run"


@pytest.mark.parametrize("scale", [1e4, 1e-4, 30.0, 0.0], ids="scale {}".format)
def test_attention_with_scores_of_any_size(scale, dtype):
    """Huge ones become one slot, tiny ones and equal ones a mean."""
    q, keys = normal(1, 2, 4, 8, dtype=dtype), normal(1, 2, 40, 8, dtype=dtype, seed=1)
    check_attention(q, keys, normal(1, 2, 40, 8, dtype=dtype, seed=2), places_of([33], [0], 4), scale)


@pytest.mark.parametrize("window", [0, 3, 9])
def test_attention_over_trees(dtype, window):
    """Wide ones and deep ones, of up to 62 nodes, beside a chain; the window counts ancestors, not slots."""
    order = random.Random(0)
    keys, values = normal(3, 2, 90, 16, dtype=dtype), normal(3, 2, 90, 16, dtype=dtype, seed=1)
    for n in (0, 1, 5, 33, 62):
        trees = [[order.randrange(-1, i) for i in range(n)], list(range(-1, n - 1))]
        places = torch.cat([tree_places(7, 2, trees[0]), tree_places(20, 0, trees[1]), places_of([11], [1], 3)], dim=2)
        q = normal(1, 4, places.shape[2], 16, dtype=dtype, seed=n)
        check_attention(q, keys, values, places, window=window)
        chain = attend(q[:, :, n + 1 : -3], keys, values, places_of([20], [0], n + 1), window=window)
        assert torch.equal(attend(q, keys, values, places, window=window)[:, n + 1 : -3], chain)


def test_attention_with_scores_far_from_zero():
    """Only differences count: scores around ±10⁴ (as far as float32 can tell them apart)."""
    for sign in (1, -1):
        keys = torch.zeros(1, 1, 40, 8)
        keys[..., 0], keys[..., 1] = sign * 1e4, torch.arange(40) % 7
        q = torch.zeros(1, 1, 3, 8)
        q[..., :2] = 1.0
        check_attention(q, keys, normal(1, 1, 40, 8, seed=2), places_of([30], [0], 3), 1.0)


def test_weights_sum_to_one(dtype):
    ones = torch.ones(1, 2, 300, 8, dtype=dtype)
    q, keys = 3 * normal(1, 2, 4, 8, dtype=dtype), normal(1, 2, 300, 8, dtype=dtype, seed=1)
    got = attend(q, keys, ones, places_of([290], [0], 4), 1.0)
    torch.testing.assert_close(got, torch.ones_like(got), rtol=0, atol=1e-6 if dtype == torch.float32 else 4e-3)


def test_attention_sees_nothing_but_its_own_slots(dtype, two_threads):
    """Bit for bit: neither how many tokens the pass has, nor later slots, other rows, capacity or threads matter."""
    keys, values = 2 * normal(3, 2, 64, 24, dtype=dtype), normal(3, 2, 64, 24, dtype=dtype, seed=1)
    q, places = normal(2, 6, 32, 24, dtype=dtype, seed=2), places_of([20, 9], [1, 2], 32)
    for window in (0, 7):
        whole = attend(q, keys, values, places, window=window)
        for t in (1, 2, 3, 5, 8, 12, 31):
            part = places_of([20, 9], [1, 2], t)
            assert torch.equal(attend(q[:, :, :t], keys, values, part, window=window), whole[:, :t])
            late = attend(q[:, :, t:], keys, values, places_of([20 + t, 9 + t], [1, 2], 32 - t), window=window)
            assert torch.equal(late, whole[:, t:])
        dirty = [buffer.clone() for buffer in (keys, values)]
        for buffer in dirty:
            buffer[0], buffer[1, :, 52:], buffer[2, :, 41:] = 1e30, -1e30, 7.0
        assert torch.equal(attend(q, *dirty, places, window=window), whole)
        larger = [torch.cat([buffer, buffer], dim=2) for buffer in (keys, values)]
        assert torch.equal(attend(q, *larger, places, window=window), whole)
        swapped = attend(q.flip(0), keys, values, places.flip(0), window=window)
        assert torch.equal(swapped.flip(0), whole)
        assert torch.equal(attend(q[1:], keys, values, places[1:], window=window), whole[1:])
        torch.set_num_threads(1)
        assert torch.equal(attend(q, keys, values, places, window=window), whole)
        torch.set_num_threads(2)


def test_attention_takes_any_layout_of_q(dtype):
    keys, places = normal(2, 2, 20, 8, dtype=dtype), places_of([3, 9], [0, 1], 4)
    q = normal(2, 4, 4, 8, dtype=dtype, seed=1)
    other = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert not other.is_contiguous()
    assert torch.equal(attend(other, keys, keys, places), attend(q, keys, keys, places))


@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_number_is_not_hidden_by_attention(where, bad, dtype):
    """Tokens that see it get NaN, as from torch's own softmax; rows that do not see it stay as they were."""
    q, keys, values = (normal(2, 2, *s, dtype=dtype, seed=i) for i, s in enumerate([(4, 8), (30, 8), (30, 8)]))
    places = places_of([10, 12], [0, 1], 4)
    q = q.abs() + 0.1  # so that a key of +inf scores +inf
    good = attend(q, keys, values, places)
    (q if where == "query" else keys if where == "key" else values)[1, 0, 2] = bad
    got = attend(q, keys, values, places)
    assert torch.equal(got[0], good[0])
    assert torch.equal(got[1, :, 1], good[1, :, 1])  # the other head
    touched = got[1, 2, 0] if where == "query" else got[1, :, 0]
    assert not bool(touched.isfinite().any())
    if where != "value":
        assert bool(touched.isnan().all())


def test_attention_refuses_a_cache_of_another_dtype(dtype):
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    keys = normal(1, 2, 20, 8, dtype=other)
    with pytest.raises(TypeError, match="dtype"):
        attend(normal(1, 2, 4, 8, dtype=dtype), keys, keys, places_of([3], [0], 4))


# ── store ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_store_writes_there_and_nowhere_else(dtype):
    keys, values = normal(4, 3, 20, 8, dtype=dtype), normal(4, 3, 20, 8, dtype=dtype, seed=1)
    key, value = normal(2, 3, 5, 8, dtype=dtype, seed=2), normal(2, 5, 3, 8, dtype=dtype, seed=3).transpose(1, 2)
    expected = [keys.clone(), values.clone()]
    for buffer, fresh in zip(expected, (key, value)):
        buffer[3, :, 15:20], buffer[1, :, 0:5] = fresh[0], fresh[1]
    torch.ops.specnb.ragged_store(keys, values, key, value, places_of([15, 0], [3, 1], 5))
    assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])


def test_store_takes_any_layout(dtype):
    keys = torch.zeros(1, 2, 9, 8, dtype=dtype)
    values, fresh = keys.clone(), normal(1, 2, 8, 4, dtype=dtype).transpose(2, 3)  # the last dimension is strided
    torch.ops.specnb.ragged_store(keys, values, fresh, fresh[:, :1].expand(-1, 2, -1, -1), places_of([4], [0], 4))
    assert torch.equal(keys[:, :, 4:8], fresh) and torch.equal(values[:, 1, 4:8], fresh[:, 0])


def test_store_refuses_a_cache_of_another_dtype(dtype):
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    keys, fresh = normal(1, 2, 20, 8, dtype=other), normal(1, 2, 4, 8, dtype=dtype)
    with pytest.raises(TypeError, match="dtype"):
        torch.ops.specnb.ragged_store(keys, keys.clone(), fresh, fresh, places_of([3], [0], 4))


# ── building ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def nothing_built(tmp_path, monkeypatch):
    """As on a machine that has never built the kernels."""
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path))
    kernels.library.cache_clear()
    yield tmp_path / "kernels"
    kernels.library.cache_clear()


def test_without_a_compiler_the_error_says_what_was_looked_for(nothing_built, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(kernels.NoCompiler, match=r"no C\+\+ compiler.*CXX"):
        kernels.library()
    assert not nothing_built.exists()


def test_a_compiler_that_fails_is_quoted(nothing_built, monkeypatch):
    said = subprocess.CompletedProcess([], 1, stdout="", stderr="unrecognized option '-fopenmp'")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: said)
    with pytest.raises(kernels.NoCompiler, match=r"could not build decoding.cpp:\nunrecognized option '-fopenmp'"):
        kernels.library()
    assert list(nothing_built.iterdir()) == []


def test_a_damaged_file_is_named(nothing_built, monkeypatch):
    def build(target):
        target.parent.mkdir(parents=True)
        target.write_bytes(b"no library")

    monkeypatch.setattr(kernels, "_build", build)
    with pytest.raises(kernels.NoCompiler, match=r"decoding-.*\.so does not load"):
        kernels.library()


def test_what_is_built_depends_on_the_compiler(monkeypatch):
    before = kernels._fingerprint()
    monkeypatch.setattr(kernels, "compiler", lambda: "/somewhere/else/c++")
    assert kernels._fingerprint() != before
