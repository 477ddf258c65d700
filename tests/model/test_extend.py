"""Weights of one model in another: fields that must agree, and resized positions."""

import dataclasses

import pytest
import torch

from model.config import ModelConfig
from model.extend import (
    MUST_AGREE,
    ROTARY,
    differences,
    differing,
    extend_positions,
    with_context_length,
)
from model.gpt import GPT

SMALL = ModelConfig(vocab_size=50, context_length=8, n_layer=2, n_head=2, n_embd=8)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"dropout": 0.1, "attention_dropout": 0.1, "attention": "sdpa"}, []),
        ({"context_length": 32}, []),
        ({"n_layer": 3}, ["model.n_layer is 2 there and 3 here"]),
        (
            {"n_embd": 16, "n_head": 4, "vocab_size": 51},
            [
                "model.vocab_size is 50 there and 51 here",
                "model.n_head is 2 there and 4 here",
                "model.n_embd is 8 there and 16 here",
            ],
        ),
        ({"vocab_multiple": 8}, ["model.vocab_multiple is 64 there and 8 here"]),
        ({"positions": "rotary"}, ["model.positions is 'learned' there and 'rotary' here"]),
        (
            {"scale_attn_by_inverse_layer_idx": True},
            ["model.scale_attn_by_inverse_layer_idx is False there and True here"],
        ),
        ({"bias": False}, ["model.bias is True there and False here"]),
        ({"n_kv_head": 1}, ["model.n_kv_head is None there and 1 here"]),
        (
            {"qk_norm": True, "norm": "rms_norm", "mlp": "swiglu"},
            [
                "model.qk_norm is False there and True here",
                "model.norm is 'layer_norm' there and 'rms_norm' here",
                "model.mlp is 'gelu' there and 'swiglu' here",
            ],
        ),
        ({"window_size": 4, "full_every": 2}, []),
    ],
)
def test_differences_name_each_field_and_both_values(changes, expected):
    assert differences(SMALL, dataclasses.replace(SMALL, **changes)) == expected


def test_rotary_settings_may_change_with_a_longer_context():
    trained = dataclasses.replace(SMALL, positions="rotary")
    scaling = {"rope_scaling": "linear", "rope_factor": 4.0}
    longer = dataclasses.replace(trained, context_length=32, rope_base=5e5, **scaling)
    assert differences(trained, longer) == []
    changes = [
        "model.rope_base is 10000.0 there and 500000.0 here",
        "model.rope_scaling is 'none' there and 'linear' here",
        "model.rope_factor is 1.0 there and 4.0 here",
    ]
    assert differing(ROTARY, trained, longer) == changes
    # with the trained context length, these changes are refused
    assert differences(trained, dataclasses.replace(longer, context_length=8)) == changes
    assert differing(ROTARY, trained, dataclasses.replace(trained, context_length=32)) == []


def test_each_field_of_the_model_must_agree_or_may_change():
    chosen = {"context_length", "dropout", "attention_dropout", "attention", "mask", "window_size"}
    chosen |= {
        "window_grows",
        "full_every",
        "recompute_gelu",
        "residual_in_fp32",
        "context_schedule",
    }
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert {*MUST_AGREE, *ROTARY} | chosen == fields
    assert not {*MUST_AGREE, *ROTARY} & chosen


@pytest.mark.parametrize(
    ("old_length", "length"), [(1, 1), (1, 5), (3, 4), (3, 7), (5, 8), (7, 7), (16, 48), (13, 101)]
)
def test_longer_tables_interpolate_between_positions(old_length, length):
    table = torch.randn(old_length, 3, dtype=torch.float64)
    longer = extend_positions(table, length)
    assert longer.shape == (length, 3)
    for i in range(length):
        at = i * old_length / length
        below = int(at)
        above = min(below + 1, old_length - 1)
        expected = table[below] + (at - below) * (table[above] - table[below])
        torch.testing.assert_close(longer[i], expected)
    assert torch.equal(longer[0], table[0])


def test_a_ramp_is_stretched_over_a_longer_table():
    ramp = torch.arange(6, dtype=torch.float32)[:, None]
    expected = [0.0, 0.6, 1.2, 1.8, 2.4, 3.0, 3.6, 4.2, 4.8, 5.0]  # 5.4 is past the last row
    torch.testing.assert_close(extend_positions(ramp, 10)[:, 0], torch.tensor(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1, 2, 3, 7, 64])
def test_whole_factors_keep_the_old_rows(factor, dtype):
    table = torch.randn(11, 4).to(dtype)
    longer = extend_positions(table, 11 * factor)
    assert longer.dtype == dtype
    assert torch.equal(longer[::factor], table)
    assert torch.equal(longer[10 * factor :], table[-1:].expand(factor, 4))


@pytest.mark.parametrize("length", [1, 4, 10, 11])
def test_shorter_tables_are_the_first_rows(length):
    table = torch.randn(11, 4)
    shorter = extend_positions(table, length)
    assert torch.equal(shorter, table[:length])
    shorter.zero_()
    assert table.abs().min() > 0  # a copy


@pytest.mark.parametrize("context_length", [5, 8, 20])
def test_only_learned_positions_change(context_length):
    model = GPT(SMALL)
    longer = GPT(dataclasses.replace(SMALL, context_length=context_length))
    longer.load_state_dict(with_context_length(model.state_dict(), context_length))
    for name, weights in model.state_dict().items():
        if name != "pos_emb.weight":
            assert torch.equal(longer.state_dict()[name], weights)
    assert torch.equal(
        longer.pos_emb.weight, extend_positions(model.pos_emb.weight, context_length)
    )


def test_rotary_weights_do_not_change():
    config = dataclasses.replace(SMALL, positions="rotary")
    weights = GPT(config).state_dict()
    assert with_context_length(weights, 64) == weights
