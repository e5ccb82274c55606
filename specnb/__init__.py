"""specnb: speculative decoding of language models, to learn it and to use it.

    model, tokenizer = specnb.load_model()
    out = specnb.generate(model, input_ids, drafter=specnb.PromptLookup(), max_new_tokens=64)

A small fast drafter guesses, the target checks a whole row of guesses in one pass, and the text is exactly the
target's own.
"""

from specnb.cache import RaggedCache, target_pass
from specnb.decoding import decode, generate
from specnb.drafters import Draft, Drafter, DraftModel, PromptLookup, Scripted
from specnb.models import load_model
from specnb.oracle import exact_law
from specnb.report import GenerateOutput, Round, Stats
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
from specnb.verification import Verdict, emitted_distribution, residual, verify_greedy, verify_sample

__version__ = "0.1.0"

__all__ = [
    "AuditResult",
    "Draft",
    "DraftModel",
    "Drafter",
    "GenerateOutput",
    "PromptLookup",
    "RaggedCache",
    "Round",
    "Scripted",
    "Stats",
    "TestResult",
    "Verdict",
    "audit",
    "chi_square",
    "correct",
    "decode",
    "effect_size",
    "emitted_distribution",
    "exact_law",
    "g_test",
    "generate",
    "load_model",
    "power",
    "required_sample_size",
    "residual",
    "target_pass",
    "total_variation",
    "two_sample_chi_square",
    "verify_greedy",
    "verify_sample",
]
