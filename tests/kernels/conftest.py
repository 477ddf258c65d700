"""What the tests of the attention kernels share."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import Tensor

from kernels import flash_attention
from kernels.testing import check_attention, make_qkv, poison_empty


@pytest.fixture(scope="session")
def device_for():
    """Where inputs of a dtype go: to the GPU if there is one, as all of bf16 must."""

    def choose(dtype):
        return "cuda" if torch.cuda.is_available() or dtype == torch.bfloat16 else "cpu"

    return choose


@pytest.fixture(scope="session")
def check(device_for):
    """Hold the Triton kernels to the error budget: out, lse and the gradients of q, k, v and sinks.

    Memory comes full of NaN, so that a result that was never written shows. A random gradient goes
    through lse too. Tensors among the options go where q goes.
    """
    triton_attention = partial(flash_attention, impl="triton", return_lse=True)

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
            return check_attention(triton_attention, q, k, v, with_dlse=True, **options)

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
