# Two commands for a fresh machine: `make quickstart` and `make test`. Both set up .venv first.
#
#   make quickstart PY=python3          use the packages that are there; set up nothing
#   make test TORCH=torch==2.11.0       another version of PyTorch (2.11 or later)

BASE ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PY ?= $(VENV)/bin/python
PYTEST = $(PY) -m pytest -n auto --dist worksteal

.PHONY: quickstart test test-all test-gpu memcheck check setup

quickstart: setup
	$(PY) -m scripts.quickstart

# Kernels run in Triton's interpreter, on the CPU, also where there is a GPU.
test test-all: export OMP_NUM_THREADS = 1
test: setup
	CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 $(PYTEST) -m "not gpu and not slow"

test-all: setup
	CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 $(PYTEST) -m "not gpu"

test-gpu: setup
	TRITON_INTERPRET=0 $(PY) -m pytest -m "gpu and not slow"

# Each tensor an allocation of its own, so that a step past its end is seen.
memcheck: setup
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=. \
	compute-sanitizer --tool memcheck --error-exitcode 1 $(PY) tests/kernels/memcheck.py

check: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright

setup: $(if $(filter $(VENV)/bin/python,$(PY)),$(VENV)/.installed)

# PyTorch goes first and by version: what comes after takes the one that is there. setuptools warns of
# every editable installation.
$(VENV)/.installed: pyproject.toml
	@echo "setting up $(VENV): PyTorch, then the rest; once, some minutes"
	$(BASE) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Papilio needs Python 3.11 or later: make BASE=python3.12 ...")'
	$(BASE) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet $(TORCH)
	PYTHONWARNINGS=ignore $(VENV)/bin/python -m pip install --quiet --editable '.[dev]'
	@touch $@
