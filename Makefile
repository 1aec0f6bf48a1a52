# make demo and make test set everything up by themselves, from a bare Python 3.11 to 3.14 on.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BUILT := $(VENV)/.built
NATIVE := $(wildcard src/foretrain/live/device/native/*)
KERNELS := $(wildcard src/foretrain/network/*/*.py src/foretrain/network/*/*/*.py src/foretrain/comm/ps/server/float16.py)
COLLECTIVES := $(wildcard src/foretrain/comm/bounded/* src/foretrain/comm/*/*.cpp src/foretrain/comm/*/*.h)
# One more than cores of a small machine: many tests wait for processes of their own.
WORKERS ?= 3
SECONDS ?= 300
SLOW := ranks or device or lab or process
LINTS := lint-style lint-types lint-imports lint-layout
# Hundreds of processes that tests start would each compile all that they import.
unexport PYTHONDONTWRITEBYTECODE
# `make setup TORCH='torch==2.15.0' PIP_ARGS='--index-url …'`. The default is the release that all tests run with.
TORCH ?= torch==2.13.0
PIP_ARGS ?=
# Versions of torch and Python for `make test-matrix`; each CUDA build of torch takes gigabytes.
MATRIX ?= 2.13.0/3.11 2.14.1/3.11 2.15.0/3.11 2.15.0/3.12 2.15.0/3.13 2.15.0/3.14

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-rest test-all test-matrix fuzz lint $(LINTS) format bench wheel docs links clean

help:
	@echo "make demo    compare, simulate, record: the three uses, a screen each; writes out/*.html"
	@echo "make test    run the tests of a change: all that need no processes, and one of each path that does"
	@echo "make test-all  run all tests"
	@echo "make test-matrix  run the smoke tests and the live examples with every version of torch and Python; gigabytes"
	@echo "make fuzz    search counterexamples with new seeds; SECONDS=300"
	@echo "make lint    ruff, basedpyright, import-linter, layout"
	@echo "make bench   run the benchmarks, quickly"
	@echo "make wheel   build dist/foretrain-….whl, with the simulated GPU compiled for the environment's PyTorch"
	@echo "make docs    build the documentation into docs/_build/html"
	@echo "make links   build it and check its links; other sites where they can be reached"

setup: $(BUILT)

# Says how much it downloads before it does. A torch that $(PYTHON) has, and that fulfils $(TORCH), is used as it is.
$(READY): pyproject.toml
	$(PYTHON) tools/environment.py $(VENV) dev --torch '$(TORCH)' --pip-args '$(PIP_ARGS)'
	@touch $@

# Cold caches would be filled while tests run, several times over.
$(BUILT): $(READY) $(NATIVE) $(KERNELS) $(COLLECTIVES)
	$(BIN)/python -m tests.prebuild
	@touch $@

demo: $(BUILT)
	$(BIN)/python examples/demo.py --out out

test: $(BUILT)
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m "smoke or not ($(SLOW))"

test-rest: $(BUILT)
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m "not smoke and ($(SLOW))"

test-all: $(BUILT)
	$(BIN)/pytest -n $(WORKERS) --dist worksteal

test-matrix:
	$(PYTHON) tools/matrix.py --pip-args '$(PIP_ARGS)' $(MATRIX)

fuzz: $(BUILT)
	$(BIN)/python -m tests.fuzz $(SECONDS) $(WORKERS)

# Side by side, each with its output in one piece; all of them, whichever fails.
lint: $(READY)
	@$(MAKE) --no-print-directory --jobs --keep-going --output-sync=target $(LINTS)

lint-style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-types:
	$(BIN)/basedpyright

lint-imports:
	$(BIN)/lint-imports

lint-layout:
	$(BIN)/python tools/house.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python benchmarks/engine.py --quick
	$(BIN)/python benchmarks/policies.py --quick
	$(BIN)/python benchmarks/explore.py --quick
	$(BIN)/python benchmarks/command.py --quick
	$(BIN)/python benchmarks/cold.py --quick
	$(BIN)/python benchmarks/auto.py --quick
	$(BIN)/python benchmarks/advise.py --quick
	$(BIN)/python benchmarks/sweep.py --quick
	$(BIN)/python benchmarks/tune.py --quick
	$(BIN)/python benchmarks/paper/bytescheduler.py --quick
	$(BIN)/python benchmarks/paper/prophet.py --quick
	$(BIN)/python benchmarks/paper/eflops.py --quick
	$(BIN)/python benchmarks/paper/dlcp.py --quick
	$(BIN)/python benchmarks/collectives.py --quick
	$(BIN)/python benchmarks/fluid.py --quick
	$(BIN)/python benchmarks/packet.py --quick
	$(BIN)/python benchmarks/time_to_accuracy.py --quick
	$(BIN)/python benchmarks/lab.py --quick
	$(BIN)/python benchmarks/ps.py --quick
	$(BIN)/python benchmarks/ring.py --quick
	$(BIN)/python benchmarks/bounded.py --quick
	$(BIN)/python benchmarks/frameworks.py --quick
	$(BIN)/python benchmarks/live.py --quick
	$(BIN)/python benchmarks/search.py --quick
	$(BIN)/python benchmarks/accuracy.py --quick
	$(BIN)/python benchmarks/cpu_truth.py --quick

wheel: $(READY)
	$(BIN)/python tools/wheel.py dist $(VENV)

docs: $(READY)
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

links: docs
	$(BIN)/python tools/links.py docs/_build/html README.md CHANGELOG.md CONTRIBUTING.md GLOSSARY.md

clean:
	rm -rf $(VENV) out dist docs/_build .pytest_cache .ruff_cache .hypothesis .import_linter_cache
