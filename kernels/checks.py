"""What `flash_attention` refuses. Each error names the argument, what it was and must be."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .argument_types import check_bool, check_number, check_tensor, is_whole_number
from .call import AttentionArguments
from .limits import MAX_HEAD_DIM
from .mask.block_mask import BlockSparseMask
from .transforms import active_transform

# The kernels add the start of a tile in int64 and offsets within it in int32, which spares
# registers. A tile has at most 128 rows: 127 * 2^24 + head_dim < 2^31.
MAX_ROW_STRIDE = 2**24  # elements

_OPTIONS = tuple(AttentionArguments.__annotations__)


def check_keywords(function: str, keywords: Mapping[str, object]) -> None:
    """Refuse keywords that `function` passes on and that are not options of attention.

    Raises:
        TypeError: as Python raises for an unknown keyword.
    """
    for name in keywords:
        if name not in _OPTIONS:
            raise TypeError(
                f"{function}() got an unexpected keyword argument {name!r}: it takes "
                f"{', '.join(_OPTIONS)}, besides those of its own"
            )


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Shapes, dtypes, devices and strides of q, k and v."""
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


def check_bools(causal: bool, return_lse: bool, deterministic: bool) -> None:
    """Types of the arguments that are bools."""
    check_bool("causal", causal)
    check_bool("return_lse", return_lse)
    check_bool("deterministic", deterministic)


def check_numbers(
    softmax_scale: float | None, window_size: int | None, softcap: float | None, dropout_p: float
) -> None:
    """Types and ranges of the arguments that are numbers."""
    check_number("softmax_scale", softmax_scale, or_none=True)
    check_number("softcap", softcap, or_none=True)
    check_number("dropout_p", dropout_p)
    if softmax_scale is not None and not 0 < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale must be positive and finite, got {softmax_scale}")
    if window_size is not None and not (is_whole_number(window_size) and window_size >= 1):
        raise ValueError(
            f"window_size counts the keys that a query sees, itself included: it must be a whole "
            f"number of at least 1, got {window_size!r}. None means no window"
        )
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be positive and finite, got {softcap}. None means no cap")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must lie in [0, 1), got {dropout_p}")


def check_side_tensors(
    q: Tensor,
    mask: BlockSparseMask | None,
    doc_start: Tensor | None,
    kv_lengths: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """Shapes, dtypes and devices of what comes beside q, k and v.

    The values of tensors go unchecked: reading them would wait for the GPU. On a CPU a sink of
    +inf is refused.
    """
    batch, seq_q, n_head, _ = q.shape
    integers = (torch.int32, torch.int64)
    for name, tensor, shape in (
        ("doc_start", doc_start, (batch, seq_q)),
        ("kv_lengths", kv_lengths, (batch,)),
        ("sinks", sinks, (n_head,)),
    ):
        if tensor is None:
            continue
        check_tensor(name, tensor, or_none=True)
        if tuple(tensor.shape) != shape or tensor.device != q.device:
            raise ValueError(
                f"{name} must have shape {shape} on {q.device}, as q {tuple(q.shape)} asks; got "
                f"{tuple(tensor.shape)} on {tensor.device}"
            )
        if name != "sinks" and tensor.dtype not in integers:
            raise ValueError(f"{name} must be int32 or int64, got {tensor.dtype}")
        if name == "sinks" and not tensor.is_floating_point():
            raise ValueError(f"sinks must be floating point, got {tensor.dtype}")
    if sinks is not None and _may_be_read(sinks) and (sinks.detach() == math.inf).any():
        raise ValueError(
            f"sinks must be below +inf, which would take all of the softmax, got {sinks.tolist()}"
        )
    if mask is None:
        return
    if not isinstance(mask, BlockSparseMask):
        raise ValueError(
            f"mask must be a BlockSparseMask, got {type(mask).__name__}: "
            "BlockSparseMask(layout, block_size) makes one of a bool layout of blocks"
        )
    if mask.n_head not in (1, n_head):
        raise ValueError(
            f"the layout of mask must have 1 head or the {n_head} of q, got {mask.n_head}"
        )


def _may_be_read(tensor: Tensor) -> bool:
    """Whether the values are there, and reading them waits for nothing."""
    is_real = type(tensor) in (Tensor, nn.Parameter)  # none that stands for others in a trace
    if not is_real or tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return active_transform() is None


def check_dropout_seed(seed: Tensor | int | None, q: Tensor) -> None:
    """The seed, an int or a tensor; the value of a tensor goes unchecked."""
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
    """Whether a tile of x (B, T, H, D), or of a contiguous tensor of its shape, can be addressed.

    The contiguous ones are the outputs and the gradients.
    """
    _, seq_len, n_head, head_dim = x.shape
    return seq_len == 1 or max(x.stride(1), n_head * head_dim) <= MAX_ROW_STRIDE
