# Two commands matter: `make demo` runs the default sweep, `make test` runs the tests.
# Everything is installed into .venv from requirements.lock; nothing else on the machine is changed.

PY := .venv/bin/python
BIN := $(abspath .venv/bin)
SOURCES := $(shell find src -name '*.py') pyproject.toml
# Idle OpenMP threads that spin take the core from a neighbour; see docs/performance.md.
export OMP_WAIT_POLICY := PASSIVE
export PIP_DISABLE_PIP_VERSION_CHECK := 1
TESTS := tests/ndif tests/workflow tests/numeric tests/unit # what takes long comes first
SNAKEMAKE := PATH="$(BIN):$$PATH" snakemake

.DEFAULT_GOAL := help
.PHONY: help demo demo-ndif ndif-env test lint bench lock schemas clean

help: ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

.venv/deps: requirements.lock envs/find_python.sh
	@$$(sh envs/find_python.sh) -m venv --clear .venv
	@echo "Installing the locked environment into .venv (2 to 4 minutes, about 6 GB with CUDA)"
	@$(PY) -m pip install --quiet --requirement requirements.lock
	@touch $@

.venv/dev: .venv/deps requirements-dev.lock
	@$(PY) -m pip install --quiet --requirement requirements-dev.lock
	@touch $@

.venv/nnsweep: .venv/deps $(SOURCES)
	@$(PY) -m pip install --quiet --no-deps --force-reinstall .
	@rm -rf build src/nnsweep.egg-info
	@touch $@

demo: .venv/nnsweep ## Run the default sweep, draw it, write the report
	@$(SNAKEMAKE) --cores 2 --config sweep=capitals_layers engine=local
	@$(SNAKEMAKE) --cores 1 --quiet all --report results/capitals_layers/report.html \
		--config sweep=capitals_layers engine=local
	@$(BIN)/nnsweep show results/capitals_layers/local

demo-ndif: .venv/nnsweep .venv-ndif/deps ## Start a local NDIF, run the default sweep on it, compare with local
	@PATH="$(BIN):$$PATH" sh envs/demo_ndif.sh

ndif-env: .venv-ndif/deps ## Install the environment of `nnsweep ndif serve`

.venv-ndif/deps: envs/ndif-server.lock envs/link_packages.py .venv/deps
	@$(PY) -m venv --clear .venv-ndif
	@echo "Installing the NDIF server's environment into .venv-ndif (1 minute; torch is linked from .venv)"
	@$(PY) envs/link_packages.py .venv-ndif envs/ndif-server.lock
	@.venv-ndif/bin/python -m pip install --quiet --requirement envs/ndif-server.lock
	@touch $@

test: .venv/nnsweep .venv/dev .venv-ndif/deps ## Run all tests
	@PATH="$(BIN):$$PATH" $(PY) -m pytest --numprocesses 2 $(TESTS)

lint: .venv/nnsweep .venv/dev ## Format and type checks, snakefmt, snakemake --lint
	@$(BIN)/ruff format --check src scripts tests bench envs
	@$(BIN)/ruff check src scripts tests bench envs
	@$(BIN)/mypy
	@$(BIN)/snakefmt --check Snakefile workflow
	@$(SNAKEMAKE) --lint

bench: .venv/nnsweep .venv/dev .venv-bench/deps ## Compare with hooks, nnsight, TransformerLens and pyvene
	@PATH="$(BIN):$$PATH" $(PY) bench/run.py

.venv-bench/deps: envs/bench-peers.lock envs/link_packages.py .venv/deps
	@$(PY) -m venv --clear .venv-bench
	@echo "Installing TransformerLens and pyvene into .venv-bench (1 minute; torch is linked from .venv)"
	@$(PY) envs/link_packages.py .venv-bench envs/bench-peers.lock
	@.venv-bench/bin/python -m pip install --quiet --requirement envs/bench-peers.lock
	@touch $@

schemas: .venv/nnsweep ## Write workflow/schemas and config/README.md from the models
	@$(BIN)/nnsweep schemas .

lock: ## Resolve the newest versions that pyproject.toml allows into the lock files
	@sh envs/lock.sh

clean: ## Remove what runs left behind, but not .venv
	@rm -rf results logs benchmarks .snakemake build src/nnsweep.egg-info
