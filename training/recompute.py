"""Activation checkpointing: blocks keep little for the backward pass and compute the rest again.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174).
"""

import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import kernels.context.ring
import kernels.ops  # noqa: F401  # both register operators below
from training.config import ActivationCheckpointing

# What attention gave is small beside the time that it took, above all in long contexts.
_ATTENTION = (
    torch.ops.papilio.attn_fwd.default,
    torch.ops.papilio.attn_packed_fwd.default,
    torch.ops.papilio.ring_attn_fwd.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)


def recompute_blocks(blocks: Iterable[nn.Module], what: ActivationCheckpointing) -> None:
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
