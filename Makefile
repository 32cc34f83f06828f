# make demo   set up, train a Go1 to walk, evaluate, export, verify; prints where the report lies
# make test   set up, run the tests
# make help   everything else
#
# Needs Python 3.11 or later and make. Everything is installed into .venv in this folder.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
# The first Python that is new enough; PYTHON=... chooses another.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.PHONY: help demo test env static lock clean

help:
	@echo "make demo     train a Go1 to walk, evaluate, export and verify it (some minutes)"
	@echo "make test     run the tests (under 10 minutes on 2 cores)"
	@echo "make static   lint, format, types, spelling"
	@echo "make env      create .venv from requirements.lock"
	@echo "make lock     write requirements.lock anew from pyproject.toml"
	@echo "make clean    remove .venv and caches; runs/ stays"

demo: env
	@$(BIN)/python tools/demo.py

test: env
	@$(BIN)/python -m pytest -m "not slow"

static: env
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright
	@$(BIN)/codespell

env: $(VENV)/ready

# The stamp is written last: an interrupted set-up is taken up again.
$(VENV)/ready: requirements.lock pyproject.toml
	@if [ -z "$(PYTHON)" ]; then \
	  echo "no Python >= 3.11 found; install one, or name it: make PYTHON=/path/to/python3" >&2; exit 2; fi
	@if ! [ -x $(BIN)/python ]; then \
	  echo "set-up 1/4: $(VENV), by $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); \
	else echo "set-up 1/4: $(VENV) is there"; fi
	@echo "set-up 2/4: torch (the largest part)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check $$(grep '^torch==' requirements.lock)
	@echo "set-up 3/4: the other packages of requirements.lock"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements.lock
	@echo "set-up 4/4: this package"
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -e .
	@$(BIN)/python -m pip check
	@touch $@

lock: env
	@$(BIN)/python tools/lock.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
