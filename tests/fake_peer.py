"""A worker as `specnb.peers` starts it, with engines made up for the tests; it runs without specnb and torch.

"vllm" counts on from the prompt's last token; "vllm-lookup" does so once and then breaks; "llama-cpp" is not installed,
and "llama-cpp-lookup" cannot load its weights.
"""

import importlib.util
import itertools
import sys
from pathlib import Path

place = Path(__file__).resolve().parents[1] / "specnb" / "peers.py"
spec = importlib.util.spec_from_file_location("worker", place)
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)


def counts_on(options):
    print("Loading", options.model, options.dtype, options.context, options.threads)  # engines talk; nobody must mind
    return f"fake 1.0 ({options.dtype})", lambda request: itertools.count(request["ids"][-1] + 1)


def breaks(options):
    asked = itertools.count(1)

    def answer(request):
        if next(asked) > 2:
            raise RuntimeError("out of memory")
        return itertools.count(1)

    return "fake 1.0", answer


def missing(options):
    raise ImportError("No module named 'llama_cpp'")


def fails(options):
    raise OSError(f"{options.model} is no model")


worker.ENGINES.update({"vllm": counts_on, "vllm-lookup": breaks, "llama-cpp": missing, "llama-cpp-lookup": fails})
assert not {"specnb", "torch"} & sys.modules.keys()
worker.work(sys.argv[1:])
