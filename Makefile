# Everything installs from the project's own files into .venv; Python 3.11 and make are all it needs.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
LOCK := build/lock

.PHONY: quickstart test soak check docs setup lock clean

quickstart: setup
	$(BIN)/ensbridge quickstart --out runs/quickstart

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# Faults and bad input at length, in minutes: counts into results/reliability.json, and the page of them.
soak: setup
	$(BIN)/python benchmarks/soak.py --out results/reliability.json
	$(BIN)/python studies/make_pages.py

check: setup docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/pre-commit validate-config .pre-commit-config.yaml

# Into build/site; a link or a name that does not exist is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

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
