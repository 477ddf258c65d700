"""Compile a model, checkpoint its activations and parallelize it (DDP, FSDP2, context)."""

import logging
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import kernels.context.ring
import kernels.ops  # noqa: F401  # both register operators below
from kernels import ContextGroup
from model.block import Block
from model.gpt import GPT
from model.residual import DeferredResidual, Norm
from training.config import ActivationCheckpointing, RunConfig
from training.distributed import Processes
from training.language.config import TrainConfig

BUCKET_MB = 100  # gradients per all-reduce
F = TypeVar("F", bound=Callable[..., Any])


def can_capture(run: RunConfig, processes: Processes) -> bool:
    """Whether a step, including its communication, can be captured in a CUDA graph."""
    # Activation checkpointing without torch.compile reads the state of a random generator on the
    # CPU, which a graph cannot capture.
    stays_on_gpu = run.compile or run.activation_checkpointing == "none"
    return run.cuda_graph and processes.device.type == "cuda" and stays_on_gpu


def weights_are_static(model: nn.Module) -> bool:
    """Whether weights keep their memory address; weights gathered by FSDP2 do not."""
    return not isinstance(model, FSDPModule)


def set_up_context_parallel(model: GPT, processes: Processes) -> ContextGroup:
    """Set up context parallelism of a model; returns the group that shares each sequence."""
    context = ContextGroup()
    if processes.mesh is not None:
        context = ContextGroup(processes.mesh.get_group("context"))
        model.set_context_group(context)
    return context


def shard_model(model: GPT, config: TrainConfig, processes: Processes) -> None:
    """Move a model to the device, or shard it over the processes (FSDP2, block by block).

    Zhao et al. 2023, "PyTorch FSDP" (arXiv 2304.11277). Nothing may hold its parameters before this
    call. Parameters of norms stay unsharded and in float32: bfloat16 numbers near 1 are 1/128
    apart, and a gain takes many steps to move that far.
    """
    parallel = config.parallel
    if parallel.mode == "ddp" or processes.world_size == 1:
        model.to(processes.device)
        return
    norms = [module for module in model.modules() if isinstance(module, Norm)]
    norm_weights = [weight for norm in norms for weight in norm.parameters()]
    for weight in norm_weights:
        weight.data = weight.data.to(processes.device)
    dtype = config.run.dtype if parallel.gather_dtype == "auto" else parallel.gather_dtype
    options: dict[str, Any] = {
        "mesh": init_device_mesh(processes.device.type, (processes.world_size,)),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if dtype == "bfloat16" else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        ),
        "ignored_params": set(norm_weights),
    }
    # This warns about outputs that are views. Nothing here changes one in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    for block in blocks_of(model):
        block.forward = partial(_forward_with_copied_bias, block.forward)
        fully_shard(block, reshard_after_forward=parallel.reshard, **options)
    # The embedding is also the head, so the root stays gathered after its forward pass.
    fully_shard(model, reshard_after_forward=False, **options)


def _forward_with_copied_bias(
    forward: Callable[..., tuple[Tensor, DeferredResidual]], *arguments: Any, **keywords: Any
) -> tuple[Tensor, DeferredResidual]:
    """Forward pass of a block that copies its pending bias.

    FSDP2 frees the block's gathered weights before the next block adds the bias.
    """
    x, (branch, bias) = forward(*arguments, **keywords)
    return x, DeferredResidual(branch, None if bias is None else bias.clone())


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Transformer blocks of a model, in order."""
    return [module for module in model.modules() if isinstance(module, Block)]


def compile_and_wrap(
    model: nn.Module, run: RunConfig, processes: Processes, n_shapes: int
) -> tuple[nn.Module, nn.Module]:
    """Compile a model, and wrap it to average gradients over processes; returns both models.

    Args:
        model: activation checkpointing is applied to its blocks, as set in `run`.
        run: settings of the run.
        processes: all processes that train it together.
        n_shapes: number of batch shapes that the model gets; each is compiled separately.
    """
    blocks = blocks_of(model)
    checkpoint_blocks(blocks, run.activation_checkpointing)
    compiled = model
    if run.compile:
        # Twice: with gradients and without. Times blocks: each may have its own softmax scale.
        _prepare_compiler(run, 2 * n_shapes * max(1, len(blocks)))
        if isinstance(model, GPT) and _compiles_by_block(model, run, processes):
            model.compile_parts(_compile)
        else:
            compiled = _compile(model)
    if processes.world_size == 1 or isinstance(model, FSDPModule):
        return compiled, compiled
    on_gpu = processes.device.type == "cuda"
    # DDP accumulates gradients on the stream that is current here. The default stream would not do:
    # it cannot be captured.
    with torch.cuda.stream(torch.cuda.Stream(processes.device)) if on_gpu else nullcontext():
        parallel = DistributedDataParallel(
            compiled,
            device_ids=[processes.device] if on_gpu else None,
            gradient_as_bucket_view=True,  # otherwise gradients are in memory twice
            bucket_cap_mb=BUCKET_MB,
        )
    # Buffers are tables of constants, equal on all processes. torch 2.13 deprecates the argument.
    parallel.broadcast_buffers = False
    return compiled, parallel


def _compiles_by_block(model: GPT, run: RunConfig, processes: Processes) -> bool:
    # With several processes, a block's gradients are exchanged while the next block computes. With
    # activation checkpointing, compiling the whole model would drop the blocks' inputs: all of them
    # would be recomputed before the first is needed.
    if processes.world_size > 1 or run.activation_checkpointing != "none":
        return True
    # Blocks that differ only in their weights share one graph: compile time does not grow with
    # depth. A memory budget below 1 is spent over all blocks, so it needs the whole model.
    return not model.config.scale_attn_by_inverse_layer_idx and run.activation_memory == 1


def _prepare_compiler(run: RunConfig, n_versions: int) -> None:
    # torch treats more than a few compiled versions of a function as an error. It also counts those
    # of earlier runs in this process, whose models share code with this one.
    torch.compiler.reset()
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, n_versions)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, n_versions)
    functorch_config.activation_memory_budget = run.activation_memory
    key_caches_by_source()


def key_caches_by_source() -> None:
    """Add a hash of our sources to the keys of torch.compile's caches on disk.

    A graph contains only the names of our operators and autograd.Functions. With their source in
    the key, PyTorch can safely cache graphs traced through an autograd.Function.
    """
    tag = torch.compiler.config.cache_key_tag  # may be set by the user
    if _SOURCES not in tag:
        torch.compiler.config.cache_key_tag = tag + _SOURCES
    functorch_config.autograd_cache_allow_custom_autograd_functions = True


def _source_hash(root: Path) -> str:
    digest = sha256()
    for package in ("kernels", "model"):
        for file in sorted((root / package).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


_SOURCES = _source_hash(Path(__file__).parents[1])
"""Hash of the imported code, taken at import: files may change later while a run starts."""


def _compile(function: F) -> F:
    return torch.compile(  # pyright: ignore
        function,
        fullgraph=True,  # a graph break would be slow and go unnoticed
        dynamic=False,  # code for dynamic shapes is slower
    )


# Outputs of attention are small for the time that they take, above all in long contexts.
_ATTENTION = (
    torch.ops.papilio.attn_fwd.default,
    torch.ops.papilio.attn_packed_fwd.default,
    torch.ops.papilio.ring_attn_fwd.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)


def checkpoint_blocks(blocks: Iterable[nn.Module], mode: ActivationCheckpointing) -> None:
    """Apply activation checkpointing to each of these modules, in place.

    Call it before `torch.compile` on any of them, or on their model.
    """
    if mode == "none":
        return
    # Silences warnings about in-place operators: here they occur only inside our own operators.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    # "full" also needs a policy: without one, code compiled by PyTorch 2.11 keeps the tensors that
    # an autograd.Function saves.
    saved = _ATTENTION if mode == "selective" else ()
    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, saved))
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


def _policy(
    saved: tuple[Any, ...], context: Any, operator: Any, *_: Any, **__: Any
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE
