"""What the tests of the attention kernels share."""

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
    """Leave out fp32, which the kernels for Hopper never take, rather than skip so many cases."""

    def is_refused(item):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        return params.get("impl") == "hopper" and params.get("dtype") == torch.float32

    config.hook.pytest_deselected(items=[x for x in items if is_refused(x)])
    items[:] = [x for x in items if not is_refused(x)]


@pytest.fixture(scope="session")
def device_for():
    """Where inputs of a dtype go: to the GPU if there is one, as all of bf16 must."""

    def choose(dtype):
        return "cuda" if torch.cuda.is_available() or dtype == torch.bfloat16 else "cpu"

    return choose


@pytest.fixture(params=IMPLS)
def impl(request):
    """The name of the kernels that a test is run with."""
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
    """Hold the kernels to the error budget: out, lse and the gradients of q, k, v and sinks.

    Memory comes full of NaN, so that a result that was never written shows. A random gradient goes
    through lse too. Tensors among the options go where q goes.
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
    """Small calls are read by TMA too, in 16 bits and where an operand allows it."""
    monkeypatch.setattr("kernels.triton.operands.LEAST_WORK", 1)


@pytest.fixture(scope="session")
def printed_by():
    """What a program of the tests prints, JSON, where Triton compiles kernels without a GPU."""

    def run(*command):
        done = subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": "."},
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
