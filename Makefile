# Every target creates .venv and installs into it by itself, and can be run again.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# One thread each, since the work of a test is tiny, and two processes more than cores, since tests wait for processes
# that they start. Rewritten asserts are kept for the next run, whatever the environment says.
WORKERS := $(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) + 2)')
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --dist worksteal

.PHONY: install demo quick test collected tests kernels style types lint docs bench peers clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # as pip does, but on all cores
	touch $(STAMP)

demo: install
	$(BIN)/holdall demo --out demo-run --overwrite

lint: style types

# Style, the layers of imports, and the generated page: seconds.
style: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python tools/architecture.py --check

types: install
	$(BIN)/mypy

# Between edits: everything that is fast.
quick: install
	$(PYTEST) -n $(WORKERS) -m "not slow"

# The checks take a core each, and the ends of the tests leave cores idle: each line runs at once.
test: install
	$(MAKE) -j 3 style types collected
	$(MAKE) -j 2 tests kernels

# Asserts are rewritten here once, and not by every process of the tests.
collected: install
	@$(PYTEST) --collect-only -qq > $(VENV)/collected.log || (cat $(VENV)/collected.log; false)

tests: install
	$(PYTEST) -n $(WORKERS)

# Triton kernels in its interpreter.
kernels: install
	TRITON_INTERPRET=1 $(PYTEST) -n auto tests/kernels

docs: install
	$(BIN)/mkdocs build --strict

bench: install
	$(BIN)/python -m benchmarks

# Other people's tests and models, in an environment of their own. PYTORCH_TESTS is the folder `test` of PyTorch's
# repository at the version in constraints.txt, TORCHREC_TESTS the folder `torchrec` of TorchRec's.
PEERS := .venv-peers
PEERS_REQUIREMENTS := tests/peers/requirements.txt tests/peers/requirements-no-deps.txt

$(PEERS)/.installed: pyproject.toml constraints.txt $(PEERS_REQUIREMENTS)
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(PEERS)/bin/pip install --quiet -c constraints.txt -e . -r tests/peers/requirements.txt
	$(PEERS)/bin/pip install --quiet --no-deps -r tests/peers/requirements-no-deps.txt
	touch $@

peers: $(PEERS)/.installed
	OMP_NUM_THREADS=1 $(PEERS)/bin/python -m benchmarks.compatibility \
		$(if $(PYTORCH_TESTS),--pytorch-tests $(PYTORCH_TESTS)) $(if $(TORCHREC_TESTS),--torchrec-tests $(TORCHREC_TESTS))
	$(PEERS)/bin/python tools/compatibility.py

clean:
	rm -rf $(VENV) $(PEERS) demo-run site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
