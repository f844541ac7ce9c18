# Everything a newcomer or CI types. Each target sets up what it needs first.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
HOST ?= 127.0.0.1
PORT ?= 8210
# Many tests wait for processes; twice as many at once as there are cores keeps both busy.
JOBS ?= 4
STAMP := $(VENV)/.ready-$(shell cksum pyproject.toml | cut -d' ' -f1)

.PHONY: setup serve test check format bench soak clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (once; about a minute)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@rm -f $(VENV)/.ready-* && touch $@

serve: setup            ## serve the demo models on http://$(HOST):$(PORT)
	@$(BIN)/greenroom demo --host $(HOST) --port $(PORT)

test: check             ## everything that must hold, in about five minutes on two cores
	@$(BIN)/python -m pytest tests/core --cov --cov-fail-under=100 --cov-report=term:skip-covered
	@$(BIN)/python -m pytest -m 'not soak and not gpu' --ignore=tests/core --numprocesses $(JOBS)

check: setup            ## format, lint (async rules included), types, layers
	@$(BIN)/ruff format --check src tests benchmarks
	@$(BIN)/ruff check src tests benchmarks
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_layers.py

format: setup
	@$(BIN)/ruff format src tests benchmarks
	@$(BIN)/ruff check --fix src tests benchmarks

bench: setup            ## CPU per request and per chunk, beside nginx in the same run
	@command -v nginx >/dev/null || (apt-get update -qq && apt-get install -y -qq nginx-light)
	@$(BIN)/python benchmarks/gateway.py

soak: setup             ## long fault runs: 300 kills of the gateway under load
	@$(BIN)/python -m pytest -m soak --timeout 7200

clean:
	rm -rf $(VENV) build dist .greenroom .pytest_cache .mypy_cache .ruff_cache .hypothesis
