"""Models of transformers give the same results on our attention as on PyTorch's."""

import copy
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

pytest.importorskip("transformers")
from transformers import (
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    StaticCache,
    masking_utils,
)

from kernels import for_transformers
from kernels.for_transformers import (
    attention_of_layer,
    register_with_transformers,
    visible_keys,
)
from tests.kernels.tiny_transformers import (
    MODELS,
    SIZES,
    B,
    T,
    assert_same_training,
    gradients,
    padding,
    pair,
    tokens,
)


@pytest.fixture(autouse=True)
def registered() -> None:
    register_with_transformers()
    torch.manual_seed(0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pads", ["none", "left", "right"])
def test_training_matches_sdpa(name: str, pads: str) -> None:
    theirs, ours = pair(MODELS[name])
    ids = tokens()
    if pads == "none":
        assert_same_training(theirs, ours, torch.ones_like(ids), input_ids=ids)
    else:
        mask = padding(T, 1, 14, left=pads == "left")
        assert_same_training(theirs, ours, mask, input_ids=ids, attention_mask=mask)


def packed_positions() -> Tensor:
    """Two rows of T tokens, each of three documents."""
    lengths = (1, 12, 10), (8, 8, 7)
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_documents_see_only_themselves(name: str) -> None:
    theirs, ours = pair(MODELS[name])
    ids, positions = tokens(2), packed_positions()
    all_tokens = torch.ones_like(ids)
    assert_same_training(theirs, ours, all_tokens, input_ids=ids, position_ids=positions)
    alone = ours(input_ids=ids[:1, 1:13]).logits
    packed = ours(input_ids=ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed[:1, 1:13], alone)


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        *product(["llama", "mistral"], ["nothing", "ones", "padding", "static cache"]),
        ("gpt2", "compiled"),
    ],
)
def test_packed_documents_stay_apart_with_a_cache(name: str, extra: str) -> None:
    """PyTorch's attention in transformers does not separate these documents."""
    _, ours = pair(MODELS[name])
    ids, positions = tokens(2), packed_positions()
    masks = {"ones": torch.ones_like(ids), "padding": padding(T, T - 3, left=False)}
    where = masks.get(extra, torch.ones_like(ids)).bool()
    cache = {}
    if extra == "static cache":
        cache = {"past_key_values": StaticCache(ours.config, max_cache_len=T + 5)}
    call = torch.compile(ours, backend="aot_eager") if extra == "compiled" else ours
    expected = ours(ids, position_ids=positions, use_cache=False).logits
    got = call(
        ids, position_ids=positions, attention_mask=masks.get(extra), use_cache=True, **cache
    )
    torch.testing.assert_close(got.logits[where], expected[where])


def test_positions_are_read_once_per_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = pair(MODELS["llama"])
    ids, positions = tokens(2), packed_positions()
    n_calls, row_minima = 0, for_transformers._row_minima

    def counted(position_ids: Tensor) -> Tensor:
        nonlocal n_calls
        n_calls += 1
        return row_minima(position_ids)

    monkeypatch.setattr(for_transformers, "_row_minima", counted)
    ours(ids, position_ids=positions)
    assert n_calls == 1  # for two layers
    positions.copy_(torch.arange(T).expand(2, -1))
    torch.testing.assert_close(ours(ids, position_ids=positions).logits, ours(ids).logits)
    with torch.inference_mode():
        positions = packed_positions()
        first = ours(ids, position_ids=positions).logits
        positions.copy_(torch.arange(T).expand(2, -1))
        assert not torch.equal(first, ours(ids, position_ids=positions).logits)


def test_image_tokens_that_share_a_position_see_each_other() -> None:
    theirs, ours = pair(MODELS["llama"])
    positions = torch.cat([torch.arange(2), torch.full((3,), 2), torch.arange(3, T - 2)])
    ids, ones = tokens(1), torch.ones(1, T, dtype=torch.long)
    inputs = {"input_ids": ids, "position_ids": positions[None], "attention_mask": ones}
    torch.testing.assert_close(ours(**inputs).logits, theirs(**inputs).logits)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_matches_sdpa(name: str, cache: str) -> None:
    theirs, ours = pair(MODELS[name])
    ids, mask = tokens(length=9), padding(9, 2, 5, left=True)[:, -9:]
    keywords = {
        "max_new_tokens": 12,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "output_logits": True,
        "return_dict_in_generate": True,
        "disable_compile": True,
        "cache_implementation": cache,
    }
    expected = theirs.generate(ids, attention_mask=mask, **keywords)
    got = ours.generate(ids, attention_mask=mask, **keywords)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits))


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_prompt_in_two_parts_matches_the_whole_prompt(name: str) -> None:
    _, ours = pair(MODELS[name])
    ids = tokens()
    first = ours(ids[:, :10], use_cache=True)
    cache = getattr(first, "cache", None) or first.past_key_values
    key = "cache" if hasattr(first, "cache") else "past_key_values"
    second = ours(ids[:, 10:], **{key: cache})
    torch.testing.assert_close(second.logits, ours(ids).logits[:, 10:])


def test_a_model_that_is_not_causal() -> None:
    config = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "head_dim")}
    theirs, ours = pair(lambda: BertModel(BertConfig(**config)))
    ids, mask = tokens(), padding(T, 4, 17, left=False)
    expected = theirs(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    torch.testing.assert_close(
        ours(ids, attention_mask=mask).last_hidden_state[mask.bool()], expected
    )
    torch.testing.assert_close(ours(ids).last_hidden_state, theirs(ids).last_hidden_state)


def test_softcap_and_sinks() -> None:
    """Two options that PyTorch's attention lacks."""
    gemma = partial(
        Gemma2ForCausalLM,
        Gemma2Config(**SIZES, sliding_window=5, attn_logit_softcapping=2.0),
    )
    oss = partial(
        GptOssForCausalLM,
        GptOssConfig(**SIZES, sliding_window=5, num_local_experts=2, num_experts_per_tok=1),
    )
    # the grouped matmul of PyTorch that gpt-oss uses does not support fp64
    for make, dtype in ((gemma, torch.float64), (oss, torch.float32)):
        theirs, ours = pair(make, "eager", dtype)
        ids = tokens()
        if make is oss:
            for layer in range(2):
                for model in (theirs, ours):
                    sinks = model.model.layers[layer].self_attn.sinks
                    nn.init.constant_(sinks, 0.5 + layer)
        assert_same_training(theirs, ours, torch.ones_like(ids), input_ids=ids)


def test_our_kernels_in_a_model() -> None:
    register_with_transformers("papilio-triton", impl="triton")
    theirs = MODELS["mistral"]()
    ours = copy.deepcopy(theirs)
    theirs.set_attn_implementation("sdpa")
    ours.set_attn_implementation("papilio-triton")
    ids, mask = tokens(2), padding(T, 9, left=True)
    expected = theirs(ids, attention_mask=mask).logits[mask.bool()]
    got = ours(ids, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_dropout_drops_the_same_when_recomputed() -> None:
    _, model = pair(MODELS["gpt2"])
    model.train()
    for block in model.transformer.h:
        block.attn.attn_dropout.p = 0.5
    ids = tokens()

    def logits_and_gradients(seed: int) -> tuple[Tensor, dict[str, Tensor]]:
        torch.manual_seed(seed)
        logits = model(ids, use_cache=False).logits
        return logits, gradients(model, logits.square().mean())

    first, first_gradients = logits_and_gradients(1)
    assert not torch.equal(first, logits_and_gradients(2)[0])
    model.gradient_checkpointing_enable()
    again, again_gradients = logits_and_gradients(1)
    assert torch.equal(first, again)
    for name, gradient in first_gradients.items():
        torch.testing.assert_close(again_gradients[name], gradient)
    model.eval()
    torch.testing.assert_close(model(ids).logits, model(ids).logits)
    assert not torch.allclose(model(ids).logits, first)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiles_without_a_graph_break(device: str) -> None:
    model = pair(MODELS["llama"])[1].to(device)
    ids, mask = tokens().to(device), padding(T, 3, 14, left=True).to(device)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    got = compiled(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
    torch.testing.assert_close(got, model(ids, attention_mask=mask).logits[mask.bool()])


def test_a_compiled_mask_works_for_other_lengths() -> None:
    function = masking_utils.sliding_window_causal_mask_function(5)

    def bounds(mask: Tensor) -> Tensor | None:
        length = mask.shape[1]
        return visible_keys(
            B, length, length, mask_function=function, local_size=5, attention_mask=mask
        )

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(bounds, backend=counter, fullgraph=True, dynamic=True)
    for length in (T, 18):
        mask = padding(T, 3, 14, left=True)[:, -length:].bool().contiguous()
        assert torch.equal(compiled(mask), bounds(mask))
    assert counter.frame_count == 1


def test_a_mask_is_none_or_linear_in_size() -> None:
    causal = partial(visible_keys, mask_function=masking_utils.causal_mask_function)
    window = partial(
        visible_keys,
        mask_function=masking_utils.sliding_window_causal_mask_function(5),
        local_size=5,
    )
    for make in (causal, window):
        assert make(B, T, T) is None
        assert make(B, T, T, attention_mask=torch.ones(B, T, dtype=torch.bool)) is None
    bounds = window(2, T, T, attention_mask=padding(T, 9, left=True).bool())
    assert bounds is not None and bounds.shape == (2, 2, T, T)
    assert bounds.untyped_storage().nbytes() == 2 * 2 * T * 4
    rows = torch.arange(T)
    assert torch.equal(bounds[0, 0, :, 0], (rows - 4).clamp(min=0).int())
    assert torch.equal(bounds[1, 0, :, 0], torch.maximum(rows - 4, torch.tensor(T - 9)).int())


def test_unsupported_calls_are_refused() -> None:
    _, model = pair(MODELS["llama"])
    ids = tokens()
    with pytest.raises(ValueError, match="attention_mask has padding between tokens"):
        holes = torch.ones_like(ids)
        holes[1, 4] = 0
        model(ids, attention_mask=holes)
    with pytest.raises(ValueError, match=r"attention_mask of shape \(3, 1, 23, 23\)"):
        model(ids, attention_mask=torch.ones(B, 1, T, T, dtype=torch.bool).tril())
    with pytest.raises(ValueError, match="overlaid by a model's own function"):
        visible_keys(1, T, T, mask_function=masking_utils.causal_mask_function, use_vmap=True)
    images = torch.full((1, T), -1)
    images[0, 3:6] = 0
    with pytest.raises(ValueError, match="sees later tokens"):
        visible_keys(
            1, T, T, allow_is_causal_skip=False,
            mask_function=masking_utils.or_masks(
                masking_utils.causal_mask_function, masking_utils.blockwise_overlay(images)
            ),
        )  # fmt: skip
    with pytest.raises(ValueError, match="sliding_window=5 of a model that is not causal"):
        visible_keys(
            1, T, T, local_size=5, allow_is_bidirectional_skip=True,
            mask_function=masking_utils.sliding_window_bidirectional_mask_function(5),
        )  # fmt: skip
    q = torch.zeros(1, 1, 4, 8)
    for name in ("position_bias", "head_mask", "cu_seq_lens_q", "block_table"):
        with pytest.raises(ValueError, match=f"{name} is not supported"):
            attention_of_layer(model, q, q, q, None, **{name: torch.zeros(1)})
    with pytest.raises(ValueError, match="output_attentions=True is not supported"):
        attention_of_layer(model, q, q, q, None, output_attentions=True)
    with pytest.raises(ValueError, match="impl must be None or one of"):
        register_with_transformers(impl="fa4")


def test_refuses_an_older_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda cache_position: None)
    with pytest.raises(ImportError, match="pip install 'transformers>="):
        for_transformers.register_with_transformers()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_a_gpu_matches_sdpa(name: str) -> None:
    """In bf16 with the default kernels, the error against fp64 is comparable to that of sdpa."""
    exact, ours = (model.cuda() for model in pair(MODELS[name]))
    theirs = copy.deepcopy(exact).bfloat16()
    ours = ours.bfloat16()
    ids, mask = tokens().cuda(), padding(T, 1, 14, left=True).cuda()
    results = {}
    for key, model in (("exact", exact), ("theirs", theirs), ("ours", ours)):
        logits = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()].double()
        grads = gradients(model, logits.square().mean())
        results[key] = [logits, *(gradient.double() for gradient in grads.values())]
    for expected, sdpa, got in zip(*results.values(), strict=True):
        assert (got - expected).norm() <= 2 * (sdpa - expected).norm() + 1e-3 * expected.norm()
    keywords = {"attention_mask": mask, "max_new_tokens": 6, "min_new_tokens": 6}
    for cache in ("dynamic", "static"):
        generated = ours.generate(ids, **keywords, pad_token_id=0, cache_implementation=cache)
        assert generated.shape == (B, T + 6)
