"""Self-attention, causal or not. Shapes: B batch, T tokens, H heads, D head_dim, C n_embd."""

import math
from operator import index

import torch
from torch import Tensor, nn

from kernels import (
    ContextGroup,
    context_attention,
    flash_attention,
    flash_attention_packed,
    rotary_qkv,
)
from kernels.fused.linear import linear
from kernels.mask.block_mask import BlockSparseMask
from model.block_config import BlockConfig
from model.cache import KVCache
from model.residual import DeferredResidual, defer, normalise


class SelfAttention(nn.Module):
    """Multi-head attention: each token attends to itself and earlier ones, or to all tokens.

    `layer` is the index of the block, from 0. With `config.scale_attn_by_inverse_layer_idx` it sets
    the softmax scale.
    """

    def __init__(self, config: BlockConfig, layer: int, *, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.layer = layer
        self.n_head, self.n_kv_head = config.n_head, config.kv_heads
        self.head_dim = config.head_dim
        self.full_attention = config.attends_to_all(layer)
        self.window_size = None if self.full_attention else config.window_size
        self.training_windows: dict[int, int | None] = {}
        """Windows of training by sequence length, where they differ from `window_size`."""
        self.impl = None if config.attention == "auto" else config.attention
        self.attention_dropout = config.attention_dropout
        self.softmax_scale = 1.0 / math.sqrt(config.head_dim)
        if config.scale_attn_by_inverse_layer_idx:
            self.softmax_scale /= layer + 1
        width = (self.n_head + 2 * self.n_kv_head) * self.head_dim
        self.qkv_proj = nn.Linear(config.n_embd, width, bias=config.bias)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(self.head_dim, eps=config.eps("rms_norm")) if config.qk_norm else None
            for _ in "qk"
        )
        self.out_proj = nn.Linear(config.attention_width, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.context: ContextGroup | None = None
        """Processes that each sequence is sharded over; None: this process has all of it."""

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        *,
        mask: BlockSparseMask | None = None,
        doc_start: Tensor | None = None,
        kv_lengths: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> DeferredResidual:
        """Compute self-attention and its output projection.

        Args:
            x: (B, T, C).
            rotary: cos and sin for `rotary_qkv`, each (T, D/2) or (B, T, D/2); None leaves q and k
                unrotated.
            mask: blocks of keys that each block of queries may attend to; None means all. Layers
                with full attention ignore it.
            doc_start: (B, T) int32, where each token's document begins. A token does not attend to
                anything before that.
            kv_lengths: (B,) integers, the number of tokens in each row that are not padding; None
                means all T.
            cache: keys and values of the tokens before x; those of x are appended to it. None means
                that x is the beginning.

        If sequences are sharded over processes, mask is that of the whole sequence, and everything
        else is that of this process's tokens.

        Returns:
            The output, still to be added to the residual stream.
        """
        B, T, _ = x.shape
        qkv = linear(x, self.qkv_proj.weight, self.qkv_proj.bias)
        window_size = self.window_size
        if self.training and self.training_windows:
            window_size = self.training_windows.get(index(T), window_size)
        grouped = self.n_kv_head != self.n_head
        dropout_p = self.attention_dropout if self.training else 0.0
        # sdpa and eager draw dropout from torch's generator themselves
        seeded = dropout_p > 0.0 and self.impl not in ("sdpa", "eager")
        options = {
            # A single query attends to all cached keys, so it needs no causal mask. Without one,
            # sdpa supports this call.
            "causal": self.causal and (cache is None or T > 1),
            "softmax_scale": self.softmax_scale,
            "mask": None if self.full_attention else mask,
            "window_size": window_size,
            "doc_start": doc_start,
            "kv_lengths": kv_lengths,
            "dropout_p": dropout_p,
            "dropout_seed": _draw_seed(x.device) if seeded else None,
        }
        plain = rotary is None and cache is None and self.q_norm is None and not grouped
        if plain and self.context is None:
            packed = qkv.view(B, T, 3, self.n_head, self.head_dim)
            out = flash_attention_packed(packed, impl=self.impl, **options)
        else:
            q, k, v = self._split(qkv.view(B, T, -1, self.head_dim), rotary)
            if cache is not None:
                k, v = cache.append(self.layer, k, v)  # T_k tokens; q is the last T of them
            if self.context is None:
                out = flash_attention(q, k, v, return_lse=False, impl=self.impl, **options)
            else:
                # Each process may draw its own seed, because it computes all of its queries itself.
                out = context_attention(q, k, v, context=self.context, impl=self.impl, **options)
        branch = linear(out.flatten(2), self.out_proj.weight)
        return defer(branch, self.out_proj.bias, self.resid_dropout)

    def _split(
        self, qkv: Tensor, rotary: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, normalised and rotated if they are to be, and values.

        From (B, T, H + 2 H_kv, D) to (B, T, H or H_kv, D) each; some are views, because the
        attention kernels support any strides.
        """
        if rotary is not None:
            if self.q_norm is None or self.k_norm is None:
                return rotary_qkv(qkv, self.n_kv_head, *rotary)
            assert self.q_norm.eps is not None  # set by __init__
            q_weight, k_weight, eps = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
            return rotary_qkv(
                qkv, self.n_kv_head, *rotary, q_weight=q_weight, k_weight=k_weight, eps=eps
            )
        q, k, v = qkv.split((self.n_head, self.n_kv_head, self.n_kv_head), dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q = normalise(q, self.q_norm).to(q.dtype)
            k = normalise(k, self.k_norm).to(k.dtype)
        return q, k, v


def _draw_seed(device: torch.device) -> Tensor:
    """Draw a (1,) int64 seed from torch's generator.

    The seed stays on the device, so it costs no synchronisation and no graph break. Activation
    checkpointing replays torch's generator, so it recomputes the same dropout mask.
    """
    return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
