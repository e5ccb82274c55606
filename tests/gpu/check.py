"""What specnb promises, tried on a GPU, and what it brings there: run by `make gpu-check`, in less than ten minutes.

    python tests/gpu/check.py [--device cpu --small] [--out data/measurements]

Exactness: greedy rows of a batch in float32 are those of each prompt alone; in bfloat16 at one pass width it is
reported how many are, which nothing promises. Law: chi-square of sampled tokens against the model's own distribution.
Throughput: tokens per second for growing batches, against transformers' `generate`, on the default model and on
random weights of about 1 and 7 billion parameters (what a pass costs does not depend on what the weights are). Drafts
come from a script that knows the answer of plain decoding and is right four times in five: random weights have nothing
to look up.

Without a CUDA device it says so and does nothing. With ``--device cpu --small`` it runs on tiny models: a test does so.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import specnb
from specnb.machine import describe_machine
from specnb.profiling import synchronise

SIZES = (1, 2, 4, 8, 16, 32, 64)
LLAMAS: dict[str, dict[str, int]] = {
    "1B": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32),
    "7B": dict(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32),
}
TINY = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
K, ALPHA = 4, 0.8


def llama(sizes: dict[str, int], device: str, dtype: torch.dtype, vocab: int = 32000) -> Any:
    """Random weights, made where they are used."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **sizes, num_key_value_heads=sizes["num_attention_heads"] // 4 or 1, vocab_size=vocab, eos_token_id=None,
        max_position_embeddings=4096, initializer_range=0.3 if vocab < 100 else 0.02,
    )  # fmt: skip
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def prompts(vocab: int, lengths: Sequence[int]) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(1, vocab) for _ in range(n)] for n in lengths]


def padded(rows: Sequence[list[int]], device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    n = max(map(len, rows))
    ids = torch.tensor([[0] * (n - len(row)) + row for row in rows], device=device)
    return ids, torch.tensor([[0] * (n - len(row)) + [1] * len(row) for row in rows], device=device)


def exactness(model: Any, rows: Sequence[list[int]], new: int, width: int | None) -> dict[str, int]:
    """How many rows of a batch with drafts are what each prompt alone is without."""
    ids, mask = padded(rows, model.device)
    options = dict(max_new_tokens=new, pass_width=width, pad_token_id=0, do_sample=False)
    equal = {}
    for name, drafter in (("plain", None), ("lookup", specnb.PromptLookup(6)), ("copy", specnb.DraftModel(model, 3))):
        out = specnb.generate(model, ids, drafter, attention_mask=mask, **options).sequences[:, ids.shape[1] :]
        alone = [
            specnb.generate(model, torch.tensor([row], device=model.device), **options).sequences[0, len(row) :]
            for row in rows
        ]
        equal[name] = sum(torch.equal(row, other) for row, other in zip(out, alone))
    return {"rows": len(rows), **equal}


def law(model: Any, samples: int) -> float:
    """p-value of the first sampled token's counts against the model's own law; drafts are a fixed guess."""
    ids = torch.tensor([[1, 2, 3, 4]], device=model.device)
    drafter = specnb.Scripted(lambda context: [5, 6])
    out = specnb.generate(
        model, ids, drafter, max_new_tokens=1, do_sample=True, top_k=0, top_p=1.0, temperature=1.0, seed=0,
        num_return_sequences=samples, pad_token_id=0,
    )  # fmt: skip
    with torch.no_grad():
        p = model(ids).logits[0, -1].double().softmax(-1).cpu()
    counts = torch.bincount(out.sequences[:, -1].cpu(), minlength=len(p))
    return specnb.chi_square(counts, p).pvalue


def knowing(texts: dict[tuple[int, ...], list[int]]) -> specnb.Drafter:
    """Guesses what plain decoding wrote after the prompt; each guess is right with chance ALPHA."""
    rng = random.Random(1)

    def guess(context: list[int]) -> list[int]:
        for prompt, text in texts.items():
            if tuple(context[: len(prompt)]) == prompt:
                following = text[len(context) - len(prompt) :][:K]
                return [token if rng.random() < ALPHA else 0 for token in following]
        return []

    return specnb.Scripted(guess, num_draft_tokens=K)


def throughput(model: Any, rows: Sequence[list[int]], sizes: Sequence[int], new: int, repeats: int) -> list[dict]:
    """Tokens per second by batch size: transformers plain, specnb plain, specnb with drafts; interleaved."""
    found = []
    for B in sizes:
        batch = [rows[i % len(rows)] for i in range(B)]
        ids, mask = padded(batch, model.device)
        known = answer(model, "plain", ids, mask, new, None).sequences[:, ids.shape[1] :].tolist()
        drafter = knowing({tuple(prompt): text for prompt, text in zip(batch, known)})
        for repeat in range(repeats + 1):  # the first warms up
            for way in ("transformers", "plain", "drafts"):
                synchronise(model.device)
                started = time.perf_counter()
                out = answer(model, way, ids, mask, new, drafter)
                synchronise(model.device)
                seconds = time.perf_counter() - started
                per_pass = 1.0 if way == "transformers" else float(out.stats.tokens_per_pass.mean())
                line = {"way": way, "batch_size": B, "seconds": seconds, "tokens": B * new, "tokens_per_pass": per_pass}
                found += [{**line, "tokens_per_second": B * new / seconds}] if repeat else []
    return found


def answer(
    model: Any, way: str, ids: torch.Tensor, mask: torch.Tensor, new: int, drafter: specnb.Drafter | None
) -> Any:
    """One batch's answers, exactly ``new`` tokens of each row."""
    options = dict(attention_mask=mask, max_new_tokens=new, eos_token_id=None, do_sample=False, pad_token_id=0)
    if way == "transformers":
        return model.generate(ids, **options)
    return specnb.generate(model, ids, drafter if way == "drafts" else None, **options)


def check(device: str, small: bool) -> dict[str, Any]:
    """Everything, as one JSON object."""
    lengths, new = ((3, 17, 40), 8) if small else ((5, 60, 200, 300), 32)
    vocab = 61 if small else 32000
    told: dict[str, Any] = {"machine": asdict(describe_machine(device)), "small": small}
    told["date"] = datetime.now(UTC).isoformat(timespec="seconds")
    torch.backends.cuda.matmul.allow_tf32 = False  # float32 is to be float32
    exact = llama(TINY if small else LLAMAS["1B"], device, torch.float32, vocab)
    told["float32"] = exactness(exact, prompts(vocab, lengths), new, None)
    half = exact.to(torch.bfloat16)
    told["bfloat16 at one width"] = exactness(half, prompts(vocab, lengths), new, 8)
    del exact, half
    told["chi-square p-value"] = law(llama(TINY, device, torch.float32, 61), 200 if small else 4000)
    models = {"tiny": TINY} if small else LLAMAS
    told["throughput"] = {}
    if not small:
        model, tokenizer = specnb.load_model(device=device)
        texts = [specnb.encode(tokenizer, p)[0].tolist() for p in specnb.load_prompts(group="copy_heavy_summary")]
        told["throughput"]["default"] = throughput(model, texts, SIZES, 48, 2)
    for name, sizes in models.items():
        model = llama(sizes, device, torch.float32 if small else torch.bfloat16, vocab)
        rows = prompts(vocab, [20] * 4 if small else [128] * 64)
        told["throughput"][name] = throughput(model, rows, (1, 2) if small else SIZES, 6 if small else 32, 1)
        del model
    return told


def problems(told: dict[str, Any]) -> list[str]:
    """What of the promises did not hold."""
    rows = told["float32"]["rows"]
    wrong = [f"float32, {name}: {n} of {rows} rows" for name, n in told["float32"].items() if n != rows]
    if told["chi-square p-value"] < 1e-4:
        wrong.append(f"sampled tokens do not follow the model's law: p-value {told['chi-square p-value']:.2g}")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="cuda")
    options.add_argument("--small", action="store_true", help="tiny models and few tokens")
    options.add_argument("--out", default="data/measurements", help="a folder for gpu_<name>.json")
    args = options.parse_args(arguments)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("gpu-check: no CUDA device here; nothing was checked and nothing measured.")
        return 0
    started = time.perf_counter()
    told = check(args.device, args.small)
    told["seconds"] = round(time.perf_counter() - started, 1)
    wrong = problems(told)
    name = "".join(c if c.isalnum() else "_" for c in told["machine"]["name"].lower())
    path = Path(args.out) / f"gpu_{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in told.items() if key != "throughput"}, indent=1))
    print(f"{path} written after {told['seconds']} s; " + ("; ".join(wrong) or "all promises hold"))
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
