# Everything installs from the project's own files into .venv; Python 3.11 and make are all it needs.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
LOCK := build/lock

.PHONY: quickstart test check setup lock clean

quickstart: setup
	$(BIN)/ensbridge quickstart --out runs/quickstart

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright

setup: $(STAMP)

$(STAMP): requirements.lock requirements-torch.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --requirement requirements-torch.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/python -m pip check > /dev/null
	touch $(STAMP)

# Versions already in requirements.lock stay; delete its lines, or the file, to take newer ones.
lock:
	test -x $(LOCK)/bin/python || $(PYTHON) -m venv $(LOCK)
	$(LOCK)/bin/python -m pip install --quiet uv==0.13.7
	$(LOCK)/bin/uv pip compile pyproject.toml --extra dev --constraints requirements-torch.txt --no-emit-package torch \
		--python-version 3.11 --universal --generate-hashes --no-annotate --custom-compile-command "make lock" \
		--quiet --output-file requirements.lock

clean:
	rm -rf .venv runs
