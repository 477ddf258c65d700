"""PyTorch's scaled_dot_product_attention, on a CPU the fastest there is."""

from torch import Tensor
from torch.nn import functional as F

from ..argument_types import plain_bool
from ..call import AttentionCall
from ..transforms import in_forward_mode


def obstacle(call: AttentionCall) -> str | None:
    """Why SDPA cannot serve the call, None if it can."""
    q, k = call.q, call.k
    if call.return_lse:
        return "it does not support return_lse=True"
    if call.deterministic and q.device.type != "cpu":
        return "it does not support deterministic=True"
    if call.arguments.get("causal") and q.shape[1] != k.shape[1]:
        return "it does not support causal with T_q != T_k"
    if in_forward_mode():
        return "it does not support forward-mode AD"
    return call.lacks({"causal", "dropout_p"})


def sdpa_attention(call: AttentionCall) -> tuple[Tensor, None]:
    """out (B, T_q, H, D) in the dtype of q; dropout draws from PyTorch's generator."""
    q, k, v = call.q, call.k, call.v
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        dropout_p=call.arguments.get("dropout_p", 0.0),
        is_causal=call.arguments.get("causal", False),
        scale=call.softmax_scale,
        enable_gqa=plain_bool(q.shape[2] != k.shape[2]),
    )
    return out.transpose(1, 2).to(q.dtype), None  # of which autocast makes another
