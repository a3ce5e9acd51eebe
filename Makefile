# Everything below needs nothing but Python (3.12 or newer) and make: each target makes what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-gpu lint serve clean help

help:
	@echo "make demo      set up, then show the model in the box at work"
	@echo "make serve     set up, then serve it at http://127.0.0.1:8000"
	@echo "make test      set up, then run linters, type checker and tests"
	@echo "make test-gpu  set up, then run the tests that need a GPU, where there is one"

$(VENV)/run.stamp: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/tests.stamp: $(VENV)/run.stamp
	$(BIN)/python -m pip install --quiet --editable '.[tests]'
	$(BIN)/python -m pip install --quiet --no-deps 'rwkv>=0.8.30'
	@touch $@

demo: $(VENV)/run.stamp
	$(BIN)/wkvm demo

serve: $(VENV)/run.stamp
	$(BIN)/wkvm serve --model demo --port 8000

lint: $(VENV)/tests.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

# On a machine with a GPU, after `.venv/bin/pip install -e '.[gpu]'`; XLA need not look for its quickest products here.
test-gpu: $(VENV)/tests.stamp
	XLA_FLAGS=--xla_gpu_autotune_level=0 $(BIN)/python -m pytest -m gpu tests/gpu tests/kernels

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .import_linter_cache
