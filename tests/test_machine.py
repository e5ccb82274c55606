"""What a machine is said to be."""

import os
import platform
import stat

import pytest
import torch
import transformers

from specnb import machine


def test_the_machine_is_this_one():
    here = machine.describe_machine()
    assert here.device == "cpu" and here.name
    assert here.torch == torch.__version__ and here.transformers == transformers.__version__
    assert here.threads == torch.get_num_threads()
    assert 1 <= here.cores <= (os.cpu_count() or 1)
    assert here.instructions == torch.backends.cpu.get_cpu_capability()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor : 0\nmodel name\t: Fast  Processor 9\nmodel name\t: Another\n", "Fast Processor 9"),
        ("processor : 0\nBogoMIPS : 50\n", platform.machine()),
        ("model name\t:\n", platform.machine()),
    ],
)
def test_the_processor_is_called_what_its_maker_calls_it(text, name):
    assert machine._from_cpuinfo(text) == name


def test_a_compiler_is_one_that_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert machine.find_compiler() is None
    for name in ("c++", "my-compiler"):
        program = tmp_path / name
        program.touch()
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert machine.find_compiler() == "c++"
    monkeypatch.setenv("CXX", "my-compiler -O2")
    assert machine.find_compiler("cpu") == "my-compiler -O2"


def test_a_card_needs_triton(monkeypatch):
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    assert machine.find_compiler("cuda") is None
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: object())
    assert machine.find_compiler("cuda") == "triton"
