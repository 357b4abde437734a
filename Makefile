VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: venv train test test-gpu lint

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

train: $(STAMP)
	$(BIN)/infinipipe train examples/stdlib.toml

test: $(STAMP)
	$(BIN)/python -m pytest

test-gpu: $(STAMP)
	$(BIN)/python -m pytest tests/gpu

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
