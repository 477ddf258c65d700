"""Convert our rotary models to transformers' GPT-NeoX and back."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from model.config import ModelConfig
from model.gpt import GPT
from model.hf.config import config_from_hf, config_to_hf
from model.hf.weights import state_from_hf, state_to_hf
from model.mask_config import MaskConfig
from tests.model.test_hf import assert_same, random_state

CONFIG = ModelConfig(
    vocab_size=61, context_length=40, n_layer=3, n_head=4, n_embd=32, positions="rotary"
)
HF = config_to_hf(CONFIG, eot_id=7, dtype=torch.float32)
OLD = {key: value for key, value in HF.items() if key != "rope_parameters"}


def theirs_of(config: ModelConfig, hf: dict, state: dict) -> GPTNeoXForCausalLM:
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**hf)).eval()
    missing, unexpected = model.load_state_dict(state_to_hf(state, config), strict=False)
    # the head is tied
    assert missing in (["embed_out.weight"], ["lm_head.weight"]) and not unexpected
    model.tie_weights()
    return model


@pytest.mark.parametrize("hf_of", ["new", "old"])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"rope_base": 500.0, "rope_scaling": "linear", "rope_factor": 4.0},
        {"rope_scaling": "ntk", "rope_factor": 4.0},
        {"rope_scaling": "yarn", "rope_factor": 2.5},
        {"bias": False},
        {"n_inner": 50, "norm_eps": 1e-3},
    ],
)
def test_transformers_gives_our_logits(change: dict, hf_of: str) -> None:
    config = replace(CONFIG, **change)
    state = random_state(config)
    ours = GPT(config).eval()
    ours.load_state_dict(state)
    hf = config_to_hf(config, eot_id=7, dtype=torch.float32)
    if hf_of == "old":  # the format of versions before 5
        del hf["rope_parameters"]
    tokens = torch.randint(61, (2, 40))
    with torch.no_grad():
        expected, got = ours(tokens), theirs_of(config, hf, state)(tokens).logits
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert expected.std() > 1  # otherwise the comparison means little


def test_export_then_import_is_exact() -> None:
    scaled = {"rope_scaling": "linear", "rope_factor": 4.0}
    yarn = replace(CONFIG, rope_scaling="yarn", rope_factor=3.0)  # 40 over 3 is rounded
    for config in (CONFIG, replace(CONFIG, rope_base=500.0, dropout=0.25, **scaled), yarn):
        hf = config_to_hf(config, eot_id=7, dtype=torch.float32)
        assert config_from_hf(hf) == config
        state = random_state(config)
        assert_same(state_from_hf(state_to_hf(state, config), config), state)


def test_reads_models_saved_by_transformers() -> None:
    theirs = GPTNeoXForCausalLM(GPTNeoXConfig(**HF)).eval()
    config = config_from_hf(theirs.config.to_dict())
    assert config == CONFIG
    ours = GPT(config).eval()
    ours.load_state_dict(state_from_hf(theirs.state_dict(), config))
    tokens = torch.randint(61, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_parallel_residual": True}, "use_parallel_residual=True, and .* only be False"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu', and this model can only be 'gelu_new'"),
        ({"hidden_act": None}, "hidden_act=None"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ({"attention_bias": False}, "attention_bias=False"),
        ({"intermediate_size": None}, "intermediate_size=None, which must be a whole number"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "rotary_pct=0.25, .* whole heads"),
        (
            {"rope_parameters": {"partial_rotary_factor": 1, "rope_type": "dynamic"}},
            "rope_type='dynamic', and this model can only scale positions as 'default', 'linear'",
        ),
        ({"rope_parameters": "linear"}, "rope_parameters='linear', which must be an object"),
        (
            {"rope_parameters": {"partial_rotary_factor": 1, "rope_type": "linear"}},
            "factor=None of rotary positions: give a number",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 1, "rope_theta": "10000"}},
            "rope_theta='10000' of rotary positions",
        ),
        ({"hidden_size": None}, "hidden_size=None, which must be a whole number"),
    ],
)
def test_other_models_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf(HF | change)


def test_transformers_defaults_are_refused() -> None:
    required = {name: HF[name] for name in ("model_type", "vocab_size", "hidden_size")}
    with pytest.raises(ValueError, match="hidden_act='gelu'"):
        config_from_hf(required)
    no_width = {key: value for key, value in OLD.items() if key != "intermediate_size"}
    assert config_from_hf(no_width).n_inner == 24_576
    no_share = {key: value for key, value in OLD.items() if key != "rotary_pct"}
    with pytest.raises(ValueError, match=r"rotary_pct=0\.25"):
        config_from_hf(no_share)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": MaskConfig(pattern="butterfly")}, "GPT-NeoX has no block-sparse masks"),
        ({"window_size": 9}, "model.window_size=9 cannot be exported: Hugging Face's GPT-NeoX"),
        ({"n_kv_head": 2}, "model.n_kv_head=2 cannot be exported: Hugging Face's GPT-NeoX"),
        ({"qk_norm": True}, "model.qk_norm=True cannot be exported: Hugging Face's GPT-NeoX"),
        (
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx=True cannot be exported: Hugging Face's GPT-NeoX only",
        ),
    ],
)
def test_models_that_gpt_neox_cannot_represent_are_refused(change: dict, message: str) -> None:
    config = replace(CONFIG, **change)
    with pytest.raises(ValueError, match=message):
        config_to_hf(config, eot_id=7, dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        state_to_hf(GPT(config).state_dict(), config)
