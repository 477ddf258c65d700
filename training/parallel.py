"""How the processes of a run share its model: which parts are compiled, and how gradients meet."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch._functorch.config as partitioner
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from model.block import Block
from model.gpt import GPT
from training.config import RunConfig
from training.distributed import Processes
from training.recompute import recompute_blocks

F = TypeVar("F", bound=Callable[..., Any])


def can_capture(run: RunConfig, processes: Processes) -> bool:
    """Whether a step can be captured in a CUDA graph."""
    # checkpointing that is not compiled looks at the state of a random generator, on the CPU
    plain = run.compile or run.activation_checkpointing == "none"
    return processes.device.type == "cuda" and processes.world_size == 1 and plain


def ways_to_run(
    model: nn.Module, run: RunConfig, processes: Processes, n_shapes: int
) -> tuple[nn.Module, nn.Module]:
    """The model fused by torch.compile; and that with its gradients averaged over processes.

    Args:
        model: its blocks will keep for the backward pass what `run` says.
        run: settings of the run.
        processes: that train it together.
        n_shapes: shapes of batches that the model is given: code is compiled for each.
    """
    blocks = [part for part in model.modules() if isinstance(part, Block)]
    recompute_blocks(blocks, run.activation_checkpointing)
    fast = model
    if run.compile:
        # Compiled whole, a model gives its gradients all at once, in the end. By block, those of
        # one are exchanged while the next computes. Little of a GPT is beside its blocks.
        parts = blocks if processes.world_size > 1 and isinstance(model, GPT) else []
        _prepare_compiler(run, n_shapes * max(1, len(parts)))
        for block in parts:
            block.forward = _compiled(block.forward)
        if not parts:
            fast = _compiled(model)
    if processes.world_size == 1:
        return fast, fast
    parallel = DistributedDataParallel(
        fast,
        device_ids=[processes.device] if processes.device.type == "cuda" else None,
        gradient_as_bucket_view=True,  # or memory would hold them twice
    )
    # tables of constants, the same everywhere; as an argument, torch 2.13 deprecates it
    parallel.broadcast_buffers = False
    return fast, parallel


def _prepare_compiler(run: RunConfig, n_versions: int) -> None:
    # torch takes more than a few versions of code for a mistake, and counts those of earlier runs
    # in this process, whose models share their code with this one
    torch.compiler.reset()
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, n_versions)
    partitioner.activation_memory_budget = run.activation_memory


def _compiled(what: F) -> F:
    return torch.compile(  # pyright: ignore
        what,
        fullgraph=True,  # a graph break would be slow, and nobody would see it
        dynamic=False,  # code for any shape is slower
    )
