PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt

# Several OpenBLAS threads beside torch's own are slower than one.
export OPENBLAS_NUM_THREADS ?= 1
# The theme prints a notice at every build otherwise.
export NO_MKDOCS_2_WARNING := 1

.PHONY: demo test check docs bench clean

demo: .venv/.dev
	$(BIN)/lambdahat demo --out demo-output

test: check
	$(BIN)/python -m pytest
	$(BIN)/python -m pytest --doctest-modules src
	$(BIN)/mkdocs build --strict --quiet

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/.dev
	$(BIN)/mkdocs build --strict

bench: .venv/.bench
	@set -e; for name in products estimates scaling coverage sampling optimizer_cost gpu; do echo "== $$name"; $(BIN)/python benchmarks/$$name.py; done

clean:
	rm -rf .venv build dist site demo-output .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.dev: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e ".[dev]"
	@touch $@

.venv/.bench: .venv/.dev
	$(PIP) -e ".[dev,bench]"
	@touch $@
