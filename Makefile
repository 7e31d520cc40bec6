# make audit   set up, then audit the bundled demo checkpoint and show the report
# make test    set up, then run `make gate` and every test that needs no GPU
# make gate    set up, then hold the demo checkpoint and a planted fault to the gate's default rules
# make check   set up, then lint, format check and types
# make oldest  the model tests against the oldest supported transformers

PYTHON ?= python3
BIN := .venv/bin
SETUP := .venv/.installed

.PHONY: audit gate test check oldest clean
.DELETE_ON_ERROR:

$(SETUP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

audit: $(SETUP)
	$(BIN)/numdev audit demo

gate: $(SETUP)
	$(BIN)/python scripts/own_gate.py

test: $(SETUP) gate
	$(BIN)/python scripts/run_tests.py

check: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# An overlay in front of the environment: the oldest transformers, and what it needs another version of.
OLDEST := transformers==5.17.0 'huggingface_hub<2' httpx httpcore certifi
.oldest/.installed: $(SETUP) Makefile
	rm -rf .oldest
	$(BIN)/python -m pip install --quiet --target .oldest --no-deps $(OLDEST)
	touch $@

MODEL_TESTS := $(addprefix tests/test_,capture.py capture_more.py mha.py arguments.py audit_models.py checkpoint.py prompts.py)
oldest: .oldest/.installed
	PYTHONPATH=.oldest $(BIN)/python scripts/run_tests.py $(MODEL_TESTS)

clean:
	rm -rf .venv .oldest
