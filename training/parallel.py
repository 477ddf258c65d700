"""Compile a model, checkpoint its activations and share it between processes (DDP, FSDP2)."""

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
from model.residual import Norm, Pending
from training.config import ActivationCheckpointing, RunConfig
from training.distributed import Processes
from training.language.config import TrainConfig

BUCKET_MB = 100  # of gradients that are exchanged at once
F = TypeVar("F", bound=Callable[..., Any])


def can_capture(run: RunConfig, processes: Processes) -> bool:
    """Whether a step can be captured in a CUDA graph, with what processes exchange in it."""
    # checkpointing that is not compiled looks at the state of a random generator, on the CPU
    plain = run.compile or run.activation_checkpointing == "none"
    return run.cuda_graph and processes.device.type == "cuda" and plain


def weights_stay(model: nn.Module) -> bool:
    """Whether weights stay where they are in memory: those that FSDP2 gathers do not."""
    return not isinstance(model, FSDPModule)


def share_sequences(model: GPT, processes: Processes) -> ContextGroup:
    """Tell a model which processes share each sequence with this one; returns them."""
    context = ContextGroup()
    if processes.mesh is not None:
        context = ContextGroup(processes.mesh.get_group("context"))
        model.share_sequences(context)
    return context


def share_weights(model: GPT, config: TrainConfig, processes: Processes) -> None:
    """Bring a model to the device, or of its weights this process's part (FSDP2, by block).

    Zhao et al. 2023, "PyTorch FSDP" (arXiv 2304.11277). Until then nothing may hold its parameters.
    Those of norms stay whole, in float32: near 1, numbers of bfloat16 lie 1/128 apart, and a gain
    takes many steps to move as far.
    """
    parallel = config.parallel
    if parallel.mode == "ddp" or processes.world_size == 1:
        model.to(processes.device)
        return
    of_norms = [p for part in model.modules() if isinstance(part, Norm) for p in part.parameters()]
    for weight in of_norms:
        weight.data = weight.data.to(processes.device)
    dtype = config.run.dtype if parallel.gather_dtype == "auto" else parallel.gather_dtype
    options: dict[str, Any] = {
        "mesh": init_device_mesh(processes.device.type, (processes.world_size,)),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if dtype == "bfloat16" else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        ),
        "ignored_params": set(of_norms),
    }
    # of outputs that are views: nothing here changes one in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    for block in blocks_of(model):
        block.forward = partial(_with_bias_of_its_own, block.forward)
        fully_shard(block, reshard_after_forward=parallel.reshard, **options)
    # the embedding is the head, too
    fully_shard(model, reshard_after_forward=False, **options)


def _with_bias_of_its_own(
    forward: Callable[..., tuple[Tensor, Pending]], *arguments: Any, **keywords: Any
) -> tuple[Tensor, Pending]:
    """What a block gives, without a part of it that is gone when the next one adds it."""
    x, (branch, bias) = forward(*arguments, **keywords)
    return x, Pending(branch, None if bias is None else bias.clone())


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The Transformer blocks of a model, in order."""
    return [part for part in model.modules() if isinstance(part, Block)]


def compile_and_wrap(
    model: nn.Module, run: RunConfig, processes: Processes, n_shapes: int
) -> tuple[nn.Module, nn.Module]:
    """The model fused by torch.compile; and that with its gradients averaged over processes.

    Args:
        model: its blocks will keep for the backward pass what `run` says.
        run: settings of the run.
        processes: that train it together.
        n_shapes: shapes of batches that the model is given: code is compiled for each.
    """
    blocks = blocks_of(model)
    checkpoint_blocks(blocks, run.activation_checkpointing)
    fast = model
    if run.compile:
        # with gradients and without; each block may have a softmax scale of its own
        _prepare_compiler(run, 2 * n_shapes * max(1, len(blocks)))
        if isinstance(model, GPT) and _compiles_by_block(model, run, processes):
            model.compile_parts(_compiled)
        else:
            fast = _compiled(model)
    if processes.world_size == 1 or isinstance(model, FSDPModule):
        return fast, fast
    on_gpu = processes.device.type == "cuda"
    # what gradients are added up on: a stream that can be captured, as the one by default cannot
    with torch.cuda.stream(torch.cuda.Stream(processes.device)) if on_gpu else nullcontext():
        parallel = DistributedDataParallel(
            fast,
            device_ids=[processes.device] if on_gpu else None,
            gradient_as_bucket_view=True,  # or memory would hold them twice
            bucket_cap_mb=BUCKET_MB,
        )
    # tables of constants, the same everywhere; as an argument, torch 2.13 deprecates it
    parallel.broadcast_buffers = False
    return fast, parallel


def _compiles_by_block(model: GPT, run: RunConfig, processes: Processes) -> bool:
    # The gradients of a block are exchanged while the next computes. And of a whole model, the
    # compiler keeps no block's input: it computes all of them again before any is needed.
    if processes.world_size > 1 or run.activation_checkpointing != "none":
        return True
    # Blocks that differ only in their weights share one graph, so that its depth costs no time.
    # A budget of memory is spent over all blocks.
    return not model.config.scale_attn_by_inverse_layer_idx and run.activation_memory == 1


def _prepare_compiler(run: RunConfig, n_versions: int) -> None:
    # torch takes more than a few versions of code for a mistake, and counts those of earlier runs
    # in this process, whose models share their code with this one
    torch.compiler.reset()
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, n_versions)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, n_versions)
    functorch_config.activation_memory_budget = run.activation_memory
    key_caches_by_source()


def key_caches_by_source() -> None:
    """Put a hash of our sources into the keys of torch.compile's caches on disk.

    A graph has only the name of an operator or an autograd.Function. With their source in the key,
    PyTorch may also keep what it traced through the latter.
    """
    tag = torch.compiler.config.cache_key_tag  # the user may have set one
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
"""Hash of the code that was imported: files may change while a run starts."""


def _compiled(what: F) -> F:
    return torch.compile(  # pyright: ignore
        what,
        fullgraph=True,  # a graph break would be slow, and nobody would see it
        dynamic=False,  # code for any shape is slower
    )


# The output of attention is small for the time that it took, above all in long contexts.
_ATTENTION = (
    torch.ops.papilio.attn_fwd.default,
    torch.ops.papilio.attn_packed_fwd.default,
    torch.ops.papilio.ring_attn_fwd.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)


def checkpoint_blocks(blocks: Iterable[nn.Module], what: ActivationCheckpointing) -> None:
    """From now on each of these modules keeps no more than `what` says.

    Whatever calls `torch.compile` on one of them, or on a model of them, must do so later.
    """
    if what == "none":
        return
    # of operators in place, which are no concern of ours: they are within ours
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    # without a policy, code compiled by PyTorch 2.11 keeps what an autograd.Function saves
    kept = _ATTENTION if what == "selective" else ()
    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, kept))
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


def _policy(
    kept: tuple[Any, ...], context: Any, operator: Any, *_: Any, **__: Any
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE
