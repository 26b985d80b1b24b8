# Everything a clean clone needs, by name. `make` alone prints the list.
#
# Two stamps stand for two states of the environment: .runtime (what `chiasm demo` needs) and .dev (and what the tests
# need). They depend on pyproject.toml and constraints.txt only, so a second `make` installs nothing.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
# By a plain path: a script beside the clone would otherwise find the clone's folder, and not the package in it.
EDITABLE := --config-settings editable_mode=compat
# Set PYTEST_ARGS to run a part: make test PYTEST_ARGS="tests/rpc -k status"
PYTEST_ARGS ?=
# How long each part of `make fuzz`, or all of `make chaos`, runs, and which faults the latter draws.
MINUTES ?= 30
SEED ?= 0

# One thread of arithmetic per test process, otherwise the workers fight over the cores.
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test fuzz chaos check proto proto-baseline bench fmt clean

help:  ## Prints this list.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

$(PY):
	$(PYTHON) -m venv $(VENV)

# torch comes first and by its exact pin: pip then takes a CPU wheel where one is at hand, and the CUDA build elsewhere.
$(VENV)/.runtime: pyproject.toml constraints.txt | $(PY)
	$(PIP) install --quiet "$$(grep '^torch==' constraints.txt)"
	$(PIP) install --quiet -c constraints.txt $(EDITABLE) -e .
	touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP) install --quiet -c constraints.txt $(EDITABLE) -e '.[dev]'
	touch $@

demo: $(VENV)/.runtime  ## Sets up .venv and lets the shipped model read a video.
	$(VENV)/bin/chiasm demo

test: $(VENV)/.dev  ## Sets up .venv and runs all tests.
	$(PY) -m pytest -n 2 $(PYTEST_ARGS)

fuzz: $(VENV)/.dev  ## Runs what the tests run a slice of, MINUTES (30) each: timelines, damaged media.
	$(PY) -m tests.fuzz.timelines --minutes $(MINUTES)
	$(PY) -m tests.fuzz.media --minutes $(MINUTES)

chaos: $(VENV)/.dev  ## Hurts systems of processes for MINUTES (30), the digits as judge, then the tell-tale ones; SEED (0).
	$(PY) -m tests.chaos --minutes $(MINUTES) --seed $(SEED)
	$(PY) -m pytest -m chaos
	$(PY) -m tests.telltale
	$(PY) -m tests.telltale.run --requests 1000 --seed $(SEED)

check: $(VENV)/.dev  ## Lint, types, import floors, wire, generated code, README commands, what deploys.
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/buf lint
	$(VENV)/bin/buf format --diff --exit-code
	$(VENV)/bin/buf breaking --against proto/baseline.binpb
	$(PY) -m tools.check_proto
	$(PY) -m tools.check_readme
	$(PY) -m tools.check_deploy

proto: $(VENV)/.dev  ## Regenerates chiasm/rpc/v1 from proto/.
	$(VENV)/bin/buf format --write
	$(PY) -m tools.make_proto

proto-baseline: $(VENV)/.dev  ## Accepts the wire as it is as the one that later changes must not break.
	$(VENV)/bin/buf build --exclude-source-info -o proto/baseline.binpb

bench: $(VENV)/.dev  ## Lists the measurements; each prints JSON with the ratio it measures.
	$(PY) -m benchmarks

fmt: $(VENV)/.dev  ## Formats Python and proto files.
	$(VENV)/bin/ruff check --fix-only --quiet .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/buf format --write

clean:  ## Removes the environments and everything built.
	rm -rf $(VENV) .venv-proto build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
