# make setup | demo | test | check | bench | soak | nodes | slurm | browser | clean
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test check lint soak nodes slurm browser bench clean

help: ## what each target does
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 10

setup: $(INSTALLED) ## make the virtualenv and install from the lock

# The stamp is written last, so that an interrupted installation is done again.
$(INSTALLED): pyproject.toml constraints.txt setup.py $(wildcard tokenizer/fastbpe/*.cpp tokenizer/fastbpe/*.h data_pipeline/*.cpp)
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, $(PYTHON) is %d.%d: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(INSTALLED) ## raw text to an evaluated, sampled model, killed and resumed on the way
	$(BIN)/python -m launch demo

# Two files at a time, whatever the cores: most tests wait for one process, and those of two ranks need two cores. In the
# order of collection, which has the long files first. Without -n all in one process, as a debugger wants it.
test: $(INSTALLED) ## the tests
	$(BIN)/python -m pytest -m 'not soak and not nodes and not slurm and not browser' -n 2 --dist loadfile --no-loadscope-reorder

lint: $(INSTALLED) ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint test ## all that CI runs

soak: $(INSTALLED) ## the long tests
	$(BIN)/python -m pytest -m soak --timeout 3600

nodes: $(INSTALLED) ## runs over two hosts, played by this machine; needs root, pdsh and an sshd
	$(BIN)/python -m pytest -m nodes

slurm: $(INSTALLED) ## jobs of a SLURM of one's own on this machine; needs slurmctld, slurmd and munged
	$(BIN)/python -m pytest -m slurm

browser: $(INSTALLED) ## reports seen in a real headless Chromium
	$(BIN)/python -m pytest -m browser

bench: $(INSTALLED) ## every benchmark in its short form, each against a named reference, as one table in runs/benchmarks
	@$(BIN)/python -m benchmarks

clean: ## remove the virtualenv and what the demo made
	rm -rf $(VENV) data/demo data/demo-tokenizer runs/make-demo runs/make-demo-uninterrupted
