# Two commands on a fresh machine: `make up` and `make test`. Both set themselves up.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# The Python that .venv is made with: the first of these that is there and new enough.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; exit; }; \
	done; true)

# Where torch comes from; empty means pip's usual index, whose build needs no GPU but is large.
# Without a GPU, set it to the address of PyTorch's index of CPU wheels: far less to download.
TORCH_INDEX ?=

ARGS ?=
BIN := .venv/bin
STAMP := .venv/.stamp
TORCH_VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
PROTOS := $(wildcard proto/baton/rpc/v1/*.proto)
PROTOC = $(BIN)/python -m grpc_tools.protoc -I proto --python_out=$(1) --pyi_out=$(1) \
	--grpc_python_out=$(1) $(PROTOS)
HAS_TORCH = $(BIN)/python -c 'import importlib.metadata as m, sys; \
	sys.exit(m.version("torch").split("+")[0] != "$(TORCH_VERSION)")' 2>/dev/null

.PHONY: help setup up down test check proto bench clean

help: ## What can be made
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16
	@echo "  ARGS=… go to baton up, pytest or the benchmark; PYTHON and TORCH_INDEX to setup"

setup: $(STAMP) ## .venv with everything in it; does nothing when that is there

$(STAMP): pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then echo "Python 3.11 or newer is needed: make PYTHON=…" >&2; exit 1; fi
	@[ -x $(BIN)/python ] || { echo "making .venv with $(PYTHON)"; $(PYTHON) -m venv .venv; }
	@$(HAS_TORCH) || { echo "installing torch $(TORCH_VERSION)"; \
		$(BIN)/python -m pip install --disable-pip-version-check \
		$(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") torch==$(TORCH_VERSION); }
	@echo "installing the packages of constraints.txt: some minutes the first time"
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet \
		-c constraints.txt -e '.[dev]'
	@touch $(STAMP)

up: setup ## A whole cluster with the demo model; Ctrl-C drains and stops it
	@$(BIN)/baton up $(ARGS)

down: setup ## Drain and stop it
	@$(BIN)/baton down $(ARGS)

test: setup ## Everything that CI runs, but for `make check`
	@$(BIN)/python -m pytest $(ARGS)

check: setup ## Lint, format, types, walls between the rooms, stubs in sync
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	@new=$$(mktemp -d); trap 'rm -rf "$$new"' EXIT; \
	$(call PROTOC,"$$new"); \
	diff -r --exclude=__init__.py --exclude=__pycache__ "$$new/baton/rpc/v1" baton/rpc/v1 \
		|| { echo "the stubs are not those of proto/: make proto" >&2; exit 1; }
	@echo "stubs are in sync"

proto: setup ## Regenerate baton/rpc/v1 from proto/
	$(call PROTOC,.)

bench: setup ## KV transports, then a cluster against the engine alone
	$(BIN)/python -m benchmarks.transport $(ARGS)
	$(BIN)/python -m benchmarks.cluster $(ARGS)

clean: ## Remove what tools leave behind; .venv stays
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
