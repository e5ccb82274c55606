"""Fixtures shared by the tests; the models themselves are in tiny.py."""

from __future__ import annotations

import os

import pytest
import torch
import transformers

import specnb
from specnb import compat
from specnb.drafters.small_model import small_model
from tests import workers
from tests.forest import Forest
from tests.tiny import perturbed, tiny_model
from tests.world import Paced

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()


_THREADS = torch.get_num_threads()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    return workers.auto_workers()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Units in the order of the collection, whatever their number of tests."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = workers.unit_of
    return scheduler


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: workers.rank(mark.name for mark in item.iter_markers()))


@pytest.fixture(autouse=True)
def threads(request):
    """One thread for tiny models, where threads only wait for each other; all that there are for the real one."""
    torch.set_num_threads(_THREADS if request.node.get_closest_marker("real_model") else 1)


@pytest.fixture(scope="session")
def llama():
    """One tiny Llama for the tests that do not depend on the family."""
    return tiny_model("llama")


def adaptive(drafter: specnb.Drafter, c: float) -> specnb.Adaptive:
    """Adaptive by a clock that is the same in every run: drafting takes c seconds a token, a pass about one second."""
    paced = Paced(drafter, c)
    return specnb.Adaptive(paced, clock=paced.clock)


def distilled(model) -> specnb.DraftModel:
    """A draft of the kind that `distill_draft` trains: a layer of the target, hints, and a head without one token."""
    return specnb.DraftModel(small_model(model, [0], torch.arange(compat.vocab_size(model) - 1)), num_draft_tokens=3)


# Every lossless drafter, as a function of the target. Greedy and statistical tests run over all of them.
DRAFTERS = {
    "none": lambda model: None,
    "lookup": lambda model: specnb.PromptLookup(),
    "lookup, longest": lambda model: specnb.PromptLookup(4, policy="longest", corpus=[[5, 1, 2, 3]], cyclic=True),
    "cascade": lambda model: specnb.Cascade(specnb.PromptLookup(4), specnb.DraftModel(perturbed(model), 3)),
    "copy": lambda model: specnb.DraftModel(model),
    "perturbed": lambda model: specnb.DraftModel(perturbed(model), num_draft_tokens=3),
    "distilled": distilled,
    "always wrong": lambda model: specnb.Scripted(lambda context: [(context[-1] + 1 + i) % 7 for i in range(4)]),
    "adaptive": lambda model: adaptive(specnb.PromptLookup(), 0.0),
    "early exit": lambda model: specnb.EarlyExit(1, num_draft_tokens=3),
    "trees": Forest,
    "now and then": lambda model: specnb.Scripted(lambda context: context[: len(context) % 4]),
}


@pytest.fixture(params=DRAFTERS)
def make_drafter(request):
    """A function model → drafter, for each kind of drafter."""
    return DRAFTERS[request.param]


@pytest.fixture(scope="session")
def real():
    """The default model and its tokenizer (float32), for tests marked real_model."""
    return specnb.load_model(dtype=torch.float32)
