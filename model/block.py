"""Transformer block, the building unit of GPTs and classifiers.

Shapes: B batch, T tokens, C n_embd.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.fused.gelu_mlp import gelu_mlp
from kernels.fused.linear import linear
from kernels.mask.block_mask import BlockSparseMask
from model.attention import SelfAttention
from model.block_config import BlockConfig
from model.cache import KVCache
from model.residual import DeferredResidual, defer, make_norm, resolve_and_normalise

INIT_STD = 0.02


class MLP(nn.Module):
    """Two linear layers with GELU, or with SwiGLU, whose gate is part of the first layer."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.gated = config.mlp == "swiglu"
        width = (2 if self.gated else 1) * config.mlp_width
        self.fc_in = nn.Linear(config.n_embd, width, bias=config.bias)
        self.fc_out = nn.Linear(config.mlp_width, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.recompute = config.recompute_gelu

    def forward(self, x: Tensor) -> DeferredResidual:
        """Apply the MLP to normalised states (B, T, C); the output is still to be added."""
        w_in, b_in, w_out = self.fc_in.weight, self.fc_in.bias, self.fc_out.weight
        if self.gated:
            gate, value = linear(x, w_in, b_in).chunk(2, dim=-1)
            y = linear(F.silu(gate) * value, w_out)
        else:
            y = gelu_mlp(x, w_in, b_in, w_out, recompute=self.recompute)
        return defer(y, self.fc_out.bias, self.resid_dropout)


class Block(nn.Module):
    """Pre-norm block: attention, then MLP, each added to the residual stream."""

    def __init__(self, config: BlockConfig, layer: int, *, causal: bool = True) -> None:
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = SelfAttention(config, layer, causal=causal)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        pending: DeferredResidual | None,
        rotary: tuple[Tensor, Tensor] | None = None,
        *,
        mask: BlockSparseMask | None = None,
        doc_start: Tensor | None = None,
        kv_lengths: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, DeferredResidual]:
        """Apply the block to the residual stream x (B, T, C) plus `pending`.

        The other arguments are those of `SelfAttention.forward`.

        Returns:
            The stream up to the attention's output, and the MLP's output, still to be added.
        """
        options = {"mask": mask, "doc_start": doc_start, "kv_lengths": kv_lengths}
        x, normal = resolve_and_normalise(x, pending, self.ln_1)
        pending = self.attn(normal, rotary, cache=cache, **options)
        x, normal = resolve_and_normalise(x, pending, self.ln_2)
        return x, self.mlp(normal)


@torch.no_grad()
def init_linear_and_norm(model: nn.Module, config: BlockConfig) -> None:
    """Initialise linear layers as GPT-2 does, from torch's global generator; reset norms.

    Weights are normal with standard deviation 0.02. In layers that add to the residual stream it is
    0.02 / sqrt(2 n_layer), so that the stream's variance does not grow with depth. Biases are 0.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            adds_to_residual = name.endswith(("attn.out_proj", "mlp.fc_out"))
            depth_scale = math.sqrt(2 * config.n_layer) if adds_to_residual else 1.0
            nn.init.normal_(module.weight, std=INIT_STD / depth_scale)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
            module.reset_parameters()
