"""PyTorch's scaled_dot_product_attention (SDPA), the fastest implementation on a CPU."""

from torch import Tensor
from torch.nn import functional as F

from ..argument_types import plain_bool
from ..options import AttentionOptions
from ..transforms import in_forward_mode


def unsupported_reason(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> str | None:
    """Reason why SDPA cannot serve the call, or None."""
    if options.return_lse:
        return "it does not support return_lse=True"
    if options.deterministic and q.device.type != "cpu":
        return "it does not support deterministic=True"
    if options.causal and q.shape[1] != k.shape[1]:
        return "it does not support causal with T_q != T_k"
    if in_forward_mode():
        return "it does not support forward-mode AD"
    return options.unsupported_option({"causal", "dropout_p"})


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """Call SDPA: out (B, T_q, H, D) in the dtype of q. Dropout draws from PyTorch's generator."""
    out = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), dropout_p=options.dropout_p,
        is_causal=options.causal, scale=options.softmax_scale,
        enable_gqa=plain_bool(q.shape[2] != k.shape[2]),
    )  # fmt: skip
    return out.transpose(1, 2).to(q.dtype)  # autocast may have changed the dtype
