# `make help` lists what there is. Everything runs in .venv, which `make setup` makes.

PYTHON ?= python3
JOBS ?= 2
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
DOCS_STAMP := $(VENV)/.docs-done
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints.txt

# Each pytest worker is a process of its own: one torch thread each, or they fight over the cores.
# Compiled files are kept, whatever the environment says: tests start many processes.
# Memory of large tensors is kept for the next ones instead of going back to the system each time.
# Files that tests write are in memory where there is room: the library waits for the disk after each of its own.
ROOM := $(shell df -k /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 4000000 { print "PYTEST_DEBUG_TEMPROOT=/dev/shm" }')
ONE_THREAD := $(ROOM) OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= \
	MALLOC_TRIM_THRESHOLD_=1000000000 MALLOC_MMAP_THRESHOLD_=1000000000

# Groups of tests as tests/conftest.py makes them, in the order that it gives them, the longest first.
IN_PARALLEL := -n $(JOBS) --dist loadscope --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup test test-exact test-slow fuzz mutants hardening demo docs bench format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## make .venv and install everything (quick when nothing changed)

# torch and torchvision first, by themselves: what comes later then takes the pinned build as it is.
# The build backend is installed beside them so that it, too, is the pinned one.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "stainlock needs Python 3.11 or newer, got " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch torchvision
	$(INSTALL) hatchling editables
	$(INSTALL) --no-build-isolation --editable '.[dev]'
	@touch $@

test: setup ## lint, format check, types, and all but the slow tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(ONE_THREAD) $(BIN)/pytest -m "not slow" $(IN_PARALLEL) $(PYTEST_ARGS)
	$(MAKE) --no-print-directory test-exact

# Another processor's kernels sum in another order: the plainest ones that PyTorch has stand in for it.
test-exact: setup ## the tests of exactness, with the kernels of a plain processor
	$(ONE_THREAD) ATEN_CPU_CAPABILITY=default STAINLOCK_TEST_ONEDNN=0 \
		$(BIN)/pytest -m "exact and not slow" $(IN_PARALLEL) $(shell grep -rl --include='test_*.py' 'mark\.exact' tests)

test-slow: setup ## the slow tests
	$(BIN)/pytest -m slow $(PYTEST_ARGS)

mutants: setup ## try deliberate mistakes on the tests, one at a time; half an hour
	$(ONE_THREAD) $(BIN)/python benchmarks/mutants.py

hardening: setup ## one table: files, forgeries and faults tried, mutants caught, p-values checked
	$(BIN)/python benchmarks/hardening.py

# FUZZ_CASES files of each format (default 10000), from seed FUZZ_SEED on; those that do harm are kept in fuzz-found/.
fuzz: setup ## many wrong files of every format, read with limits of time and memory
	$(ONE_THREAD) PYTHONPATH=tests:tests/fuzz:benchmarks $(BIN)/python tests/fuzz/run.py

demo: setup ## stain, verify and lock a real ImageNet model; writes demo-output/
	$(BIN)/stainlock demo --out demo-output

docs: $(DOCS_STAMP) ## build the documentation into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "site/index.html"

$(DOCS_STAMP): $(STAMP)
	$(INSTALL) --no-build-isolation --editable '.[docs]'
	@touch $@

bench: setup ## measure the stains side by side
	$(BIN)/python benchmarks/stains.py

format: setup ## sort imports, fix what can be fixed, format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv, caches, builds, the site and the demo's output
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist demo-output fuzz-found site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
