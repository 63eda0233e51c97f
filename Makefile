# Everything installs from the project's own files into .venv; Python 3.11 and make are all it needs.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: quickstart test check setup clean

quickstart: setup
	$(BIN)/ensbridge quickstart --out runs/quickstart

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(STAMP)

clean:
	rm -rf .venv runs
