# make setup   a virtual environment in .venv with everything pinned (quick the second time)
# make demo    setup, then the main job on what this machine has: profile, plan, train, compare -> report.html
# make test    setup, then make check; what CI runs
# make check   ruff, mypy and import-linter, and beside them pytest
# make tables  the cases of tables that `make check` leaves out: more of kinds that it tests
# make test-install  build the wheel, install it into fresh environments of every Python here, plan in an empty folder
# make engines the jobs of `asa launch` on torchrun, Slurm, Ray and by Kubernetes' schemas, on this machine
# make faults  what must hold when ranks die, hang or report nonsense, when files are damaged, when a disk is full
# make golden  plan the committed profiles anew; the diff is the review of a cost-model change
# make samples the sample documents of docs/samples, from real runs
# make gpu     what this machine's GPUs can tell, in pieces that can be taken up again -> runs/gpu/gpu-report.md
# make standin everything that asks for CUDA, on stood-in GPUs (minutes, no GPU needed)
# make clean   everything that can be made again, but not .venv

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= $(shell command -v python3 || command -v python)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

DEMO_MODEL ?= vgg16
DEMO_GPUS ?= 2
DEMO_BATCH ?= 64

.PHONY: setup demo test test-install engines faults check lint types floors pytest tables golden samples gpu standin clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "asa needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try make PYTHON=python3.12" >&2; exit 5; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "python -m venv failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 5; }
	@$(BIN)/python -m uv --version >/dev/null 2>&1 || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/python -m uv pip install --compile-bytecode --python $(BIN)/python --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m compileall -q -j 0 asa  # also where PYTHONDONTWRITEBYTECODE would have every start compile anew
	@touch $(STAMP)

demo: setup
	@BIN=$(BIN) MODEL=$(DEMO_MODEL) GPUS=$(DEMO_GPUS) BATCH=$(DEMO_BATCH) bash benchmarks/demo.sh

test: setup
	@$(MAKE) --no-print-directory check

test-install: setup
	@BIN=$(BIN) bash benchmarks/install.sh

engines: setup
	$(BIN)/python benchmarks/engines.py

# Two at a time: what checks types needs one core and a minute of two. All end before a failure is reported.
check:
	@$(MAKE) --no-print-directory --jobs=2 lint types floors pytest

lint:
	$(BIN)/ruff check asa planner_tests benchmarks
	$(BIN)/ruff format --check asa planner_tests benchmarks

types:
	$(BIN)/mypy

floors:
	$(BIN)/lint-imports

# Three processes on two cores: tests of lost, late and hanging ranks wait, and leave a core idle.
pytest:
	$(BIN)/python -m pytest -m 'not gpu and not standin and not table' --numprocesses 3 --dist loadfile --no-loadscope-reorder

tables: setup
	$(BIN)/python -m pytest -m table --numprocesses 2 --dist worksteal

FAULTS := faults launch ending recovery restart checkpoint corrupt bad_files bad_input zoo_download zoo_files idle migration adapt_laws

faults: setup
	$(BIN)/python -m pytest -m 'not gpu and not standin' $(FAULTS:%=planner_tests/test_%.py)

golden: setup
	$(BIN)/python benchmarks/golden.py

samples: setup
	BIN=$(BIN) bash benchmarks/samples.sh

NEEDED := torch, torchvision, networkx, numpy, pulp, highspy, pynvml, rich, pydantic, psutil, platformdirs, safetensors, pytest

gpu:
	@python=$(BIN)/python; $(MAKE) -s --no-print-directory setup || python=$(PYTHON); \
	$$python -c 'import $(NEEDED)' || \
	  { echo "no network to set up from, and $(PYTHON) lacks a package that asa needs (above)" >&2; exit 5; }; \
	$$python benchmarks/gpu.py --shares 99 --failed

standin: setup
	$(BIN)/python -m pytest -m standin -s planner_tests/test_standin.py

clean:
	rm -rf runs report.html build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find asa planner_tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
