"""The GPU check itself, on the CPU with tiny models: so that it works when it meets a card."""

import json

import pytest
import torch

from tests.gpu import check


def test_it_runs_and_finds_nothing_wrong(tmp_path, capsys):
    assert check.main(["--device", "cpu", "--small", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("gpu_*.json")
    told = json.loads(path.read_text(encoding="utf-8"))
    assert told["float32"] == {"rows": 3, "plain": 3, "lookup": 3, "copy": 3}
    assert told["machine"]["device"] == "cpu" and told["date"]
    ways = {(line["way"], line["batch_size"]) for line in told["throughput"]["tiny"]}
    assert ways == {(way, B) for way in ("transformers", "plain", "drafts") for B in (1, 2)}
    drafted = [line for line in told["throughput"]["tiny"] if line["way"] == "drafts"]
    assert all(line["tokens_per_pass"] > 1.5 for line in drafted)
    assert "all promises hold" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card is here")
def test_without_a_card_it_says_so(capsys, tmp_path):
    assert check.main(["--out", str(tmp_path)]) == 0
    assert "no CUDA device here" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_a_broken_promise_is_a_failure():
    told = {"float32": {"rows": 3, "plain": 3, "lookup": 2, "copy": 3}, "chi-square p-value": 1e-9}
    assert len(check.problems(told)) == 2
