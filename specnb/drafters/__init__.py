"""Sources of drafts, one file each, behind one small protocol (`Drafter`)."""

from specnb.drafters.base import Draft, Drafter, Session
from specnb.drafters.cascade import Cascade
from specnb.drafters.draft_model import DraftModel
from specnb.drafters.early_exit import EarlyExit
from specnb.drafters.medusa import Medusa, MedusaHeads
from specnb.drafters.prompt_lookup import PromptLookup
from specnb.drafters.scripted import Scripted

__all__ = [
    "Cascade", "Draft", "DraftModel", "Drafter", "EarlyExit", "Medusa", "MedusaHeads", "PromptLookup", "Scripted",
    "Session",
]  # fmt: skip
