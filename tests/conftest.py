"""What all tests share: interpreted kernels, a seed, and our own packages on the path."""

import os
from pathlib import Path

import pytest
import torch

# Triton decides when a kernel is defined whether it will be interpreted, so this comes before any
# of our imports. On a GPU the kernels are compiled: `make test-gpu`.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parent.parent


def pytest_sessionstart(session):
    """Stop if another distribution's package (PyPI has a `kernels`) hides one of ours."""
    import configs
    import data
    import kernels
    import model
    import scripts
    import training

    for package in (configs, data, kernels, model, scripts, training):
        origin = Path(package.__file__).resolve()
        if ROOT not in origin.parents:
            raise pytest.UsageError(
                f"`import {package.__name__}` finds {origin}, not the one in {ROOT}: run pytest "
                "from the root of the checkout, and uninstall the other package"
            )


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
