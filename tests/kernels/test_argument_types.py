"""Arguments of the wrong type are refused in a sentence that names them, on every device."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kernels import BlockSparseMask, ContextGroup, context_attention, flash_attention
from kernels import flash_attention_packed as packed
from kernels.fused.cross_entropy import linear_cross_entropy
from kernels.fused.gelu_mlp import gelu_mlp
from kernels.fused.layer_norm import add_layer_norm
from kernels.fused.linear import linear
from kernels.mask.patterns import butterfly, random, sliding_window

X = torch.randn(1, 16, 2, 16)
QKV = torch.randn(1, 16, 3, 2, 16)
ROWS, TABLE, BIAS = torch.randn(4, 8), torch.randn(8, 8), torch.randn(8)
TARGETS = torch.zeros(4, dtype=torch.int64)
SQUARE = torch.ones(2, 2, dtype=torch.bool)


def attention(**options: Any) -> Any:
    return flash_attention(X, X, X, **options)


def context(**options: Any) -> Any:
    return context_attention(X, X, X, **{"context": ContextGroup(), **options})


def loss(**options: Any) -> Any:
    return linear_cross_entropy(ROWS, TABLE, TARGETS, **options)


CASES: list[tuple[Callable[[], Any], str]] = [
    (lambda: attention(causal="False"), "causal must be True or False, got 'False' (str)"),
    (lambda: attention(causal=float("nan")), "causal must be True or False, got nan (float)"),
    (lambda: attention(causal=1), "causal must be True or False, got 1 (int)"),
    (lambda: attention(causal=None), "causal must be True or False, got None"),
    (lambda: attention(causal=np.True_), "causal must be True or False, got"),
    (lambda: attention(return_lse=1), "return_lse must be True or False, got 1 (int)"),
    (lambda: attention(deterministic="no"), "deterministic must be True or False, got 'no' (str)"),
    (lambda: packed(QKV, causal=0), "causal must be True or False, got 0 (int)"),
    (lambda: context(causal="yes"), "causal must be True or False, got 'yes' (str)"),
    (
        lambda: attention(softmax_scale="0.1"),
        "softmax_scale must be a number or None, got '0.1' (str): convert it with float()",
    ),
    (lambda: attention(softmax_scale=True), "softmax_scale must be a number or None, got True"),
    (lambda: attention(softcap=[1.0]), "softcap must be a number or None, got [1.0] (list)"),
    (lambda: attention(softcap=np.float32(2)), "softcap must be a number or None, got"),
    (lambda: attention(dropout_p="0"), "dropout_p must be a number, got '0' (str)"),
    (lambda: attention(dropout_p=None), "dropout_p must be a number, got None"),
    (lambda: context(dropout_p="0"), "dropout_p must be a number, got '0' (str)"),
    (
        lambda: attention(window_size=True),
        "window_size must be the number of keys that a query",
    ),
    (lambda: attention(window_size="2"), "a whole number of at least 1, got '2'. None means no"),
    (lambda: attention(dropout_seed=True), "dropout_seed must be an int or an int64 tensor"),
    (lambda: attention(doc_start=[0] * 16), "doc_start must be a torch.Tensor or None, got [0, 0,"),
    (lambda: attention(kv_lengths=3), "kv_lengths must be a torch.Tensor or None, got 3 (int)"),
    (lambda: attention(sinks=[0.0, 0.0]), "sinks must be a torch.Tensor or None, got [0.0, 0.0]"),
    (lambda: attention(mask=SQUARE), "mask must be a BlockSparseMask, got Tensor"),
    (lambda: attention(impl=["sdpa"]), "impl must be None or one of"),
    (lambda: flash_attention([0.0], X, X), "q must be a torch.Tensor, got [0.0] (list)"),
    (lambda: flash_attention(X, "k", X), "k must be a torch.Tensor, got 'k' (str)"),
    (lambda: flash_attention(X, X, X.numpy()), "v must be a torch.Tensor, got array("),
    (lambda: packed(None), "qkv must be a torch.Tensor, got None: convert it with torch.as_t"),
    (
        lambda: attention(softcap=10**30),
        "softcap must be a number or None, got 1000000000000000000",
    ),
    (
        lambda: loss(ignore_index=2**63),
        "ignore_index must be a whole number of 64 bits, got 922337",
    ),
    (
        lambda: ContextGroup("ring"),
        "process_group must be a group of torch.distributed or None, go",
    ),
    (lambda: context(context=None), "context must be a ContextGroup, got NoneType"),
    (lambda: context(impl=["reference"]), "impl must be None or one of"),
    (lambda: linear_cross_entropy([1.0], TABLE, TARGETS), "hidden must be a torch.Tensor, got"),
    (lambda: linear_cross_entropy(ROWS, TABLE, [0] * 4), "targets must be a torch.Tensor, got [0,"),
    (
        lambda: loss(vocab_size=True),
        "vocab_size must be a whole number of 64 bits or None, got True",
    ),
    (lambda: loss(vocab_size=8.0), "vocab_size must be a whole number of 64 bits or None, got 8.0"),
    (lambda: loss(softcap="2"), "softcap must be a number or None, got '2' (str)"),
    (lambda: loss(z_loss=None), "z_loss must be a number, got None"),
    (lambda: loss(ignore_index=None), "ignore_index must be a whole number of 64 bits, got None"),
    (lambda: loss(reduction=["mean"]), "reduction must be 'mean', 'sum' or 'none', got ['mean']"),
    (lambda: gelu_mlp([0.0], TABLE, BIAS, TABLE), "x must be a torch.Tensor, got [0.0] (list)"),
    (lambda: gelu_mlp(ROWS, TABLE, 0.0, TABLE), "b_in must be a torch.Tensor or None, got 0.0"),
    (
        lambda: gelu_mlp(ROWS, TABLE, None, TABLE, recompute="no"),
        "recompute must be True or False, got 'no' (str)",
    ),
    (lambda: gelu_mlp(ROWS, TABLE.int(), None, TABLE.int()), "must be floating-point, the weights"),
    (lambda: gelu_mlp(ROWS, BIAS[0], None, TABLE), "w_in (F, C) and w_out (C, F), got (4, 8), ()"),
    (lambda: linear(ROWS, "w"), "weight must be a torch.Tensor, got 'w' (str)"),
    (lambda: linear(ROWS, TABLE, 0.0), "bias must be a torch.Tensor or None, got 0.0 (float)"),
    (lambda: linear(ROWS.int(), TABLE), "must be floating-point and on one device, got torch.int3"),
    (lambda: linear(ROWS, TABLE.to("meta")), "on one device, got torch.float32 on cpu, torch.flo"),
    (
        lambda: add_layer_norm(ROWS, None, None, [1.0], None),
        "weight must be a torch.Tensor, got [1.0] (list)",
    ),
    (
        lambda: add_layer_norm(ROWS, ROWS, BIAS, BIAS, BIAS, eps="1e-5"),
        "eps must be a number, got '1e-5' (str)",
    ),
    (
        lambda: add_layer_norm(ROWS.double(), None, None, BIAS, BIAS),
        "all or none float64, got x in torch.float64, weight in torch.float32, norm_bias in torch.",
    ),
    (
        lambda: add_layer_norm(ROWS, None, None, BIAS.to("meta"), None),
        "all must be on one device, got x on cpu, weight on meta",
    ),
    (lambda: add_layer_norm(BIAS[0], None, None, BIAS, BIAS), "x must be (..., C), got a scalar"),
    (
        lambda: add_layer_norm(ROWS, None, None, BIAS, BIAS, eps=float("nan")),
        "eps must be a finite number of at least 0, got nan",
    ),
    (lambda: BlockSparseMask([[True]], 16), "layout must be a torch.Tensor, got [[True]] (list)"),
    (lambda: BlockSparseMask(SQUARE, 16.0), "block_size must be one of (16, 32, 64, 128, 256), g"),
    (lambda: BlockSparseMask(SQUARE, "16"), "block_size must be one of (16, 32, 64, 128, 256), g"),
    (
        lambda: BlockSparseMask(SQUARE, 16).to_dense("32", 32),
        "seq_q must be a whole number of",
    ),
    (lambda: context(method="tree"), "method must be None, 'ring' or 'gather', got 'tree'"),
    (lambda: butterfly("4"), "n_blocks must be a whole number of 64 bits, got '4' (str)"),
    (lambda: butterfly(4, n_factors=1.5), "n_factors must be a whole number of 64 bits, got 1.5"),
    (lambda: sliding_window(4, True), "window_blocks must be a whole number of 64 bits, got Tr"),
    (lambda: random(4, 2, seed=0.5), "seed must be a whole number of 64 bits, got 0.5 (float)"),
]


@pytest.mark.parametrize(("call", "message"), CASES, ids=[message for _, message in CASES])
def test_the_error_names_the_argument_and_the_value(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: packed(QKV, window=3), "flash_attention_packed() got .* argument 'window'"),
        (lambda: context(return_lse=True), "context_attention() got .* argument 'return_lse'"),
    ],
)
def test_an_unknown_keyword_is_refused_by_name(call: Callable[[], Any], name: str) -> None:
    with pytest.raises(TypeError, match=name.replace("()", r"\(\)")):
        call()
