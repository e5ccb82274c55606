"""compile=True: a twin whose logits are the model's, one text whatever the drafter, and a way out if it cannot be."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
import transformers as hf

import specnb
from specnb import compiled, kernels, layers
from specnb.cache import RAGGED_ATTENTION, RaggedCache, target_pass
from specnb.compiled import Twin, Unsupported, compare, compiled_width, probe, twin_for
from tests.tiny import FAMILIES, fresh_logits, padded, plain, prompt, tiny_model

pytestmark = [
    pytest.mark.skipif(kernels.compiler() is None, reason="no C++ compiler"),
    pytest.mark.filterwarnings("error:compile=True"),  # falling back where the twin should work must not go unnoticed
]


@pytest.fixture(scope="module")
def bfloat16():
    return tiny_model("llama").to(torch.bfloat16)


def text(model, ids, drafter=None, new=24, **options):
    options = {"compile": True, "pass_width": 4, **options}
    return specnb.generate(model, ids, drafter, max_new_tokens=new, **options).sequences.tolist()


# ── the twin ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", FAMILIES)
def test_a_twins_logits_are_the_models(family):
    """Layer by layer, without compiling: after a longer prompt than the twin's own check has, and a rollback."""
    model = tiny_model(family)
    twin, tokens = Twin(model).network, prompt(30)
    cache = RaggedCache(model.config, 1, 40)
    target_pass(twin, cache, tokens[:, :20])
    target_pass(twin, cache, prompt(5, seed=3))
    cache.rollback(5)
    got, expected = target_pass(twin, cache, tokens[:, 20:]), fresh_logits(model, tokens)[:, 20:]
    assert float((got - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bfloat16_twin_errs_no_more_than_the_model(family):
    """Against the same weights in float64: at most half again as far off as the model's own bfloat16 pass."""
    model = tiny_model(family).to(torch.bfloat16)
    exact = fresh_logits(tiny_model(family).to(torch.bfloat16).double(), prompt(30))
    cache = RaggedCache(model.config, 1, 40)
    got = target_pass(Twin(model).network, cache, prompt(30))
    ours, theirs = ((x.double() - exact).pow(2).mean().sqrt() for x in (got, fresh_logits(model, prompt(30))))
    assert float(ours) <= 1.5 * float(theirs)


def test_the_models_own_things_stay_as_they_are(llama):
    def state():
        return (
            [(name, p.data_ptr(), p._version, p.requires_grad) for name, p in llama.named_parameters()],
            [(name, b.data_ptr()) for name, b in llama.named_buffers()], list(llama.state_dict()), llama.training,
            llama.config.to_dict(), llama.config._attn_implementation, [type(m) for m in llama.modules()],
            ["forward" in vars(m) for m in llama.modules()],
        )  # fmt: skip

    before = state()
    text(llama, prompt())
    assert state() == before
    assert twin_for(llama, 4).network.config._attn_implementation == RAGGED_ATTENTION


def test_the_twin_goes_when_the_model_goes():
    model = tiny_model("llama", seed=7)
    text(model, prompt(), new=3)
    twin = twin_for(model, 4)
    assert twin.graphs  # compiled closures are among what has to go
    refs = [weakref.ref(x) for x in (model, twin, twin.network, model.lm_head.weight)]
    del model, twin
    gc.collect()
    assert [ref() for ref in refs] == [None] * 4


# ── the text ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_text_is_that_of_plain_generate(llama, make_drafter):
    assert text(llama, prompt(40), make_drafter(llama)) == plain(llama, prompt(40)).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "gemma3", "mistral"])
def test_other_families_write_the_text_of_plain_generate(family):
    """Conv1D; layers of two kinds; a window of 8."""
    model = tiny_model(family)
    assert text(model, prompt(40), specnb.PromptLookup()) == plain(model, prompt(40)).tolist()
    assert len(twin_for(model, 4).graphs) == 2 * (2 if family == "gemma3" else 1)  # rounds, and the reading of prompts


def test_in_bfloat16_the_text_is_one_bit_for_bit(bfloat16, make_drafter):
    ids, options = prompt(40), {"return_trace": "probs", "compile": True, "pass_width": 4, "max_new_tokens": 24}
    reference = specnb.generate(bfloat16, ids, **options)
    out = specnb.generate(bfloat16, ids, make_drafter(bfloat16), **options)
    assert out.sequences.tolist() == reference.sequences.tolist()
    p_reference, p = (torch.cat([r.p[r.places] for r in o.trace]) for o in (reference, out))
    assert torch.equal(p, p_reference)


@pytest.mark.parametrize(("lengths", "side"), [((40, 1, 9), "left"), ((250, 1, 255, 33, 256), "right")], ids=str)
def test_a_row_of_a_batch_equals_the_prompt_alone(lengths, side, bfloat16):
    """Three and five rows, padded to a power of two inside; some cross a bucket, others are in the next one."""
    ids, mask = padded(lengths, side)
    out = text(bfloat16, ids, specnb.PromptLookup(), attention_mask=mask)
    for b, n in enumerate(lengths):
        assert out[b][max(lengths) :] == text(bfloat16, prompt(n, seed=n))[0][n:]


def sizes_of_passes(monkeypatch, run):
    """Positions of the compiled passes while ``run`` runs, and what it returns."""
    sizes, through = [], compiled.run_pass
    monkeypatch.setattr(
        compiled, "run_pass", lambda n, c, line, *args: sizes.append(line.shape[1]) or through(n, c, line, *args)
    )
    return run(), sizes


def test_prompts_are_read_in_compiled_passes_too(bfloat16, monkeypatch):
    """In chunks of 32, the last in the smallest size that holds it; planted: a size that is refused."""
    ids, twin = prompt(39), twin_for(bfloat16, 8)
    options = dict(compile=True, pass_width=8, max_new_tokens=3)
    out, sizes = sizes_of_passes(monkeypatch, lambda: specnb.generate(bfloat16, ids, **options))
    assert sizes == [32, 8, 4, 4, 4] and twin.serves(32)
    monkeypatch.setattr(twin, "widths", twin.widths - {32})
    monkeypatch.setattr(twin, "refused", {32})
    other, sizes = sizes_of_passes(monkeypatch, lambda: specnb.generate(bfloat16, ids, **options))
    assert sizes == [4, 4, 4] and other.sequences.tolist() == out.sequences.tolist()


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 34, 253, 257, 488], ids="prompt of {}".format)
def test_prompts_of_any_length(length, llama):
    """Around prefill chunks and buckets, and up to the model's last position."""
    ids = prompt(length, seed=length)
    assert text(llama, ids, specnb.PromptLookup()) == plain(llama, ids).tolist()


def test_beyond_two_buckets():
    model = tiny_model("llama", max_position_embeddings=1024)
    ids = prompt(500)
    assert text(model, ids, specnb.PromptLookup()) == plain(model, ids).tolist()


def test_an_end_of_sequence_ends(llama):
    written = plain(llama, prompt(40))[0, 40:].tolist()
    eos = written[9]
    expected = written[: written.index(eos) + 1]
    assert text(llama, prompt(40), specnb.PromptLookup(), eos_token_id=eos)[0][40:] == expected


def test_sampling_is_reproducible_and_a_certain_draft_changes_nothing(bfloat16):
    options = {"do_sample": True, "temperature": 0.7, "seed": 3}
    first = text(bfloat16, prompt(), **options)
    assert first == text(bfloat16, prompt(), **options) != text(bfloat16, prompt(), **(options | {"seed": 4}))
    drafted = text(bfloat16, prompt(), specnb.DraftModel(bfloat16), **options)
    assert drafted == text(bfloat16, prompt(), specnb.DraftModel(bfloat16), **options)


def test_a_draft_reads_its_prompt_and_what_it_missed_in_compiled_passes(llama, monkeypatch):
    """A copy of the target as the second part of a cascade is always right, whatever it has not been asked."""
    ids, silent = prompt(70), range(100, 120)
    expected = plain(llama, ids, max_new_tokens=60)[0].tolist()
    first = specnb.Scripted(lambda context: expected[len(context) :][:6] if len(context) not in silent else [])
    draft, passes = tiny_model("llama", seed=0), []
    draft.load_state_dict(llama.state_dict())
    drafter = specnb.Cascade(first, specnb.DraftModel(draft, 3), c=0.0)
    text(llama, ids, drafter)  # compiles
    through = Twin.packed_pass

    def noted(twin, cache, tokens, rows, counts, pass_width, *args, scored=True, **more):
        if cache is drafter.parts[1].cache:
            passes.append((sum(counts), scored))
        return through(twin, cache, tokens, rows, counts, pass_width, *args, scored=scored, **more)

    monkeypatch.setattr(Twin, "packed_pass", noted)
    monkeypatch.setattr(specnb.DraftModel, "_plain_pass", None)
    out = specnb.generate(llama, ids, drafter, compile=True, max_new_tokens=60, return_trace=True)
    assert out.sequences[0].tolist() == expected and out.stats.alpha.tolist() == [1.0]
    read = [n for n, scored in passes if not scored]
    assert read[:3] == [32, 32, 32] and all(n <= 4 for n, scored in passes if scored)


@pytest.mark.statistical
def test_sampled_tokens_have_the_models_law(llama):
    """False alarms: 1 in 10⁴ (chi-square over the second new token of 256 rows; drafts are always wrong or right)."""
    ids, rows = prompt(), 256
    drafter = specnb.Scripted(lambda context: [5, 6, 7])
    out = specnb.generate(
        llama, ids, drafter, compile=True, pass_width=4, max_new_tokens=2, do_sample=True, seed=0,
        num_return_sequences=rows,
    )  # fmt: skip
    first = fresh_logits(llama, ids)[0, -1].double().softmax(-1)
    follow = torch.cat([ids.expand(61, -1), torch.arange(61)[:, None]], dim=1)
    second = torch.cat([fresh_logits(llama, row[None])[:, -1] for row in follow]).double().softmax(-1)
    counts = torch.bincount(out.sequences[:, -1], minlength=61)
    assert specnb.chi_square(counts, first @ second).pvalue > 1e-4


@pytest.mark.slow
def test_widths_do_not_disturb_each_other():
    """A width compiled in between, also one as wide as a prefill chunk, leaves the bits of the first as they were."""
    model = tiny_model("llama", seed=5).to(torch.bfloat16)
    ids, options = prompt(100), {"compile": True, "max_new_tokens": 12, "return_trace": "probs"}

    def probs(width):
        out = specnb.generate(model, ids, pass_width=width, **options)
        return torch.cat([r.p for r in out.trace])

    before = probs(4)
    probs(32)
    assert torch.equal(probs(4), before)
    assert twin_for(model, 4).widths >= {4, 32}


@pytest.mark.parametrize("max_batch", [1, 4])
def test_a_batcher_writes_what_each_prompt_writes_alone(bfloat16, max_batch, make_drafter):
    """Rows with a draft beside rows without one, in packed passes of several sizes."""
    lengths = (40, 1, 250, 9, 33, 12)
    options = dict(compile=True, pass_width=4, max_new_tokens=10)
    batcher = specnb.Batcher(bfloat16, make_drafter(bfloat16), max_batch=max_batch, **options)
    jobs = [batcher.submit(prompt(n, seed=n)) for n in lengths]
    batcher.run()
    for n, job in zip(lengths, jobs):
        assert job.tokens == text(bfloat16, prompt(n, seed=n), new=10)[0][n:]


def test_a_size_that_gives_other_bits_is_not_used(bfloat16, monkeypatch):
    """Planted: passes over 8 positions come out slightly different. The rows go through two passes instead."""
    twin = twin_for(bfloat16, 4)
    monkeypatch.setattr(twin, "widths", set(twin.widths) - {8})
    monkeypatch.setattr(twin, "refused", set())
    checked = compiled.probe

    def other_bits(network, width, *, compiled=False):
        return checked(network, width, compiled=compiled) * (1.01 if width == 8 and compiled else 1.0)

    monkeypatch.setattr(compiled, "probe", other_bits)
    assert list(twin.passes([4, 4], 4)) == [([4], 4), ([4], 4)] and twin.refused == {8}
    assert list(twin.passes([1, 3], 4)) == [([1, 3], 4)]


def test_sizes_of_passes():
    sizes = [compiled.pass_size(n) for n in range(1, 200)]
    assert all(size >= n and size % 4 == 0 for n, size in enumerate(sizes, 1))
    assert sorted(set(sizes)) == [4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    assert compiled.sizes_up_to(10) == [4, 8, 10] and compiled.sizes_up_to(3) == [3]


def test_compile_alone_means_a_width():
    assert [compiled_width(k) for k in (0, 3, 4, 10, 11, 12)] == [4, 4, 8, 12, 12, 16]


def test_through_transformers_generate(llama):
    out = llama.generate(
        prompt(40), attention_mask=torch.ones(1, 40, dtype=torch.long), custom_generate=specnb.decode, compile=True,
        drafter=specnb.PromptLookup(num_draft_tokens=3), max_new_tokens=24, do_sample=False,
    )  # fmt: skip
    assert out.tolist() == plain(llama, prompt(40)).tolist()


@pytest.mark.parametrize("bad", [1, None, "yes", "max-autotune"])
def test_compile_is_true_or_false(bad, llama):
    with pytest.raises(TypeError, match="compile must be True or False"):
        specnb.generate(llama, prompt(), compile=bad, max_new_tokens=2)


def test_a_kept_cache_goes_on(llama):
    first = specnb.generate(llama, prompt(70), compile=True, pass_width=4, max_new_tokens=9, return_cache=True)
    longer = torch.cat([first.sequences, prompt(5, seed=9)], dim=1)
    assert text(llama, longer, cache=first.cache) == plain(llama, longer).tolist()


def test_another_number_of_threads_writes_the_same(llama):
    before = text(llama, prompt(40))
    torch.set_num_threads(2)
    assert text(llama, prompt(40)) == before


def test_inference_mode_and_back(llama):
    expected = plain(llama, prompt()).tolist()
    with torch.inference_mode():
        assert text(llama, prompt()) == expected
    assert text(llama, prompt()) == expected


def test_several_threads_at_once():
    """One of them compiles what the others want as well."""
    model, found = tiny_model("llama", seed=2), {}

    def work(i):
        ids = prompt(40, seed=i)
        found[i] = text(model, ids, specnb.PromptLookup(num_draft_tokens=3), new=12)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == {i: plain(model, prompt(40, seed=i), max_new_tokens=12).tolist() for i in range(4)}


# ── weights that change ─────────────────────────────────────────────────────────────────────────────────────────────


def in_place(model):
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(-1)


def through_data(model):
    model.lm_head.weight.data.mul_(-1)


def new_parameter(model):
    model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach())


CHANGES = {
    "in place": in_place,
    "through data": through_data,
    "a new parameter": new_parameter,
    "load_state_dict": lambda model: model.load_state_dict(tiny_model("llama", seed=1).state_dict()),
    "to and back": lambda model: model.to(torch.bfloat16).to(torch.float32),
}


@pytest.fixture
def uncompiled(monkeypatch):
    """Twins run layer by layer: what is to be seen does not need the compiler."""
    monkeypatch.setattr(Twin, "warm_up", lambda twin, pass_width: twin.widths.add(pass_width))
    monkeypatch.setattr(compiled, "compile_layer", lambda layer, names, form, inputs: replay(layer, names, form))
    monkeypatch.setattr(Twin, "frame", lambda *_: None)


def replay(layer, names, form):
    def run(*tensors):
        args, kwargs = layers.assemble(form, iter(tensors[: -len(names)]))
        with layers.stateless(layer, dict(zip(names, tensors[-len(names) :]))):
            return type(layer).forward(layer, *args, **kwargs)

    return run


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_make_a_new_twin(change, uncompiled):
    model = tiny_model("llama")
    before = text(model, prompt(40))
    twin = twin_for(model, 4)
    assert twin_for(model, 4) is twin
    CHANGES[change](model)
    assert twin_for(model, 4) is not twin
    after = text(model, prompt(40))
    assert after == plain(model, prompt(40)).tolist()
    assert after != before or change == "to and back"


def test_a_model_in_another_dtype_has_another_twin(uncompiled):
    model = tiny_model("llama")
    text(model, prompt(40))
    model.to(torch.bfloat16)
    other = tiny_model("llama").to(torch.bfloat16)
    assert text(model, prompt(40)) == text(other, prompt(40))


def test_two_models_have_two_twins(uncompiled):
    one, other = tiny_model("llama"), tiny_model("llama", seed=1)
    texts = [text(model, prompt(40)) for model in (one, other, one)]
    assert texts == [plain(model, prompt(40)).tolist() for model in (one, other, one)]


# ── ways out ────────────────────────────────────────────────────────────────────────────────────────────────────────


def falls_back(model, match, **options):
    """One warning that says why, at the user's line, and the text of the same call without compiling."""
    ids, options = prompt(), {"pass_width": 4, "max_new_tokens": 6, **options}
    with pytest.warns(UserWarning, match=match) as seen:
        out = specnb.generate(model, ids, compile=True, **options)
    ours = [w for w in seen if str(w.message).startswith("compile=True: ")]
    assert len(ours) == 1 and ours[0].filename == __file__
    assert "uncompiled" in str(ours[0].message)
    assert out.sequences.tolist() == specnb.generate(model, ids, **options).sequences.tolist()
    return str(ours[0].message)


def test_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(kernels, "compiler", lambda: None)
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path))
    kernels.library.cache_clear()
    model = tiny_model("llama")
    falls_back(model, r"no C\+\+ compiler was found")
    text(model, prompt(), new=3)  # said once


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_other_dtypes(dtype):
    assert "float32 or bfloat16" in falls_back(tiny_model("llama").to(dtype), str(dtype))


def test_soft_capped_attention():
    config = hf.Gemma2Config(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, attn_logit_softcapping=5.0, sliding_window=8, bos_token_id=None, eos_token_id=None,
        pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    falls_back(hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval(), "soft-capped attention")


def test_a_twin_that_computes_something_else_is_not_used(monkeypatch):
    """Planted: the keys of a pass go one slot too far."""
    store = torch.ops.specnb.ragged_store

    def shifted(view, key, value, *args, **kwargs):
        if view.keys is None:
            view.layer.lazy_initialization(key, value)
            view.keys, view.values = view.layer.keys, view.layer.values
        moved = view.places.clone()
        moved[..., 0] = (moved[..., 0] + 1).clamp(max=view.keys.shape[2] - 1)
        store(view.keys, view.values, key, value, moved)
        return view.keys, view.values

    monkeypatch.setattr(layers.LayerView, "update", shifted)
    assert "differ by" in falls_back(tiny_model("llama"), "gives other logits")


def test_a_compiler_that_trips(monkeypatch):
    def trip(*args):
        raise RuntimeError("Inductor tripped.")

    monkeypatch.setattr(compiled, "compile_layer", trip)
    falls_back(tiny_model("llama"), r"Inductor tripped\.$")


def test_an_interrupted_check_is_made_again(monkeypatch):
    model, checked = tiny_model("llama"), compiled.compare
    monkeypatch.setattr(compiled, "compile_layer", lambda layer, names, form, inputs: replay(layer, names, form))
    monkeypatch.setattr(Twin, "frame", lambda *_: None)

    def interrupted(expected, got, dtype):
        if expected.shape[1] == 4:
            raise KeyboardInterrupt
        checked(expected, got, dtype)

    monkeypatch.setattr(compiled, "compare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        text(model, prompt())
    monkeypatch.setattr(compiled, "compare", lambda expected, got, dtype: compare(expected, got + 1, dtype))
    falls_back(model, "gives other logits")


def test_hooks_are_not_passed_over_in_silence(uncompiled):
    """One that was set after the model had a twin, too; without it the twin is back."""
    model = tiny_model("llama")
    before = text(model, prompt())
    hook = model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: -out)
    falls_back(model, r"layers\.0\.mlp.*hook")
    hook.remove()
    assert text(model, prompt()) == before


def test_hidden_states_asked_for_once_are_no_obstacle(uncompiled):
    model = tiny_model("llama")
    model(prompt(), output_hidden_states=True, output_attentions=False)
    text(model, prompt(), new=3)


def test_transformers_generate_warns_at_the_users_line_too():
    model = tiny_model("llama").to(torch.float64)
    with pytest.warns(UserWarning, match="runs uncompiled") as seen:
        model.generate(
            prompt(), attention_mask=torch.ones(1, 12, dtype=torch.long), custom_generate=specnb.decode, compile=True,
            max_new_tokens=3,
        )  # fmt: skip
    assert [w.filename for w in seen if "compile=True" in str(w.message)] == [__file__]


def test_models_that_cannot_be_decoded_are_refused_as_ever():
    torch.manual_seed(0)
    config = hf.BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4)
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    for options in ({}, {"compile": True}):
        with pytest.raises(ValueError, match=r"(?i)bloom|alibi"):
            specnb.generate(model, prompt(), max_new_tokens=2, **options)


def test_compare_tells_a_gap_from_rounding():
    expected = torch.tensor([[1.0, -2.0]])
    compare(expected, expected + 1e-4, torch.float32)
    for bad in (expected + 1e-2, expected * float("nan")):
        with pytest.raises(Unsupported):
            compare(expected, bad, torch.float32)
    assert probe(tiny_model("llama"), 5).shape == (1, 5, 61)


def test_a_window_that_only_the_mask_knows(monkeypatch):
    """Some families never tell attention their window, and a short probe lies inside it: seen all the same."""
    monkeypatch.setattr(compiled.compat, "layer_windows", lambda config: [4096] * config.num_hidden_layers)
    with pytest.raises(Unsupported, match="window"):
        Twin(tiny_model("llama"))
