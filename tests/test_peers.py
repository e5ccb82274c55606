"""Peers: the protocol with workers made up for it, a benchmark with peers that fail, and weights in another form."""

import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
import transformers

import specnb
from specnb import peer_weights, peers
from specnb.peers import Peer, PeerError
from tests.test_benchmark import PROMPTS, Letters
from tests.tiny import fresh_logits, prompt, tiny_model

FAKE = Path(__file__).with_name("fake_peer.py")


def fake(engine, **options):
    peer = Peer(engine, sys.executable, script=FAKE, **options)
    peer.settle = 0.0
    return peer


@pytest.fixture
def started():
    peer = fake("vllm")
    peer.start("weights", "bfloat16", 100, 2)
    yield peer
    peer.close()


# --- the protocol ---


def test_a_worker_answers(started):
    assert started.version == "fake 1.0 (bfloat16)"
    reply = started.ask([5, 6], 4, 0.0, 1, [])
    assert reply["tokens"] == [7, 8, 9, 10] and reply["seconds"] > 0
    assert started.ask([5], 4, 0.0, 1, eos=[7])["tokens"] == [6, 7]


def test_a_worker_ends_with_its_pipe(started):
    process = started._process
    started.close()
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ("llama-cpp", "not installed: No module named 'llama_cpp'"),
        ("llama-cpp-lookup", r"it stopped working \(OSError: weights is no model\)"),
    ],
)
def test_a_worker_that_cannot_start_says_why(engine, reason):
    peer = fake(engine)
    with pytest.raises(PeerError, match=reason):
        peer.start("weights", "float32", 100, 1)
    peer.close()


def test_an_interpreter_that_is_not_there():
    peer = Peer("vllm", "/nowhere/python")
    with pytest.raises(PeerError, match="not installed: /nowhere/python cannot be run"):
        peer.start("weights", "float32", 100, 1)
    peer.close()
    with pytest.raises(ValueError, match=r"no peer 'ollama'\. There is: llama-cpp, "):
        Peer("ollama", "python")


def test_a_worker_that_breaks_tells_its_last_words():
    peer = fake("vllm-lookup")
    peer.start("weights", "float32", 100, 1)
    assert [peer.ask([1], 2, 0.0, 0, [])["tokens"] for _ in range(2)] == [[1, 2]] * 2
    with pytest.raises(PeerError, match=r"it stopped working \(RuntimeError: out of memory\)"):
        peer.ask([1], 2, 0.0, 0, [])
    with pytest.raises(PeerError):
        peer.ask([1], 2, 0.0, 0, [])
    peer.close()


def test_the_real_worker_needs_the_standard_library_only():
    """-S leaves out everything that was installed, so that no engine is there either."""
    command = [sys.executable, "-S", peers.__file__, "llama-cpp", "--model", "x"]
    done = subprocess.run(command, input="", capture_output=True, text=True)
    assert done.stdout == '{"error": "not installed: No module named \'llama_cpp\'"}\n', done.stderr


# --- in a benchmark ---


def bench(model, tried, **options):
    return specnb.run_benchmark(model, Letters(), PROMPTS, peers=tried, contestants=["plain", *(p.name for p in tried)],
                                max_new_tokens=4, progress=False, **options)  # fmt: skip


def test_a_peer_stands_beside_ours(llama):
    found = bench(llama, [fake("vllm")])
    rows = {row.contestant: row for row in found.rows() if row.group == "all"}
    assert rows["vllm"].prompts == 3 and rows["vllm"].compared == 3 and rows["vllm"].ms_per_token > 0
    (line,) = [note for note in found.notes() if "vllm is" in note and "specnb's best" in note]
    assert line.startswith("float32: vllm is faster than specnb's best here, plain: speed-up ")
    assert line.endswith("vllm is fake 1.0 (float32) with the same weights in float32.")


def test_a_slower_peer_is_called_slower():
    from tests.test_benchmark import measured

    answers = [measured(), measured("plain", seconds=0.5), measured("vllm", seconds=0.7)]
    known = dict(about="vllm is fake", reference="transformers", plain=None, way=None, peer=True)
    ours = {**known, "way": {"pass_width": None, "compiled": False}, "plain": "plain", "peer": False}
    found = specnb.BenchmarkResult(answers, contestants={"plain": ours, "vllm": known})
    assert (
        "float32: vllm is slower than specnb's best here, plain: speed-up 1.43 against 2.00. vllm is fake."
        in found.notes()
    )


def test_peers_that_fail_do_not_stop_the_run(llama):
    found = bench(llama, [fake("llama-cpp"), fake("vllm-lookup"), Peer("vllm", "/nowhere/python")])
    assert found.complete and sum(m.contestant == "plain" for m in found.measurements) == 3
    assert sum(m.contestant == "vllm-lookup" for m in found.measurements) == 1  # after the warm-up
    assert set(found.absent) == {"llama-cpp", "vllm-lookup", "vllm"}
    text = found.table()
    assert "llama-cpp is not in this report: not installed: No module named 'llama_cpp'." in text
    assert "vllm-lookup is not in this report" not in text
    assert "vllm-lookup took part only until it failed: it stopped working (RuntimeError: out of memory)." in text


# --- weights ---


def test_other_weights_are_called_so(llama):
    with peer_weights.weights_for(Peer("llama-cpp", "python", "some/Model-Q4.gguf"), llama) as (path, which):
        assert path == "some/Model-Q4.gguf" and "Model-Q4.gguf, which may differ" in which
    with pytest.raises(PeerError, match=r"a qwen2 in torch\.float32 is not converted to GGUF"):
        peer_weights.weights_for(Peer("llama-cpp", "python"), tiny_model("qwen2")).__enter__()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gguf_holds_the_same_weights(tmp_path, dtype):
    """transformers reads the file back: nothing was lost, and queries and keys stand in order."""
    model = tiny_model("llama", hidden_size=64, vocab_size=64, head_dim=16).to(dtype)
    peer_weights.write_gguf(model, tmp_path / "model.gguf")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=dtype).eval()
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in model.state_dict().items())
    if dtype == torch.float32:
        assert torch.equal(fresh_logits(again, prompt(12)), fresh_logits(model, prompt(12)))
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    kind = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    assert tensors["blk.0.attn_q.weight"].tensor_type.name == kind
    assert tensors["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    assert len(tensors) == len(model.state_dict())
