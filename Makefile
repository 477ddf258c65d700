# Two commands for a fresh machine: `make quickstart` and `make test`. Both set up .venv first.
#
#   make quickstart PY=python3          use installed packages, without setting up .venv
#   make test TORCH=torch==2.11.0       another version of PyTorch (2.11 or later)
#   make test LOCKED=1                  other packages at the versions of requirements.lock
#   make test-compile TRITON=3.6.0      what another Triton compiles the Hopper kernels to, without a GPU

BASE ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
PY ?= $(VENV)/bin/python
TRITON ?= 3.6.0
UV ?= uv
PYTEST = $(PY) -m pytest -n auto --dist worksteal

.PHONY: quickstart test test-all test-compile test-gpu memcheck check setup lock

quickstart: setup
	$(PY) -m scripts.quickstart

# Kernels run in Triton's interpreter on the CPU, even if there is a GPU.
test test-all test-compile: export OMP_NUM_THREADS = 1
test: setup
	CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 $(PYTEST) -m "not gpu and not slow"

test-all: setup
	CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 $(PYTEST) -m "not gpu"

test-compile: setup
	$(PY) -m pip install --quiet --no-deps --upgrade --target out/triton-$(TRITON) triton==$(TRITON)
	PYTHONPATH=out/triton-$(TRITON) CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 \
	$(PYTEST) tests/kernels/hopper/test_compile.py

test-gpu: setup
	TRITON_INTERPRET=0 $(PY) -m pytest -m "gpu and not slow"

# Each tensor gets its own allocation, so that out-of-bounds accesses are detected.
memcheck: setup
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=. \
	compute-sanitizer --tool memcheck --error-exitcode 1 $(PY) tests/kernels/memcheck.py

check: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright

# With LOCKED=1, a file of its own records the setup: after a setup without it, versions may differ.
LOCK = $(if $(filter-out 0,$(LOCKED)),requirements.lock)
INSTALLED = $(VENV)/.installed$(if $(LOCK),-locked)

setup: $(if $(filter $(VENV)/bin/python,$(PY)),$(INSTALLED))

# PyTorch is installed first, to pin its version: later packages then use it. PYTHONWARNINGS hides the
# warning of setuptools about editable installations.
$(INSTALLED): pyproject.toml $(LOCK)
	@echo "setting up $(VENV): PyTorch, then other packages; takes a few minutes, once"
	$(BASE) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Papilio needs Python 3.11 or later: make BASE=python3.12 ...")'
	$(BASE) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet $(TORCH)
	PYTHONWARNINGS=ignore $(VENV)/bin/python -m pip install --quiet $(LOCK:%=--requirement %) --editable '.[dev]'
	@touch $@

# Keeps the versions that requirements.lock has, where pyproject.toml allows them. TORCH chooses PyTorch,
# and PyTorch its Triton, its setuptools and its CUDA packages: the lock has none of them.
lock:
	printf 'torch\ntriton\nsetuptools\n' | $(UV) pip compile --quiet --universal --python-version 3.11 --extra dev \
	--excludes /dev/stdin --no-emit-index-url --no-emit-find-links --annotation-style line \
	--custom-compile-command "make lock" --output-file requirements.lock pyproject.toml
