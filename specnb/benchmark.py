"""Side by side: every contestant answers the same prompts, one after the other, in one run.

    result = specnb.run_benchmark(model, tokenizer, drafters={"lookup": specnb.PromptLookup()})
    print(result.table())

A machine's speed drifts while a benchmark runs. So contestants take turns on every prompt, in an order drawn anew each
time, and only times of one prompt are compared; the cost of passes is sampled in between, all along the run.
Notebook 07 reads such a report.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from specnb import checks
from specnb.contest import Bench, model_name
from specnb.contestants import BASELINE, Ask, Contestant, everyone, named_drafters
from specnb.drafters import Drafter, DraftModel
from specnb.models import load_model
from specnb.peers import ENGINES, Peer
from specnb.progress import say
from specnb.results import BenchmarkResult
from specnb.theory import whole_number
from specnb.workloads import GROUPS, Prompt, load_prompts

NEW_TOKENS, QUICK_TOKENS = 128, 32
RESULT = "result.json"
INTERRUPTED = 130  # what shells report after Ctrl-C


def run_benchmark(
    model: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[Prompt | str] | None = None,
    *,
    drafters: Drafter | Sequence[Drafter] | Mapping[str, Drafter] | None = None,
    contestants: Sequence[str] | None = None,
    others: Mapping[str, Ask] | None = None,
    peers: Sequence[Peer] = (),
    temperatures: Sequence[float] = (0.0,),
    max_new_tokens: int = NEW_TOKENS,
    repeats: int = 1,
    seed: int = 0,
    compile: bool = False,
    pass_width: int | None = None,
    progress: bool = True,
    after_each: Callable[[BenchmarkResult], Any] | None = None,
    resume: BenchmarkResult | None = None,
) -> BenchmarkResult:
    """Measure ways to decode against transformers' plain ``generate``, interleaved in one run.

    Taking part, by name: ``transformers`` (always; the baseline), ``transformers-lookup``, ``transformers-assisted``
    if a drafter is a `DraftModel`; ``plain`` (specnb without drafter), every drafter by its name, and
    ``adaptive-NAME``, the same drafter under `specnb.Adaptive`. With ``compile=True`` specnb's take part a second
    time, compiled and of one fixed width, with ``+compile`` after their names.

    A prompt of several turns is asked turn by turn. The answers in between are the baseline's, for everyone, so that
    all get the same tokens; times of its turns are added.

    Args:
        model, tokenizer: as `specnb.load_model` returns them.
        prompts: `Prompt` objects, or questions as text; None means the suite.
        drafters: by name, or a sequence named after their classes; None means ``{"lookup": PromptLookup()}``.
        contestants: names to keep; None keeps all.
        others: further contestants: name → function ``(ids [1, n], max_new_tokens, temperature, seed)`` that returns
            the new tokens, or an `Answer` (specnb/contestants.py) that says more.
        peers: other engines, see `specnb.peers.Peer`; one that cannot run is named in the report with the reason.
        temperatures: 0 is greedy; above it plain sampling, without top-k and top-p.
        max_new_tokens, repeats: tokens per answer at most, and how often each is measured.
        seed: of the samples and of the order of contestants.
        compile: let specnb's also run compiled.
        pass_width: W for specnb's that are not compiled, as in `generate`; with ``compile`` also for those that are.
        progress: show how far it is, and the time left.
        after_each: called with the result so far after every prompt, to keep it: ``lambda r: r.to_json("now.json")``.
        resume: the result of an interrupted run of the same settings; what it has is not measured again.

    Returns:
        `BenchmarkResult`. After Ctrl-C it holds what was measured until then, and ``complete`` is False.

    Raises:
        ValueError, TypeError: for bad input, before anything is measured.
        KeyboardInterrupt: if nothing has been measured yet.
    """
    checks.check_model(model)
    asked = as_prompts(prompts)
    numbers = settings(model, temperatures, max_new_tokens, repeats, seed, pass_width)
    known = everyone(model, named_drafters(drafters), pass_width=pass_width, compile=compile, others=others)
    chosen = selected(known, contestants, [peer.name for peer in peers])
    bench = Bench(model, tokenizer, asked, chosen, numbers, progress)
    bench.check_lengths()
    if resume is not None:
        bench.take_over(resume)
    # transformers draws from torch's global generator: what the caller draws afterwards should not depend on us
    with torch.random.fork_rng(), bench.with_peers([p for p in peers if contestants is None or p.name in contestants]):
        return bench.run(after_each)


def as_prompts(prompts: Sequence[Prompt | str] | None) -> list[Prompt]:
    """Prompts as such; bare questions are numbered."""
    if prompts is None:
        return load_prompts()
    if isinstance(prompts, (str, os.PathLike)):
        raise TypeError("prompts must be a list of questions; for a file of them give load_prompts(file).")
    made = [Prompt(str(n), "", (p,)) if isinstance(p, str) else p for n, p in enumerate(prompts, start=1)]
    if not made or not all(isinstance(prompt, Prompt) for prompt in made):
        raise ValueError(
            "prompts must hold at least one question, each a string or a specnb.Prompt; None is the suite."
        )
    if len({prompt.id for prompt in made}) < len(made):
        raise ValueError("Two prompts have the same id: each needs one of its own.")
    return made


def settings(
    model: PreTrainedModel, temperatures: Sequence[float], max_new_tokens: int, repeats: int, seed: int,
    pass_width: int | None,
) -> dict[str, Any]:  # fmt: skip
    """The numbers of a run, checked, as the result keeps them."""
    checks.check_pass_width(pass_width)
    heats: list[Any] = list(temperatures) if isinstance(temperatures, Sequence) else [temperatures]
    if not heats or not all(isinstance(t, Real) and 0 <= float(t) < math.inf for t in heats):
        raise ValueError(
            f"temperatures must be numbers of at least 0 (0 is greedy), at least one; got {temperatures!r}."
        )
    return {
        "model": model_name(model),
        "temperatures": [float(t) for t in heats],
        "max_new_tokens": whole_number("max_new_tokens", max_new_tokens, at_least=1),
        "repeats": whole_number("repeats", repeats, at_least=1),
        "seed": whole_number("seed", seed),
        "pass_width": pass_width,
    }


def selected(
    known: Mapping[str, Contestant], wanted: Sequence[str] | None, peers: Sequence[str]
) -> dict[str, Contestant]:
    """The contestants of these names, and the baseline."""
    names = list(known) if wanted is None else [wanted] if isinstance(wanted, str) else list(wanted)
    if missing := [name for name in names if name not in known and name not in peers]:
        raise ValueError(f"There is no contestant {missing[0]!r} here. There is: {', '.join([*known, *peers])}.")
    return {name: contestant for name, contestant in known.items() if name == BASELINE or name in names}


# --- the command ---


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``specnb bench`` takes."""
    add = parser.add_argument
    add("--model", metavar="NAME", help="Hub id or folder; default: SmolLM2-135M-Instruct")
    add("--dtype", type=_words, default=[None], metavar="A,B", help="float32, bfloat16, …; one run each")
    add("--draft-model", metavar="NAME", help="a smaller model that drafts, here and in transformers")
    add(
        "--questions", metavar="FILE", help="JSONL with `turns`, as MT-bench and Spec-Bench have it; default: the suite"
    )
    add("--groups", type=_words, metavar="A,B", help=f"kinds of questions; in the suite: {', '.join(GROUPS)}")
    add("--limit", type=int, metavar="N", help="at most N questions of each group")
    add("--contestants", type=_words, metavar="A,B",
        help=f"beside {BASELINE}: {BASELINE}-lookup, {BASELINE}-assisted, plain, lookup, adaptive-lookup, "
        "draft, adaptive-draft, specnb's also with +compile; default: all that there are")  # fmt: skip
    add("--temperatures", type=_numbers, default=[0.0], metavar="A,B", help="such as 0,0.7; 0 is greedy, the default")
    add("--max-new-tokens", type=int, metavar="N", help=f"per answer; default: {NEW_TOKENS}")
    add("--repeats", type=int, default=1, metavar="N", help="how often each answer is measured; default: 1")
    add("--seed", type=int, default=0, metavar="N", help="of samples and of the order of contestants; default: 0")
    add("--pass-width", type=int, metavar="W", help="positions of every pass of specnb, filler included")
    add("--compile", action="store_true", help="specnb's a second time, compiled; it takes a minute or two more")
    add(
        "--quick",
        action="store_true",
        help=f"one question of each group, {QUICK_TOKENS} tokens, unless you say otherwise",
    )
    add("--peer", action="append", default=[], metavar="ENGINE=PYTHON",
        help=f"another engine, and the interpreter that has it; engines: {', '.join(ENGINES)}")  # fmt: skip
    add("--peer-weights", action="append", default=[], metavar="ENGINE=FILE", help="what the engine loads instead")
    add("--out", metavar="FOLDER", help="for result.json, rows.csv, report.txt and pictures; default: named after now")
    add("--resume", metavar="FOLDER", help="go on with the interrupted run in this folder, same options")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the report, and keep it in files, also of a run that is stopped."""
    folder = Path(arguments.resume or arguments.out or f"specnb-bench-{datetime.now():%Y%m%d-%H%M%S}").expanduser()
    earlier = BenchmarkResult.from_json(folder / "result.json") if arguments.resume else None
    prompts = load_prompts(arguments.questions, arguments.groups, _limit(arguments))
    say(f"Results go to {folder}, after every prompt.")
    result: BenchmarkResult | None = None
    for dtype in arguments.dtype:
        so_far = _joined(result)
        one = _run_dtype(arguments, dtype, prompts, earlier, lambda r: keep_raw(so_far(r), folder))  # noqa: B023
        result = so_far(one)
        if not one.complete:
            break
    assert result is not None
    print(result.table())
    keep(result, folder)
    return 0 if result.complete else INTERRUPTED


def _joined(before: BenchmarkResult | None) -> Callable[[BenchmarkResult], BenchmarkResult]:
    return lambda result: result if before is None else before.merged(result)


def _run_dtype(
    arguments: argparse.Namespace,
    dtype: str | None,
    prompts: Sequence[Prompt],
    earlier: BenchmarkResult | None,
    after_each: Callable[[BenchmarkResult], Any],
) -> BenchmarkResult:
    model, tokenizer = load_model(arguments.model, dtype=dtype)
    drafters: dict[str, Drafter] = named_drafters(None)
    if arguments.draft_model:
        drafters["draft"] = DraftModel(load_model(arguments.draft_model, dtype=dtype)[0])
    return run_benchmark(
        model, tokenizer, prompts, drafters=drafters, contestants=arguments.contestants, peers=_peers(arguments),
        temperatures=arguments.temperatures, max_new_tokens=_new_tokens(arguments), repeats=arguments.repeats,
        seed=arguments.seed, compile=arguments.compile, pass_width=arguments.pass_width, after_each=after_each,
        resume=earlier,
    )  # fmt: skip


def keep(result: BenchmarkResult, folder: Path) -> None:
    """Write the result in every form; pictures where matplotlib and seaborn are installed."""
    keep_raw(result, folder)
    result.to_csv(folder / "rows.csv")
    (folder / "report.txt").write_text(result.table() + "\n", encoding="utf-8")
    with contextlib.suppress(ImportError):
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        for kind in ("speedup", "prediction"):
            with contextlib.suppress(ValueError):  # nothing of the kind to draw
                figure = result.plot(kind=kind).figure
                figure.savefig(folder / f"{kind}.png", bbox_inches="tight", dpi=150)  # type: ignore[union-attr]
            plt.close("all")


def keep_raw(result: BenchmarkResult, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    result.to_json(folder / RESULT)


def _peers(arguments: argparse.Namespace) -> list[Peer]:
    """``--peer`` and ``--peer-weights`` as peers."""
    weights = dict(_pair("--peer-weights", text) for text in arguments.peer_weights)
    pythons = dict(_pair("--peer", text) for text in arguments.peer)
    if unknown := sorted(weights.keys() - pythons.keys()):
        raise ValueError(f"--peer-weights names {unknown[0]!r}, which no --peer starts.")
    return [Peer(engine, python, weights.get(engine)) for engine, python in pythons.items()]


def _pair(option: str, text: str) -> tuple[str, str]:
    engine, found, path = text.partition("=")
    if not found or not path:
        raise ValueError(f"{option} takes ENGINE=PATH, such as llama-cpp=/opt/llama/bin/python; got {text!r}.")
    return engine, path


def _limit(arguments: argparse.Namespace) -> int | None:
    return 1 if arguments.quick and arguments.limit is None else arguments.limit


def _new_tokens(arguments: argparse.Namespace) -> int:
    usual = QUICK_TOKENS if arguments.quick else NEW_TOKENS
    return usual if arguments.max_new_tokens is None else arguments.max_new_tokens


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _numbers(text: str) -> list[float]:
    return [float(word) for word in _words(text)]
