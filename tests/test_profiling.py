"""Measuring by a clock that is set by hand, counting against slow oracles. No real time is asserted anywhere."""

from __future__ import annotations

import copy
import math
import pickle
import xml.etree.ElementTree as ET
from statistics import median

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import specnb
from specnb import profiling
from specnb.cache import bucket_size, target_pass
from specnb.profiling import CostTable, PassCost, Rate, count_pass, quantity
from tests.tiny import FAMILIES, fresh_logits, tiny_model


class Clock:
    """Stands still unless a pass moves it on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    hand_set = Clock()
    monkeypatch.setattr(profiling, "perf_counter", hand_set)
    return hand_set


class FakePass:
    """A real pass that takes as long as it is told: `milliseconds(T, how many passes over T there were before)`."""

    def __init__(self, model, clock, milliseconds) -> None:
        self.model, self.clock, self.milliseconds = model, clock, milliseconds
        self.widths: list[int] = []
        self.seen: list[tuple[specnb.RaggedCache, list[int]]] = []

    def __call__(self, cache, tokens):
        T = tokens.shape[1]
        self.seen.append((cache, cache.lengths.tolist()))
        self.clock.now += self.milliseconds(T, self.widths.count(T)) / 1000
        self.widths.append(T)
        return target_pass(self.model, cache, tokens)


def measure(model, clock, milliseconds=lambda T, nth: 10.0 + T, positions=(1, 2, 4), **options):
    run = FakePass(model, clock, milliseconds)
    return specnb.forward_cost(model, positions, run=run, **{"context": 20, "repeats": 5, **options}), run


# --- medians of interleaved passes ---


def test_the_median_counts_and_all_samples_are_kept(llama, clock):
    times = [500.0, 3.0, 1.0, 2.0, 90.0, 4.0]  # the first one warms up
    cost, _ = measure(llama, clock, lambda T, nth: T * times[nth])
    assert cost.positions == (1, 2, 4)
    for T, ms, samples, spread in zip(cost.positions, cost.milliseconds, cost.samples, cost.spread, strict=True):
        assert samples == pytest.approx([T * ms for ms in times[1:]])
        assert ms == pytest.approx(T * median(times[1:])) == pytest.approx(3.0 * T)
        assert spread == pytest.approx(T * (4.0 - 2.0))  # the middle half of 1, 2, 3, 4, 90
    assert cost(3) == pytest.approx(9.0)
    assert cost.relative(4) == pytest.approx(4.0)


def test_passes_are_interleaved(llama, clock):
    positions = (1, 2, 3, 4, 6, 8)
    _, run = measure(llama, clock, positions=positions, repeats=4)
    rounds = [run.widths[i : i + 6] for i in range(0, len(run.widths), 6)]
    assert [sorted(one) for one in rounds] == [list(positions)] * 5
    assert len({tuple(one) for one in rounds}) > 1  # no width always follows the same other


def test_the_cache_is_left_as_it_was(llama, clock):
    _, run = measure(llama, clock, context=20, batch_size=2)
    caches = {id(cache): cache for cache, _ in run.seen}
    (cache,) = caches.values()
    assert all(lengths == [20, 20] for _, lengths in run.seen)
    assert cache.lengths.tolist() == [20, 20]
    tokens = profiling.some_tokens(llama, 2, 24)
    logits = target_pass(llama, cache, tokens[:, 20:])
    torch.testing.assert_close(logits, fresh_logits(llama, tokens)[:, 20:], atol=1e-4, rtol=0)


def test_contexts_make_a_table(llama, clock):
    def milliseconds(T, nth):
        return T + 0.5 * run_lengths[-1]

    run_lengths: list[int] = []
    run = FakePass(llama, clock, milliseconds)

    def spy(cache, tokens):
        run_lengths.append(int(cache.lengths[0]))
        return run(cache, tokens)

    table = specnb.forward_cost(llama, (1, 3), context=(0, 40), repeats=3, run=spy)
    assert isinstance(table, CostTable)
    assert {n: (cost.context, cost(3)) for n, cost in table.items()} == {
        0: (0, pytest.approx(3.0)),
        40: (40, pytest.approx(23.0)),
    }
    assert set(run_lengths[:4]) == {0, 40}  # contexts are interleaved too
    assert [(row["context"], row["T"]) for row in table.rows()] == [(0, 1), (0, 3), (40, 1), (40, 3)]


def test_a_fixed_width_is_one_pass_over_its_bucket(llama, monkeypatch):
    seen = []

    def spy(model, cache, tokens, **options):
        seen.append((tokens.shape[1], options.get("attended"), int(cache.lengths.max())))
        return target_pass(model, cache, tokens, **options)

    monkeypatch.setattr(profiling, "target_pass", spy)
    cost = specnb.forward_cost(llama, context=20, repeats=2, pass_width=8)
    assert seen == [(8, bucket_size(20), 20)] * 3
    assert cost.positions == (1, 8)
    assert cost(1) == cost(5) == cost(8)


def test_the_plain_pass_attends_to_what_is_there(llama, monkeypatch):
    seen = []

    def spy(model, cache, tokens, **options):
        seen.append(options)
        return target_pass(model, cache, tokens, **options)

    monkeypatch.setattr(profiling, "target_pass", spy)
    specnb.forward_cost(llama, (1, 2), context=20, repeats=1)
    assert seen == [{"attended": None}] * 4


def test_it_stops_early_but_not_too_early(llama, clock):
    cost, _ = measure(llama, clock, lambda T, nth: 10_000.0, repeats=50, max_seconds=1.0)
    assert [len(samples) for samples in cost.samples] == [3, 3, 3]
    cost, _ = measure(llama, clock, lambda T, nth: 1.0, repeats=5, max_seconds=1.0)
    assert [len(samples) for samples in cost.samples] == [5, 5, 5]


def test_it_says_how_far_it_is(llama, clock, capsys):
    measure(llama, clock, progress=True)
    assert "18 of 18 passes" in capsys.readouterr().err
    shares = []
    measure(llama, clock, repeats=1, progress=shares.append)
    assert shares == pytest.approx([n / 6 for n in range(1, 7)])


def test_a_run_that_fills_no_cache_is_found_out(llama):
    with pytest.raises(ValueError, match=r"must append its 1 tokens .* grown by \[0\]"):
        specnb.forward_cost(llama, (1,), context=5, run=lambda cache, tokens: None)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(positions=()), ValueError, "positions is empty"),
        (dict(positions=(0, 1)), ValueError, "at least 1"),
        (dict(positions=(1.5,)), TypeError, "whole number"),
        (dict(positions=4), TypeError, "sequence"),
        (dict(positions="14"), TypeError, "sequence"),
        (dict(context=-1), ValueError, "at least 0"),
        (dict(context=()), ValueError, "context is empty"),
        (dict(context=True), TypeError, "whole number"),
        (dict(context=500), ValueError, "makes? 532 tokens.*holds 512"),
        (dict(batch_size=0), ValueError, "batch_size must be at least 1"),
        (dict(repeats=0), ValueError, "repeats must be at least 1"),
        (dict(pass_width=0), ValueError, "pass_width"),
        (dict(pass_width=4, positions=(1, 8)), ValueError, "width 4 has no 8 positions"),
    ],
)
def test_bad_numbers_are_refused(llama, options, error, message):
    with pytest.raises(error, match=message):
        specnb.forward_cost(llama, **options)


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match="expected a transformers causal language model"):
        specnb.forward_cost(torch.nn.Linear(2, 2))


# --- bandwidth and peak ---


def test_bandwidth_is_bytes_by_seconds_of_the_faster_reader(monkeypatch):
    read = []

    def seconds(work, repeats, device):
        buffer = work.args[0]
        work()
        read.append(buffer.nbytes)
        return [[0.5, 0.25, 0.4], [0.2, 0.1, 0.9]][len(read) - 1]

    monkeypatch.setattr(profiling, "time_repeatedly", seconds)
    rate = specnb.memory_bandwidth("cpu", num_bytes=3 << 20)
    assert read == [3 << 20, 3 << 20]
    assert rate == pytest.approx((3 << 20) / 0.2)
    assert rate.samples == pytest.approx([(3 << 20) / s for s in (0.2, 0.1, 0.9)])


def test_the_readers_read_everything():
    buffer = torch.randint(8, (512, 1024)).float()
    vector = torch.ones(1024)
    whole = sum(sum(row) for row in buffer.tolist())
    sums = [read(buffer, vector).sum().item() for read in profiling._READERS.values()]
    assert sums == [whole, whole]


def test_repeated_timing_leaves_the_warm_up_out(clock):
    taken = iter([9.0, 1.0, 2.0, 3.0])

    def work():
        clock.now += next(taken)

    assert profiling.time_repeatedly(work, 3, torch.device("cpu")) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("flops", [1e9, 1e11])
def test_peak_is_operations_by_seconds_of_a_large_enough_product(monkeypatch, flops):
    sizes = []

    def seconds(work, repeats, device):
        a, b = work.args
        assert a.dtype == b.dtype == torch.bfloat16
        sizes.append(len(a))
        return [2 * len(a) ** 3 / flops] * repeats

    monkeypatch.setattr(profiling, "time_repeatedly", seconds)
    assert specnb.arithmetic_peak(torch.bfloat16, "cpu") == pytest.approx(flops)
    *_, before, chosen, measured = [0, *sizes]
    assert chosen == measured
    assert 2 * before**3 / flops < 0.03 <= 2 * chosen**3 / flops


def test_background_work_is_waited_for(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    profiling.synchronise(torch.device("cpu"))
    assert waited == []
    profiling.synchronise(torch.device("cuda", 0))
    assert waited == [torch.device("cuda", 0)]


@pytest.mark.parametrize(
    ("measure", "error", "message"),
    [
        (lambda: specnb.memory_bandwidth(num_bytes=1000), ValueError, "num_bytes must be at least"),
        (lambda: specnb.memory_bandwidth(repeats=0), ValueError, "repeats"),
        (lambda: specnb.arithmetic_peak(torch.int8), TypeError, "floating-point torch.dtype"),
        (lambda: specnb.arithmetic_peak("bfloat16"), TypeError, "floating-point torch.dtype"),
        (lambda: specnb.arithmetic_peak(repeats=0.5), TypeError, "repeats"),
    ],
)
def test_probes_refuse_bad_numbers(measure, error, message):
    with pytest.raises(error, match=message):
        measure()


def test_a_rate_is_a_float_that_remembers():
    rate = Rate([3e9, 1e9, 2e9], "B/s")
    assert rate / 1e9 == 2.0
    assert isinstance(rate, float)
    assert repr(rate) == "2 GB/s (median of 3, spread 1 GB/s)"
    for twin in (copy.copy(rate), pickle.loads(pickle.dumps(rate))):
        assert (twin, twin.samples, twin.unit) == (rate, rate.samples, rate.unit)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (999.9, "1 kB"), (1.234e6, "1.23 MB"), (3.35e12, "3.35 TB")]
)
def test_quantities_have_three_digits(value, text):
    assert quantity(value, "B") == text


# --- counting, against slow and obvious oracles ---


def weights_read(model) -> int:
    """All weights, each once, without tables that only embed."""
    head = model.get_output_embeddings().weight
    tables = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    only_embed = {id(table) for table in tables if table is not head}
    return sum(weight.nbytes for weight in model.parameters() if id(weight) not in only_embed)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_weight_bytes(family, tied):
    model = tiny_model(family, tie_word_embeddings=tied)
    count = count_pass(model)
    assert count.weight_bytes == weights_read(model)
    if tied and family not in ("gpt2", "opt"):  # these two look up positions as well
        assert count.weight_bytes == sum(weight.nbytes for weight in model.parameters())
        assert count.bytes_per_position == 0


def test_an_embedding_table_of_its_own_costs_only_the_rows_looked_up():
    model = tiny_model(tie_word_embeddings=False)
    weights, _, _ = count_pass(model).of_pass(rows=2, positions=3, context=0)
    assert weights == weights_read(model) + 2 * 3 * 32 * 4  # six rows of 32 float32 numbers


@pytest.mark.parametrize("family", FAMILIES)
def test_kv_bytes_are_those_of_a_filled_cache(family):
    model = tiny_model(family)
    cache = specnb.RaggedCache(model.config, 2, 9)
    target_pass(model, cache, torch.ones(2, 9, dtype=torch.long))
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert count_pass(model).of_pass(rows=2, positions=2, context=7)[1] == held


@pytest.mark.parametrize(("rows", "positions", "before"), [(1, 1, 0), (1, 5, 11), (3, 4, 6)])
@pytest.mark.parametrize("family", FAMILIES)
def test_flops_are_those_torch_counts(family, rows, positions, before):
    model = tiny_model(family, attention="eager")
    cache = specnb.RaggedCache(model.config, rows, before + positions)
    if before:
        target_pass(model, cache, torch.ones(rows, before, dtype=torch.long))
    with FlopCounterMode(display=False) as counter:
        target_pass(model, cache, torch.ones(rows, positions, dtype=torch.long))
    by_module = counter.get_flop_counts()
    rotations = sum(sum(ops.values()) for name, ops in by_module.items() if name.endswith("rotary_emb"))
    counted = count_pass(model).of_pass(rows, positions, before)[2]
    assert counted == counter.get_total_flops() - rotations > 0  # angles are no work with weights


def test_counting_leaves_packed_weights_their_true_size():
    class Packed(torch.nn.Module):
        """Two weights in one byte, as quantised layers keep them."""

        def __init__(self) -> None:
            super().__init__()
            self.in_features, self.out_features = 8, 6
            self.weight = torch.nn.Parameter(torch.zeros(24, 1, dtype=torch.uint8), requires_grad=False)

    assert profiling._multiplications(Packed()) == 48


# --- the roofline ---


def test_a_roofline_is_the_longer_of_two_times(llama):
    weights, kv, flops = count_pass(llama).of_pass(1, 4, 50)
    slow_memory = specnb.roofline(llama, positions=4, context=50, bandwidth=1e6, peak=1e12)
    assert slow_memory.bound == "memory"
    assert slow_memory.predicted_ms == slow_memory.memory_ms == pytest.approx(1000 * (weights + kv) / 1e6)
    slow_arithmetic = specnb.roofline(llama, positions=4, context=50, bandwidth=1e12, peak=1e6)
    assert slow_arithmetic.bound == "compute"
    assert slow_arithmetic.predicted_ms == slow_arithmetic.compute_ms == pytest.approx(1000 * flops / 1e6)
    assert slow_arithmetic.arithmetic_intensity == pytest.approx(flops / (weights + kv))
    assert slow_arithmetic.ridge == 1e-6


@pytest.mark.parametrize(("rows", "before"), [(1, 0), (1, 300), (4, 40)])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_knee_is_where_arithmetic_takes_as_long_as_memory(family, rows, before):
    model = tiny_model(family)
    rates = dict(batch_size=rows, context=before, bandwidth=1e9, peak=2e10)
    knee = specnb.roofline(model, **rates).knee
    assert knee > 1
    below = specnb.roofline(model, positions=math.floor(knee), **rates)
    above = specnb.roofline(model, positions=math.floor(knee) + 1, **rates)
    assert (below.bound, above.bound) == ("memory", "compute")


def test_the_sum_on_paper():
    """70 billion bfloat16 weights on a card of 3.35 TB/s and 989 TFLOP/s, as notebook 01 works out by hand."""
    card = dict(bandwidth=3.35e12, peak=989e12)
    large, small = specnb.roofline(70e9, **card), specnb.roofline(1e9, **card)
    assert large.weight_bytes == 140e9
    assert large.memory_ms == pytest.approx(41.8, abs=0.05)
    assert large.compute_ms == pytest.approx(0.14, abs=0.005)
    assert large.knee == pytest.approx(989 / 3.35)
    assert large.predicted_ms == pytest.approx(70 * small.predicted_ms)
    quantised = specnb.roofline(70e9, bytes_per_param=0.5, kv_bytes_per_token=1e6, context=1000, **card)
    assert quantised.memory_ms == pytest.approx((35e9 + 1001e6) / 3.35e9)


def test_arithmetic_that_grows_no_faster_than_reading_never_takes_over():
    assert specnb.roofline(1e3, kv_bytes_per_token=1e9, bandwidth=1e9, peak=1e12).knee == math.inf


def test_rates_are_measured_where_none_are_given(llama, monkeypatch):
    asked = {}

    def bandwidth(device, *, num_bytes):
        asked["bandwidth"] = (device, num_bytes)
        return 2e9

    def peak(dtype, device):
        asked["peak"] = (dtype, device)
        return 3e9

    monkeypatch.setattr(profiling, "memory_bandwidth", bandwidth)
    monkeypatch.setattr(profiling, "arithmetic_peak", peak)
    roof = specnb.roofline(llama)
    assert (roof.bandwidth, roof.peak) == (2e9, 3e9)
    assert asked == {"bandwidth": (llama.device, 1 << 24), "peak": (torch.float32, llama.device)}
    specnb.roofline(70e9)
    assert asked == {"bandwidth": (None, 1 << 30), "peak": (torch.bfloat16, None)}


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        ("70B", {}, TypeError, "number of parameters such as 70e9"),
        (True, {}, TypeError, "number of parameters"),
        (0, {}, ValueError, "more than 0 parameters"),
        (math.inf, {}, ValueError, "more than 0 parameters"),
        (1e9, dict(bytes_per_param=0), ValueError, "more than 0 bytes"),
        (1e9, dict(bandwidth=0, peak=1), ValueError, "bandwidth must be above 0.*not GB/s"),
        (1e9, dict(bandwidth="fast", peak=1), TypeError, "bandwidth must be a number"),
        (1e9, dict(bandwidth=1, peak=math.nan), ValueError, "peak must be above 0"),
        (1e9, dict(positions=0), ValueError, "positions"),
        (1e9, dict(context=-1), ValueError, "context"),
        (1e9, dict(batch_size=0), ValueError, "batch_size"),
    ],
)
def test_a_roofline_refuses_bad_input(model, options, error, message):
    with pytest.raises(error, match=message):
        specnb.roofline(model, **options)


# --- how they look ---


def cells(table: str) -> list[list[str]]:
    """The rows of an HTML table."""
    return [["".join(cell.itertext()) for cell in row] for row in ET.fromstring(table).iter("tr")]


def test_curves_and_tables_are_readable(llama, clock):
    cost, _ = measure(llama, clock, lambda T, nth: 10.0 * T + nth, positions=(1, 4))
    assert repr(cost).splitlines() == [
        "Cost of a pass: FakePass, float32, context 20, 5 passes each",
        "     T  median ms   spread  v(T)/v(1)",
        "     1      13.00     2.00       1.00",
        "     4      43.00     2.00       3.31",
    ]
    assert cells(cost._repr_html_())[1:] == [["1", "13.00", "2.00", "1.00"], ["4", "43.00", "2.00", "3.31"]]
    table = CostTable({20: cost})
    assert cells(table._repr_html_()) == [["positions T", "ms, context 20"], ["1", "13.00"], ["4", "43.00"]]
    assert repr(table) == repr(cost)
    assert "1.00" in repr(PassCost((1,), (5.0,)))  # one made by hand has no samples


def test_a_roofline_is_readable():
    roof = specnb.roofline(70e9, bandwidth=3.35e12, peak=989e12)
    for text in (repr(roof), str(cells(roof._repr_html_()))):
        for part in ("140 GB", "3.35 TB/s", "41.8 ms", "bound by memory", "295 positions"):
            assert part in text


def test_tables_escape_their_text():
    assert cells(profiling.html_table(["<a>"], [["&", 1]], caption="<x>")) == [["<a>"], ["&", "1"]]


@pytest.mark.real_model
def test_the_real_model_has_its_published_size(real):
    model, _ = real
    count = count_pass(model)
    assert count.weight_bytes == 134_515_008 * 4 == 4 * model.num_parameters()
    assert count.kv_bytes_per_token == 2 * 30 * 3 * 64 * 4
    matrices = 30 * (576 * (576 + 2 * 192 + 576) + 3 * 576 * 1536) + 49_152 * 576
    assert count.flops_per_position == 2 * matrices
