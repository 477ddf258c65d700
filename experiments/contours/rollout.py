"""Exact attention weights of a trained classifier, computed from q and k of its blocks.

Computed in float32 on the CPU, a chunk of rows at a time, so that the attention matrix of a long
sequence is never in memory. Shapes: T tokens, H heads, D head_dim, R rows of the T, S image width
in pixels.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.lra.batches import PixelExamples
from experiments.classifier_runs import read_run_config
from experiments.contours.geometry import open_contours
from kernels.fused.layer_norm import add_bias
from kernels.fused.reference.rotary import apply_rotary
from kernels.reference.standard import visible_keys
from model.attention import SelfAttention
from model.classifier import Classifier
from model.residual import DeferredResidual
from training.classification.config import ClassifyConfig
from training.classification.scoring import read_best

_ROWS = 512
_MAX_MASKED_TOKENS = 8192  # longest sequence whose elementwise mask fits into memory


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Attention inputs and output of one block, for one image."""

    q: Tensor
    """(T, H, D); q and k are after rotary positions, if any."""
    k: Tensor
    v: Tensor
    out: Tensor
    """(T, C) output of the block's attention, for checks."""
    softmax_scale: float
    visible: Tensor | None
    """(1 or H, T, T) bool, keys visible to each query; None: all."""

    def weights(self, rows: Tensor) -> Tensor:
        """Attention of the tokens `rows`, (R,) int64, to each token: (H, R, T); rows sum to 1."""
        scores = torch.einsum("rhd,thd->hrt", self.q[rows], self.k) * self.softmax_scale
        if self.visible is not None:
            scores = scores.masked_fill(~self.visible[:, rows], -math.inf)
        return scores.softmax(-1)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Trace of one image through a classifier."""

    image: Tensor
    """(S, S) uint8."""
    label: int
    positions: Tensor
    """(T,) int64, the pixel (row * S + column) of each token."""
    under_markers: list[Tensor]
    """Token indices under each marker, int64: origin end, terminal end."""
    markers: Tensor
    """(2, 2) int64, the pixels (y, x) under the markers."""
    marker_radius: float
    """Pixels."""
    layers: list[Layer]
    logits: Tensor

    def paid(self) -> Tensor:
        """Attention from each marker in each layer, mean over pixels and heads: (n_layer, 2, T)."""
        pairs = ((layer, tokens) for layer in self.layers for tokens in self.under_markers)
        paid = [layer.weights(tokens).mean((0, 1)) for layer, tokens in pairs]
        return torch.stack(paid).unflatten(0, (-1, 2))

    def rollout(self) -> Tensor:
        """Attention rollout from each marker through all layers: (2, T); rows sum to 1.

        Each block passes on half of a token itself and half of what the token attends to, mean over
        heads (Abnar and Zuidema 2020, arXiv 2005.00928, section 3).
        """
        n_tokens = len(self.positions)
        share = torch.zeros(2, n_tokens)
        for marker, tokens in enumerate(self.under_markers):
            share[marker, tokens] = 1 / len(tokens)
        for layer in reversed(self.layers):
            attended = torch.zeros_like(share)
            for rows in torch.arange(n_tokens).split(_ROWS):
                attended += share[:, rows] @ layer.weights(rows).mean(0)
            share = (share + attended) / 2
        return share


@torch.no_grad()
def trace(run: Path, number: int, folder: Path | None = None) -> Trace:
    """Run test image `number` through the best weights of a run.

    `folder` is the prepared task; None: the run's data.path.

    Raises:
        ValueError, FileNotFoundError: the image or the run does not exist, or is of another kind.
    """
    config = read_run_config(run)
    split, parameters = open_contours(folder or Path(config.data.path), "test")
    if not 0 <= number < len(split):
        raise ValueError(f"--image {number} must be between 0 and {len(split) - 1}")
    model = _open(run, config)
    one = replace(split, display_lists=split.display_lists[number : number + 1])
    examples = PixelExamples(one, config.model.context_length, config.data, torch.device("cpu"))
    zero = torch.zeros(1, dtype=torch.int64)
    tokens, lengths, positions, labels = examples.batch(zero, zero)
    if bool(examples.overflow):
        raise ValueError(
            f"image {number} has more pixels above zero than model.context_length="
            f"{config.model.context_length}. Choose another image"
        )
    positions = torch.arange(tokens.shape[1]) if positions is None else positions.flatten()
    if lengths is not None:  # drop the padding, which no token attends to
        tokens, positions = tokens[:, : int(lengths)], positions[: int(lengths)]
    layers, logits = _run(model, tokens, positions[None])
    radius = parameters.scale.marker_radius
    markers = torch.from_numpy(one.display_lists["markers"][0].astype("int64"))
    pixels = torch.stack((positions // examples.size, positions % examples.size), dim=-1)
    distances = (pixels - markers[:, None]).double().norm(dim=-1)
    return Trace(
        image=examples.images(zero)[0],
        label=int(labels),
        positions=positions,
        under_markers=[(x <= radius).nonzero()[:, 0] for x in distances],
        markers=markers,
        marker_radius=radius,
        layers=layers,
        logits=logits,
    )


def _open(run: Path, config: ClassifyConfig) -> Classifier:
    """Load the best weights of a run into a model for the CPU in float32."""
    model = config.model
    if model.pooling == "cls":
        raise ValueError(
            f"{run} has model.pooling=cls, a token that is not a pixel. Choose a run that pools by "
            "mean or max"
        )
    if model.window_size is not None:
        raise ValueError(
            f"{run} has model.window_size={model.window_size}, which must be null: attention "
            "with a window cannot be drawn"
        )
    masked = model.mask.pattern != "dense"
    if masked and (config.data.zeros == "padding" or model.context_length > _MAX_MASKED_TOKENS):
        raise ValueError(
            f"{run} has model.mask.pattern={model.mask.pattern} on {model.context_length:,} tokens "
            f"with data.zeros={config.data.zeros}. Attention must be dense, or have a mask over at "
            f"most {_MAX_MASKED_TOKENS:,} tokens without padding"
        )
    opened = Classifier(replace(model, attention="reference" if masked else "sdpa"))
    opened.load_state_dict(read_best(run))
    return opened.eval()


def _run(model: Classifier, tokens: Tensor, positions: Tensor) -> tuple[list[Layer], Tensor]:
    """Run (1, T) tokens at (1, T) positions; return the layers and the logits."""
    layers: list[Layer] = []
    n_tokens = tokens.shape[1]

    def record(
        block: SelfAttention, args: tuple, keywords: dict[str, Any], out: DeferredResidual
    ) -> None:
        x, rotary = args
        qkv = block.qkv_proj(x).view(1, n_tokens, 3, block.n_head, block.head_dim)
        q, k, v = qkv.unbind(dim=2)
        if rotary is not None:
            q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        mask = keywords["mask"]
        visible = None if mask is None else visible_keys(n_tokens, n_tokens, mask=mask)[0]
        mask_values = {"softmax_scale": block.softmax_scale, "visible": visible}
        layers.append(Layer(q=q[0], k=k[0], v=v[0], out=add_bias(*out)[0], **mask_values))

    blocks = [module for module in model.modules() if isinstance(module, SelfAttention)]
    hooks = [block.register_forward_hook(record, with_kwargs=True) for block in blocks]
    logits = model(tokens, None, positions)[0]
    for hook in hooks:
        hook.remove()
    return layers, logits
