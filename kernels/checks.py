"""Checks of the tensors of an attention call.

Each error names the argument, its value, and what it must be.
"""

import math

import torch
from torch import Tensor, nn

from .argument_types import check_tensor
from .limits import MAX_HEAD_DIM
from .mask.block_mask import BlockSparseMask
from .transforms import active_transform

# The kernels add the start of a tile in int64 and offsets within it in int32, which spares
# registers. A tile has at most 128 rows: 127 * 2^24 + head_dim < 2^31.
MAX_ROW_STRIDE = 2**24  # elements


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check shapes, dtypes, devices and strides."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must be (B, T, H, D), got shape {tuple(tensor.shape)}")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"q, k and v must share dtype and device: q is {q.dtype} on {q.device}, "
                f"{name} is {tensor.dtype} on {tensor.device}"
            )
        if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
            raise ValueError(
                f"the last dimension of {name} must be contiguous, got strides "
                f"{tensor.stride()}: call .contiguous() on it"
            )
        if 0 in tensor.shape:
            raise ValueError(f"{name} is empty: shape {tuple(tensor.shape)}")
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"q, k and v must be fp16, bf16 or fp32, got {q.dtype}")
    batch, _, n_head, head_dim = q.shape
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape: {tuple(k.shape)} and {tuple(v.shape)}")
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise ValueError(
            f"q and k must share batch and head_dim: {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if n_head % k.shape[2] != 0:
        raise ValueError(
            f"the heads of q must be a multiple of those of k and v: {n_head} and {k.shape[2]}"
        )
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be at most {MAX_HEAD_DIM}, got {head_dim}")


def check_positions(q: Tensor, doc_start: Tensor | None, kv_lengths: Tensor | None) -> None:
    """Check shapes, dtypes and devices, but not values: reading them would synchronize."""
    for name, tensor, shape in (
        ("doc_start", doc_start, tuple(q.shape[:2])),
        ("kv_lengths", kv_lengths, tuple(q.shape[:1])),
    ):
        if tensor is None:
            continue
        one_row = isinstance(tensor, Tensor) and tuple(tensor.shape) == (1, *shape[1:])
        _check_shape(name, tensor, (1, *shape[1:]) if one_row else shape, q)
        if tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be int32 or int64, got {tensor.dtype}")


def check_sinks(q: Tensor, sinks: Tensor | None) -> None:
    """Check shape, dtype and device, and on a CPU that no sink is +inf."""
    if sinks is None:
        return
    _check_shape("sinks", sinks, (q.shape[2],), q)
    if not sinks.is_floating_point():
        raise ValueError(f"sinks must be floating point, got {sinks.dtype}")
    if may_be_read(sinks) and (sinks.detach() == math.inf).any():
        raise ValueError(
            f"sinks must be below +inf, which would take all of the softmax, got {sinks.tolist()}"
        )


def check_slopes(q: Tensor, slopes: Tensor | None, softcap: float | None) -> None:
    """Check shape, dtype and device of ALiBi's slopes, and what they cannot be combined with."""
    if slopes is None:
        return
    if isinstance(slopes, Tensor) and slopes.dim() == 2:
        raise ValueError(
            f"alibi_slopes must be (H,), got shape {tuple(slopes.shape)}: slopes of each sequence "
            "are not supported"
        )
    _check_shape("alibi_slopes", slopes, (q.shape[2],), q)
    if not slopes.is_floating_point():
        raise ValueError(f"alibi_slopes must be floating point, got {slopes.dtype}")
    if slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes must not require a gradient: pass alibi_slopes.detach()")
    if softcap:
        raise ValueError(f"softcap={softcap} cannot be combined with alibi_slopes: leave one out")


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], q: Tensor) -> None:
    check_tensor(name, tensor, or_none=True)
    if tuple(tensor.shape) != shape or tensor.device != q.device:
        raise ValueError(
            f"{name} must have shape {shape} on {q.device}, to match q {tuple(q.shape)}; got "
            f"{tuple(tensor.shape)} on {tensor.device}"
        )


def check_mask(q: Tensor, mask: BlockSparseMask | None) -> None:
    if mask is None:
        return
    if not isinstance(mask, BlockSparseMask):
        advice = "BlockSparseMask(layout, block_size) builds one from a bool layout of blocks"
        if type(mask).__name__ == "BlockMask":
            advice = "pass **BlockSparseMask.from_flex(block_mask) instead"
        raise ValueError(f"mask must be a BlockSparseMask, got {type(mask).__name__}: {advice}")
    if mask.n_head not in (1, q.shape[2]):
        raise ValueError(
            f"the layout of mask must have 1 head or the {q.shape[2]} of q, got {mask.n_head}"
        )


def may_be_read(tensor: Tensor) -> bool:
    """Whether the values exist and reading them does not wait for a GPU."""
    # Subclasses include the placeholders of a trace, which have no values.
    is_real = type(tensor) in (Tensor, nn.Parameter)
    if not is_real or tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return active_transform() is None


def check_dropout_seed(seed: Tensor | int | None, q: Tensor) -> None:
    """Check an int, or the dtype, shape and device of a tensor."""
    if seed is None:
        return
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != q.device:
            raise ValueError(
                "dropout_seed must be an int64 tensor with one element on the device of q, got "
                f"{seed.dtype} of shape {tuple(seed.shape)} on {seed.device}: pass an int, or "
                f"torch.tensor([seed], dtype=torch.int64, device={str(q.device)!r})"
            )
    elif not isinstance(seed, int) or isinstance(seed, bool):
        raise ValueError(
            "dropout_seed must be an int or an int64 tensor, got "
            f"{seed!r} ({type(seed).__name__}): convert it with int()"
        )
    elif not 0 <= seed < 2**63:
        raise ValueError(f"dropout_seed must lie in [0, 2^63), got {seed}: take it modulo 2**63")


def rows_in_reach(x: Tensor) -> bool:
    """Whether kernels can address tiles of x (B, T, H, D) and of its contiguous copy.

    Outputs and gradients are contiguous.
    """
    _, seq_len, n_head, head_dim = x.shape
    return seq_len == 1 or max(x.stride(1), n_head * head_dim) <= MAX_ROW_STRIDE
