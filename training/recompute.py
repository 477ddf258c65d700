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
    options: dict[str, Any] = {"use_reentrant": False}
    if what == "selective":
        # of operators in place, which are no concern of ours: they are within ours
        logging.getLogger("torch._dynamo.variables.higher_order_ops").setLevel(logging.ERROR)
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    if what != "none":
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, **options)


def _policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """What attention gave is small beside the time that it took, above all in long contexts."""
    kept = operator in _ATTENTION
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
