"""How the shipped draft and heads were made: `python -m specnb.recipe` and one of its steps.

    python -m specnb.recipe lessons FOLDER            # questions, and the default model's answers with p, part by part
    python -m specnb.recipe lessons FOLDER --worker 1 --of 2     # half of the parts, in a process of its own
    python -m specnb.recipe train FOLDER DRAFT        # distil; the state is kept in FOLDER
    python -m specnb.recipe evaluate FOLDER DRAFT     # α and tokens per pass on the suite, which is held out
    python -m specnb.recipe evaluate-trees FOLDER DRAFT      # tokens per pass where the draft's guesses are trees
    python -m specnb.recipe cost FOLDER DRAFT         # c: a draft step against the compiled target pass
    python -m specnb.recipe states FOLDER             # what the target had in mind along the answers, part by part
    python -m specnb.recipe medusa FOLDER HEADS       # train Medusa heads on that; the state is kept in FOLDER
    python -m specnb.recipe medusa-tree FOLDER HEADS  # the tree that suits this machine, from measured pass costs
    python -m specnb.recipe evaluate-medusa FOLDER HEADS     # their accuracy and tokens per pass on the suite

A part that is there is not made again, so each step can be broken off and started anew; the seeds are fixed, and which
process makes a part does not matter.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from specnb import curriculum, medusa_training, teaching, trees
from specnb.compiled import pass_size, twin_for
from specnb.decoding import Run, generate
from specnb.drafters import DraftModel, Medusa
from specnb.drafters.medusa import Attached, medusa_shape
from specnb.medusa_training import MedusaScore, Places
from specnb.models import load_model
from specnb.profiling import forward_cost
from specnb.theory import CostCurve
from specnb.training import Score, agreement, distill_draft, tokens_per_pass
from specnb.workloads import GROUPS, encode, load_prompts

SEED = 20240
PART = 256  # questions from templates in a part
INVENTED = 48  # questions that the target invents for every other part
LAG = 4  # parts come in fours: one is drawn, two invent; and each asks about the answers of the part so many before
PARTS = 64
FORM_PARTS = tuple(range(PARTS, PARTS + 6))  # code and structured output only, where the draft was weak
BEGUN = 320  # questions that the target finishes in each of these
TOP = 32
HELD_OUT = 64  # questions of part 0 that are not learnt from
TRAINING: dict[str, Any] = dict(layers=(0, 1), head_rows=8192, batch_tokens=768, scores=12)
# The first round began while the other parts were still being made. Each goes on from the draft of the one before; in
# the first two, heads did not yet score the hinted token.
ROUNDS: list[dict[str, Any]] = [
    dict(parts=range(3), epochs=3.0, learning_rate=2e-3, seed=0),
    dict(parts=range(6), epochs=2.0, learning_rate=1.5e-3, seed=1),
    dict(parts=range(6), epochs=1.0, learning_rate=1e-3, seed=2),
    dict(parts=(*range(7), *FORM_PARTS[:4]), epochs=3.0, learning_rate=1.5e-3, seed=3),
    dict(parts=(*range(7), *FORM_PARTS), epochs=2.0, learning_rate=1e-3, seed=4),
]
MEDUSA_PARTS = (0, 1, 2, 4, 5, 6)  # the greedy ones
MEDUSA: dict[str, Any] = dict(
    heads=4, hinted=True, head_rows=8192, epochs=5.0, batch_places=256, learning_rate=2e-3, seed=0
)  # fmt: skip
PASSES = (4, 8, 12, 16, 24, 32)  # positions of compiled passes
FORMAL, DRAFT_TREES = ("code_edit", "code_completion", "structured_output"), (8, 12, 16)  # nodes of a draft's trees
TREES = (3, 7, 15, 23, 31, 63)  # nodes of the trees that heads are measured with
ANSWER_TOKENS, TURN_TOKENS = 128, 80
USER_TURN = "<|im_start|>user\n"


def questions_of(part: int) -> list[tuple[str, str]]:
    """Questions from templates, no two parts the same."""
    return list(itertools.islice(curriculum.questions(PART * PARTS, SEED), PART * part, PART * (part + 1)))


def temperature_of(part: int) -> float:
    """Three of four parts are greedy, one is drawn: the draft is to guess under both."""
    return 0.8 if part % 4 == 3 else 0.0


def make_part(model: PreTrainedModel, tokenizer: Any, part: int, folder: Path, max_batch: int) -> None:
    """Questions from templates, questions the model invents, and tasks about earlier answers; all answered by it."""
    seed = SEED + 10_000 * part

    def answers(prompts: list[list[int]], temperature: float, tokens: int) -> list[teaching.Lesson]:
        made = teaching.lessons(
            model, prompts, top=TOP, max_batch=max_batch, seed=seed, temperature=temperature, max_new_tokens=tokens
        )
        return list(made)

    if part in FORM_PARTS:
        kinds, begun = zip(*curriculum.starts(BEGUN, seed))
        turns = answers([opening(tokenizer, start) for start in begun], 1.0, TURN_TOKENS)
        asked = list(finished(tokenizer, kinds, begun, turns))
    else:
        turns = answers([opening(tokenizer)] * INVENTED, 1.0, TURN_TOKENS) if part % LAG < 2 else []
        asked = questions_of(part) + list(invented(tokenizer, turns))
        if part >= LAG:
            asked += curriculum.further(answered(tokenizer, part - LAG, folder), seed)
    prompts = [encode(tokenizer, question)[0].tolist() for _, question in asked]
    lessons = answers(prompts, temperature_of(part), ANSWER_TOKENS)
    teaching.save(lessons, path_of(part, folder))
    path_of(part, folder).with_suffix(".jsonl").write_text(curriculum.as_json(asked), encoding="utf-8")


def path_of(part: int, folder: Path) -> Path:
    return folder / f"part-{part:03d}.safetensors"


def answered(tokenizer: Any, part: int, folder: Path) -> Iterator[tuple[str, str]]:
    """Kinds and answers of a part's questions from templates."""
    for (kind, _), lesson in zip(questions_of(part), teaching.load(path_of(part, folder))):
        yield kind, tokenizer.decode(lesson.tokens[lesson.answer :], skip_special_tokens=True)


def opening(tokenizer: Any, start: str = "") -> list[int]:
    """A conversation up to where the user begins to speak, or has begun: the model goes on as the user."""
    before, _, _ = tokenizer.decode(encode(tokenizer, "?")[0]).partition(USER_TURN)
    return tokenizer(before + USER_TURN + start).input_ids


def invented(tokenizer: Any, turns: Sequence[teaching.Lesson]) -> Iterator[tuple[str, str]]:
    """The questions that the target has invented."""
    return finished(tokenizer, ["invented"] * len(turns), [""] * len(turns), turns)


def finished(
    tokenizer: Any, kinds: Sequence[str], starts: Sequence[str], turns: Sequence[teaching.Lesson]
) -> Iterator[tuple[str, str]]:
    """The questions that the target has finished, if they are of a sensible length and touch no held-out one."""
    runs = curriculum.held_out_runs()
    for kind, start, turn in zip(kinds, starts, turns):
        text = (start + tokenizer.decode(turn.tokens[turn.answer :], skip_special_tokens=True)).strip()
        if 15 < len(text) < 500 and not curriculum.overlaps(text, runs):
            yield kind, text


def make_lessons(folder: Path, worker: int, of: int, max_batch: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load_model()
    for part in (*FORM_PARTS, *range(PARTS))[worker::of]:
        if not path_of(part, folder).exists():
            make_part(model, tokenizer, part, folder, max_batch)
            print(json.dumps({"part": part}), flush=True)


def lessons_of(
    folder: Path, parts: Iterable[int], tokenizer: Any
) -> tuple[list[teaching.Lesson], list[teaching.Lesson]]:
    """The lessons of these parts, part 0 among them, to learn from; and those that are not learnt from."""
    return divided({part: teaching.load(path_of(part, folder)) for part in parts}, tokenizer)


def divided(
    made: dict[int, list[teaching.Lesson]], tokenizer: Any
) -> tuple[list[teaching.Lesson], list[teaching.Lesson]]:
    """The same from parts that are loaded, part 0 among them."""
    held_out = made[0][:HELD_OUT]
    made = made | {0: made[0][HELD_OUT:]}
    if LAG in made:
        asked, tasks = made[LAG][:PART], made[LAG][PART:]
        made[LAG] = asked + [lesson for lesson in tasks if not is_about(lesson, held_out, tokenizer)]
    return [lesson for part in made.values() for lesson in part], held_out


def is_about(lesson: teaching.Lesson, others: Sequence[teaching.Lesson], tokenizer: Any) -> bool:
    """Whether a question shares a run of words with one of the other lessons' answers."""
    answers = [tokenizer.decode(other.tokens[other.answer :], skip_special_tokens=True) for other in others]
    question = tokenizer.decode(lesson.tokens[: lesson.answer], skip_special_tokens=True)
    return curriculum.overlaps(question, curriculum.held_out_runs(answers))


def train(folder: Path, draft: Path) -> None:
    """All rounds; each keeps its state in a folder of its own."""
    target, tokenizer = load_model()
    found, history = None, list[Score]()
    for number, options in enumerate(ROUNDS):
        options = {**TRAINING, **options}
        learnt, held_out = lessons_of(folder, options.pop("parts"), tokenizer)
        options |= dict(folder=folder / f"round-{number}", callback=say_score)
        start = None if found is None else found.draft
        found = distill_draft(target, lessons=learnt, held_out=held_out, start=start, **options)
        history += continued(history, found.history)
    assert found is not None
    rounds = [{**options, "parts": list(options["parts"])} for options in ROUNDS]
    replace(found, history=history, settings={**found.settings, "rounds": rounds}).save(draft)
    (draft / "held_out.jsonl").write_text(curriculum.as_json(questions_of(0)[:HELD_OUT]), encoding="utf-8")


def continued(before: Sequence[Score], history: Sequence[Score]) -> list[Score]:
    """Scores of a later round, with steps and tokens counted from the beginning of the first."""
    if not before:
        return list(history)
    steps, tokens = before[-1].step, before[-1].tokens
    return [replace(score, step=score.step + steps, tokens=score.tokens + tokens) for score in history[1:]]


def say_score(score: Score | MedusaScore) -> None:
    print(json.dumps(asdict(score)), flush=True)


def suite_answers(folder: Path, target: PreTrainedModel, tokenizer: Any) -> list[teaching.Lesson]:
    """The target's greedy answers to the suite, made once."""
    path = folder / "suite.safetensors"
    if not path.exists():
        ids = [encode(tokenizer, prompt)[0].tolist() for prompt in load_prompts()]
        teaching.save(list(teaching.lessons(target, ids, top=TOP, max_new_tokens=ANSWER_TOKENS, max_batch=30)), path)
    return teaching.load(path)


def evaluate(folder: Path, draft: Path, k: int = 4) -> None:
    """Where the draft agrees with the target's greedy answers to the suite, by group, and what that is worth."""
    target, tokenizer = load_model()
    drafter = DraftModel.from_pretrained(draft, target=target)
    suite, hits = load_prompts(), agreement(drafter.model, suite_answers(folder, target, tokenizer))
    groups = {group: scored([hit for prompt, hit in zip(suite, hits) if prompt.group == group], k) for group in GROUPS}
    told = {"k": k, "dtype": str(target.dtype), "max_new_tokens": ANSWER_TOKENS, "all": scored(hits, k)}
    told["groups"] = groups
    (draft / "evaluation.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(told, indent=1))


def evaluate_trees(folder: Path, draft: Path) -> None:
    """Tokens per pass on code and structured output with trees of several sizes, four levels deep."""
    target, tokenizer = load_model()
    path = draft / "evaluation.json"
    told = json.loads(path.read_text(encoding="utf-8"))
    told["trees"] = {
        group: {nodes: _tree_tokens_per_pass(target, tokenizer, draft, group, nodes) for nodes in DRAFT_TREES}
        for group in FORMAL
    }
    path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(told["trees"], indent=1))


def _tree_tokens_per_pass(target: PreTrainedModel, tokenizer: Any, draft: Path, group: str, nodes: int) -> float:
    drafter = DraftModel.from_pretrained(draft, target=target, tree_nodes=nodes)
    passes = tokens = 0
    for prompt in load_prompts(group=group):
        ids = encode(tokenizer, prompt)
        stats = generate(target, ids, drafter, max_new_tokens=ANSWER_TOKENS, do_sample=False).stats
        assert stats is not None
        passes, tokens = passes + int(stats.target_passes), tokens + int(stats.emitted)
    return round(tokens / passes, 3)


def cost(folder: Path, draft: Path) -> None:
    """c: the time of a draft step over that of a target pass, both compiled, in bfloat16; medians of six answers."""
    target, tokenizer = load_model(dtype=torch.bfloat16)
    drafter = DraftModel.from_pretrained(draft, target=target)
    ids = [encode(tokenizer, prompt) for prompt in load_prompts(limit=1)[:6]]
    options: dict[str, Any] = dict(compile=True, do_sample=False)
    generate(target, ids[0], drafter, max_new_tokens=16, **options)  # compiles
    steps, passes = timed(drafter, "_logits"), timed(Run, "target_pass")
    for prompt in ids:
        generate(target, prompt, drafter, max_new_tokens=64, **options)
    told = {"draft_step_ms": 1e3 * median(steps), "target_pass_ms": 1e3 * median(passes)}
    told |= {"c": told["draft_step_ms"] / told["target_pass_ms"], "steps": len(steps), "passes": len(passes)}
    print(json.dumps(told | {"threads": torch.get_num_threads()}, indent=1))


def timed(owner: Any, name: str) -> list[float]:
    """The seconds of every call of a method from now on."""
    method, seconds = getattr(owner, name), list[float]()

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = method(*args, **kwargs)
        seconds.append(time.perf_counter() - started)
        return result

    setattr(owner, name, wrapped)
    return seconds


def scored(hits: Sequence[Tensor], k: int) -> dict[str, float]:
    alpha = float(torch.cat(list(hits)).float().mean())
    passes = round(tokens_per_pass(hits, k), 3)
    return {"alpha": round(alpha, 4), "tokens_per_pass": passes, "tokens": sum(map(len, hits))}


# --- Medusa heads ---


def make_states(folder: Path) -> None:
    """The hidden states of the answers of each part, in bfloat16."""
    target, _ = load_model(dtype=torch.bfloat16)
    for part in MEDUSA_PARTS:
        known_states(states_of(part, folder), target, teaching.load(path_of(part, folder)))


def known_states(path: Path, target: PreTrainedModel, lessons: Sequence[teaching.Lesson]) -> Tensor:
    """The hidden states along these answers, from the file if it is there."""
    if not path.exists():
        hidden = medusa_training.hidden_states(target, lessons)
        save_file({"hidden": hidden}, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)
    return load_file(path)["hidden"]


def states_of(part: int, folder: Path) -> Path:
    return folder / f"states-{part:03d}.safetensors"


def train_heads(folder: Path, draft: Path) -> None:
    """Heads for the default model, on what `make_states` has left."""
    target, tokenizer = load_model()
    made = {part: teaching.load(path_of(part, folder)) for part in MEDUSA_PARTS}
    hidden = dict[teaching.Lesson, Tensor]()
    for part, lessons in made.items():
        states = load_file(states_of(part, folder))["hidden"].split([len(lesson.ids) for lesson in lessons])
        hidden |= dict(zip(lessons, states))
    learnt, held_out = divided(made, tokenizer)
    heads, hinted = MEDUSA["heads"], MEDUSA["hinted"]
    places, kept = (
        Places.around(torch.cat([hidden[lesson] for lesson in some]), some, heads, hinted)
        for some in (learnt, held_out)
    )
    settings = {**MEDUSA, "lessons": len(learnt), "tokens": len(places.newest), "parts": list(MEDUSA_PARTS)}
    found = medusa_training.train_on(
        target, learnt, held_out, places, kept, settings, folder=folder / "medusa", scores=12, callback=say_score
    )
    found.save(draft)


def choose_tree(folder: Path, draft: Path) -> None:
    """The heads' tree for this machine, with compiled passes in bfloat16; it is saved with them."""
    target, tokenizer = load_model(dtype=torch.bfloat16)
    drafter = Medusa.from_pretrained(draft)
    curve = compiled_cost(target)
    seconds = timed(drafter, "draft")
    for prompt in load_prompts(limit=1)[:3]:
        generate(target, encode(tokenizer, prompt), drafter, max_new_tokens=32, compile=True, do_sample=False)
    drafting = 1e3 * median(seconds)
    shape = medusa_shape(drafter, lambda positions: curve(pass_size(int(positions))), drafting=drafting)
    Medusa(drafter.heads, shape, chances=drafter.chances).save(draft, target)
    told = {"pass_ms": dict(zip(curve.positions, curve.milliseconds)), "draft_ms": drafting, "nodes": len(shape)}
    told |= {"threads": torch.get_num_threads(), "dtype": str(target.dtype)}
    (draft / "tree.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(told))


def compiled_cost(target: PreTrainedModel) -> CostCurve:
    """v(T) of compiled passes over one row, at the sizes that there are."""
    twin = twin_for(target, PASSES[-1])
    assert twin is not None, "this machine cannot compile a pass"
    return forward_cost(target, PASSES, run=lambda cache, tokens: twin.target_pass(cache, tokens, [0]), repeats=15)


def evaluate_heads(folder: Path, draft: Path) -> None:
    """How often the heads are right along the target's greedy answers to the suite, and what trees make of it."""
    target, tokenizer = load_model()
    drafter, lessons, suite = Medusa.from_pretrained(draft), suite_answers(folder, target, tokenizer), load_prompts()
    heads = drafter.heads.float()
    hidden = known_states(folder / "suite-states.safetensors", target, lessons)
    places = Places.around(hidden, lessons, len(heads), heads.hinted)
    found, chances = medusa_training.judged(Attached(heads, target), places)
    ranks = found.split(places.sizes)
    told: dict[str, Any] = {"dtype": str(target.dtype), "max_new_tokens": ANSWER_TOKENS, "shape": drafter.shape}
    told["all"] = measured_heads(ranks, drafter)
    told["groups"] = {
        group: measured_heads([found for prompt, found in zip(suite, ranks) if prompt.group == group], drafter)
        for group in GROUPS
    }
    told["tokens_per_pass_of_trees"] = {
        nodes: round(tree_worth(ranks, [path for path, _ in drafter.chances[:nodes]]), 3) for nodes in TREES
    }
    told["tokens_per_pass_of_growing_trees"] = {
        nodes: round(medusa_training.tree_tokens_per_pass(found, places.sizes, nodes, chances), 3) for nodes in TREES
    }
    (draft / "evaluation.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(told, indent=1))


def measured_heads(ranks: Sequence[Tensor], drafter: Medusa) -> dict[str, Any]:
    accuracy = medusa_training.accuracies(torch.cat(list(ranks)))
    told: dict[str, Any] = {"accuracy": [[round(share, 4) for share in row] for row in accuracy]}
    chain = [(0,) * depth for depth in range(1, len(drafter.heads) + 1)]
    told["tokens_per_pass"] = round(tree_worth(ranks, drafter.shape), 3)
    told["tokens_per_pass_of_chain"] = round(tree_worth(ranks, chain), 3)
    return told | {"tokens": sum(map(len, ranks))}


def tree_worth(ranks: Sequence[Tensor], shape: Sequence[trees.Path]) -> float:
    return medusa_training.tree_tokens_per_pass(torch.cat(list(ranks)), [len(rows) for rows in ranks], shape)


STEPS = (
    ("train", "distil from the answers"), ("evaluate", "measure on the suite"),
    ("evaluate-trees", "measure trees on a part of it"), ("cost", "measure c"),
    ("medusa", "train heads"), ("medusa-tree", "choose the heads' tree"),
    ("evaluate-medusa", "measure heads on the suite"),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m specnb.recipe", description=__doc__.splitlines()[0])
    steps = parser.add_subparsers(dest="step", required=True)
    lessons = steps.add_parser("lessons", help="questions and the default model's answers")
    lessons.add_argument("folder", type=Path)
    lessons.add_argument("--worker", type=int, default=0)
    lessons.add_argument("--of", type=int, default=1)
    lessons.add_argument("--max-batch", type=int, default=96)
    states = steps.add_parser("states", help="the target's hidden states along the answers")
    states.add_argument("folder", type=Path)
    for name, told in STEPS:
        step = steps.add_parser(name, help=told)
        step.add_argument("folder", type=Path)
        step.add_argument("draft", type=Path)
    options = vars(parser.parse_args(arguments))
    do: dict[str, Callable[..., None]] = {
        "lessons": make_lessons, "train": train, "evaluate": evaluate, "evaluate-trees": evaluate_trees, "cost": cost,
        "states": make_states, "medusa": train_heads, "medusa-tree": choose_tree, "evaluate-medusa": evaluate_heads,
    }  # fmt: skip
    do[options.pop("step")](**options)


if __name__ == "__main__":
    main()
