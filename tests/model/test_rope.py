"""Scaled rotary positions, compared with formulas and with transformers."""

import math
from dataclasses import replace

import pytest
import torch

from model.config import ModelConfig
from model.gpt import GPT
from model.rope import rope_tables

T, D = 40, 16
CONFIG = ModelConfig(
    vocab_size=30, context_length=T, n_layer=1, n_head=2, n_embd=2 * D, positions="rotary"
)
POSITIONS = torch.arange(T)


def scaled(kind, factor, **changes):
    return replace(CONFIG, rope_scaling=kind, rope_factor=factor, **changes)


@pytest.mark.parametrize("factor", [1.5, 3.0, 4.0])
def test_linear_divides_the_positions(factor):
    cos, sin = rope_tables(POSITIONS, scaled("linear", factor))
    for t in range(T):
        for i in range(D // 2):
            angle = t / factor * 10_000 ** (-2 * i / D)
            assert cos[t, i].item() == pytest.approx(math.cos(angle), abs=1e-7)
            assert sin[t, i].item() == pytest.approx(math.sin(angle), abs=1e-7)


def test_linear_keeps_the_tables_at_multiples():
    old, new = rope_tables(POSITIONS, CONFIG), rope_tables(POSITIONS * 3, scaled("linear", 3.0))
    assert all(map(torch.equal, old, new))


def test_ntk_turns_the_slowest_pair_as_far_over_the_longer_context():
    factor = 2.5
    config = scaled("ntk", factor)
    old, new = rope_tables(POSITIONS, CONFIG), rope_tables(POSITIONS * factor, config)
    torch.testing.assert_close([x[:, -1] for x in new], [x[:, -1] for x in old])
    fast_old, fast_new = rope_tables(POSITIONS, CONFIG), rope_tables(POSITIONS, config)
    torch.testing.assert_close([x[:, 0] for x in fast_new], [x[:, 0] for x in fast_old])
    # the base that docs and earlier runs give for 1K to 4K and heads of 64
    four = ModelConfig(positions="rotary", rope_scaling="ntk", rope_factor=4.0)
    assert round(four.scaled_rope_base) == 41_829


@pytest.mark.parametrize(
    ("head_dim", "context_length", "factor", "base"),
    [(64, 4096, 4.0, 1e4), (128, 16_384, 16.0, 1e4), (64, 8192, 2.0, 5e5), (32, 3000, 1.7, 1e3)],
)
def test_yarn_is_that_of_transformers(head_dim, context_length, factor, base):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = scaled(
        "yarn", factor, context_length=context_length, rope_base=base, head_size=head_dim
    )
    rope = {
        **{"rope_type": "yarn", "rope_theta": base, "factor": factor},
        "original_max_position_embeddings": round(context_length / factor),
    }
    theirs = transformers.LlamaConfig(
        head_dim=head_dim, max_position_embeddings=context_length, rope_parameters=rope
    )
    frequencies, magnitude = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    cos, sin = rope_tables(torch.arange(300), config)
    angles = torch.arange(300).double()[:, None] * frequencies.double()
    torch.testing.assert_close(cos, (angles.cos() * magnitude).float(), rtol=0, atol=1e-4)
    torch.testing.assert_close(sin, (angles.sin() * magnitude).float(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "ntk", "yarn"])
def test_a_model_scales_its_positions(kind, monkeypatch):
    model = GPT(CONFIG)
    for parameter in model.parameters():
        parameter.data.mul_(10)  # so that the positions of keys matter
    config = scaled(kind, 2.5)
    longer = GPT(config)
    longer.load_state_dict(model.state_dict())
    tokens = torch.randint(30, (2, T))
    got = longer(tokens)
    assert not torch.allclose(got, model(tokens), atol=1e-5)
    tables = rope_tables(POSITIONS, config)
    model.rotary_cos, model.rotary_sin = tables
    torch.testing.assert_close(model(tokens), got)
    # positions after the context have no table yet
    beyond = torch.randint(30, (1, 2 * T))
    monkeypatch.setattr(
        "model.gpt.rope_tables", lambda *_: rope_tables(torch.arange(2 * T), config)
    )
    torch.testing.assert_close(longer(beyond)[:, :T], longer(beyond[:, :T]))


@pytest.mark.parametrize("kind", ["none", "linear", "ntk", "yarn"])
def test_training_follows_the_context_and_evaluation_has_the_longest(kind):
    factor = {} if kind == "none" else {"rope_factor": 4.0}
    schedule = [[10, 0.5], [20, 0.25], [T, 0.25]]
    config = replace(CONFIG, context_schedule=schedule, rope_scaling=kind, **factor)
    model = GPT(config)
    for length, own in ((10, 1.0), (20, 2.0), (T, 4.0)):
        at_length = config.at_context(length)
        expected_factor = 1.0 if kind == "none" else own
        assert (at_length.rope_factor, at_length.context_schedule) == (expected_factor, [])
        tokens = torch.randint(30, (2, length))
        for config_of_mode, train in ((at_length, True), (config, False)):
            plain = GPT(replace(config_of_mode, context_schedule=[]))
            plain.load_state_dict(model.state_dict())
            with torch.no_grad():
                got = model.train(train)(tokens)
                torch.testing.assert_close(got, plain.eval()(tokens))
    if kind != "none":
        assert not torch.equal(model.rotary_cos_10, model.rotary_cos[:10])


def test_weights_on_another_device_have_all_tables():
    schedule = [[10, 0.5], [T, 0.5]]
    config = replace(CONFIG, context_schedule=schedule, rope_scaling="yarn", rope_factor=4.0)
    model = GPT(config)
    copy = GPT.with_weights(config, model.state_dict())
    assert dict(model.named_buffers()).keys() == dict(copy.named_buffers()).keys()
    assert {"rotary_cos_10", "rotary_sin_10"} < dict(copy.named_buffers()).keys()
    for name, table in model.named_buffers():
        assert torch.equal(copy.get_buffer(name), table)
