# make help lists the targets. Only relative paths: the clone's own path may hold spaces.

PYTHON ?= python3
# More arguments for pip, e.g. --extra-index-url with torch's CPU builds, which saves 2 GB there.
PIP_ARGS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
NATIVE := $(wildcard native/*.cpp native/*.h) native/CMakeLists.txt

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench gpu sanitize clean
.DELETE_ON_ERROR:

help:
	@echo "make demo      install, then train a byte-level GPT on Python's standard library (2 minutes)"
	@echo "make test      install, then run the tests"
	@echo "make lint      ruff, format, strict mypy, import contracts"
	@echo "make bench     CPU Adam against the traffic limit and torch, in one process"
	@echo "make gpu       on a machine with a GPU: its tests, then measurements within 8 minutes; offline"
	@echo "make sanitize  kernels under ASan and UBSan, the pool and the queue under TSan"
	@echo "make clean     remove .venv, builds and caches; data and runs stay"

demo: .venv/.installed
	$(BIN)/offloadtrain train demo

test: .venv/.installed
	$(BIN)/python -m pytest

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/.installed
	$(BIN)/offloadtrain bench adam --n 16M

# With the Python and torch that are there, and nothing from the network: the extension is built
# with their nanobind and put beside the sources; without one the Numba kernels take over.
# GPU_ARGS: --budget-minutes, --only, --gpu-memory, --out.
gpu:
	-cmake -S native -B build/gpu -DPython_EXECUTABLE="$$($(PYTHON) -c 'import sys; print(sys.executable)')"
	-cmake --build build/gpu --parallel && cp build/gpu/_native*.so offloadtrain/
	$(PYTHON) -m benchmarks.gpu $(GPU_ARGS)

# Needs a compiler and nothing else.
sanitize:
	native/sanitize/run.sh kernels
	native/sanitize/run.sh pool
	native/sanitize/run.sh queue

# Stamps, so that a second run installs nothing.
.venv/.created:
	$(PYTHON) -m venv .venv
	@touch $@

# torch comes first and alone: it is by far the largest, and a failure to get it should say so.
.venv/.torch: .venv/.created constraints.txt
	$(PIP) install $(PIP_ARGS) -c constraints.txt torch
	@touch $@

# Editable: Python files take effect as they are saved, which a plain install would not notice. The
# extension is rebuilt when one of its sources is newer than the stamp.
.venv/.installed: .venv/.torch pyproject.toml constraints.txt $(NATIVE)
	rm -f offloadtrain/_native*.so
	$(PIP) install $(PIP_ARGS) -c constraints.txt -e ".[dev]"
	@touch $@

clean:
	rm -f offloadtrain/_native*.so
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
