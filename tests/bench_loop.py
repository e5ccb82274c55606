"""What the loop costs beside the model itself: interleaved runs, medians, one table. Not a test.

    python tests/bench_loop.py [--dtype bfloat16] [--new 48] [--repeats 7]

Run it on a machine that does nothing else. "passes alone" is the model called through `target_pass` as often as plain
decoding needs, and nothing around it; the loop's own time is what `generate` takes longer than that.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

import specnb

PROMPT = "Tell me a short story about a lighthouse keeper and a whale, and then explain what it means."


def passes_alone(model, ids: torch.Tensor, new: int) -> None:
    cache = specnb.RaggedCache(model.config, 1, ids.shape[1] + new)
    specnb.target_pass(model, cache, ids[:, :-1], logits_to_keep=1)
    for _ in range(new):
        specnb.target_pass(model, cache, ids[:, -1:])


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--dtype", default="float32")
    options.add_argument("--new", type=int, default=48, help="new tokens per run")
    options.add_argument("--repeats", type=int, default=7)
    args = options.parse_args()
    model, tokenizer = specnb.load_model(dtype=getattr(torch, args.dtype))
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    fixed = dict(max_new_tokens=args.new, min_new_tokens=args.new, do_sample=False)
    runs = {
        "passes alone": lambda: passes_alone(model, ids, args.new),
        "specnb.generate, no drafter": lambda: specnb.generate(model, ids, **fixed),
        "model.generate": lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **fixed),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.repeats + 1):  # the first round warms up
        for name, run in runs.items():
            times[name].append(seconds(run))
    alone = median(times["passes alone"][1:])
    print(
        f"{args.dtype}, {args.new} tokens, median of {args.repeats} interleaved runs, {torch.get_num_threads()} threads"
    )
    for name, taken in times.items():
        ms = median(taken[1:])
        print(f"{name:30} {1000 * ms / args.new:7.2f} ms per token   {ms / alone:6.3f} x passes alone")


if __name__ == "__main__":
    main()
