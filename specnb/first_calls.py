"""Settles a race in MKL before it can touch a result.

PyTorch's CPU builds for x86 hand cos, sin, exp and their like to MKL, which chooses the code of each function at its
first call. When two threads make that call together, one of them may be given a version with 12 correct bits instead of
23, this once: https://github.com/pytorch/pytorch/issues/188792. The first such call of a process is often the rotary
embedding of a model's first pass. Then the texts of that one run differ from those of every later run.
"""

from __future__ import annotations

import torch

# those that libtorch_cpu takes from MKL's vector mathematics, in single and double precision
FUNCTIONS = [
    "acos",
    "asin",
    "atan",
    "cos",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "log",
    "log10",
    "log2",
    "sin",
    "sqrt",
    "tan",
    "tanh",
    "trunc",
]


def settle() -> None:
    """Call every function once in each precision, on a single number, which is one thread's work."""
    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype)
        for function in FUNCTIONS:
            getattr(torch, function)(number)
