# Paths are relative and quoted: a clone may lie in a folder with a space in its name.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
NATIVE := $(wildcard native/*)

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench clean

help: ## Show this list
	@grep -hE '^[a-z]+:.*##' Makefile | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

demo: $(VENV)/installed ## Install and train a small GPT on the Python standard library (about 2 minutes)
	$(VENV)/bin/offloadtrain train demo

test: $(VENV)/installed ## Install and run the tests
	$(PY) -m pytest

lint: $(VENV)/installed ## Check style, types and the direction of imports
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

bench: $(VENV)/installed ## Measure the CPU Adam kernels against the memory's limit and torch
	$(PY) -m benchmarks.adam

clean: ## Remove the environment and everything built
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(VENV)/created: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet -c constraints.txt torch
	@touch $@

# Editable, so that Python sources are live; the extension is rebuilt when native/ changes.
$(VENV)/installed: $(VENV)/created pyproject.toml $(NATIVE)
	$(PY) -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@
