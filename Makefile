# Every target makes the virtual environment where it is missing; asked twice, nothing is installed again.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

# One process of tests per core: they wait for what they start for a third of their time.
CORES := $(shell nproc)
XDIST := $(shell [ $(CORES) -gt 1 ] && echo --numprocesses $(CORES) --dist loadgroup)

.PHONY: setup demo test test-cluster check bench studies pages format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/flockstep demo

test: setup
	$(BIN)/python -m pytest -m 'not cluster' $(XDIST)

# Those that measure time one at a time: workers that are killed must be missed within seconds, and a test starts up to
# 16 processes.
test-cluster: setup
	$(BIN)/python -m pytest -m 'cluster and not alone' $(XDIST)
	$(BIN)/python -m pytest -m 'cluster and alone'

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m benchmarks --write

# All studies of the papers once more, from the first run to the last: some four hours, with MNIST and Fashion-MNIST
# there. Stopped and started again it goes on where it was; the records that are part of the repository stay as they are.
studies: setup
	$(BIN)/flockstep study $(sort $(wildcard studies/*.toml)) --out studies/again

# The short page of every study, that of printed figures, and the map of who wins where, from the records that are there.
MAP := $(foreach part,even jitter slow_worker,studies/results/asynchrony_$(part))
pages: setup
	$(BIN)/flockstep report $(patsubst %/study.toml,%,$(wildcard studies/results/*/study.toml)) --format page
	$(BIN)/flockstep retest $(sort $(wildcard studies/e*.toml)) --page studies/results/printed_figures/page.md
	$(BIN)/flockstep report $(MAP) --map studies/results/who_wins_where.png

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
