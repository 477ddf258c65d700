"""Muon's steps on weights sharded over processes, against steps on whole weights."""

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.training_runs import call_on_processes
from training import muon
from training.distributed import full_tensor, start_processes
from training.muon import Muon
from training.orthogonalize import orthogonalize
from training.sharded_muon import apply_to_whole, batch_size

# On three processes: uneven shards, empty shards, wide, tall, and batches of 3, 1 and 2 matrices.
SHAPES = [(17, 5), (24, 8), (17, 5), (1, 8), (8, 24), (2, 8), (17, 5), (4, 6), (24, 8)]


def numbers(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def take_steps(
    weights: list[nn.Parameter], gradients: list[list[Tensor]], settings: dict[str, Any]
) -> list[Tensor]:
    """Weights and their states after steps that divide gradients; one skips."""
    group = {"params": weights, "momentum": 0.9, **settings}
    impl = group.pop("impl", None)
    optimizer = Muon([group], lr=0.02, weight_decay=0.1, impl=impl)
    optimizer.grad_scale = torch.tensor(3.0)
    for step, grads in enumerate(gradients):
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad
        optimizer.found_inf = torch.tensor(float(step == 1))
        optimizer.step()
    states = [optimizer.state[weight] for weight in weights]
    assert all(
        isinstance(state["momentum_buffer"], DTensor) == isinstance(weight, DTensor)
        for weight, state in zip(weights, states, strict=True)
    )
    whole = [*weights, *(x for state in states for name, x in state.items() if name != "step")]
    return [*(full_tensor(x.detach()) for x in whole), *(state["step"] for state in states)]


def compare_with_whole_weights(batch_elements: int, *groups: dict[str, Any]) -> None:
    """Take the steps of groups with these settings, in one start of the processes."""
    with start_processes("cpu") as processes:
        mesh = init_device_mesh("cpu", (processes.world_size,))
        for settings in groups:
            compare_group(mesh, batch_elements, settings)
        if processes.world_size == 3:
            count_matrices(mesh, processes.rank)


def compare_group(mesh: DeviceMesh, batch_elements: int, settings: dict[str, Any]) -> None:
    def shard(x: Tensor) -> Tensor:
        return distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)

    settings = dict(settings)
    dtype, n_steps = settings.pop("products", torch.float32), settings.pop("n_steps", 4)
    muon.orthogonalize = partial(orthogonalize, dtype=dtype)
    gradients = [numbers(1 + step) for step in range(n_steps)]
    gradients[1][0][0, 0] = math.nan  # known to one process only
    expected = take_steps([nn.Parameter(x) for x in numbers(0)], gradients, settings)
    sharded = [[shard(grad) for grad in grads] for grads in gradients]
    muon._BATCH_ELEMENTS = batch_elements
    actual = take_steps([nn.Parameter(shard(x)) for x in numbers(0)], sharded, settings)
    for one, other in zip(actual, expected, strict=True):
        error = 1e-6 if dtype == torch.float32 else 1e-4  # sums have another order
        torch.testing.assert_close(one, other, rtol=10 * error, atol=error)
    assert (expected[0] - numbers(0)[0]).abs().max() > 0.01 and expected[-1] == n_steps - 1


def count_matrices(mesh: DeviceMesh, rank: int) -> None:
    """Each process computes its share of a batch, and gets the rows that it sent."""
    batch = torch.arange(7 * 5 * 2.0).view(7, 5, 2)
    like = distribute_tensor(batch[0], mesh, [Shard(0)], src_data_rank=None)
    shards = batch[:, 2 * rank : 2 * rank + 2]
    shapes = []

    def column_means(x: Tensor) -> Tensor:
        shapes.append(tuple(x.shape))
        return x.float().mean(1, keepdim=True).expand_as(x).to(x.dtype)

    means = apply_to_whole(column_means, shards, like)
    expected = batch.mean(1, keepdim=True).bfloat16()
    assert batch_size(like, 39) == 9 and batch_size(like, 9) == 3  # 3 or 1 for each process
    assert batch_size(batch[0], 39) == 3
    assert shapes == [(3, 5, 2)] and torch.equal(means, expected.expand_as(shards))
    assert dist.get_world_size() == 3 and means.shape == shards.shape


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("n", "batch_elements", "groups"),
    [
        (2, 1, [{}]),  # a matrix for each process at a time
        (
            3,
            2**25,
            [
                *({}, {"normalize_rows": True}),
                {"impl": "triton", "n_steps": 2},  # slow when interpreted
                {"normalize_rows": True, "products": torch.float16},  # as on GPUs
            ],
        ),
    ],
)
def test_sharded_matrices_match_whole_ones(tmp_path, n, batch_elements, groups) -> None:
    ends = call_on_processes(n, tmp_path, compare_with_whole_weights, batch_elements, *groups)
    assert [status for status, _ in ends] == [0] * n, ends
