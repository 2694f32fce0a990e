# Every target creates .venv and installs into it by itself, and can be run again.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# One process a core, one thread each: the work of a test is tiny.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n auto

.PHONY: install demo quick test lint docs bench clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: install
	$(BIN)/holdall demo --out demo-run --overwrite

# Style, types, the layers of imports, and the generated page.
lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/architecture.py --check

# Between edits: everything that is fast.
quick: install
	$(PYTEST) -m "not slow"

test: lint
	$(PYTEST)
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels

docs: install
	$(BIN)/mkdocs build --strict

bench: install
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) demo-run site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
