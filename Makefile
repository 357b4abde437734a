VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: venv train test test-gpu test-oldest lint

venv: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	python3 -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $(STAMP)

train: $(STAMP)
	$(BIN)/infinipipe train examples/stdlib.toml

test: $(STAMP)
	$(BIN)/python -m pytest

test-gpu: $(STAMP)
	$(BIN)/python -m pytest tests/gpu

test-oldest:
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
