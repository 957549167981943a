PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt

# Several OpenBLAS threads beside torch's own are slower than one.
export OPENBLAS_NUM_THREADS ?= 1
# Types beside the documentation leave a core idle otherwise.
export MYPY_NUM_WORKERS ?= 2
# Tests start many processes, each of which would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
# The theme prints a notice at every build otherwise.
export NO_MKDOCS_2_WARNING := 1

.PHONY: demo test check docs docs-check bench bench-check bench-page cluster-check dist-check clean help

demo: .venv/.dev ## The NGD paper in miniature, on digits; writes demo-output/
	$(BIN)/lambdahat demo --out demo-output

# Types and documentation take one core each.
test: .venv/.dev ## Style, types, layering, documentation, tests
	$(MAKE) --jobs 2 check docs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal --durations=25 --doctest-modules src tests

check: .venv/.dev ## Style, types, layering
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Not quietly: mkdocs counts no warnings as failures under --quiet.
docs: .venv/.dev ## Build the documentation into site/
	$(BIN)/mkdocs build --strict

# Pages made from stored runs are what the stores give today; pages and examples that take long run.
docs-check: .venv/.dev ## Pages against stored runs, and the pages that take long
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m documents
	$(BIN)/mkdocs build --strict

# What everything costs beside the peers; then the questions that need neither hours nor data that are fetched.
bench: .venv/.bench ## What everything costs beside the peers
	$(BIN)/lambdahat bench --peers --out benchmarks/scratch/bench
	@set -e; for name in scaling coverage sampling; do echo "== $$name"; $(BIN)/python benchmarks/$$name.py; done

# Fails where we are slower by more than 15 %, in the ratios to a gradient and to every peer, than on record.
bench-check: .venv/.bench ## Fail where we are slower than on record
	$(BIN)/lambdahat bench --peers --against benchmarks/results/bench-cpu.json --out benchmarks/scratch/bench

bench-page: .venv/.dev ## The tables and figures of docs/bench.md, from benchmarks/results
	$(BIN)/python benchmarks/bench_page.py
	$(BIN)/python benchmarks/speed_figures.py

# The same rows on loky, a local dask cluster and a local ray. Stays in benchmarks/results/clusters.txt.
cluster-check: .venv/.cluster ## The same rows on loky, dask and ray
	$(BIN)/python benchmarks/cluster_check.py

# The wheel and the sdist install beside torch in a fresh environment, measure a trace and run the first notebook there.
dist-check: .venv/.dev ## The wheel and the sdist install and work
	$(BIN)/python tests/distribution.py

clean: ## Remove .venv and all that is built
	rm -rf .venv build dist site demo-output .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.dev: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e ".[dev]"
	@touch $@

.venv/.cluster: .venv/.dev
	$(PIP) -e ".[dev,dask,ray]"
	@touch $@

.venv/.bench: .venv/.dev
	$(PIP) -e ".[dev,bench]"
	@touch $@
