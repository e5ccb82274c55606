"""MKL's functions are called by one thread first. The race itself shows in one process out of ten or fewer."""

from __future__ import annotations

import mmap
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specnb import first_calls

WHO_CALLS = """
import sys, torch

sizes = {}
for name in sys.argv[2:]:
    def recorded(x, name=name, function=getattr(torch, name)):
        sizes.setdefault(name, []).append((x.numel(), x.dtype))
        return function(x)
    setattr(torch, name, recorded)
__import__(sys.argv[1])
assert set(sizes) == set(sys.argv[2:]), set(sys.argv[2:]) - set(sizes)
for calls in sizes.values():
    assert {(1, torch.float32), (1, torch.float64)} <= set(calls), calls
"""


@pytest.mark.parametrize("module", ["specnb.cache", "specnb.models"])
def test_what_loads_or_runs_a_model_settles_them(module):
    subprocess.run([sys.executable, "-c", WHO_CALLS, module, *first_calls.FUNCTIONS], check=True)


def test_none_is_forgotten():
    """The names that PyTorch's own library has from MKL: vmsCos, vmsLn, …"""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not (library.exists() and torch.backends.mkl.is_available()):
        pytest.skip("This PyTorch does not come with MKL in a shared library.")
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = {name.decode().lower() for name in re.findall(rb"\0vms([A-Z][A-Za-z0-9]*)(?=\0)", content)}
    if not found:
        pytest.skip("This PyTorch does not show the names of what it takes from MKL.")
    assert {{"ln": "log"}.get(name, name) for name in found} == set(first_calls.FUNCTIONS)
