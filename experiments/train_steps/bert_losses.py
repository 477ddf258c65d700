"""Forward passes of one BertForMaskedLM: transformers' own, and on Papilio's kernels."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.train_steps.bert_batches import IGNORED, Batch
from kernels import flash_attention
from kernels.fused.gelu_mlp import gelu_mlp
from kernels.fused.layer_norm import add_layer_norm
from kernels.fused.linear import linear

BASE, COMPILED = "transformers, eager", "transformers, compiled"
BEST = f"{COMPILED}, logits of masked tokens"  # of transformers' forward passes


class Select(torch.autograd.Function):
    """Select rows of x by `index`; the gradient selects by `inverse`, without atomic additions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None


def our_loss(bert: Any, batch: Batch) -> Tensor:
    """Loss of a BertForMaskedLM on Papilio's kernels, over tokens without padding."""
    embeddings, head = bert.bert.embeddings, bert.cls.predictions
    tokens = batch.tokens.flatten()[batch.row]
    x = embeddings.word_embeddings(tokens) + embeddings.token_type_embeddings.weight[0]
    x = embeddings.LayerNorm(x + embeddings.position_embeddings(batch.row % batch.tokens.shape[1]))
    for layer in bert.bert.encoder.layer:
        attention, output = layer.attention.output, layer.output
        y = linear(_attend(layer.attention.self, x, batch), attention.dense.weight)
        x = _add_norm(x, y, attention)
        up, down = layer.intermediate.dense, output.dense
        x = _add_norm(x, gelu_mlp(x, up.weight, up.bias, down.weight), output)
    states = x.index_select(0, batch.token[batch.masked])
    logits = head.decoder(head.transform(states))
    return F.cross_entropy(logits.float(), batch.targets, ignore_index=IGNORED)


def _attend(layer: Any, x: Tensor, batch: Batch) -> Tensor:
    """Attention of a layer on tokens (N, C), which are padded for it alone."""
    is_padded = len(x) < len(batch.token)
    shape = *batch.tokens.shape, layer.num_attention_heads, layer.attention_head_size
    qkv = [linear(x, part.weight, part.bias) for part in (layer.query, layer.key, layer.value)]
    if is_padded:
        qkv = [Select.apply(part, batch.token, batch.row) for part in qkv]
    q, k, v = (part.view(shape) for part in qkv)
    out = flash_attention(q, k, v, kv_lengths=batch.lengths if is_padded else None)
    out = out.flatten(2).flatten(0, 1)
    return Select.apply(out, batch.row, batch.token) if is_padded else out


def _add_norm(x: Tensor, y: Tensor, output: Any) -> Tensor:
    norm = output.LayerNorm
    return add_layer_norm(x, y, output.dense.bias, norm.weight, norm.bias, eps=norm.eps)[1]


def their_loss(bert: Any, batch: Batch) -> Tensor:
    """Loss of transformers' model, with logits of all tokens."""
    return bert(batch.tokens, attention_mask=_mask(batch), labels=batch.labels).loss


def their_masked_loss(bert: Any, batch: Batch) -> Tensor:
    """Loss of transformers' model, with logits of masked tokens only."""
    states = bert.bert(batch.tokens, attention_mask=_mask(batch))[0].flatten(0, 1)
    logits = bert.cls(states.index_select(0, batch.masked))
    return F.cross_entropy(logits.float(), batch.targets, ignore_index=IGNORED)


def _mask(batch: Batch) -> Tensor | None:
    """Attention mask (B, T) int64 of transformers; None without padding."""
    if len(batch.row) == len(batch.token):
        return None
    position = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    return (position < batch.lengths[:, None]).long()


def set_attention(bert: Any, case: str) -> None:
    """Choose PyTorch's fused attention for a model of transformers, without a mask if possible.

    For `full`, older versions would else give a compiled model a mask of ones, which takes time.
    transformers makes no mask for an attention that has no mask function.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("sdpa_without_mask", sdpa_attention_forward)
    bert.set_attn_implementation("sdpa" if case == "padded" else "sdpa_without_mask")


Loss = Callable[[Any, Batch], Tensor]
CONTENDERS: dict[str, tuple[Loss, bool]] = {  # loss; whether it is compiled and captured
    BASE: (their_loss, False),
    COMPILED: (their_loss, True),
    BEST: (their_masked_loss, True),
    "ours": (our_loss, True),
}
