"""specnb: speculative decoding of language models, to learn it and to use it.

    model, tokenizer = specnb.load_model()
    out = specnb.generate(model, input_ids, drafter=specnb.PromptLookup(), max_new_tokens=64)

A small fast drafter guesses, the target checks a whole row of guesses in one pass, and the text is exactly the
target's own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# ruff: noqa: F401
if TYPE_CHECKING:  # for editors and type checkers; at run time a name is imported when it is first used
    from specnb.adaptive import Adaptive, AdaptiveSummary
    from specnb.batching import Batcher, Completion, Job, QueueFull
    from specnb.benchmark import run_benchmark
    from specnb.cache import RaggedCache, target_pass
    from specnb.decoding import decode, generate
    from specnb.diagnosis import Diagnosis
    from specnb.doctor import diagnose
    from specnb.drafters import (
        Cascade,
        Draft,
        Drafter,
        DraftModel,
        EarlyExit,
        Medusa,
        MedusaHeads,
        PromptLookup,
        Scripted,
    )
    from specnb.drafters.medusa import medusa_shape
    from specnb.lossy import TypicalAcceptance
    from specnb.medusa_training import TrainedHeads, train_medusa
    from specnb.models import load_model
    from specnb.offline import generate_many
    from specnb.oracle import exact_law
    from specnb.profiling import Roofline, arithmetic_peak, forward_cost, memory_bandwidth, roofline
    from specnb.report import GenerateOutput, Round, Stats
    from specnb.results import BenchmarkResult
    from specnb.stats import (
        AuditResult,
        TestResult,
        audit,
        chi_square,
        correct,
        effect_size,
        g_test,
        power,
        required_sample_size,
        total_variation,
        two_sample_chi_square,
    )
    from specnb.theory import (
        CostCurve,
        batch_speedup,
        best_draft_length,
        break_even_alpha,
        break_even_batch,
        expected_tokens,
        operations_factor,
        speedup,
        tokens_per_round_law,
    )
    from specnb.training import Distilled, distill_draft
    from specnb.trees import verify_tree_greedy, verify_tree_sample
    from specnb.verification import Verdict, emitted_distribution, residual, verify_greedy, verify_sample
    from specnb.workloads import Prompt, encode, load_prompts

__version__ = "0.1.0"

# Where each public name lives. transformers' model classes and scipy take seconds to import, so that
# `import specnb` brings neither; the first use of a name does.
_HOMES = {
    "adaptive": "Adaptive AdaptiveSummary",
    "benchmark": "run_benchmark",
    "batching": "Batcher Completion Job QueueFull",
    "cache": "RaggedCache target_pass",
    "decoding": "decode generate",
    "diagnosis": "Diagnosis",
    "doctor": "diagnose",
    "drafters": "Cascade Draft Drafter DraftModel EarlyExit Medusa MedusaHeads PromptLookup Scripted",
    "drafters.medusa": "medusa_shape",
    "medusa_training": "TrainedHeads train_medusa",
    "models": "load_model",
    "offline": "generate_many",
    "oracle": "exact_law",
    "profiling": "Roofline arithmetic_peak forward_cost memory_bandwidth roofline",
    "report": "GenerateOutput Round Stats",
    "results": "BenchmarkResult",
    "stats": "AuditResult TestResult audit chi_square correct effect_size g_test power required_sample_size "
    "total_variation two_sample_chi_square",
    "theory": "CostCurve batch_speedup best_draft_length break_even_alpha break_even_batch expected_tokens "
    "operations_factor speedup tokens_per_round_law",
    "training": "Distilled distill_draft",
    "lossy": "TypicalAcceptance",
    "trees": "verify_tree_greedy verify_tree_sample",
    "verification": "Verdict emitted_distribution residual verify_greedy verify_sample",
    "workloads": "Prompt encode load_prompts",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(importlib.import_module(f"specnb.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'specnb' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
