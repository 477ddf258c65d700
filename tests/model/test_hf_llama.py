"""Convert our modern models to transformers' Llama and Qwen3 and back."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from configs.reader import read_config
from model.config import ModelConfig
from model.generate import generate
from model.gpt import GPT
from model.hf.config import config_from_hf, config_to_hf, layout_for
from model.hf.weights import state_from_hf, state_to_hf
from model.mask_config import MaskConfig
from tests.model.test_hf import assert_same, random_state
from training.language.config import TrainConfig

LLAMA = ModelConfig(
    vocab_size=61,
    context_length=40,
    n_layer=5,
    n_head=6,
    n_embd=48,
    n_kv_head=2,
    positions="rotary",
    norm="rms_norm",
    mlp="swiglu",
    bias=False,
)
QWEN3 = replace(LLAMA, qk_norm=True, window_size=9, full_every=3)
LINEAR = {"rope_scaling": "linear", "rope_factor": 4.0}
CASES = {
    "llama": LLAMA,
    "llama with other sizes": replace(
        LLAMA, n_kv_head=None, n_inner=50, norm_eps=1e-3, rope_base=500.0, **LINEAR
    ),
    "llama with an untied head": replace(LLAMA, tie_embeddings=False),
    "qwen3 with an untied head": replace(QWEN3, tie_embeddings=False),
    "llama with narrow heads": replace(LLAMA, head_size=4),
    "qwen3 with wide heads": replace(QWEN3, head_size=16, n_embd=50),
    "llama with biases": replace(LLAMA, bias=True),
    "qwen3": QWEN3,
    "qwen3 with other sizes": replace(
        QWEN3, n_kv_head=1, n_inner=50, norm_eps=1e-3, rope_base=500.0, **LINEAR
    ),
    "qwen3 with yarn": replace(QWEN3, rope_scaling="yarn", rope_factor=4.0),
    "qwen3 with windows only": replace(QWEN3, window_size=1, full_every=0),
    "qwen3 without windows": replace(QWEN3, window_size=None, full_every=0),
}
cases = pytest.mark.parametrize("config", CASES.values(), ids=CASES)


def hf_config(config: ModelConfig) -> dict:
    return config_to_hf(config, eot_id=7, dtype=torch.float32)


def theirs_of(config: ModelConfig, state: dict, hf: dict | None = None):
    """Build transformers' model with our weights."""
    hf = hf_config(config) if hf is None else hf
    hf = {key: value for key, value in hf.items() if key != "torch_dtype"}
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf)).eval()
    missing, unexpected = theirs.load_state_dict(state_to_hf(state, config), strict=False)
    assert missing == ["lm_head.weight"] * config.tie_embeddings and not unexpected
    theirs.tie_weights()
    return theirs


def soft_state(config: ModelConfig) -> dict:
    """Random weights, small enough that attention is not one-hot."""
    state = random_state(config)
    return {name: 0.3 * x if x.dim() == 2 else x for name, x in state.items()}


def ours_of(config: ModelConfig, state: dict) -> GPT:
    ours = GPT(config).eval()
    ours.load_state_dict(state)
    return ours


def assert_same_logits(ours: GPT, theirs, *, batch: int = 2, length: int = 40) -> None:
    tokens = torch.randint(ours.config.vocab_size, (batch, length))
    with torch.no_grad():
        expected, got = ours(tokens), theirs(tokens).logits
    assert expected.std() > 0.5  # otherwise the comparison means little
    assert (got - expected).abs().max() <= 1e-4


@pytest.mark.parametrize("form", ["new", "old"])
@cases
def test_transformers_gives_our_logits(config: ModelConfig, form: str) -> None:
    state, hf = soft_state(config), hf_config(config)
    if form == "old":  # the format of versions before 5
        del hf["rope_parameters"]
    if form == "old" and not config.full_every:  # which have no layer_types
        hf.pop("layer_types", None)
    assert_same_logits(ours_of(config, state), theirs_of(config, state, hf))


@cases
def test_export_then_import_is_exact(config: ModelConfig) -> None:
    hf = hf_config(config)
    assert config_from_hf(hf) == config
    state = random_state(config)
    exported = state_to_hf(state, config)
    assert exported["model.embed_tokens.weight"].shape == (61, config.n_embd)
    assert_same(state_from_hf(exported, config), state)
    bare = {name.removeprefix("model."): tensor for name, tensor in exported.items()}
    more = {"lm_head.weight": bare.get("lm_head.weight", bare["embed_tokens.weight"]).clone()}
    more["layers.4.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    assert_same(state_from_hf(bare | more, config), state)


@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_reads_models_of_transformers(config: ModelConfig) -> None:
    state = soft_state(config)
    theirs = theirs_of(config, state)
    assert type(theirs).__name__ == layout_for(config).architecture
    assert config_from_hf(theirs.config.to_dict()) == config
    assert_same(state_from_hf(theirs.state_dict(), config), state)


@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_greedy_generation_matches_transformers(config: ModelConfig) -> None:
    state = soft_state(config)
    ours, theirs = ours_of(config, state), theirs_of(config, state)
    prompt = torch.randint(61, (1, 5))
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    expected = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    got = generate(ours, prompt, 20, temperature=0.0)
    assert got.tolist() == expected.tolist()
    assert len(set(got[0, 5:].tolist())) > 3


def test_an_exported_model_has_the_defaults_of_its_config() -> None:
    """A config.json with sizes only is read as transformers reads it."""
    sizes = {"vocab_size": 61, "max_position_embeddings": 40, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "hidden_size": 32, "tie_word_embeddings": True}
    theirs = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=88)).eval()
    config = config_from_hf({"model_type": "llama", **sizes, "intermediate_size": 88})
    assert config == config_from_hf(theirs.config.to_dict())
    assert (config.n_inner, config.norm_eps, config.n_kv_head) == (88, None, None)
    ours = ours_of(config, state_from_hf(theirs.state_dict(), config))
    tokens = torch.randint(61, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-6)
    assert config_from_hf({"model_type": "llama", **sizes}).n_inner == 11_008
    qwen3 = config_from_hf({"model_type": "qwen3", **sizes, "num_attention_heads": 32})
    assert (qwen3.n_inner, qwen3.head_size, qwen3.n_kv_head) == (22_016, 128, None)


HF = {"llama": hf_config(LLAMA), "qwen3": hf_config(QWEN3)}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10}
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("llama", {"head_dim": 7}, "model.head_size=7 gives heads of 7, .* choose an even size"),
        ("llama", {"head_dim": 8.0}, "head_dim=8.0, which must be a whole number"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"tie_word_embeddings": None}, "tie_word_embeddings=None, which must be true"),
        ("llama", {"attention_bias": True}, "attention_bias=True and mlp_bias=False, which must"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True, and .* no other Qwen3"),
        ("llama", {"num_key_value_heads": 4}, "model.n_kv_head=4 must divide model.n_head=6"),
        ("llama", {"num_key_value_heads": "2"}, "num_key_value_heads='2', which must be a whole"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps=None of the normalisations"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope_type='llama3', and this model can only scale positions as 'default', 'linear'",
        ),
        (
            "llama",
            {"rope_scaling": {**YARN, "beta_fast": 16}},
            "beta_fast=16, and this model can only have 32",
        ),
        (
            "llama",
            {"rope_scaling": {**YARN, "attention_factor": 1.0}},
            "attention_factor=1.0, and this model multiplies by 1.13863 at factor=4",
        ),
        (
            "llama",
            {"rope_scaling": {**YARN, "original_max_position_embeddings": 40}},
            "original_max_position_embeddings=40, .* needs 10, max_position_embeddings=40 over",
        ),
        (
            "qwen3",
            {"rope_parameters": {FULL: {"rope_theta": 1e6}, SLIDING: {"rope_theta": 1e4}}},
            "rope_parameters=.*all layers have the same rotary positions",
        ),
        ("llama", {"partial_rotary_factor": 0.5, "rope_parameters": None}, "=0.5, .* whole heads"),
        ("qwen3", {"layer_types": [FULL] * 4}, "layer_types=.* must be 5 times 'full_attention'"),
        ("qwen3", {"layer_types": ["linear_attention"] * 5}, "layer_types=.* must be 5 times"),
        ("qwen3", {"layer_types": [FULL, *[SLIDING] * 4]}, "all layers slide, or all but every"),
        ("qwen3", {"layer_types": [SLIDING, FULL, *[SLIDING] * 3]}, "all layers slide, or all but"),
        ("qwen3", {"use_sliding_window": False}, "need use_sliding_window=true and a width"),
        ("qwen3", {"sliding_window": 0}, "model.window_size=0 must be at least 1"),
        (
            "qwen3",
            {"layer_types": None, "max_window_layers": 3},
            "max_window_layers=3, and in this model all layers slide, or all but every N-th",
        ),
    ],
)
def test_other_models_are_refused(kind: str, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf(HF[kind] | change)


def test_windows_without_types_of_layers() -> None:
    old = {"layer_types": None, "max_window_layers": 0}
    assert config_from_hf(HF["qwen3"] | old) == replace(QWEN3, full_every=0)


def test_windows_that_no_layer_uses_are_ignored() -> None:
    plain = replace(QWEN3, window_size=None, full_every=0)
    for change in (
        {"layer_types": [FULL] * 5},
        {"layer_types": None, "max_window_layers": 5},
        {"layer_types": None, "use_sliding_window": False},
    ):
        assert config_from_hf(HF["qwen3"] | change) == plain


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (QWEN3, {"bias": True}, "model.bias=True .* Qwen3 only .* model.bias=False"),
        (LLAMA, {"n_embd": 50, "head_size": 8}, "model.qk_norm=False .* Qwen3 only .*=True"),
        (QWEN3, {"qk_norm": False}, "model.qk_norm=False .* Qwen3 only .* model.qk_norm=True"),
        (QWEN3, {"positions": "learned"}, "model.positions='learned' .* model.positions='rotary'"),
        (LLAMA, {"logit_softcap": 15.0}, "model.logit_softcap=15.0 .*_softcap=None"),
        (LLAMA, {"mlp": "gelu"}, "model.mlp='gelu' .* Llama only .* model.mlp='swiglu'"),
        (LLAMA, {"norm": "layer_norm"}, "model.norm='layer_norm' .* Llama only .*'rms_norm'"),
        (LLAMA, {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx=True cannot be"),
        (LLAMA, {"mask": MaskConfig(pattern="butterfly")}, "Llama has no block-sparse masks"),
    ],
)
def test_models_without_an_equivalent_are_refused(
    base: ModelConfig, change: dict, message: str
) -> None:
    config = replace(base, **change)
    with pytest.raises(ValueError, match=message):
        hf_config(config)
    with pytest.raises(ValueError, match=message):
        state_to_hf(GPT(config).state_dict(), config)


@pytest.mark.slow
def test_the_shipped_modern_configuration_gives_the_logits_of_qwen3() -> None:
    """The window of 1,024 tokens hides keys from the last ones."""
    config = read_config(TrainConfig, ["configs/long_4k.yaml"]).model
    model = GPT(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # of a norm, which starts as ones
                parameter.add_(0.1 * torch.randn_like(parameter))
    theirs = theirs_of(config, model.state_dict())
    assert_same_logits(model, theirs, batch=1, length=1500)
