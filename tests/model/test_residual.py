"""Residual stream: deferred addition gives the same results."""

import pytest
import torch
from torch import nn

from model.block import Block
from model.config import ModelConfig
from model.residual import DeferredResidual, defer, resolve, resolve_and_normalise

B, T, C = 2, 7, 32


def test_pending_output_is_added_once() -> None:
    x, branch, bias = torch.randn(B, T, C), torch.randn(B, T, C), torch.randn(C)
    assert resolve(x, None) is x
    assert torch.equal(resolve(x, DeferredResidual(branch, None)), x + branch)
    assert torch.equal(resolve(x, DeferredResidual(branch, bias)), x + (branch + bias))
    norm = nn.LayerNorm(C)
    s, normal = resolve_and_normalise(x, DeferredResidual(branch, bias), norm)
    assert torch.equal(s, x + (branch + bias))
    assert torch.equal(normal, norm(s))


def test_dropout_includes_the_bias() -> None:
    branch, bias = torch.zeros(B, T, C), torch.ones(C)
    dropped = defer(branch, bias, nn.Dropout(0.5))
    assert dropped.bias is None
    assert set(dropped.branch.unique().tolist()) == {0.0, 2.0}
    for kept in (defer(branch, bias, nn.Dropout(0.0)), defer(branch, bias, nn.Dropout(0.5).eval())):
        assert kept.branch is branch and kept.bias is bias


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_block_is_attention_and_mlp_each_after_a_norm(dropout: float, bias: bool) -> None:
    torch.manual_seed(0)
    config = ModelConfig(n_head=4, n_embd=C, dropout=dropout, bias=bias)
    block = Block(config, layer=0).double()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(B, T, C, dtype=torch.float64)
    torch.manual_seed(1)
    actual = resolve(*block(x, None))
    torch.manual_seed(1)
    expected = resolve(x, block.attn(block.ln_1(x)))
    expected = resolve(expected, block.mlp(block.ln_2(expected)))
    torch.testing.assert_close(actual, expected)
    assert (actual - x).abs().mean() > 0.1
