# make audit      set up, then audit the bundled demo checkpoint and show the report
# make test       set up, then hold the demo and a planted fault to the gate, and run the tests that guard
#                 behaviour, on a CPU: four minutes of two processors
# make test-all   the same and the slow tests: what CI runs
# make thorough   set up, then the tests that take a compiler, minutes, or thousands of inputs
# make check      set up, then lint, format, types, layers, reading limits, and the docs built strictly
# make docs       set up, then build the documentation as a site in build/site
# make release    set up, then build sdist and wheel into dist/ and try the wheel where nothing else is installed
# make oldest     the model tests against the oldest supported transformers

PYTHON ?= python3
BIN := .venv/bin
SETUP := .venv/.installed
# Bytecode is kept whatever the shell says: without it each process that imports PyTorch and
# transformers compiles them again, ten seconds of a core.
export PYTHONDONTWRITEBYTECODE :=
# Tests are small: a process for each processor, and one thread in each.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p no:cacheprovider -n logical --maxprocesses 4 --dist worksteal

.PHONY: audit gate test test-all thorough check docs release oldest clean
.DELETE_ON_ERROR:

$(SETUP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $@

audit: $(SETUP)
	$(BIN)/numdev audit demo

gate: $(SETUP)
	$(BIN)/python scripts/own_gate.py

test: $(SETUP) gate
	$(PYTEST) -m "not gpu and not thorough and not slow"

test-all: $(SETUP) gate
	$(PYTEST) -m "not gpu and not thorough"

thorough: $(SETUP)
	$(PYTEST) -m "thorough and not gpu"

check: $(SETUP) docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/limits.py
	$(BIN)/python scripts/walk.py

docs: $(SETUP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The wheel is built from the sdist, by the pinned hatchling: the same commit gives the same bytes.
release: $(SETUP)
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	$(BIN)/python scripts/try_release.py --extras dist/numdev-*.whl
	cd dist && sha256sum numdev-*

# An overlay in front of the environment: the oldest transformers, and what it needs another version of.
OLDEST := transformers==5.17.0 'huggingface_hub<2' httpx httpcore certifi
.oldest/.installed: $(SETUP) Makefile
	rm -rf .oldest
	$(BIN)/python -m pip install --quiet --no-compile --target .oldest --no-deps $(OLDEST)
	touch $@

MODEL_TESTS := $(addprefix tests/test_,capture.py audit_models.py checkpoint.py)
oldest: .oldest/.installed
	PYTHONPATH=.oldest $(PYTEST) -m "not gpu and not thorough" $(MODEL_TESTS)

clean:
	rm -rf .venv .oldest
