# Everything runs from .venv, which the first target that needs it makes; nothing is installed elsewhere.
SHELL := bash
.DEFAULT_GOAL := help

PYTHON ?= python3
JOBS ?= 2
# Of tests that wait as much as they compute there may be more at a time than there are cores.
WAITERS = $(shell echo $$(($(JOBS) * 3 / 2)))
EXAMPLES ?= 20000
SEEDS ?= 20000
LOAD_S ?= 120
BIN := .venv/bin

# The work is many small arrays: a thread pool per process only gets in the way.
export OMP_NUM_THREADS := 1

.PHONY: help setup demo serve test contract faults engine hybrids serving load check sim bench docs

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/.stamp  ## make .venv with Baton and its tools in it

.venv/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup  ## a real model, prefilled in one layout, decoded in another: timed, and its tokens proven
	$(BIN)/baton demo

serve: setup  ## the demo deployment behind an OpenAI endpoint, until Ctrl-C
	$(BIN)/baton up --model demo --prefill pp2 --decode tp3

# What tests use and Python cannot bring: system libraries of two transports, and a browser. Each says so
# in a line where it cannot be had, and the tests that need it are skipped with the reason.
.venv/.extras: .venv/.stamp tools/native.sh tools/browser.sh
	tools/native.sh
	tools/browser.sh
	touch $@

test: .venv/.extras  ## all tests but those with a target of their own, and those of `make check`
	$(BIN)/pytest -q -rs -n $(WAITERS) --ignore=tests/test_tidy.py -m "not contract and not slow and not engine and not serve and not load"

contract: .venv/.extras  ## what every transport promises, through libraries of others and through wrappers
	$(BIN)/pytest -q -rs -n $(JOBS) -m contract

faults: .venv/.extras  ## kill and stop rank processes at every stage, over shm and tcp
	$(BIN)/pytest -q -rs -n $(JOBS) -m slow

# Models with more than K and V have a target of their own, so that each of the two takes minutes.
HYBRIDS := $(addprefix tests/engine/,$(addsuffix .py,parallel/test_recurrent \
	$(addprefix e2e/test_,recurrent drafts windowed sparse state_slots)))

engine: .venv/.extras  ## every layout pair, family and transport through a real model, against transformers
	$(BIN)/pytest -q -rs -n $(JOBS) --dist loadfile -m engine $(addprefix --ignore=,$(HYBRIDS))

hybrids: .venv/.extras  ## the same for windows, recurrent state, sparse index and drafts
	$(BIN)/pytest -q -rs -n $(JOBS) --dist loadfile -m engine $(HYBRIDS)

serving: .venv/.extras  ## servers and routers as real processes, with stock clients and a stock router
	$(BIN)/pytest -q -rs -n $(JOBS) --dist loadfile -m serve

load: .venv/.extras  ## two minutes of mixed load and kill -9 of every part (LOAD_S=600 for ten)
	BATON_LOAD_S=$(LOAD_S) $(BIN)/pytest -q -rs -s -m load

check: setup  ## lint, format, types, layers and tidiness
	$(BIN)/ruff check src tests examples
	$(BIN)/ruff format --check src tests examples
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/pytest -q tests/test_tidy.py

sim: setup  ## long random search: hand-overs under faults (SEEDS=20000), plans (EXAMPLES=20000)
	$(BIN)/baton sim --seeds $(SEEDS) --jobs $(JOBS)
	BATON_EXAMPLES=$(EXAMPLES) $(BIN)/pytest -q -n $(JOBS) tests/plan/test_property.py

bench: .venv/.extras  ## measure planning, binding, transports, hand-overs and the engine
	$(BIN)/baton bench plan
	$(BIN)/baton bench transport
	$(BIN)/baton bench handoff
	$(BIN)/baton bench handoff --control
	$(BIN)/baton bench handoff --sweep
	$(BIN)/baton bench overlap
	$(BIN)/baton bench engine

docs: setup  ## write again the pages that code generates
	$(BIN)/python -m baton.plan.models > docs/models.md.new
	mv docs/models.md.new docs/models.md
	$(BIN)/python -m baton.protocol docs/protocol.md
