# Everything a newcomer needs: `make demo` and `make test` set the environment up by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: setup demo test test-full check fmt bench docs zoo-eval clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e . --group dev
	touch $@

setup: $(STAMP)

demo: $(STAMP)
	$(BIN)/triptych demo

test: $(STAMP)
	$(BIN)/python -m pytest -m "not full"

test-full: $(STAMP)
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff format --check src tests tools bench
	$(BIN)/ruff check src tests tools bench
	$(BIN)/mypy src/triptych

fmt: $(STAMP)
	$(BIN)/ruff format src tests tools bench
	$(BIN)/ruff check --fix src tests tools bench

bench: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[bench]"
	$(BIN)/python -m bench.run $(BENCH)

zoo-eval: $(STAMP)
	$(BIN)/python tools/train/eval_tiny_vl.py
	$(BIN)/python tools/train/eval_tiny_image.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
