# make lab          install, fetch the model, open JupyterLab on notebooks/
# make test         everything that must hold: lint, types, tests, notebooks, browser
# make test-quick   the tests without the real model, statistics, notebooks and browser
# make test-oldest  those quick tests that touch transformers, with the oldest release that specnb supports
# make notebooks    run the series headless in full mode and store the outputs
# make bench-batch  tokens per second by batch size, on a quiet machine (ARGS="--dtype bfloat16 --compile")
# make gpu-check    what is promised and what it brings, on a CUDA GPU; says so where there is none
# make clean        remove the environments and every cache in this folder (the fetched model stays)
#
# Variables: PYTHON=python3.12, LAB_FLAGS=--no-browser,
#            TORCH_INDEX=https://download.pytorch.org/whl/cu128 for another build of torch,
#            WORKERS=1 to run the tests one after the other (default: one worker per core, four at most)

PYTHON ?= python3
TORCH_INDEX ?=
LAB_FLAGS ?=
WORKERS ?= auto

PY        := .venv/bin/python
INSTALLED := .venv/.installed
MODEL     := .venv/.model
OLDEST    := transformers==5.17.0
PYTEST    := -m pytest -n $(WORKERS)
QUICK     := -m "not real_model and not slow and not statistical and not notebook and not browser"
# all but the tests of what never sees a model of transformers, or sees it through what the others test
UNRELATED := adaptive advice benchmark bugs cascade cli doctor exercises% kernels machine notebooks packaging peers plots \
             profiling progress prompt_lookup replay replayed setup stats theory tree_loop trees verification vocabularies widgets workers \
             workloads
TOUCHING  := $(filter-out $(UNRELATED:%=tests/test_%.py), $(wildcard tests/test_*.py))
SETUP      = PYTHON="$(PYTHON)" TORCH_INDEX="$(TORCH_INDEX)" sh .ci/setup.sh

.PHONY: lab test test-quick test-oldest notebooks bench-batch gpu-check clean again
.DEFAULT_GOAL := lab

# The stamp's lines are the folder and the torch index it was made for: a moved checkout and a newly chosen
# build of torch are installed again.
ifneq ($(shell sed -n 1p $(INSTALLED) 2>/dev/null),$(CURDIR))
$(INSTALLED): again
else ifneq ($(TORCH_INDEX),)
ifneq ($(shell sed -n 2p $(INSTALLED) 2>/dev/null),$(TORCH_INDEX))
$(INSTALLED): again
endif
endif

$(INSTALLED): pyproject.toml constraints.txt .ci/setup.sh
	@$(SETUP) .venv

.venv-oldest/.installed: pyproject.toml constraints.txt .ci/setup.sh
	@$(SETUP) .venv-oldest $(OLDEST)

$(MODEL): $(INSTALLED)
	@$(PY) -m specnb.fetch
	@touch $@

lab: $(MODEL)
	$(PY) -m jupyterlab $(LAB_FLAGS) notebooks

test: $(MODEL)
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) $(PYTEST)

test-quick: $(INSTALLED)
	$(PY) $(PYTEST) $(QUICK)

test-oldest: .venv-oldest/.installed
	.venv-oldest/bin/python $(PYTEST) $(QUICK) $(TOUCHING)

notebooks: $(MODEL)
	$(PY) tests/run_notebooks.py

bench-batch: $(MODEL)
	$(PY) tests/bench_batch.py $(ARGS)

gpu-check: $(MODEL)
	$(PY) tests/gpu/check.py $(ARGS)

clean:
	rm -rf .venv .venv-oldest build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis test-results
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
