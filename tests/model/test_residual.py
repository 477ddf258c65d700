"""The residual stream: a layer's output is added later, and nothing else is different."""

import pytest
import torch
from torch import nn

from model.block import Block
from model.config import ModelConfig
from model.residual import Pending, add, add_and_normalise, leave

B, T, C = 2, 7, 32


def test_what_is_pending_is_added_once() -> None:
    x, branch, bias = torch.randn(B, T, C), torch.randn(B, T, C), torch.randn(C)
    assert add(x, None) is x
    assert torch.equal(add(x, Pending(branch, None)), x + branch)
    assert torch.equal(add(x, Pending(branch, bias)), x + (branch + bias))
    norm = nn.LayerNorm(C)
    s, normal = add_and_normalise(x, Pending(branch, bias), norm)
    assert torch.equal(s, x + (branch + bias))
    assert torch.equal(normal, norm(s))


def test_dropout_takes_the_bias_too() -> None:
    branch, bias = torch.zeros(B, T, C), torch.ones(C)
    dropped = leave(branch, bias, nn.Dropout(0.5))
    assert dropped.bias is None
    assert set(dropped.branch.unique().tolist()) == {0.0, 2.0}
    for kept in (leave(branch, bias, nn.Dropout(0.0)), leave(branch, bias, nn.Dropout(0.5).eval())):
        assert kept.branch is branch and kept.bias is bias


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_block_is_attention_and_mlp_each_behind_a_norm(dropout: float, bias: bool) -> None:
    torch.manual_seed(0)
    config = ModelConfig(n_head=4, n_embd=C, dropout=dropout, bias=bias)
    block = Block(config, layer=0).double()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(B, T, C, dtype=torch.float64)
    torch.manual_seed(1)
    actual = add(*block(x, None))
    torch.manual_seed(1)
    expected = add(x, block.attn(block.ln_1(x)))
    expected = add(expected, block.mlp(block.ln_2(expected)))
    torch.testing.assert_close(actual, expected)
    assert (actual - x).abs().mean() > 0.1
