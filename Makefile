# make help lists the targets. Only relative paths: the clone's own path may hold spaces.

PYTHON ?= python3
# More arguments for pip. Without a GPU: PIP_ARGS="--extra-index-url ADDRESS", the address of torch's
# CPU builds, which its install page names; they make .venv 3.5 GB smaller.
PIP_ARGS ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Passes on what a command prints, and fills silences.
WATCH := $(PYTHON) tools/watch.py
# Three processes, which take a test from each other's end when they have none left: on two cores a
# third one works while others wait. What they and the commands that they start have compiled is
# kept, wherever the environment says otherwise.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist worksteal
NATIVE := $(wildcard native/*.cpp native/*.h) native/CMakeLists.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-rest test-all test-long test-faults lint docs bench gpu sanitize clean
.DELETE_ON_ERROR:

help:
	@echo "make demo      install, then train a byte-level GPT on Python's standard library (2 minutes)"
	@echo "make test      install, then run the quick tests (4 minutes)"
	@echo "make test-all  run these and the slow ones: faults, sanitizers, larger samples (40 minutes)"
	@echo "make test-long run every case of every test (over an hour)"
	@echo "make test-faults plant faults in copies of the source; the tests must find each (40 minutes)"
	@echo "make lint      run ruff, format, strict mypy, import contracts"
	@echo "make docs      build the documentation's pages in build/site; any warning is an error"
	@echo "make bench     compare CPU Adam with the traffic limit and torch, in one process"
	@echo "make gpu       run the GPU tests, then measurements, within 6 minutes and offline"
	@echo "make sanitize  run kernels under ASan and UBSan, the pool and the queue under TSan"
	@echo "make clean     remove .venv, builds and caches; data and runs are kept"

# 75: stopped on request, with a checkpoint. That is no failure, and make would call it one.
demo: .venv/.runtime
	@trap : INT; $(BIN)/offloadtrain train demo || [ $$? -eq 75 ]

# What each level holds: tests/levels.py. TEST_ARGS: more for pytest, such as --seed of a run before.
test: .venv/.installed
	$(PYTEST) --level quick $(TEST_ARGS)

test-rest: .venv/.installed
	$(PYTEST) --level rest $(TEST_ARGS)

test-all: test test-rest

test-long: .venv/.installed
	$(PYTEST) --level full $(TEST_ARGS)

# FAULTS: parts of names; all without it.
test-faults: .venv/.installed
	$(BIN)/python -m tests.faults.run $(FAULTS)

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The variables silence advertisements of other site generators, which strict mode would not pass.
docs: .venv/.installed
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict --quiet

bench: .venv/.runtime
	$(BIN)/offloadtrain bench adam --n 16M

# With the Python and torch that are there, and nothing from the network: the extension is built
# with their nanobind and put beside the sources; without one the Numba kernels take over.
# GPU_ARGS: --list 2 for what is asked more rarely, --only, --budget-minutes, --gpu-memory, --out.
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
	@echo "1. A Python environment in .venv."
	@$(WATCH) "the environment" $(PYTHON) -m venv .venv
	@touch $@

# torch comes first and alone: it is by far the largest, and a failure to get it should say so.
.venv/.torch: .venv/.created constraints.txt
	@echo "2. torch. Its CPU build is a download of 192 MB. The default for Linux brings CUDA's libraries:"
	@echo "   4.8 GB in .venv in place of 1.2; see PIP_ARGS in the Makefile."
	@$(WATCH) "torch" $(PIP) install $(PIP_ARGS) -c constraints.txt torch
	@touch $@

# Editable: Python files take effect as they are saved, which a plain install would not notice. The
# extension is rebuilt when one of its sources is newer than the stamp.
.venv/.runtime: .venv/.torch pyproject.toml constraints.txt $(NATIVE)
	@echo "3. offloadtrain, what it runs with, and its C++ kernels, which are compiled here."
	@rm -f offloadtrain/_native*.so
	@$(WATCH) "offloadtrain" $(PIP) install $(PIP_ARGS) -c constraints.txt -e .
	@touch $@

# The extra `dev` alone: naming the package again would build it again.
.venv/.installed: .venv/.runtime
	@echo "4. What tests and lint need."
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["dev"], sep="\n")' > .venv/dev.txt
	@$(WATCH) "tools" $(PIP) install $(PIP_ARGS) -c constraints.txt -r .venv/dev.txt
	@touch $@

clean:
	rm -f offloadtrain/_native*.so
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
