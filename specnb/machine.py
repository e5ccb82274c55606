"""What a machine is, in the words a report needs: its processor or card, its threads, its software, its compiler."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from specnb import kernels


@dataclass(frozen=True)
class Machine:
    """Where a model runs.

    Attributes:
        device: "cpu", "cuda:0", …
        name: what the maker calls the processor or the card.
        cores: processor cores this process may use.
        threads: those torch uses for one operation.
        instructions: the vector instructions torch uses on a CPU; "" elsewhere.
        python, torch, transformers: versions.
        compiler: what `torch.compile` would call for this device; None if it is not there.
    """

    device: str
    name: str
    cores: int
    threads: int
    instructions: str
    python: str
    torch: str
    transformers: str
    compiler: str | None


def describe_machine(device: torch.device | str = "cpu") -> Machine:
    """The machine as this process finds it."""
    import transformers

    place = torch.device(device)
    on_cpu = place.type == "cpu"
    return Machine(
        device=str(place),
        name=_cpu_name() if on_cpu else _card_name(place),
        cores=_usable_cores(),
        threads=torch.get_num_threads(),
        instructions=torch.backends.cpu.get_cpu_capability() if on_cpu else "",
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        compiler=find_compiler(place),
    )


def find_compiler(device: torch.device | str = "cpu") -> str | None:
    """What ``compile=True`` (or `torch.compile`) needs for this device: a C++ compiler, or Triton for a card."""
    if torch.device(device).type != "cpu":
        return "triton" if importlib.util.find_spec("triton") else None
    return kernels.compiler()


def _usable_cores() -> int:
    """Cores this process may run on, which in a container can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _card_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} device"


def _cpu_name() -> str:
    """What the maker calls the processor; Linux and macOS know it, elsewhere the architecture must do."""
    try:
        if platform.system() == "Darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        return _from_cpuinfo(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except (OSError, subprocess.CalledProcessError):
        return platform.processor() or platform.machine()


def _from_cpuinfo(text: str) -> str:
    """The model name in /proc/cpuinfo, which Arm kernels leave out."""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return " ".join(names[0].split()) if names and names[0] else platform.machine()
