"""Early exit: the target's first layers as its draft, over the target's own cache, and the target as it was."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

import specnb
from specnb import kernels
from specnb.compiled import twin_for
from specnb.drafters.early_exit import first_layers
from tests.tiny import FAMILIES, plain, prompt, tiny_model

IDS = prompt(12)
LAYERS = 4


def deep(family="llama", layers=LAYERS, **changes):
    """A model of this many layers; one of fewer layers is the beginning of one of more."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2} if family == "gemma3" else {}
    kinds = {name: kind[:layers] for name, kind in kinds.items()}
    model = tiny_model(family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": layers}, **kinds, **changes)
    if layers < LAYERS:
        model.load_state_dict(deep(family, **changes).state_dict(), strict=False)
    return model


@pytest.fixture(scope="module")
def model():
    return deep()


# --- what it drafts, and that the text is the target's ---


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_gives_the_targets_text_and_drafts_what_it_would_write(family):
    """The oracle of a draft: a model that has only these layers, without any cache."""
    model = deep(family)
    expected, accepted = plain(model, IDS).tolist(), 0
    for layer in range(1, LAYERS):
        out = specnb.generate(model, IDS, specnb.EarlyExit(layer, 3), max_new_tokens=24, return_trace=True)
        assert out.sequences.tolist() == expected
        short, text = deep(family, layer), IDS
        for r in out.trace[:3]:
            own = plain(short, text, max_new_tokens=3, use_cache=False)[0, text.shape[1] :]
            assert r.drafted == own[: len(r.drafted)].tolist()
            text = torch.cat([text, torch.tensor([r.emitted])], dim=1)
        accepted += int(out.stats.accepted)
    assert accepted > 0


def test_q_is_what_it_drew_from(model):
    """After the target's own processors, and with the context that each place has."""
    options = dict(do_sample=True, temperature=0.7, top_k=9, repetition_penalty=1.3, seed=3)
    out = specnb.generate(model, IDS, specnb.EarlyExit(2, 3), max_new_tokens=12, return_trace="probs", **options)
    short, text, places = deep(layers=2), IDS, 0
    for r in out.trace:
        for place, q in enumerate(r.q if r.q is not None else []):
            seen = torch.cat([text, torch.tensor([r.drafted[:place]], dtype=torch.long)], dim=1)
            law = specnb.exact_law(short, seen, 1, **{name: v for name, v in options.items() if name != "seed"})
            torch.testing.assert_close(q.double(), law, atol=1e-5, rtol=1e-4)
            places += 1
        text = torch.cat([text, torch.tensor([r.emitted])], dim=1)
    assert places >= 12


def test_around_and_inside_other_drafters(model):
    expected = plain(model, IDS).tolist()
    adaptive = specnb.Adaptive(specnb.EarlyExit(3, 4), c=0.1)
    assert specnb.generate(model, IDS, adaptive, max_new_tokens=24).sequences.tolist() == expected
    assert sum(adaptive.chosen.values()) and max(adaptive.chosen) > 0


def test_alone_it_is_the_same_draft(model):
    drafter = specnb.EarlyExit(2, 3)
    shared, apart = (
        specnb.generate(model, IDS, d, max_new_tokens=24, return_trace=True) for d in (drafter, drafter.alone(model))
    )
    assert [r.drafted for r in shared.trace] == [r.drafted for r in apart.trace]


def test_one_drafter_for_targets_one_after_another(model):
    drafter, other = specnb.EarlyExit(1), deep("gpt2")
    for target in (model, other, model):
        assert (
            specnb.generate(target, IDS, drafter, max_new_tokens=24).sequences.tolist() == plain(target, IDS).tolist()
        )


# --- one cache ---


def test_nothing_is_computed_twice_but_the_guesses(model):
    """Positions through the first and the last layer: the prompt once, then each round's own."""
    seen = [0, 0]
    layers = (model.model.layers[0], model.model.layers[-1])

    def count(i):
        def hook(module, args, output):
            seen[i] += args[0].shape[1]

        return hook

    hooks = [layer.register_forward_hook(count(i)) for i, layer in enumerate(layers)]
    out = specnb.generate(model, IDS, specnb.EarlyExit(2, 3), max_new_tokens=20, return_trace=True)
    for hook in hooks:
        hook.remove()
    drafted = int(out.stats.drafted)
    target = IDS.shape[1] - 1 + sum(1 + len(r.drafted) for r in out.trace)
    assert seen == [target + drafted, target]
    assert drafted > 20


def test_the_cache_holds_the_targets_own_entries(model):
    """After a run its entries are those of a run without drafts, bit for bit at one pass width, in all layers."""
    caches = []
    for drafter in (None, specnb.EarlyExit(2, 3)):
        out = specnb.generate(model, IDS, drafter, max_new_tokens=20, pass_width=4, return_cache=True)
        caches.append(out.cache)
    (n,) = {int(cache.lengths) for cache in caches}
    assert n == IDS.shape[1] + 20 - 1
    for plainly, drafted in zip(*(cache.layers for cache in caches)):
        assert torch.equal(plainly.keys[:, :, :n], drafted.keys[:, :, :n])
        assert torch.equal(plainly.values[:, :, :n], drafted.values[:, :, :n])


@pytest.mark.skipif(kernels.compiler() is None, reason="no C++ compiler")
@pytest.mark.filterwarnings("error:compile=True")
def test_compiled_it_goes_through_graphs_that_are_there(llama):
    """One layer's graph serves the draft as it serves the target; rows of a batch draft for themselves."""
    options = dict(compile=True, pass_width=4, max_new_tokens=24)
    specnb.generate(llama, IDS, **options)
    graphs = len(twin_for(llama, 4).graphs)
    out = specnb.generate(llama, IDS, specnb.EarlyExit(1, 3), **options)
    assert out.sequences.tolist() == plain(llama, IDS).tolist()
    assert int(out.stats.drafted) > 24 and len(twin_for(llama, 4).graphs) == graphs
    ids, mask = torch.cat([IDS, prompt(12, seed=1)]), torch.ones(2, 12, dtype=torch.long)
    ids[1, :5], mask[1, :5] = 0, 0
    out = specnb.generate(llama, ids, specnb.EarlyExit(1, 3), attention_mask=mask, **options)
    assert out.sequences[0].tolist() == plain(llama, IDS)[0].tolist()
    assert out.sequences[1, 5:].tolist() == plain(llama, ids[1:, 5:])[0].tolist()


# --- the model is as it was ---


def state(model):
    return (
        [(name, p.data_ptr(), p._version) for name, p in model.named_parameters()],
        [(name, id(module), type(module)) for name, module in model.named_modules()],
        [(list(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        model.config.to_dict(), model.generation_config.to_dict(), model.training,
    )  # fmt: skip


def test_the_model_is_as_it_was(model):
    before = state(model)
    specnb.generate(model, IDS, specnb.EarlyExit(2), max_new_tokens=12)
    assert state(model) == before


def test_also_after_an_exception_in_the_middle_of_a_draft(model):
    passes = [0]

    def fail(module, args, output):
        passes[0] += 1
        if passes[0] == 5:  # prefill, a draft of three, …
            raise RuntimeError("the lights went out")

    drafter, hook = specnb.EarlyExit(2, 3), model.lm_head.register_forward_hook(fail)
    try:
        before = state(model)
        with pytest.raises(RuntimeError, match="lights"):
            specnb.generate(model, IDS, drafter, max_new_tokens=12)
        assert state(model) == before
    finally:
        hook.remove()
    assert specnb.generate(model, IDS, drafter, max_new_tokens=24).sequences.tolist() == plain(model, IDS).tolist()


def test_a_draft_that_breaks_off_leaves_no_entries(model):
    """Requests in a batcher go on after Ctrl-C in a draft's second pass."""
    batcher = specnb.Batcher(model, specnb.EarlyExit(2, 3), max_batch=2, max_new_tokens=24)
    jobs = [batcher.submit(IDS), batcher.submit(prompt(7, seed=7))]
    batcher.step()
    calls = [0]

    def interrupt(module, args, output):
        calls[0] += 1
        if calls[0] == 2:
            raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            batcher.step()
    finally:
        hook.remove()
    batcher.run()
    assert jobs[0].tokens == plain(model, IDS)[0, 12:].tolist()
    assert jobs[1].tokens == plain(model, prompt(7, seed=7))[0, 7:].tolist()


def test_hidden_states_by_configuration_put_no_second_hooks_on_the_layers():
    """transformers gives layers hooks when hidden states are asked for, once for each model it knows."""
    hooks = []
    for drafter in (None, specnb.EarlyExit(2)):
        model = deep()
        model.config.output_hidden_states = True
        specnb.generate(model, IDS, drafter, max_new_tokens=6)
        hooks.append([len(m._forward_hooks) for m in model.modules()])
    assert hooks[0] == hooks[1]


def test_what_watches_the_whole_model_sees_its_own_passes_only(model):
    passes = []
    hook = model.register_forward_hook(lambda module, args, output: passes.append(1))
    out = specnb.generate(model, IDS, specnb.EarlyExit(1, 3), max_new_tokens=20)
    hook.remove()
    assert len(passes) == int(out.stats.target_passes) + 1  # and the prefill


# --- which layers ---


@pytest.mark.parametrize("layer", [0, -1, True, False, 2.0, "2", None])
def test_a_layer_that_is_no_layer(layer):
    with pytest.raises(ValueError, match="from 1 to one less than the target has, got"):
        specnb.EarlyExit(layer)


def no_pass(*args, **kwargs):
    raise AssertionError("a pass was made")


@pytest.mark.parametrize("layer", [LAYERS, LAYERS + 1, 10**6])
def test_a_layer_beyond_the_last_but_one(model, layer, monkeypatch):
    """Known when the run starts, before the prompt is read; the model is as it was."""
    before = state(model)
    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", no_pass)
        with pytest.raises(ValueError, match=rf"between 1 and 3, since LlamaForCausalLM has 4 layers, got {layer}\."):
            specnb.generate(model, IDS, specnb.EarlyExit(layer), max_new_tokens=4)
        with pytest.raises(ValueError, match="between 1 and 3"):
            specnb.Batcher(model, specnb.EarlyExit(layer))
    assert state(model) == before


def test_a_model_of_one_layer_has_no_exit():
    with pytest.raises(ValueError, match="A model of one layer has no early exit"):
        specnb.generate(deep(layers=1), IDS, specnb.EarlyExit(1))


def test_layers_of_an_image_encoder_are_not_taken_for_the_targets():
    """A multimodal model with as many layers in its eye as in its language model, and the eye comes first."""
    text = deep("gemma3").config
    eye = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=LAYERS, num_attention_heads=2, image_size=8,
               patch_size=4)  # fmt: skip
    config = hf.Gemma3Config(text_config=text.to_dict(), vision_config=eye, mm_tokens_per_image=1)
    torch.manual_seed(0)
    model = hf.Gemma3ForConditionalGeneration(config).eval()
    cut = first_layers(model, 1)
    assert sum(isinstance(m, type(model.model.language_model.layers[0])) for m in cut.modules()) == 1
    assert len(cut.model.vision_tower.encoder.layers) == LAYERS


def test_a_model_without_a_list_of_layers(model):
    cut = first_layers(model, 2)  # it has two layers and says four
    with pytest.raises(ValueError, match="no list of decoder layers"):
        first_layers(cut, 1)


def test_a_replay_of_it_never_runs_the_target(model, monkeypatch):
    from specnb.replay import replay

    out = specnb.generate(model, IDS, specnb.EarlyExit(3, 3), max_new_tokens=30, return_trace=True)
    monkeypatch.setattr(type(model.model.layers[3].mlp), "forward", refusing(model.model.layers[3].mlp))
    tried = replay(model, specnb.EarlyExit(3), IDS[0].tolist(), out.sequences[0, 12:].tolist())
    assert tried.rounds(3) == [(len(r.drafted), r.num_accepted) for r in out.trace]
    assert tried.start_ms == 0


def refusing(module):
    """The forward of this module's class, for every module but this one."""
    forward = type(module).forward

    def checked(self, *args):
        assert self is not module, "the target's last layer was run"
        return forward(self, *args)

    return checked


def test_without_a_target_pass_there_is_no_cache_to_share(model):
    from types import SimpleNamespace

    session = SimpleNamespace(model=model, cache=None, twin=None)
    with pytest.raises(ValueError, match=r"EarlyExit\.alone\(model\)"):
        specnb.EarlyExit(1).start(session)
