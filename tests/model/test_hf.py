"""Convert transformers' GPT-2 to ours and back; tests/scripts covers the files."""

from dataclasses import dataclass, replace

import pytest
import torch

from model.config import ModelConfig
from model.gpt import GPT
from model.hf.config import config_from_hf, config_to_hf
from model.hf.weights import state_from_hf, state_to_hf
from model.mask_config import MaskConfig

VOCAB = 61  # odd: the table is padded to 64
CONFIG = ModelConfig(
    vocab_size=VOCAB, context_length=40, n_layer=3, n_head=4, n_embd=32, dropout=0.1
)
HF = {"vocab_size": VOCAB, "n_positions": 40, "n_layer": 3, "n_head": 4, "n_embd": 32}


@pytest.fixture(scope="module")
def tensors(make_gpt2):
    """State dict as transformers saves it, with a tied head."""
    state = make_gpt2(vocab_size=VOCAB).state_dict()
    return {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}


def random_state(config):
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
        for table in (model.tok_emb.weight, model.head_weight):
            table[config.vocab_size :] = 0
    return model.state_dict()


def assert_same(state, expected):
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, expected[name]), name
        assert tensor.dtype == expected[name].dtype and tensor.is_contiguous(), name


@pytest.mark.parametrize("inverse_layer", [False, True])
def test_imported_weights_give_the_logits_of_transformers(make_gpt2, inverse_layer):
    theirs = make_gpt2(vocab_size=VOCAB, scale_attn_by_inverse_layer_idx=inverse_layer)
    config = config_from_hf(theirs.config.to_dict())
    ours = GPT(config).eval()
    ours.load_state_dict(state_from_hf(theirs.state_dict(), config))
    assert not ours.tok_emb.weight[VOCAB:].any()
    tokens = torch.randint(VOCAB, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("vocab_size", "vocab_multiple"), [(61, 64), (64, 64), (61, 1), (1, 7)])
def test_export_then_import_is_exact(vocab_size, vocab_multiple):
    config = ModelConfig(
        vocab_size=vocab_size,
        vocab_multiple=vocab_multiple,
        context_length=13,
        n_layer=2,
        n_head=3,
        n_embd=15,
    )
    state = random_state(config)
    exported = state_to_hf(state, config)
    assert exported["transformer.wte.weight"].shape == (vocab_size, 15)
    assert_same(state_from_hf(exported, config), state)


def test_import_then_export_is_exact(tensors):
    assert_same(state_to_hf(state_from_hf(tensors, CONFIG), CONFIG), tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_round_trips(tensors, dtype):
    half = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    state = state_from_hf(half, CONFIG)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert_same(state_to_hf(state, CONFIG, dtype=dtype), half)


def test_prefix_buffers_and_tied_head_make_no_difference(tensors):
    expected = state_from_hf(tensors, CONFIG)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    assert_same(state_from_hf(bare, CONFIG), expected)
    for prefix, some in (("transformer.", tensors), ("", bare)):
        more = {**some, "lm_head.weight": bare["wte.weight"].clone()}
        for layer in range(3):
            more[f"{prefix}h.{layer}.attn.bias"] = torch.ones(1, 1, 40, 40, dtype=torch.uint8)
            more[f"{prefix}h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
        assert_same(state_from_hf(more, CONFIG), expected)


def test_buffers_of_more_than_ten_layers():
    config = replace(CONFIG, n_layer=12)
    state = random_state(config)
    more = {f"transformer.h.11.attn.{name}": torch.ones(1) for name in ("bias", "masked_bias")}
    assert_same(state_from_hf(state_to_hf(state, config) | more, config), state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ln_f.bias": None}, "lacks ln_f.bias:"),
        ({"h.3.attn.extra": torch.zeros(1)}, "has h.3.attn.extra, which GPT-2 does not have"),
        (
            {"h.1.ln_1.bias": None, "score.weight": torch.zeros(2, 32)},
            "lacks h.1.ln_1.bias and has score.weight",
        ),
        ({"wpe.weight": torch.zeros(41, 32)}, r"wpe.weight is \(41, 32\) and not \(40, 32\)"),
        (
            {"h.0.attn.c_attn.weight": torch.zeros(96, 32)},  # the shape of torch's Linear
            r"h.0.attn.c_attn.weight is \(96, 32\) and not \(32, 96\)",
        ),
        ({"ln_f.bias": torch.zeros(32).double()}, "ln_f.bias is torch.float64"),
        ({"lm_head.weight": torch.zeros(VOCAB, 32)}, "lm_head.weight is not equal to"),
        ({"lm_head.weight": torch.zeros(64, 32)}, "lm_head.weight is not equal to"),
        ({"transformer.ln_f.bias": torch.zeros(32)}, "both transformer.ln_f.bias and ln_f.bias"),
    ],
)
def test_other_tensors_are_refused_by_name(tensors, change, message):
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    changed = {name: tensor for name, tensor in (bare | change).items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        state_from_hf(changed, CONFIG)


def test_a_model_without_biases_is_exported_with_zeros(make_gpt2):
    config = replace(CONFIG, bias=False)
    state = random_state(config)
    assert not [name for name in state if name.endswith("bias")]
    ours = GPT(config).eval()
    ours.load_state_dict(state)
    theirs = make_gpt2(vocab_size=VOCAB)
    theirs.load_state_dict(state_to_hf(state, config), strict=False)  # the head is tied
    tokens = torch.randint(VOCAB, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(AssertionError):
        state_to_hf(state, CONFIG)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_refused_in_both_directions(tensors, value):
    state = random_state(CONFIG)
    state["ln_f.weight"][3] = value
    with pytest.raises(ValueError, match=r"ln_f.weight has values that are not finite"):
        state_to_hf(state, CONFIG)
    broken = tensors["transformer.ln_f.weight"].clone()
    broken[3] = value
    with pytest.raises(ValueError, match=r"^ln_f.weight of the checkpoint has values that are not"):
        state_from_hf(tensors | {"transformer.ln_f.weight": broken}, CONFIG)


def test_long_lists_of_names_are_shortened():
    with pytest.raises(ValueError, match=r"lacks (\S+, ){11}\S+ and 28 more"):
        state_from_hf({}, CONFIG)


def test_configuration_round_trips():
    config = ModelConfig(
        vocab_size=VOCAB,
        context_length=40,
        n_layer=3,
        n_head=4,
        n_embd=32,
        dropout=0.25,
        attention_dropout=0.5,
        scale_attn_by_inverse_layer_idx=True,
        n_inner=50,
        norm_eps=1e-3,
    )
    assert config_from_hf(config_to_hf(config, eot_id=7, dtype=torch.float32)) == config


def test_defaults_match_transformers(make_gpt2):
    assert config_from_hf(HF) == config_from_hf(make_gpt2(vocab_size=VOCAB).config.to_dict())
    harmless = {"n_inner": 128, "activation_function": "gelu_pytorch_tanh"}
    assert config_from_hf(HF | harmless | {"reorder_and_upcast_attn": True}) == config_from_hf(HF)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gptj"}, "model_type='gptj', and .* 'gpt2' or 'gpt_neox' or 'llama'"),
        ({"activation_function": "relu"}, "activation_function='relu'.*'gelu_new' or"),
        ({"layer_norm_epsilon": "1e-5"}, "layer_norm_epsilon='1e-5' of the normalisations"),
        ({"layer_norm_epsilon": 0.0}, "model.norm_eps=0.0 must be above 0"),
        ({"scale_attn_weights": False}, "scale_attn_weights=False"),
        ({"add_cross_attention": True}, "add_cross_attention=True"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ({"n_inner": 64.0}, "n_inner=64.0, which must be a whole number"),
        ({"n_inner": 0}, "model.n_inner=0 must be at least 1"),
        ({"resid_pdrop": 0.2}, "embd_pdrop=0.1 and resid_pdrop=0.2.*one rate for both"),
        ({"attn_pdrop": "no"}, "attn_pdrop='no', which must be a rate"),
        ({"attn_pdrop": 1.0}, "model.attention_dropout=1.0 is a rate"),
        ({"attn_pdrop": 10**400}, "attn_pdrop=1000+[.]{3}, which must be a rate"),
        ({"model_type": ["gpt2"]}, "model_type=.'gpt2'., and"),
        ({"n_layer": 10**400}, "model.n_layer=1000+ must be at most 10,000"),
        ({"n_head": None}, "n_head=None, which must be a whole number"),
        ({"n_embd": 32.0}, "n_embd=32.0, which must be a whole number"),
        ({"scale_attn_by_inverse_layer_idx": 1}, "idx=1, which must be true or false"),
    ],
)
def test_other_models_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(HF | change)


def test_block_masks_cannot_be_exported():
    butterfly = ModelConfig(mask=MaskConfig(pattern="butterfly"))
    with pytest.raises(ValueError, match="model.mask.pattern=butterfly cannot be exported"):
        config_to_hf(butterfly, eot_id=0, dtype=torch.float32)
    unused = ModelConfig(mask=MaskConfig(block_size=64))
    config_to_hf(unused, eot_id=0, dtype=torch.float32)


def test_new_fields_cannot_be_exported_unless_unused():
    @dataclass(frozen=True, kw_only=True)
    class Later(ModelConfig):
        novelty: str = "none"

    config_to_hf(Later(), eot_id=0, dtype=torch.float32)
    with pytest.raises(ValueError, match="model.novelty='some' cannot be exported"):
        config_to_hf(Later(novelty="some"), eot_id=0, dtype=torch.float32)


def test_weight_too_large_for_the_dtype():
    state = random_state(CONFIG)
    state["ln_f.weight"][3] = -1e5
    state_to_hf(state, CONFIG, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"ln_f.weight reaches 1e\+05, and torch.float16 ends at"):
        state_to_hf(state, CONFIG, dtype=torch.float16)
