"""KV cache: what it returns and refuses, and that it does not change hidden states."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from model.cache import KVCache
from model.config import ModelConfig
from model.gpt import GPT
from model.mask_config import MaskConfig

VOCAB, CONTEXT, N_LAYER = 61, 16, 2
B, H, D = 3, 2, 4


def make_model(**changes: Any) -> GPT:
    torch.manual_seed(0)
    shape: dict[str, Any] = {"context_length": CONTEXT, "n_head": 4, "n_embd": 32, **changes}
    model = (
        GPT(ModelConfig(vocab_size=VOCAB, n_layer=N_LAYER, **shape)).eval().requires_grad_(False)
    )
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    return model


def keys_and_values(n_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, B, n_tokens, H, D)
    return k, v


def test_append_returns_all_keys_and_values_of_the_layer() -> None:
    cache = KVCache(N_LAYER, capacity=7)
    given: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[], []]
    for n_tokens in (3, 1, 2, 1):
        for layer in range(N_LAYER):
            given[layer].append(keys_and_values(n_tokens))
            k, v = cache.append(layer, *given[layer][-1])
            assert torch.equal(k, torch.cat([k for k, _ in given[layer]], dim=1))
            assert torch.equal(v, torch.cat([v for _, v in given[layer]], dim=1))
        cache.advance(n_tokens)
    assert cache.length == 7


def test_tokens_count_from_advance_until_reset() -> None:
    cache = KVCache(1, capacity=4)
    first, _ = cache.append(0, *keys_and_values(2))
    k, v = keys_and_values(3)
    assert torch.equal(cache.append(0, k, v)[0], k)
    cache.advance(3)
    cache.reset()
    assert cache.length == 0
    again, _ = cache.append(0, k, v)
    assert torch.equal(again, k)
    assert again.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_is_that_of_the_first_keys(dtype: torch.dtype) -> None:
    cache = KVCache(1, capacity=4)
    k, v = (tensor.to(dtype) for tensor in keys_and_values(2))
    assert [tensor.dtype for tensor in cache.append(0, k, v)] == [dtype, dtype]


def test_under_autocast_the_cache_has_the_autocast_dtype() -> None:
    model, cache = make_model(positions="rotary"), KVCache(N_LAYER, CONTEXT)
    tokens = torch.randint(VOCAB, (2, 9))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = model.hidden(tokens)
        parts = [model.hidden(part, cache=cache) for part in tokens.split([4, 1, 3, 1], dim=1)]
    assert cache.append(0, *torch.zeros(2, 2, 1, 4, 8).bfloat16())[0].dtype == torch.bfloat16
    error = (torch.cat(parts, dim=1) - whole).abs().max()
    assert error < 0.03 * whole.abs().max()


def test_invalid_keys_are_refused() -> None:
    cache = KVCache(1, capacity=4)
    cache.append(0, *keys_and_values(3))
    cache.advance(3)
    with pytest.raises(ValueError, match=r"holds 3 tokens and has room for 4: 2 more.*reset"):
        cache.append(0, *keys_and_values(2))
    k, v = keys_and_values(1)
    with pytest.raises(ValueError, match=r"\(2, 1, 2, 4\).*takes \(3, 1, 2, 4\).*another cache"):
        cache.append(0, k[:2], v[:2])
    with pytest.raises(ValueError, match=r"torch.float64.*takes.*torch.float32"):
        cache.append(0, k.double(), v.double())
    with pytest.raises(ValueError, match=r"keys that require gradients.*torch.no_grad"):
        cache.append(0, k.requires_grad_(), v)
    with pytest.raises(ValueError, match=r"keys that require gradients.*torch.no_grad"):
        cache.append(0, k.detach(), v.requires_grad_())
    assert cache.length == 3


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize(
    ("attention", "parts"),
    [
        ("reference", [3, 1, 4]),
        ("reference", [1, 1, 7]),
        ("reference", [13, 3]),
        ("auto", [5, 2, 1]),
        ("sdpa", [5, 1, 1]),
        ("sdpa", [1, 1, 1]),
    ],
)
def test_hidden_states_do_not_depend_on_the_split(
    positions: str, attention: str, parts: list[int]
) -> None:
    model = make_model(positions=positions, attention=attention)
    cache = KVCache(N_LAYER, sum(parts))
    tokens = torch.randint(VOCAB, (3, sum(parts)))
    hidden = [model.hidden(part, cache=cache) for part in tokens.split(parts, dim=1)]
    assert cache.length == sum(parts)
    torch.testing.assert_close(torch.cat(hidden, dim=1), model.hidden(tokens), rtol=1e-4, atol=1e-5)


SPARSEST = MaskConfig(pattern="butterfly", block_size=16, window_blocks=1, global_blocks=0)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("mask", [SPARSEST, replace(SPARSEST, window_blocks=2, global_blocks=1)])
@pytest.mark.parametrize("first", [1, 16, 21, 47])
def test_tokens_one_by_one_under_a_butterfly(positions: str, mask: MaskConfig, first: int) -> None:
    model = make_model(context_length=83, positions=positions, mask=mask)
    cache = KVCache(N_LAYER, 83)
    tokens = torch.randint(VOCAB, (2, 83))  # six blocks, the last one partial
    parts = tokens.split([first, *[1] * (83 - first)], dim=1)
    hidden = torch.cat([model.hidden(part, cache=cache) for part in parts], dim=1)
    whole = model.hidden(tokens)
    torch.testing.assert_close(hidden, whole, rtol=1e-4, atol=1e-5)
    dense = make_model(context_length=83, positions=positions).hidden(tokens)
    assert ((dense - whole).abs().amax(dim=-1) > 1e-3)[:, 64:].all()


def test_several_tokens_after_others_are_refused_under_a_butterfly() -> None:
    model, cache = make_model(context_length=64, mask=SPARSEST), KVCache(N_LAYER, 64)
    model.hidden(torch.zeros(1, 20, dtype=torch.int64), cache=cache)
    with pytest.raises(ValueError, match=r"2 new tokens after 20.*=butterfly pass one at a"):
        model.hidden(torch.zeros(1, 2, dtype=torch.int64), cache=cache)
    assert cache.length == 20
    model.hidden(torch.zeros(1, 1, dtype=torch.int64), cache=cache)
    assert cache.length == 21


def test_documents_are_refused_with_a_cache() -> None:
    model, cache = make_model(), KVCache(N_LAYER, CONTEXT)
    tokens = torch.zeros(1, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="doc_start and cache exclude each other"):
        model.hidden(tokens, doc_start=torch.zeros_like(tokens, dtype=torch.int32), cache=cache)
    assert cache.length == 0


def test_triton_supports_chunks() -> None:
    model = make_model(positions="rotary", attention="reference")
    tokens = torch.randint(VOCAB, (1, 8))
    expected = model.hidden(tokens)
    for block in model.blocks:
        block.attn.impl = "triton"  # pyright: ignore
    cache = KVCache(N_LAYER, 8)
    hidden = [model.hidden(part, cache=cache) for part in tokens.split([3, 1, 4], dim=1)]
    torch.testing.assert_close(torch.cat(hidden, dim=1), expected, rtol=1e-4, atol=1e-5)


def test_sdpa_refuses_a_chunk_after_others() -> None:
    model, cache = make_model(attention="sdpa"), KVCache(N_LAYER, 8)
    model.hidden(torch.zeros(1, 3, dtype=torch.int64), cache=cache)
    with pytest.raises(ValueError, match="does not support causal with T_q != T_k"):
        model.hidden(torch.zeros(1, 2, dtype=torch.int64), cache=cache)
    assert cache.length == 3


def test_a_cache_does_not_extend_learned_positions() -> None:
    model, cache = make_model(), KVCache(N_LAYER, 2 * CONTEXT)
    model.hidden(torch.zeros(1, CONTEXT - 1, dtype=torch.int64), cache=cache)
    with pytest.raises(ValueError, match=r"17 tokens.*model.context_length=16.*rotary"):
        model.hidden(torch.zeros(1, 2, dtype=torch.int64), cache=cache)
    assert cache.length == CONTEXT - 1
