"""A long run of `Batcher`: many requests with random cancellations and planted failures, each compared with its prompt
decoded alone; memory watched. Not a test: it takes minutes.

    python tests/soak_batcher.py [--requests 1000] [--max-batch 8] [--drafter model] [--pass-width 8] [--seed 0]
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import specnb
from tests.test_batching import FAILURES
from tests.tiny import VOCAB, perturbed, tiny_model

NAN_TOKEN = VOCAB - 1  # its embedding is NaN: a prompt that holds it fails
LONGEST, MOST_NEW = 300, 40


def draft_of(name: str, model) -> specnb.Drafter | None:
    return {
        "none": lambda: None,
        "lookup": specnb.PromptLookup,
        "model": lambda: specnb.DraftModel(perturbed(model), 3),
    }[name]()


def planned(requests: int, rng: random.Random) -> list[dict]:
    """What each request asks, and what is to happen to it."""
    kinds = [None] * 16 + ["cancel", "cancel", "nan", *FAILURES]
    return [
        {
            "prompt": [rng.randrange(1, VOCAB - 1) for _ in range(rng.randint(1, LONGEST))],
            "new": rng.randint(1, MOST_NEW),
            "fate": rng.choice(kinds),
        }
        for _ in range(requests)
    ]


def submit(batcher: specnb.Batcher, plan: dict) -> specnb.Job:
    prompt = [*plan["prompt"], NAN_TOKEN] if plan["fate"] == "nan" else plan["prompt"]
    options = FAILURES.get(plan["fate"], {})
    return batcher.submit(prompt, max_new_tokens=plan["new"], suppress_tokens=[NAN_TOKEN], **options)


def memory() -> float:
    """Megabytes of this process."""
    gc.collect()
    return psutil.Process().memory_info().rss / 1e6


def soak(batcher: specnb.Batcher, plans: list[dict], rng: random.Random) -> tuple[list[specnb.Job], list[float]]:
    """Play all requests, some submitted at once and some later; returns the jobs and the memory along the way.

    All jobs are kept, to be judged: a few kilobytes each, their prompts and tokens.
    """
    jobs: list[specnb.Job] = []
    used: list[float] = []
    while len(jobs) < len(plans) or batcher.running or batcher.waiting:
        while len(jobs) < len(plans) and batcher.waiting < rng.randint(0, 20):
            jobs.append(submit(batcher, plans[len(jobs)]))
            if len(jobs) % max(1, len(plans) // 10) == 0:
                used.append(memory())
                print(f"{len(jobs)} submitted, {used[-1]:.0f} MB", flush=True)
        batcher.step()
        doomed = [job for job, plan in zip(jobs, plans) if plan["fate"] == "cancel" and not job.done]
        if doomed and rng.random() < 0.1:
            rng.choice(doomed).cancel()
    return jobs, used


def judge(job: specnb.Job, plan: dict, expected: list[int]) -> str:
    """What became of a request, or "WRONG"."""
    if job.tokens != expected[: len(job.tokens)]:
        return "WRONG"
    if plan["fate"] == "nan":
        return "failed as planned" if isinstance(job.error, ValueError) and "NaN" in str(job.error) else "WRONG"
    if job.finish_reason == "error":
        return "failed as planned" if plan["fate"] in FAILURES else "WRONG"
    if job.finish_reason == "cancelled":
        return "cancelled" if plan["fate"] == "cancel" else "WRONG"
    return "equal to its prompt alone" if job.tokens == expected else "WRONG"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--drafter", choices=["none", "lookup", "model"], default="model")
    parser.add_argument("--pass-width", type=int)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = tiny_model("llama").to(getattr(torch, args.dtype))
    drafter = draft_of(args.drafter, model)
    with torch.no_grad():
        model.model.embed_tokens.weight[NAN_TOKEN] = float("nan")
    rng = random.Random(args.seed)
    plans = planned(args.requests, rng)
    batcher = specnb.Batcher(
        model, drafter, max_batch=args.max_batch, pass_width=args.pass_width, max_waiting=40, prefill_chunk=32
    )
    started = time.perf_counter()
    jobs, used = soak(batcher, plans, rng)
    seconds = time.perf_counter() - started
    options = dict(pass_width=args.pass_width, suppress_tokens=[NAN_TOKEN], do_sample=False)
    fates: Counter[str] = Counter()
    for job, plan in zip(jobs, plans):
        ids = torch.tensor([plan["prompt"]])
        alone = specnb.generate(model, ids, max_new_tokens=plan["new"], **options).sequences[0, ids.shape[1] :]
        fates[judge(job, plan, alone.tolist())] += 1
    tokens = sum(len(job.tokens) for job in jobs)
    print(f"{len(jobs)} requests, {tokens} tokens, {seconds:.0f} s; {dict(fates)}")
    half = used[len(used) // 2 :]
    print(f"memory: {used[0]:.0f} MB after a tenth, {half[0]:.0f} after half, {used[-1]:.0f} at the end; {batcher}")
    lost = int(batcher._slots.cache.lengths.sum()) + batcher.running + batcher.waiting
    return int(fates["WRONG"] > 0 or lost > 0 or not all(job.done for job in jobs))


if __name__ == "__main__":
    raise SystemExit(main())
