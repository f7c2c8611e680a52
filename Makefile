# Every target does its own set-up: the first call makes .venv and installs what the target needs, later calls
# find the stamp files and go straight to work. Needed beforehand: Python 3.11 or newer, make, and g++ for the tests.
#     make test PYTHON=/opt/python3.12/bin/python3      chooses the interpreter
#     make test ARGS="-k weights -x"                    hands arguments on to the command

VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
MIN_PYTHON := 3, 11
MATCHES := import sys; sys.exit(sys.version_info < ($(MIN_PYTHON)))

# The first interpreter that is new enough, whatever its name (expanded only when the environment is made).
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c '$(MATCHES)' 2>/dev/null && { echo $$p; break; }; done)

# Two installations into one environment at the same time would break it.
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test test-all check format lint types bench docs clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

$(VENV)/.made:
	@interpreter="$(PYTHON)"; \
	"$${interpreter:-false}" -c '$(MATCHES)' || { echo "abft_tsm2 needs Python 3.11 or newer. Found:" \
	"$$("$${interpreter:-python3}" --version 2>&1 || true). Choose another one: make PYTHON=/path/to/python3.11"; exit 1; }; \
	echo "Making $(VENV) with $$("$$interpreter" --version)"; \
	"$$interpreter" -m venv --clear $(VENV) || { rm -rf $(VENV); echo "$$interpreter cannot make virtual environments." \
	"On Debian and Ubuntu install the package python3-venv, or choose another one: make PYTHON=/path/to/python3.11"; exit 1; }
	@touch $@

# $(VENV)/.demo, .test, .lint, .docs: the package, editable, with what the target needs.
$(VENV)/.demo: EXTRAS := examples
$(VENV)/.test: EXTRAS := examples,test
$(VENV)/.lint: EXTRAS := lint
$(VENV)/.docs: EXTRAS := docs
$(VENV)/.%: pyproject.toml $(VENV)/.made
	@echo "Installing abft_tsm2[$(EXTRAS)] into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$(EXTRAS)]"
	@touch $@

demo: $(VENV)/.demo ## a photograph, a planted fault, the repair: table, pictures and report in abft_tsm2_demo/
	$(BIN)/abft-tsm2 demo $(ARGS)

# Each process takes one half of the tests, and what the other has not begun when it is done: kernels are compiled once.
test: $(VENV)/.test ## the tests, by two processes
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

test-all: $(VENV)/.test ## the tests marked `full` as well: other architectures, every order of threads, the sanitizer
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu" $(ARGS)

lint: $(VENV)/.lint ## formatting and ruff's rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.lint ## mypy, strict
	$(BIN)/mypy

check: lint types test ## all that has to pass before a change is merged

format: $(VENV)/.lint ## rewrite the sources in the one format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.test ## overhead of a protected product on this machine
	$(BIN)/python -m pytest benchmarks/bench_gemm.py $(ARGS)

docs: $(VENV)/.docs ## the documentation, into docs/_build/html
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html $(ARGS)

clean: ## remove the environment and everything built
	rm -rf $(VENV) build dist *.egg-info abft_tsm2_demo docs/_build docs/generated \
		.pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
