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
from specnb.report import GenerateOutput, Round, Stats
from specnb.verification import Verdict, emitted_distribution, residual, verify_greedy, verify_sample

__version__ = "0.1.0"

__all__ = [
    "Draft",
    "DraftModel",
    "Drafter",
    "GenerateOutput",
    "PromptLookup",
    "RaggedCache",
    "Round",
    "Scripted",
    "Stats",
    "Verdict",
    "decode",
    "emitted_distribution",
    "generate",
    "load_model",
    "residual",
    "target_pass",
    "verify_greedy",
    "verify_sample",
]
