# `make help` lists the targets. Everything runs in .venv, which `make setup` creates.

PYTHON ?= python3
JOBS ?= 2
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done
DOCS_STAMP := $(VENV)/.docs-done
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints.txt

# One torch thread per pytest worker; with more, the workers compete for the cores.
# Bytecode is always written, because tests start many processes.
# Threads that wait for others sleep: a few tests start more threads, and other workers need the cores.
# malloc keeps the memory of large tensors for reuse instead of returning it to the system each time.
# Temporary files go to /dev/shm if it has 4 GB free, because the library calls fsync after each file it writes.
ROOM := $(shell df -k /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 4000000 { print "PYTEST_DEBUG_TEMPROOT=/dev/shm" }')
ONE_THREAD := $(ROOM) OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE PYTHONDONTWRITEBYTECODE= \
	MALLOC_TRIM_THRESHOLD_=1000000000 MALLOC_MMAP_THRESHOLD_=1000000000

# tests/conftest.py groups the tests and puts the longest groups first; keep that order.
IN_PARALLEL := -n $(JOBS) --dist loadscope --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup test test-exact test-slow fuzz mutants hardening demo docs bench format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## create .venv and install everything (quick if nothing changed)

# torch and torchvision are installed first, so that later packages accept the pinned build.
# The build backend is installed explicitly, so that it is the pinned version too.
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

# Kernels for other processors sum in a different order; PyTorch's plainest kernels simulate one.
test-exact: setup ## the tests of exactness, with PyTorch's plainest kernels
	$(ONE_THREAD) ATEN_CPU_CAPABILITY=default STAINLOCK_TEST_ONEDNN=0 \
		$(BIN)/pytest -m "exact and not slow" $(IN_PARALLEL) $(shell grep -rl --include='test_*.py' 'mark\.exact' tests)

test-slow: setup ## the slow tests
	$(BIN)/pytest -m slow $(PYTEST_ARGS)

mutants: setup ## check that tests catch deliberate mistakes, one at a time; half an hour
	$(ONE_THREAD) $(BIN)/python benchmarks/mutants.py

hardening: setup ## one table: files, forgeries and faults tried, mutants caught, p-values checked
	$(BIN)/python benchmarks/hardening.py

# FUZZ_CASES files per format (default 10000), starting from seed FUZZ_SEED; files that do harm are kept in fuzz-found/.
fuzz: setup ## read many damaged files of every format, with limits on time and memory
	$(ONE_THREAD) PYTHONPATH=tests:tests/fuzz:benchmarks $(BIN)/python tests/fuzz/run.py

demo: setup ## stain, verify and lock a real ImageNet model; writes demo-output/
	$(BIN)/stainlock demo --out demo-output

docs: $(DOCS_STAMP) ## build the documentation into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "site/index.html"

$(DOCS_STAMP): $(STAMP)
	$(INSTALL) --no-build-isolation --editable '.[docs]'
	@touch $@

bench: setup ## measure stains on real models
	$(BIN)/python benchmarks/stains.py

format: setup ## sort imports, apply automatic fixes, format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv, caches, builds, the site and the demo's output
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist demo-output fuzz-found site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
