"""Parameter count and initialisation of a GPT."""

import math
from typing import Any

import pytest
import torch

from model.config import GPT2_SIZES, ModelConfig
from model.gpt import GPT

TINY: dict[str, Any] = {
    "vocab_size": 61,
    "context_length": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 32,
}


@pytest.mark.parametrize(("size", "count"), [("small", 124_439_808), ("medium", 354_823_168)])
def test_parameter_counts_match_gpt2(size: str, count: int) -> None:
    config = ModelConfig(**GPT2_SIZES[size])
    with torch.device("meta"):
        model = GPT(config)
    assert model.n_params() == count
    assert model.n_params(lookup_tables=False) == count - 1024 * config.n_embd
    assert not list(model.buffers())


def test_initial_weights_have_gpt2_statistics() -> None:
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=1000, context_length=256, n_layer=8, n_head=2, n_embd=128)
    for name, parameter in GPT(config).named_parameters():
        if "ln_" in name:
            assert (parameter == (1.0 if name.endswith("weight") else 0.0)).all(), name
        elif name.endswith("bias"):
            assert not parameter.any(), name
        else:
            residual = name.endswith(("attn.out_proj.weight", "mlp.fc_out.weight"))
            std = 0.02 / math.sqrt(16) if residual else 0.02
            drawn = parameter[:1000] if name == "tok_emb.weight" else parameter
            assert drawn.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(drawn.mean().item()) < 5 * std / math.sqrt(drawn.numel()), name


def test_initial_loss_matches_a_uniform_guess() -> None:
    torch.manual_seed(0)
    model = GPT(ModelConfig(**TINY))
    tokens, targets = torch.randint(TINY["vocab_size"], (2, 16, 32))
    assert model(tokens, targets).item() == pytest.approx(math.log(TINY["vocab_size"]), abs=0.05)


def test_weights_can_be_drawn_after_building_on_meta() -> None:
    expected = GPT(ModelConfig(**TINY))
    with torch.device("meta"):
        model = GPT(ModelConfig(**TINY))
    model.to_empty(device="cpu")
    for one in (expected, model):
        torch.manual_seed(4)
        one.init_weights()
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
