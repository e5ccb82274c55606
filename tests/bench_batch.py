"""Tokens per second of a batch, with and without speculation, against transformers' batched `generate`. Not a test.

    python tests/bench_batch.py [--dtype bfloat16] [--sizes 1,2,4,8,16] [--new 64] [--repeats 3] [--compile]

Run it on a machine that does nothing else. Every repetition goes through all ways and batch sizes, in an order of its
own. Rows end where the model ends them; tokens after an end do not count. The break-even is predicted from the cost of
passes (`forward_cost`) and from the tokens per pass that were counted, and compared with what was measured.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import specnb
from specnb.compiled import pass_size, twin_for
from specnb.machine import describe_machine
from specnb.prediction import compiled_pass
from specnb.profiling import synchronise

BASELINE = "transformers"
DRAFTERS: dict[str, Callable[[], specnb.Drafter | None]] = {
    "plain": lambda: None,
    "lookup": specnb.PromptLookup,
    "adaptive": lambda: specnb.Adaptive(specnb.PromptLookup()),
}
WIDTH = 12  # positions of a row in a compiled pass, at most
COSTS = (1, 2, 4, 8, 11)  # positions of each row, of which passes are timed


@dataclass
class Speed:
    """What one way made of batches of one size.

    Attributes:
        seconds, tokens: of each repetition.
        tokens_per_pass: of a row, over all repetitions; 1 for plain decoding.
        positions: of a row and pass, its newest token and its guesses; filler not counted.
        widest: the same with the filler of rows with a shorter draft.
    """

    way: str
    batch_size: int
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    tokens_per_pass: float = 1.0
    positions: float = 1.0
    widest: float = 1.0

    @property
    def rate(self) -> float:
        """Tokens per second, the median."""
        return median(n / s for n, s in zip(self.tokens, self.seconds))


def padded(prompts: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """input_ids and attention_mask [B, n], left-padded."""
    n = max(map(len, prompts))
    ids = [[0] * (n - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (n - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def new_tokens(sequences: Tensor, n: int, ends: Sequence[int]) -> int:
    """Tokens written after the prompts' n columns, each row's up to its end."""
    ended = torch.isin(sequences[:, n:], torch.tensor(ends, device=sequences.device)).cumsum(1)
    return int(((ended == 0).sum(1) + (ended > 0).any(1)).sum())


def run(model: Any, way: str, prompts: Sequence[list[int]], new: int, compile: bool) -> tuple[Tensor, Any]:
    """One batch's sequences, and specnb's trace of it (None for transformers)."""
    ids, mask = (part.to(model.device) for part in padded(prompts))
    options = dict(attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)
    if way == BASELINE:
        return model.generate(ids, **options), None
    drafter = WARM.setdefault((model, way, len(prompts)), DRAFTERS[way]())
    width = dict(compile=True, pass_width=WIDTH) if compile else {}
    out = specnb.generate(model, ids, drafter, return_trace=True, **width, **options)
    return out.sequences, out


WARM: dict[Any, Any] = {}  # drafters: an adaptive one keeps what it has learned of the machine


def compile_sizes(model: Any, positions: int) -> None:
    """All passes up to so many positions; else they would be compiled in the midst of what is timed."""
    twin = twin_for(model, WIDTH)
    for n in range(1, positions + 1) if twin is not None else ():
        twin.serves(pass_size(n))


def account(speed: Speed, out: Any) -> None:
    """Counts of a specnb run."""
    rounds = len(out.trace)
    speed.tokens_per_pass = sum(len(r.emitted) for r in out.trace) / rounds
    speed.positions = 1 + sum(len(r.drafted) for r in out.trace) / rounds
    passes, seen = [], set()  # the trace goes round by round, rows in order
    for r in out.trace:
        if r.row in seen:
            passes, seen = [*passes, []], set()
        passes = passes or [[]]
        seen.add(r.row)
        passes[-1].append(1 + len(r.drafted))
    speed.widest = sum(max(widths) * len(widths) for widths in passes) / rounds


def measure(
    model: Any, prompts: Sequence[list[int]], sizes: Sequence[int], ways: Sequence[str], new: int, repeats: int,
    compile: bool,
) -> list[Speed]:  # fmt: skip
    """All ways and sizes, interleaved; one repetition before warms up."""
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    speeds = [Speed(way, B) for B in sizes for way in ways]
    if compile:
        compile_sizes(model, WIDTH * max(sizes))
    order = random.Random(0)
    for repeat in range(repeats + 1):
        for speed in order.sample(speeds, len(speeds)):
            batch = [prompts[i % len(prompts)] for i in range(speed.batch_size)]
            synchronise(model.device)
            started = time.perf_counter()
            sequences, out = run(model, speed.way, batch, 4 if repeat == 0 else new, compile)
            synchronise(model.device)
            if repeat:
                speed.seconds.append(time.perf_counter() - started)
                speed.tokens.append(new_tokens(sequences, max(map(len, batch)), ends))
            if out is not None and out.trace:
                account(speed, out)
    return speeds


def pass_cost(model: Any, rows: int, context: int, compile: bool, repeats: int = 3) -> specnb.CostCurve:
    """v by positions of each of so many rows."""
    if not compile:
        return specnb.forward_cost(model, COSTS, context=context, batch_size=rows, repeats=repeats)
    run_pass = compiled_pass(model, WIDTH)
    return specnb.forward_cost(model, COSTS, context=context, batch_size=rows, repeats=repeats, run=run_pass)


def break_evens(speeds: Sequence[Speed], way: str, cost: specnb.CostCurve, packed: bool) -> dict[str, float]:
    """Where speculation stops paying: the smallest size measured at which it does not, and the one predicted."""
    plain = {s.batch_size: s for s in speeds if s.way == "plain"}
    drafted = [s for s in speeds if s.way == way]
    measured = next((s.batch_size for s in drafted if s.rate < plain[s.batch_size].rate), math.inf)
    tokens = sum(s.tokens_per_pass for s in drafted) / len(drafted)
    positions = sum(s.positions if packed else s.widest for s in drafted) / len(drafted)
    predicted = specnb.break_even_batch(tokens, positions, cost)
    return {"tokens_per_pass": tokens, "positions": positions, "measured": measured, "predicted": predicted}


def table(speeds: Sequence[Speed]) -> str:
    base = {s.batch_size: s.rate for s in speeds if s.way == BASELINE}
    heads = ("tokens/s", "x " + BASELINE, "tokens/pass", "positions", "filled")
    lines = ["{:>4} {:14} {:>9} {:>15} {:>12} {:>10} {:>7}".format("B", "way", *heads)]
    for s in speeds:
        ratio = f"{s.rate / base[s.batch_size]:15.2f}" if s.batch_size in base else f"{'':15}"
        counts = f"{s.tokens_per_pass:12.2f} {s.positions:10.2f} {s.widest:7.2f}"
        lines.append(f"{s.batch_size:4} {s.way:14} {s.rate:9.1f} {ratio} {counts}")
    return "\n".join(lines)


def whole_numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--dtype", default="float32")
    options.add_argument("--sizes", type=whole_numbers, default=[1, 2, 4, 8, 16])
    options.add_argument("--new", type=int, default=64, help="most new tokens of a row")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--group", default="copy_heavy_summary")
    options.add_argument("--ways", default=",".join([BASELINE, *DRAFTERS]))
    options.add_argument("--compile", action="store_true")
    options.add_argument("--out", help="a JSON file for all figures")
    args = options.parse_args()
    model, tokenizer = specnb.load_model(dtype=getattr(torch, args.dtype))
    prompts = [specnb.encode(tokenizer, p)[0].tolist() for p in specnb.load_prompts(group=args.group)]
    ways = args.ways.split(",")
    speeds = measure(model, prompts, args.sizes, ways, args.new, args.repeats, args.compile)
    context = round(sum(map(len, prompts)) / len(prompts)) + args.new // 2
    cost = pass_cost(model, 4, context, args.compile)
    kind = "compiled" if args.compile else "uncompiled"
    print(f"{args.dtype}, {kind}, {args.group}, up to {args.new} tokens, median of {args.repeats}")
    print(describe_machine())
    print(table(speeds))
    print(cost)
    found = {way: break_evens(speeds, way, cost, args.compile) for way in ways if way not in (BASELINE, "plain")}
    for way, numbers in found.items():
        print(f"{way} stops paying at B = {numbers['measured']} (measured), {numbers['predicted']} (predicted)")
    if args.out:
        told = {"settings": vars(args), "machine": asdict(describe_machine()), "break_even": found}
        told |= {"speeds": [asdict(s) for s in speeds], "cost": [list(cost.positions), list(cost.milliseconds)]}
        Path(args.out).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
