# Everything runs from .venv, which the first target that needs it creates; nothing is installed elsewhere.
SHELL := bash
.DEFAULT_GOAL := help

PYTHON ?= python3
JOBS ?= 2
# Tests wait as much as they compute, so more of them run at a time than there are cores.
WAITERS = $(shell echo $$(($(JOBS) * 3 / 2)))
WAITERS_ALL = $(shell echo $$(($(JOBS) * 2)))
EXAMPLES ?= 5000
SEEDS ?= 20000
PORT ?= 8000
# test-all skips vLLM's tests after this time (Unix time).
VLLM_UNTIL ?= 9999999999
BIN := .venv/bin

# The work is on many small arrays, where a thread pool per process only costs time.
export OMP_NUM_THREADS := 1
# Without bytecode, pytest rewrites the assertions of every test file in every process again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup setup-vllm setup-vllm-0.31 setup-sglang demo serve test test-all test-vllm test-vllm-all
.PHONY: test-sglang test-sglang-all bench-vllm lowest check sim soak bench docs site

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/.stamp  ## make .venv with Baton and its tools in it

.venv/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

setup-vllm: .venv-vllm/.stamp  ## make .venv-vllm with vLLM for CPUs and Baton in it

.venv-vllm/.stamp: tools/setup_vllm.sh
	tools/setup_vllm.sh
	touch $@

setup-vllm-0.31: .venv-vllm-0.31/.stamp

.venv-vllm-0.31/.stamp: tools/setup_vllm.sh
	tools/setup_vllm.sh .venv-vllm-0.31 0.31.0
	touch $@

setup-sglang: .venv-sglang/.stamp  ## make .venv-sglang with SGLang for CPUs and Baton in it

.venv-sglang/.stamp: tools/setup_sglang.sh
	tools/setup_sglang.sh
	touch $@

demo: setup  ## a real model, prefilled in one layout, decoded in another: timed, every token checked
	$(BIN)/baton demo

serve: setup  ## the demo deployment behind an OpenAI endpoint on PORT=8000, until Ctrl-C
	$(BIN)/baton up --model demo --prefill pp2 --decode tp3 --port $(PORT)

# What tests use and pip cannot install: system libraries of two transports, and a browser. If one cannot be
# installed, a line says so, and the tests that need it are skipped with the reason.
.venv/.extras: .venv/.stamp tools/native.sh tools/browser.sh
	tools/native.sh
	tools/browser.sh
	touch $@

# What is not in `make test`: transports through other libraries (contract), killed ranks at every stage (slow),
# every layout pair and family (engine), deployments of real processes (serve, load), long searches and broken
# variants that a checker must catch (long), vLLM servers (vllm; skipped where vLLM cannot be installed), and
# SGLang servers (sglang; skipped where `make setup-sglang` was not run).
test: .venv/.extras  ## the tests that a change needs
	$(BIN)/pytest -q -rs -n $(WAITERS) -m "not contract and not slow and not engine and not serve and not load and not long and not vllm and not sglang"

test-all: .venv/.extras  ## every test, with ten times the examples and seeds, and five minutes of soak
	$(BIN)/pytest -q -rs -m "sglang and not long" tests/sglang
	@if [ $$(date +%s) -gt $(VLLM_UNTIL) ]; then echo "vLLM's tests are skipped: it is too late for them"; exit 0; fi; \
	test -e .venv-vllm/.stamp || { timeout 900 tools/setup_vllm.sh && touch .venv-vllm/.stamp; } || \
		{ rm -rf .venv-vllm; echo "vLLM cannot be installed here: its tests are skipped"; }; \
	$(BIN)/pytest -q -rs -m "vllm and not long" tests/vllm
	BATON_EXAMPLES=500 BATON_LOAD_S=$(or $(LOAD_S),300) $(BIN)/pytest -q -rs -n $(WAITERS_ALL) --dist worksteal -m "not vllm and not sglang"

soak: .venv/.extras  ## an hour of load (LOAD_S) while parts are killed, stopped and cut off
	BATON_LOAD_S=$(or $(LOAD_S),3600) $(BIN)/pytest -q -rs -s tests/serve/test_soak.py

test-vllm: setup setup-vllm  ## hand-overs between real vLLM servers on this machine's CPUs
	$(BIN)/pytest -q -rs -m "vllm and not long" tests/vllm

test-vllm-all: setup setup-vllm setup-vllm-0.31  ## the same with more models, two hosts and an older vLLM
	$(BIN)/pytest -q -rs -m vllm tests/vllm

test-sglang: setup setup-sglang  ## hand-overs between real SGLang servers on this machine's CPUs
	$(BIN)/pytest -q -rs -m "sglang and not long" tests/sglang

test-sglang-all: setup setup-sglang  ## the same with pipeline stages and data-parallel groups
	$(BIN)/pytest -q -rs -m sglang tests/sglang

# NIXL is installed without its dependencies, because these include torch for CUDA.
bench-vllm: setup setup-vllm  ## vLLM with our connector beside NixlConnector
	.venv-vllm/bin/python -m pip install --quiet --no-deps nixl-cu13==1.5.1 nixl==1.5.1
	PYTHONPATH=. $(BIN)/python benchmarks/vllm_nixl.py

lowest: setup  ## the command line and a smoke test with the lowest version of every dependency
	$(BIN)/python tools/lowest.py

check: setup  ## lint, format, types and import layers
	$(BIN)/ruff check src tests examples benchmarks tools
	$(BIN)/ruff format --check src tests examples benchmarks tools
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

sim: setup  ## long random search: hand-overs under faults (SEEDS=20000), plans (EXAMPLES=5000, four hand-overs each)
	$(BIN)/baton sim --seed $$(date +%s)00000 --seeds $(SEEDS) --jobs $(JOBS)
	BATON_FRESH=1 BATON_EXAMPLES=$(EXAMPLES) $(BIN)/pytest -q -n $(JOBS) tests/plan/test_property.py

bench: .venv/.extras  ## measure planning, binding, transports, hand-overs and the engine
	$(BIN)/baton bench plan
	$(BIN)/baton bench transport
	$(BIN)/baton bench handoff
	$(BIN)/baton bench handoff --control
	$(BIN)/baton bench handoff --sweep
	$(BIN)/baton bench overlap
	$(BIN)/baton bench engine

site: setup  ## build docs/ as a web site in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

docs: setup  ## regenerate the pages that are generated from code
	$(BIN)/python tools/models_page.py > docs/models.md.new
	mv docs/models.md.new docs/models.md
	$(BIN)/python tools/protocol_page.py docs/protocol.md
