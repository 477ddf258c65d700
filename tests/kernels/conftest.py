"""Fixtures shared by the tests of the kernels."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from kernels.testing import check_attention, make_qkv, poison_empty
from tests.kernels.implementations import IMPLS, attention_by


def pytest_collection_modifyitems(config, items):
    """Deselect fp32 cases of the Hopper kernels, which never support fp32, without a skip each."""

    def is_unsupported(item):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        return params.get("impl") == "hopper" and params.get("dtype") == torch.float32

    config.hook.pytest_deselected(items=[x for x in items if is_unsupported(x)])
    items[:] = [x for x in items if not is_unsupported(x)]


@pytest.fixture(scope="session")
def device_for():
    """Device for inputs of a dtype: the GPU if there is one, and always for bf16."""

    def choose(dtype):
        return "cuda" if torch.cuda.is_available() or dtype == torch.bfloat16 else "cpu"

    return choose


@pytest.fixture(params=IMPLS)
def impl(request):
    """Name of the kernels that a test runs with."""
    return request.param


@pytest.fixture
def attention(impl):
    return attention_by(impl)


@pytest.fixture
def precise(impl):
    """The most precise dtype that the kernels take."""
    return torch.float16 if impl == "hopper" else torch.float32


@pytest.fixture
def check(device_for, attention):
    """Check out, lse and the gradients of q, k, v and sinks against the error budget.

    Empty tensors are filled with NaN, so that a result that was never written shows. lse also gets
    a random gradient. Options that are tensors are moved to the device of q.
    """

    def check_shape(
        batch, seq_q, seq_k, n_head, n_kv_head, head_dim, dtype, *, scale=1.0, **options
    ):
        device = device_for(dtype)
        q, k, v = make_qkv(
            batch, seq_q, seq_k, n_head, n_kv_head, head_dim,
            dtype=dtype, device=device, scale=scale,
        )  # fmt: skip
        for name, option in options.items():
            if isinstance(option, Tensor):
                options[name] = option.to(device)
        with poison_empty():
            return check_attention(attention, q, k, v, with_dlse=True, **options)

    return check_shape


@pytest.fixture
def copy_engines(monkeypatch):
    """Read small calls with TMA as well, in 16 bits and where an operand allows it."""
    monkeypatch.setattr("kernels.triton.operands.MIN_TMA_WORK", 1)


@pytest.fixture(scope="session")
def printed_by():
    """Run a program that compiles kernels without a GPU, and return the JSON that it prints."""

    def run(*command):
        # Keep what PYTHONPATH has: it may select another Triton.
        path = os.pathsep.join(filter(None, [".", os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path},
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
