"""load_model on small models saved to disk, on a small hub served from this machine, and offline."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from specnb.models import load_model
from tests.tiny_hub import serve

TINY = dict(vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)


def save_tokenizer(folder: Path) -> None:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(20)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", unk_token="w0").save_pretrained(folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A tiny Llama and its tokenizer, as save_pretrained writes them."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def folder(tiny, tmp_path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# --- what comes back ---


def test_a_folder_gives_its_own_weights(tiny):
    model, _ = load_model(tiny)
    expected = LlamaForCausalLM.from_pretrained(tiny)
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(model(ids).logits, expected(ids).logits)


def test_the_model_is_ready_for_use(tiny):
    model, tokenizer = load_model(str(tiny))
    assert not model.training
    assert model.dtype == torch.float32
    assert model.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert tokenizer.padding_side == "left"
    assert tokenizer.pad_token == "w1"  # it has none of its own


@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16"])
def test_dtype_is_taken(tiny, dtype):
    assert load_model(tiny, dtype=dtype, device="cpu")[0].dtype == torch.bfloat16


def test_dtype_auto_is_the_checkpoints(tiny, tmp_path):
    LlamaForCausalLM.from_pretrained(tiny, dtype=torch.float16).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    assert load_model(tmp_path, dtype="auto", device="cpu")[0].dtype == torch.float16


def test_options_reach_transformers(tiny):
    assert load_model(tiny, attn_implementation="eager")[0].config._attn_implementation == "eager"


def test_home_is_expanded(tiny, monkeypatch):
    monkeypatch.setenv("HOME", str(tiny.parent))
    assert load_model(f"~/{tiny.name}")[0].config.vocab_size == 20


# --- what is refused ---


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (dict(dtype="float17"), ValueError, "float17"),
        (dict(dtype="relu"), ValueError, "floating-point"),
        (dict(dtype=torch.int8), TypeError, "floating-point"),
        (dict(dtype=16), TypeError, "floating-point"),
        (dict(device="gpu"), ValueError, "'gpu' cannot be used"),
        (dict(device="meta"), ValueError, "'meta' cannot be used"),
        (dict(device_map="auto"), ValueError, "one device"),
        (dict(trust_remote_code=True), ValueError, "no code"),
        (dict(use_safetensors=False), ValueError, "safetensors only"),
    ],
)
def test_bad_arguments(tiny, arguments, error, says):
    with pytest.raises(error, match=says):
        load_model(tiny, **arguments)


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        (3, TypeError, "not int"),
        ("", ValueError, "name is empty"),
        ("./no/such/folder", ValueError, "no folder './no/such/folder'"),
        ("two words", ValueError, "no folder 'two words'"),
        (Path(__file__), ValueError, "is a file"),
    ],
)
def test_bad_names(name, error, says):
    with pytest.raises(error, match=says):
        load_model(name)


def truncate_weights(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def scribble_on_weights(folder):
    (folder / "model.safetensors").write_bytes(b"not a model" * 100)


def pickle_weights(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def remove_weights(folder):
    (folder / "model.safetensors").unlink()


def remove_config(folder):
    (folder / "config.json").unlink()


def scribble_on_config(folder):
    (folder / "config.json").write_text("{not json")


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def remove_tokenizer(folder):
    for path in folder.glob("tokenizer*"):
        path.unlink()


def drop_output_head(folder):
    LlamaModel(LlamaConfig(**TINY)).save_pretrained(folder)


def claim_more_layers(folder):
    edit_config(folder, num_hidden_layers=2)


def claim_more_words(folder):
    edit_config(folder, vocab_size=30)


def need_remote_code(folder):
    edit_config(folder, model_type="their_own", auto_map={"AutoModelForCausalLM": "theirs.Model"})


def become_adapter(folder):
    remove_config(folder)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "x/y"}))


def become_adapter_with_base(folder):
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "x/y"}))


def become_encoder_decoder(folder):
    config = T5Config(vocab_size=20, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(folder)


def become_masked(folder):
    BertForMaskedLM(BertConfig(**TINY)).save_pretrained(folder)


def become_image_model(folder):
    edit_config(folder, model_type="vit")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (truncate_weights, "weights file is damaged"),
        (scribble_on_weights, "weights file is damaged"),
        (pickle_weights, r"pickled \(pytorch_model.bin\).*convert them once"),
        (remove_weights, "no safetensors weights"),
        (remove_config, "no config.json"),
        (scribble_on_config, "is damaged"),
        (empty, "no config.json"),
        (remove_tokenizer, "its tokenizer cannot be loaded"),
        (drop_output_head, "lack lm_head.weight"),
        (claim_more_layers, "and 6 more, which would start at random"),
        (claim_more_words, "other shapes"),
        (need_remote_code, "needs Python code from its own repository"),
        (become_adapter, "merge_and_unload"),
        (become_adapter_with_base, "merge_and_unload"),
        (become_encoder_decoder, "encoder-decoder"),
        (become_masked, "fill blanks"),
        (become_image_model, "not a causal language model"),
    ],
)
def test_unfit_folders_are_refused_with_the_reason(folder, spoil, says):
    spoil(folder)
    with pytest.raises(ValueError, match=says) as caught:
        load_model(folder)
    assert str(folder) in str(caught.value)


def test_no_pickle_is_read_even_beside_other_weights(folder):
    """A folder with both kinds loads, from safetensors alone."""
    (folder / "pytorch_model.bin").write_bytes(b"would fail, were it read")
    assert load_model(folder)[0].config.vocab_size == 20


def test_no_remote_code_runs(folder, tmp_path):
    (folder / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Model: pass\nclass Config: pass\n")
    edit_config(folder, auto_map={"AutoModelForCausalLM": "theirs.Model", "AutoConfig": "theirs.Config"})
    model, _ = load_model(folder)  # transformers has this architecture itself, so it can be loaded all the same
    assert type(model) is LlamaForCausalLM
    assert not (tmp_path / "ran").exists()


def test_a_missing_quantisation_library_is_named(folder):
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ImportError, match="pip install"):
        load_model(folder)


# --- the Hub: served from this machine, then switched off ---

HUB_SCRIPT = """
import json, sys
from specnb.models import load_model
said = {}
for name in sys.argv[1:]:
    name, _, revision = name.partition("@")
    try:
        model, tokenizer = load_model(name, **({"revision": revision} if revision else {}))
        said[name + revision] = f"loaded {model.config.vocab_size}"
    except Exception as error:
        said[name + revision] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


def ask_hub(endpoint: str, home: Path, *names: str, **environment: str) -> dict[str, str]:
    """What load_model says to each name, in a process whose Hub is `endpoint`."""
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), **environment}
    done = subprocess.run([sys.executable, "-c", HUB_SCRIPT, *names], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def hub(tiny, tmp_path_factory):
    """A Hub with a good model, a pickled one, an adapter and one with code; what it said to load_model about each."""
    root, home = tmp_path_factory.mktemp("repos"), tmp_path_factory.mktemp("hf")
    for name, spoil in {"good": None, "pickled": pickle_weights, "adapter": become_adapter}.items():
        copy = Path(shutil.copytree(tiny, root / "me" / name))
        if spoil:
            spoil(copy)
    names = ["me/good", "me/nobody", "me/gated", "me/good@nope", "me/pickled", "me/adapter"]
    with serve(root) as endpoint:
        online = ask_hub(endpoint, home, *names)
    offline = ask_hub(endpoint, home, "me/good", "me/nobody", HF_HUB_OFFLINE="1")
    return online, offline


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("me/good", "loaded 20"),
        ("me/nobody", "ValueError: .*neither a folder nor a model on the Hub.*spelling"),
        ("me/gated", "ValueError: .*agree to terms.*https://huggingface.co/me/gated"),
        ("me/goodnope", "ValueError: .*not this revision"),
        ("me/pickled", "ValueError: .*no safetensors weights"),
        ("me/adapter", "ValueError: .*merge_and_unload"),
    ],
)
def test_hub(hub, name, says):
    assert re.match(says, hub[0][name]), hub[0][name]


def test_hub_offline_uses_what_is_cached(hub):
    assert hub[1]["me/good"] == "loaded 20"


def test_hub_offline_with_nothing_cached_says_what_to_do(hub):
    assert hub[1]["me/nobody"].startswith("OSError: cannot fetch the model 'me/nobody'")
    assert "Connect once" in hub[1]["me/nobody"]


# --- the real one ---


@pytest.mark.real_model
def test_default_model_answers_sensibly(real):
    model, tokenizer = real
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    inputs = inputs.to(model.device)
    out = model.generate(**inputs, do_sample=False, max_new_tokens=24)
    assert "Paris" in tokenizer.decode(out[0, inputs["input_ids"].shape[1] :])
    assert out[0, -1] == tokenizer.eos_token_id  # it knows when it has finished


@pytest.mark.real_model
def test_default_model_is_what_it_should_be(real):
    model, tokenizer = real
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert getattr(model.config, "quantization_config", None) is None
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 8192


@pytest.mark.real_model
def test_default_tokenizer_splits_digits_as_in_training(real):
    _, tokenizer = real
    assert tokenizer.tokenize("x  12 3") == ["x", "ĠĠ", "1", "2", "Ġ", "3"]
    text = textwrap.dedent("""
        def f(x):
            return x + 10  # naïve, 100 %

        …""")
    assert tokenizer.decode(tokenizer(text).input_ids) == text
