"""Weights of one model in another."""

import dataclasses

import pytest

from model.config import ModelConfig
from model.extend import MUST_AGREE, differences

SMALL = ModelConfig(vocab_size=50, context_length=8, n_layer=2, n_head=2, n_embd=8)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"dropout": 0.1, "attention_dropout": 0.1, "attention": "sdpa"}, []),
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
    ],
)
def test_differences_name_each_field_and_both_values(changes, expected):
    assert differences(SMALL, dataclasses.replace(SMALL, **changes)) == expected


def test_only_fields_of_the_model_must_agree():
    assert set(MUST_AGREE) <= {field.name for field in dataclasses.fields(ModelConfig)}
