"""Data of each rank reaches the next one, by driver copies between GPUs or by a collective."""

from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from kernels.context import exchange
from kernels.context.exchange import post
from tests.kernels.context.processes import Processes
from tests.kernels.context.whole import check_budget, device_of, whole_results

pytestmark = pytest.mark.distributed
of_gpus = pytest.mark.gpu(2)
each_way = pytest.mark.parametrize("buffers", [True, False], ids=["buffers", "nccl"])


@pytest.fixture(scope="module")
def two_gpus():
    processes = Processes(2, on_gpus=True)
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def four_gpus():
    processes = Processes(4, on_gpus=True)
    yield processes
    processes.close()


def with_buffers(enabled):
    """Let GPUs exchange through receive buffers, or through NCCL."""
    return mock.patch.object(exchange, "MAX_RECEIVE_BUFFER", 2**30 if enabled else 0)


def payload(rank, shape, dtype, device):
    """Data that this rank sends, different for each rank."""
    return (torch.arange(2 * shape[1], device=device) + 1000 * rank).to(dtype).view(shape)


def pass_around(context, kind, shape, dtype, buffers=True):
    """Pass data around the ring: it arrives from the nearest previous rank first."""
    device = device_of(context, kind)
    own = received = payload(context.rank, shape, dtype, device)
    with with_buffers(buffers):
        for i in range(1, context.size):
            received = post(context, received, i % 2).wait()
            source = (context.rank - i) % context.size
            assert torch.equal(received, payload(source, shape, dtype, device))
            assert torch.equal(own, payload(context.rank, shape, dtype, device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_data_goes_around_the_ring(processes, dtype):
    processes.call(pass_around, "cpu", (2, 7), dtype)


def two_at_a_time(context, kind, buffers=True):
    device = device_of(context, kind)
    before = (context.rank - 1) % context.size
    shapes = (2, 5), (2, 300)
    with with_buffers(buffers):
        exchanges = [
            post(context, payload(context.rank, shape, torch.float32, device), i)
            for i, shape in enumerate(shapes)
        ]
        for shape, posted in zip(shapes[::-1], exchanges[::-1], strict=True):
            assert torch.equal(posted.wait(), payload(before, shape, torch.float32, device))


def test_two_at_a_time(processes):
    processes.call(two_at_a_time, "cpu")


@of_gpus
@each_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_data_goes_around_the_ring_on_gpus(two_gpus, buffers, dtype):
    for n in (1, 7, 1_000_003, 13, 4096):  # larger than the previous one, and smaller
        two_gpus.call(pass_around, "cuda", (2, n), dtype, buffers)


@of_gpus
@each_way
def test_two_at_a_time_on_gpus(two_gpus, buffers):
    two_gpus.call(two_at_a_time, "cuda", buffers)


def exchange_at_different_speeds(context, buffers):
    """Exchange between fast and slow ranks: no buffer is overwritten before it is read."""
    device = device_of(context, "cuda")
    n, before = 2**20, (context.rank - 1) % context.size
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    with with_buffers(buffers):
        for i in range(200):
            if i % 7 == 3 * context.rank:
                torch.cuda._sleep(2_000_000)
            sent = torch.full((2, n), context.size * i + context.rank, device=device)
            arrived = post(context, sent, 0).wait()
            wrong += (arrived != context.size * i + before).sum()
    assert wrong.item() == 0


@of_gpus
@each_way
def test_nothing_is_overwritten_before_it_is_read(two_gpus, buffers):
    two_gpus.call(exchange_at_different_speeds, buffers)


def count_buffers(context):
    """Bytes of receive buffers that a larger exchange adds, and then a smaller one."""
    counts = [exchange.receive_buffer_bytes()]
    for n in (3_000_000, 10):
        x = torch.zeros(2, n, device=device_of(context, "cuda"))
        post(context, x, 7).wait()
        counts.append(exchange.receive_buffer_bytes())
    return [b - a for a, b in pairwise(counts)]


@of_gpus
def test_buffers_are_counted_and_reused_for_smaller_exchanges(two_gpus):
    assert two_gpus.call(count_buffers) == [[24_000_000, 0]] * 2


def close_and_open(context):
    """Close the buffers on all ranks: their memory is free once every rank has closed them."""
    device = device_of(context, "cuda")
    before = (context.rank - 1) % context.size
    for n in (50_000_000, 7):
        sent = payload(context.rank, (2, n), torch.float32, device)
        expected = payload(before, (2, n), torch.float32, device)
        assert torch.equal(post(context, sent, 6).wait(), expected)
        opened, free = exchange.receive_buffer_bytes(), torch.cuda.mem_get_info(device)[0]
        exchange.free_receive_buffers()
        dist.barrier(context.process_group)
        freed = torch.cuda.mem_get_info(device)[0] - free
        assert freed >= opened > exchange.receive_buffer_bytes() == 0


@of_gpus
def test_freed_buffers_release_their_memory_and_open_again(two_gpus):
    two_gpus.call(close_and_open)


def open_while_busy(context):
    """Delay each rank in turn, so that its buffer is opened while its GPU is busy."""
    before = (context.rank - 1) % context.size
    for late in range(2 * context.size):
        sent = payload(
            context.rank, (2, 2_000_000 + late), torch.float32, device_of(context, "cuda")
        )
        if late % context.size == context.rank:
            torch.cuda._sleep(200_000_000)
        arrived = post(context, sent, 5).wait()
        assert torch.equal(arrived, payload(before, sent.shape, torch.float32, sent.device))


@of_gpus
def test_a_buffer_is_opened_while_a_gpu_is_busy(two_gpus):
    two_gpus.call(open_while_busy)


def replay(context, buffers):
    device = device_of(context, "cuda")
    before = (context.rank - 1) % context.size
    sent = torch.zeros(2, 100_000, device=device)
    out = torch.empty_like(sent)
    stream = torch.cuda.Stream()
    with with_buffers(buffers):
        with torch.cuda.stream(stream):
            post(context, sent, 0).wait()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(3):
                out.copy_(post(context, sent, 0).wait())
                sent.add_(1)
        for i in range(5):
            sent.fill_(10 * i + context.rank)
            graph.replay()
            assert (out == 10 * i + before + 2).all()
            # and an eager exchange between replays
            assert (post(context, sent, 0).wait() == 10 * i + before + 3).all()


@of_gpus
@each_way
def test_captured_exchanges(two_gpus, buffers):
    two_gpus.call(replay, buffers)


def capture_the_first(context):
    x = torch.zeros(2, 7_654_321, device=device_of(context, "cuda"))
    post(context, x[:, :1].contiguous(), 3).wait()
    refused = pytest.raises(RuntimeError, match="run the step once before")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        post(context, x, 3)


@of_gpus
def test_the_first_exchange_is_not_captured(two_gpus):
    two_gpus.call(capture_the_first)


def picked_exchange(context, reason):
    """Name of the exchange that this group picks if rank 1 cannot use receive buffers."""
    patch = {
        "none": mock.patch.dict("os.environ", {}),
        "switched off": mock.patch.dict("os.environ", {exchange.SWITCH: "0"}),
        "out of reach": mock.patch("torch.cuda.can_device_access_peer", lambda *_: False),
    }[reason if context.rank == 1 else "none"]
    sent = torch.zeros(2, 3, device=device_of(context, "cuda"))
    with patch, mock.patch.dict(exchange._PEER_ACCESS, clear=True):
        posted = post(context, sent, 0)
    posted.wait()
    return type(posted).__name__


@of_gpus
@pytest.mark.parametrize("reason", ["none", "switched off", "out of reach"])
def test_all_ranks_have_buffers_or_none_do(two_gpus, reason):
    expected_name = "_PeerCopy" if reason == "none" else "_Collective"
    assert two_gpus.call(picked_exchange, reason) == [expected_name, expected_name]


def same_bits(context, sizes, options):
    runs = []
    for buffers in (True, False):
        with with_buffers(buffers):
            runs.append(whole_results(context, sizes, torch.bfloat16, options, "cuda"))
    return all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


@pytest.mark.parametrize(
    "gpus", [pytest.param("two_gpus", marks=pytest.mark.gpu(2)),
             pytest.param("four_gpus", marks=pytest.mark.gpu(4))],
)  # fmt: skip
def test_attention_has_the_same_bits_with_and_without_buffers(request, gpus):
    options = {"causal": True, "method": "ring", "impl": "triton"}
    arguments = (1, 4096, 4096, 4, 2, 64), options
    assert all(request.getfixturevalue(gpus).call(same_bits, *arguments))


@pytest.mark.gpu(4)
@pytest.mark.parametrize("impl", ["triton", "hopper"])
def test_four_keep_to_the_error_budget(four_gpus, impl):
    options = {"causal": True, "method": "ring", "impl": impl}
    four_gpus.call(check_budget, (2, 4096, 4096, 4, 2, 64), torch.bfloat16, options, "cuda")
