"""Forward pass of the Hopper kernels on an H100 or H200, against standard attention.

These calls test its tiles, schedule and counters. The folder above tests what all kernels promise,
and skips unsupported calls; here they fail.
"""

import itertools
import threading
from functools import partial

import pytest
import torch

from kernels import flash_attention
from kernels.testing import check_attention, make_qkv, poison_empty, relative_error

hopper_attention = partial(flash_attention, impl="hopper", return_lse=True)
BF16, FP16 = torch.bfloat16, torch.float16

pytestmark = pytest.mark.gpu
causal_or_full = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
each_head_dim = pytest.mark.parametrize("head_dim", [64, 128, 256])


@pytest.fixture(autouse=True)
def on_hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("these kernels are for H100 and H200")


def check(batch, seq_q, seq_k, n_head, n_kv_head, head_dim, dtype=BF16, *, scale=1.0, **options):
    qkv = make_qkv(
        batch, seq_q, seq_k, n_head, n_kv_head, head_dim, dtype=dtype, device="cuda", scale=scale
    )
    with poison_empty():
        return check_attention(hopper_attention, *qkv, with_dlse=True, **options)


# on both sides of 64 queries of a group, 128 keys of a tile and 192 or 256 queries of a row tile,
# and of the change to three groups above 1,024 queries, or 4,096 under a causal mask
LENGTHS = [1, 63, 64, 65, 127, 128, 129, 191, 193, 384, 777, 1024, 1025, 1280, 2304, 2305, 4224]


@causal_or_full
@each_head_dim
@pytest.mark.parametrize("seq", LENGTHS)
def test_any_length(seq, head_dim, causal):
    check(1, seq, seq, 2, 2, head_dim, causal=causal)


@causal_or_full
@each_head_dim
@pytest.mark.parametrize(
    "lengths",
    [
        *((1, 500), (64, 192), (65, 640), (200, 1), (1000, 1130)),
        *((1130, 1000), (2500, 2756), (2500, 3000), (3000, 2500), (2100, 64)),
        *((2500, 2560), (5000, 5128)),
    ],
)
def test_causal_aligns_at_the_bottom_right(lengths, head_dim, causal):
    check(1, *lengths, 2, 1, head_dim, causal=causal)


@causal_or_full
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("head_dim", [8, 72, 120, 136, 192])
def test_any_multiple_of_eight_as_head_dim(head_dim, dtype, causal):
    check(2, 333, 333, 2, 2, head_dim, dtype, causal=causal)


@causal_or_full
@pytest.mark.parametrize(("n_head", "n_kv_head"), [(4, 1), (6, 2), (12, 12)])
def test_more_tiles_than_programs(n_head, n_kv_head, causal):
    # 9 x n_head x 8 row tiles: each program takes several, of several heads
    check(9, 500, 500, n_head, n_kv_head, 64, causal=causal)


@causal_or_full
@each_head_dim
@pytest.mark.parametrize("scale", [20.0, 1e-3])
def test_extreme_logits(scale, head_dim, causal):
    check(1, 300, 300, 2, 2, head_dim, causal=causal, scale=scale)


@causal_or_full
@each_head_dim
@pytest.mark.parametrize("seq", [8192, 16_384, 65_536])
def test_long_rows(seq, head_dim, causal):
    # compare some rows of each part with fp32: all rows would take minutes
    generator = torch.Generator(device="cuda").manual_seed(0)
    q, k, v = torch.randn(3, 1, seq, 3, head_dim, device="cuda", generator=generator).to(BF16)
    with poison_empty():
        out, lse = hopper_attention(q, k, v, causal=causal)
    rows = torch.arange(0, seq, 61, device="cuda")
    scores = torch.einsum("bthd,bshd->bhts", q[:, rows].float(), k.float()) * head_dim**-0.5
    if causal:
        hidden = torch.arange(seq, device="cuda") > rows[:, None]
        scores.masked_fill_(hidden, -torch.inf)
    torch.testing.assert_close(lse[:, :, rows], scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    expected = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v.float())
    assert relative_error(out[:, rows], expected) < 4e-3
    assert out.isfinite().all()


def test_padding_of_long_rows():
    # a plan in which three groups take turns (pingpong)
    kv_lengths = torch.tensor([0, 1000], dtype=torch.int32, device="cuda")
    check(2, 1280, 1280, 2, 2, 64, kv_lengths=kv_lengths)


@causal_or_full
@each_head_dim
@pytest.mark.parametrize("seq", [512, 4096])
def test_repeats_bit_for_bit(seq, head_dim, causal):
    qkv = make_qkv(4, seq, seq, 8, 4, head_dim, dtype=BF16, device="cuda")
    first = hopper_attention(*qkv, causal=causal)
    for repeat in range(250):
        for name, a, b in zip(
            ("out", "lse"), first, hopper_attention(*qkv, causal=causal), strict=True
        ):
            assert torch.equal(a, b), (name, repeat)


def test_compiles_without_a_graph_break():
    qkv = torch.randn(2, 300, 3, 4, 64, device="cuda", dtype=BF16, requires_grad=True)

    def gradient(attend):
        (grad,) = torch.autograd.grad(attend(qkv).square().sum(), qkv)
        return grad

    def attend(qkv):
        return flash_attention(*qkv.unbind(2), causal=True)  # dispatches to these kernels

    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True)
    assert torch.equal(compiled(qkv), hopper_attention(*qkv.unbind(2), causal=True)[0])
    assert torch.equal(gradient(compiled), gradient(attend))


def test_a_thread_that_never_called_cuda_may_launch():
    qkv = make_qkv(1, 200, 200, 2, 2, 64, dtype=BF16, device="cuda")
    expected, _ = hopper_attention(*qkv)
    results = []
    thread = threading.Thread(target=lambda: results.append(hopper_attention(*qkv)[0]))
    thread.start()
    thread.join()
    (got,) = results
    assert torch.equal(got, expected)


def test_an_unaligned_address_is_read():
    numbers = torch.randn(3 * 2 * 200 * 4 * 64 + 1, device="cuda").to(BF16)
    q, k, v = numbers[1:].view(3, 2, 200, 4, 64)
    check_attention(hopper_attention, q, k, v, causal=True)


@causal_or_full
def test_streams_and_graphs_do_not_share_their_counters(causal):
    qkv = make_qkv(2, 1536, 1536, 16, 16, 64, dtype=BF16, device="cuda")
    expected = hopper_attention(*qkv, causal=causal)
    streams = [torch.cuda.Stream() for _ in range(4)]
    graphs, results = [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append(hopper_attention(*qkv, causal=causal))
        graphs.append(graph)
    torch.cuda.synchronize()
    for _ in range(100):
        for stream, graph in itertools.zip_longest(streams, graphs):
            with torch.cuda.stream(stream):
                if graph is None:
                    results.append(hopper_attention(*qkv, causal=causal))
                else:
                    graph.replay()
    torch.cuda.synchronize()
    for got in results:
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)
