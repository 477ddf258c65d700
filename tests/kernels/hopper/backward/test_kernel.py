"""Backward pass of the Hopper kernels on an H100 or H200, against standard attention.

These calls test its tiles, dq semaphores and schedule. The folder above tests what all kernels
promise, and forward/test_kernel.py compares the gradients of many lengths.
"""

import json
import os
import subprocess
import sys
from functools import partial

import pytest
import torch

from kernels import flash_attention
from kernels.options import AttentionOptions
from kernels.testing import check_attention, make_qkv, poison_empty, relative_error

pytest.importorskip("triton")
import triton
import triton.language as tl

from kernels.hopper.backward.launch import attn_bwd

hopper_attention = partial(flash_attention, impl="hopper", return_lse=True)
BF16, FP16 = torch.bfloat16, torch.float16

pytestmark = pytest.mark.gpu
causal_or_full = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
each_head_dim = pytest.mark.parametrize("head_dim", [64, 128])


@pytest.fixture(autouse=True)
def on_hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("these kernels are for H100 and H200")


def make_backward_pass(batch, seq, n_head, n_kv_head, head_dim, causal, dtype=BF16):
    """Function that runs a backward pass and returns dq, dk and dv; and its q, k, v and dout."""
    q, k, v = (
        x.detach() for x in make_qkv(
            batch, seq, seq, n_head, n_kv_head, head_dim, dtype=dtype, device="cuda"
        )
    )  # fmt: skip
    out, lse = hopper_attention(q, k, v, causal=causal)
    dout = torch.randn_like(out)
    options = AttentionOptions(causal=causal, softmax_scale=head_dim**-0.5)

    def run():
        grads = [torch.empty_like(x) for x in (q, k, v)]
        attn_bwd(dout, None, q, k, v, out, lse, options, grads)
        return grads

    return run, (q, k, v, dout)


# on both sides of the 64 keys of a group and the 128 keys of a program
@causal_or_full
@each_head_dim
@pytest.mark.parametrize("seq_k", [1, 63, 64, 65, 127, 128, 129, 192, 320])
@pytest.mark.parametrize("seq_q", [1, 64, 65, 129, 200])
def test_any_two_lengths(seq_q, seq_k, head_dim, causal):
    qkv = make_qkv(2, seq_q, seq_k, 4, 2, head_dim, dtype=BF16, device="cuda")
    with poison_empty():
        check_attention(hopper_attention, *qkv, with_dlse=True, causal=causal)


@causal_or_full
@each_head_dim
@pytest.mark.parametrize("seq", [8192, 16_384])
def test_long_rows(seq, head_dim, causal):
    # of one key head, compared in fp32 as a whole
    run, (q, k, v, dout) = make_backward_pass(1, seq, 2, 1, head_dim, causal)
    with poison_empty():
        grads = run()
    q, k, v = (x.float().requires_grad_() for x in (q, k, v))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            *(x.expand(-1, -1, 2, -1).transpose(1, 2) for x in (k, v)),
            is_causal=causal,
        )
    expected = torch.autograd.grad(out, (q, k, v), dout.float().transpose(1, 2))
    for got, want in zip(grads, expected, strict=True):
        assert relative_error(got, want) < 4e-3


@causal_or_full
@each_head_dim
@pytest.mark.parametrize(
    ("batch", "seq", "n_kv_head"), [(4, 512, 4), (4, 4096, 1), (1, 16_384, 4), (1, 16_384, 2)]
)
def test_repeats_bit_for_bit(batch, seq, n_kv_head, head_dim, causal):
    run, _ = make_backward_pass(batch, seq, 8, n_kv_head, head_dim, causal)
    first = run()
    for repeat in range(250):
        for name, a, b in zip(("dq", "dk", "dv"), first, run(), strict=True):
            assert torch.equal(a, b), (name, repeat)


@causal_or_full
@each_head_dim
@pytest.mark.parametrize("seq", [32_768, 65_536, 131_072])
def test_more_key_tiles_than_programs(seq, head_dim, causal):
    # 256 to 1,024 key tiles per head, which wait for each other at the dq semaphores
    run, _ = make_backward_pass(1, seq, 2, 1, head_dim, causal)
    with poison_empty():
        first = run()
    assert all(grad.isfinite().all() for grad in first)
    for a, b in zip(first, run(), strict=True):
        assert torch.equal(a, b)


@triton.jit
def _spin_kernel(stop_ptr):
    while tl.atomic_add(stop_ptr, 0) == 0:
        pass


# a program alternates between key tiles that queries see and key tiles that none sees
@causal_or_full
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("case", ["padding", "documents", "window", "a window before all keys"])
def test_programs_take_key_tiles_that_no_query_sees(case, head_dim, causal):
    batch, seq_q, seq_k = 48, 1024, 2048
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = make_qkv(batch, seq_q, seq_k, 2, 2, head_dim, dtype=BF16, device="cuda")
    options = {}
    if case == "padding":
        lengths = torch.randint(0, seq_k + 1, (batch,), device="cuda", generator=generator)
        options = {"kv_lengths": lengths}
    elif case == "documents":
        starts = torch.randint(0, seq_k, (batch, 1), device="cuda", generator=generator)
        options = {"doc_start": starts.expand(batch, seq_q).sort().values}
    elif case == "window":
        options = {"window_size": 100}
    else:
        options = {"window_size": 100, "kv_lengths": torch.full((batch,), 300, device="cuda")}
    grads = []
    for impl in ("hopper", "triton"):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = flash_attention(*leaves, causal=causal, impl=impl, **options)
        grads.append(torch.autograd.grad(out, leaves, torch.ones_like(out) + out.detach()))
    for ours, portable in zip(*grads, strict=True):
        assert relative_error(ours, portable) < 1e-2


@causal_or_full
@each_head_dim
@pytest.mark.parametrize("seq", [512, 16_384])
def test_other_kernels_may_hold_most_of_the_gpu(seq, head_dim, causal):
    """No program waits for one that has not started: a few SMs are enough."""
    run, _ = make_backward_pass(1, seq, 4, 4, head_dim, causal)
    expected = run()
    stop = torch.zeros(1, dtype=torch.int32, device="cuda")
    warm_up = torch.ones_like(stop)
    _spin_kernel[(1,)](warm_up, num_warps=32, enable_fp_fusion=True)
    torch.cuda.synchronize()
    n_multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    for n_held in (n_multiprocessors // 2, n_multiprocessors - 3):
        stop.zero_()
        torch.cuda.synchronize()
        spinning, working, stopping = (torch.cuda.Stream() for _ in range(3))
        with torch.cuda.stream(spinning):
            # 32 warps leave no room on an SM
            _spin_kernel[(n_held,)](stop, num_warps=32, enable_fp_fusion=True)
        try:
            with torch.cuda.stream(working):
                results = [run() for _ in range(3)]
            working.synchronize()
        finally:
            with torch.cuda.stream(stopping):
                stop.fill_(1)
        torch.cuda.synchronize()
        for got in results:
            for a, b in zip(got, expected, strict=True):
                assert torch.equal(a, b)


def test_other_processes_may_preempt_the_gpu():
    # Programs are preempted anywhere and resume with the state that they had. If the state is not
    # restored exactly, a key tile is lost, and the tiles after it wait forever.
    running = [
        subprocess.Popen(
            [sys.executable, "tests/kernels/hopper/backward/repeat.py"],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        for _ in range(8)
    ]
    try:
        for process in running:
            printed, _ = process.communicate(timeout=180)
            assert process.returncode == 0
            assert json.loads(printed) == []
    finally:
        for process in running:
            process.kill()


@causal_or_full
def test_runs_alongside_kernels_of_other_streams(causal):
    run, _ = make_backward_pass(2, 2048, 8, 8, 64, causal)
    other, _ = make_backward_pass(1, 4096, 8, 4, 64, not causal, FP16)
    expected = run(), other()
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for i in range(100):
        with torch.cuda.stream(streams[i % 4]):
            results.append((run, other)[i % 2]())
            torch.mm(*torch.ones(2, 2048, 2048, device="cuda", dtype=BF16))
    torch.cuda.synchronize()
    for i, got in enumerate(results):
        for a, b in zip(got, expected[i % 2], strict=True):
            assert torch.equal(a, b)


def test_an_expanded_gradient_is_read():
    # from sum(): one number, expanded to all elements
    q, k, v = make_qkv(2, 300, 300, 4, 2, 64, dtype=BF16, device="cuda")
    qkv = [x.detach().requires_grad_() for x in (q, k, v)]
    grads = torch.autograd.grad(hopper_attention(*qkv)[0].sum(), qkv)
    dout = torch.ones_like(q)
    out, _ = hopper_attention(*qkv)
    for a, b in zip(grads, torch.autograd.grad(out, qkv, dout), strict=True):
        assert torch.equal(a, b)
