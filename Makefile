# make serve   set up everything, then serve the default model on http://127.0.0.1:8000 (flags: make serve ARGS="--port 9000")
# make check   lint and the tests of pure code, in about two minutes
# make test    every check that CI runs
# make test-all  the same with the slow tests: every architecture over a thousand steps, and 200 kills of a writing process
# make test-metal  what matters on a Mac: the cache on Metal, within 10 minutes, and a report that can be attached to an issue
# make test-cuda  the same on an NVIDIA GPU, within an hour: what is right, how fast it is beside mlx-lm, a soak; into cuda-report/
# make soak    random chats and restarts over a small disk for KVSTRATA_SOAK_MINUTES, 20 by default; then KVSTRATA_SOAK_REQUESTS short ones, 50,000, to one engine
# make peers   into .peers, what kvstrata bench compare and benchmarks/cpu.py run beside ours; some of it: make peers NAMES="mlx-lm llama-server"
# make screenshots  pictures of the page of a real server, into docs/screenshots; needs Chromium
# make agents  coding agents into .agents (about 2 GB), for the slow tests in tests/agents: Claude Code, Codex, opencode, pi, aider (docs/agents.md)
# make docs    the docs site into site/, readable without a network: open site/index.html
# make setup   .venv and the default model; the CUDA back-end where nvidia-smi answers, else the CPU one
# make lock    renew requirements/, the versions and hashes that make installs, after a change of pyproject.toml; needs uv. All to the newest: make lock ARGS=--upgrade
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

# macOS has Metal in the plain wheel; on Linux a back-end must be chosen.
BACKEND ?= $(shell if nvidia-smi >/dev/null 2>&1; then \
	  nvidia-smi | grep -q 'CUDA Version: 12' && echo cuda12 || echo cuda13; \
	else echo cpu; fi)

.DEFAULT_GOAL := help
.PHONY: help setup lock serve check test test-all test-metal test-cuda soak screenshots peers agents lint format clean

help:
	@sed -n 's/^# //p' $(MAKEFILE_LIST)

# Everything has a hash but this project, which then needs no network: its build backend is among what is locked.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
LOCKED := $(PIP) --require-hashes --requirement requirements/serve.txt --requirement requirements/$(BACKEND).txt
EDITABLE := $(PIP) --no-deps --no-build-isolation --editable .

$(VENV)/.installed-$(BACKEND): pyproject.toml requirements/serve.txt requirements/$(BACKEND).txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "kvstrata needs Python 3.11 or newer; try: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(LOCKED)
	$(EDITABLE)
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-$(BACKEND) requirements/dev.txt
	$(LOCKED) --requirement requirements/dev.txt
	touch $@

lock:
	$(PYTHON) requirements/renew.py $(ARGS)

setup: $(VENV)/.installed-$(BACKEND)
	@$(BIN)/kvstrata pull

# Ctrl-C is the server's to read: the shell survives it, and make reports no error where it was obeyed.
serve: setup
	@trap : INT; $(BIN)/kvstrata serve $(ARGS) || test $$? -eq 130

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

# Types of src/ alone, and tests without a server: what to run after each edit.
PURE := tests/text tests/grammar tests/codecs tests/test_config.py tests/test_structure.py tests/test_common_prefix.py \
  tests/engine/test_scheduler.py tests/prefix_cache/test_tree.py tests/prefix_cache/test_worth.py tests/prefix_cache/test_ladder.py
check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/basedpyright src
	$(BIN)/pytest -n auto --dist loadfile $(PURE) $(ARGS)

# A process for each core, where memory has room. A file stays in one process, because its fixtures are expensive.
# Tests of speed run alone afterwards; 5: none was chosen.
test: setup lint
	$(BIN)/pytest -n auto --dist loadfile $(ARGS)
	$(BIN)/pytest -m perf -n 0 $(ARGS) || test $$? -eq 5

test-all: setup lint
	KVSTRATA_KILLS=200 $(BIN)/pytest -m 'slow or not slow' $(ARGS)

REPORT ?= kvstrata-report.json
test-metal: setup $(VENV)/.installed-dev
	$(BIN)/kvstrata doctor --report $(REPORT)
	$(BIN)/pytest tests/codecs tests/attention tests/kv tests/kv tests/models tests/prefix_cache tests/engine/test_sixteen_bits.py \
	  tests/engine/test_prefixes.py tests/engine/test_requantize.py tests/engine/test_disk.py tests/engine/test_ladder.py \
	  tests/server/test_chat.py $(ARGS)

# The comparison is made beside mlx_lm.server if it is there: make peers NAMES=mlx-lm
CUDA_REPORT ?= cuda-report
test-cuda: setup $(VENV)/.installed-dev
	$(BIN)/python -m tests.gpu.all $(CUDA_REPORT) $(ARGS)

KVSTRATA_SOAK_MINUTES ?= 20
KVSTRATA_SOAK_REQUESTS ?= 50000
soak: setup $(VENV)/.installed-dev
	KVSTRATA_SOAK_MINUTES=$(KVSTRATA_SOAK_MINUTES) KVSTRATA_SOAK_REQUESTS=$(KVSTRATA_SOAK_REQUESTS) \
	  $(BIN)/pytest -m slow -s tests/engine/test_soak.py tests/engine/test_soak_one_engine.py $(ARGS)

SCREENSHOTS ?= docs/screenshots
screenshots: setup $(VENV)/.installed-dev
	$(BIN)/python -m tests.screenshots $(SCREENSHOTS)

PEERS := .peers
NAMES ?=
# Each run looks what is missing: a peer that was skipped is tried again.
peers:
	$(PYTHON) peers/install.py $(PEERS) $(BACKEND) $(NAMES)

AGENTS := .agents
agents: $(AGENTS)/.installed

$(AGENTS)/.installed: agents/package.json agents/install.py
	$(PYTHON) agents/install.py $(AGENTS)
	touch $@

.PHONY: docs
$(VENV)/.installed-docs: $(VENV)/.installed-$(BACKEND) requirements/docs.txt
	$(LOCKED) --requirement requirements/docs.txt
	touch $@

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open site/index.html"

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
