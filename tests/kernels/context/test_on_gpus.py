"""Attention sharded over two GPUs: error budget of one GPU, equal bits, and no waiting."""

import pytest
import torch

from kernels import BlockSparseMask, context_attention
from kernels.mask.patterns import butterfly
from kernels.testing import make_qkv
from tests.kernels.context.processes import Processes
from tests.kernels.context.test_attention import packed
from tests.kernels.context.test_operators import COMPILED, compile_and_compare
from tests.kernels.context.whole import check_budget, on_device, whole_results

pytestmark = [pytest.mark.gpu(2), pytest.mark.distributed]

IMPLS = ["triton", "hopper"]
each_impl = pytest.mark.parametrize("impl", IMPLS)
# For 2,048 tokens in chunks of 512: documents that begin at chunks, within tiles, and so late that
# whole steps see nothing
DOCUMENTS = {
    "at chunks": packed(512, 512, 1024),
    "within tiles": packed(5, 700, 63, 1, 900, 379),
    "late": packed(2000, 48),
    "after the query": packed(1000, 1048) + 300,
}
CALLS = {
    "causal": ("ring", {}),
    "softcap": ("ring", {"softcap": 2.0, "softmax_scale": 0.2}),
    **{f"documents {name}": ("ring", {"doc_start": x}) for name, x in DOCUMENTS.items()},
    "gather": ("gather", {}),
    "gather, documents": ("gather", {"doc_start": DOCUMENTS["within tiles"]}),
    "window": ("gather", {"window_size": 300}),
    "window, documents": ("gather", {"window_size": 700, "doc_start": DOCUMENTS["late"]}),
    "padding": ("gather", {"kv_lengths": torch.tensor([1500])}),
    "dropout": ("gather", {"dropout_p": 0.2, "dropout_seed": 2**40 + 11}),
    "butterfly of 64": ("gather", {"mask": BlockSparseMask(butterfly(32), 64)}),
    "butterfly of 128": ("gather", {"mask": BlockSparseMask(butterfly(16), 128)}),
    "ring, butterfly of 128": ("ring", {"mask": BlockSparseMask(butterfly(16), 128)}),
    "ring, butterfly, documents": (
        "ring",
        {"mask": BlockSparseMask(butterfly(32), 64), "doc_start": DOCUMENTS["within tiles"]},
    ),
    "butterfly, window, dropout": (
        "gather",
        {
            "mask": BlockSparseMask(butterfly(16), 128), "window_size": 900,
            "dropout_p": 0.2, "dropout_seed": 3,
        },
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def gpus():
    processes = Processes(2, on_gpus=True)
    yield processes
    processes.close()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", CALLS)
@each_impl
def test_keeps_to_the_error_budget(gpus, impl, name, head_dim):
    method, options = CALLS[name]
    options = {**options, "causal": True, "method": method, "impl": impl}
    gpus.call(check_budget, (1, 2048, 2048, 4, 2, head_dim), torch.bfloat16, options, "cuda")


# chunks of one token, of less than a tile, and of tiles plus a rest; several samples
@pytest.mark.parametrize("tokens", [4, 100, 1204])
@pytest.mark.parametrize("method", ["ring", "gather"])
@each_impl
def test_any_length(gpus, impl, method, tokens):
    options = {"causal": True, "method": method, "impl": impl}
    gpus.call(check_budget, (3, tokens, tokens, 2, 2, 64), torch.bfloat16, options, "cuda")


@pytest.mark.parametrize("name", ["causal", "documents within tiles", "gather", "dropout"])
@each_impl
def test_repeats_bit_for_bit(gpus, impl, name):
    method, options = CALLS[name]
    options = {**options, "method": method, "impl": impl, "deterministic": True}
    sizes = (1, 2048, 2048, 4, 2, 64)
    one, other = gpus.call(whole_results, sizes, torch.bfloat16, options, "cuda", 50)
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_without_a_graph_break(gpus, name):
    arguments = (name, "cuda", "inductor", "triton")
    assert gpus.call(compile_and_compare, *arguments) == [1, 1]


def step_without_waiting(context, method, impl, options):
    device = torch.device("cuda", context.rank)
    qkv = make_qkv(2, 1024, 1024, 4, 2, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    options = on_device(options, device)
    dout = torch.randn_like(qkv[0])

    def step():
        out = context_attention(*qkv, context=context, method=method, impl=impl, **options)
        torch.autograd.grad(out, qkv, dout)

    step()  # compiles, connects the GPUs, and copies the lists of the mask to them
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["causal", "documents late", "butterfly of 128", "dropout"])
@each_impl
def test_no_call_waits_for_a_gpu(gpus, impl, name):
    method, options = CALLS[name]
    if "doc_start" in options:  # for the tokens of one process
        options = {"doc_start": options["doc_start"][:, :1024].expand(2, -1).contiguous()}
    gpus.call(step_without_waiting, method, impl, options)


def memory_of_captured(context, method, n_calls):
    """Bytes that a CUDA graph of `n_calls` successive calls reserves."""
    device = torch.device("cuda", context.rank)
    sizes = (1, 16_384, 16_384, 12, 12, 64)
    qkv = make_qkv(*sizes, dtype=torch.bfloat16, device=device, requires_grad=True)
    dout = torch.randn_like(qkv[0])

    def call():
        out = context_attention(*qkv, context=context, method=method)
        torch.autograd.grad(out, qkv, dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(n_calls):
            call()
    return torch.cuda.memory_reserved() - before


@pytest.mark.parametrize("method", ["ring", "gather"])
def test_captured_calls_reuse_the_same_memory(gpus, method):
    one, many = (max(gpus.call(memory_of_captured, method, n)) for n in (1, 6))
    assert one > 0
    assert many <= 1.3 * one
