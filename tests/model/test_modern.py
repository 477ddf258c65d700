"""Options of a GPT that GPT-2 does not have: grouped heads, windows, patterns, gates, norms."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from kernels.fused.embedding import _Embedding
from kernels.fused.rotary import rotary_qkv
from kernels.reference.standard import standard_attention
from model.config import ModelConfig
from model.flops import attention_share, count_params
from model.generate import generate
from model.gpt import GPT
from model.mask_config import MaskConfig

BASE = ModelConfig(
    vocab_size=61, context_length=64, n_layer=4, n_head=4, n_embd=32, positions="rotary"
)
MODERN = replace(
    BASE,
    n_kv_head=2,
    window_size=9,
    full_every=2,
    qk_norm=True,
    norm="rms_norm",
    mlp="swiglu",
    bias=False,
)
CHOICES = {
    "grouped": {"n_kv_head": 2},
    "one kv head": {"n_kv_head": 1, "positions": "learned"},
    "wide heads": {"head_size": 16, "n_kv_head": 2},
    "narrow heads": {"head_size": 4, "positions": "learned"},
    "untied": {"tie_embeddings": False, "positions": "learned"},
    "window": {"window_size": 9},
    "alternating": {"window_size": 9, "full_every": 2},
    "qk_norm": {"qk_norm": True, "positions": "learned"},
    "rms_norm": {"norm": "rms_norm", "norm_eps": 1e-3},
    "swiglu": {"mlp": "swiglu"},
    "narrow swiglu": {"mlp": "swiglu", "n_inner": 50},
    "softcap": {"logit_softcap": 0.5, "positions": "learned"},
    "growing window": {
        "window_size": 9, "context_schedule": [[16, 0.5], [64, 0.5]], "window_grows": True
    },
    "narrow gelu": {"n_inner": 50, "norm_eps": 1e-3},
    "strided": {"mask": MaskConfig(pattern="strided", block_size=16, stride_blocks=2)},
    "random": {"mask": MaskConfig(pattern="random", block_size=16, random_blocks=1)},
    "window of blocks": {"mask": MaskConfig(pattern="window", block_size=16, global_blocks=0)},
    "global": {"mask": MaskConfig(pattern="global", block_size=16, window_blocks=1)},
    "masked and full": {"mask": MaskConfig(pattern="butterfly", block_size=16), "full_every": 2},
    "modern": {name: getattr(MODERN, name) for name in (
        "n_kv_head", "window_size", "full_every", "qk_norm", "norm", "mlp", "bias",
    )},
}  # fmt: skip
choices = pytest.mark.parametrize("change", CHOICES.values(), ids=CHOICES)


def tokens(length: int = 64) -> torch.Tensor:
    return torch.randint(61, (2, length), generator=torch.Generator().manual_seed(0))


def without_zeros(model: GPT) -> GPT:
    """Replace parameters that are 0 at first, so that they have an effect and get a gradient."""
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_kernels_of_queries_keys_and_tokens_have_the_gradients_of_the_reference(
    qk_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    model = GPT(replace(MODERN, qk_norm=qk_norm))
    expected = gradients(without_zeros(model))
    kernels = partial(rotary_qkv, impl="triton")
    monkeypatch.setattr("model.attention.rotary_qkv", kernels)
    monkeypatch.setattr("model.embedding.embedding", _Embedding.apply)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def gradients(model: GPT) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(tokens(), tokens().roll(-1, 1)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@choices
def test_count_params_agrees_with_the_model(change: dict) -> None:
    model = GPT(replace(BASE, **change))
    assert model.n_params(lookup_tables=False) == count_params(model.config)
    padded = replace(model.config, vocab_multiple=50)
    assert GPT(padded).n_params() == GPT(replace(padded, vocab_multiple=1)).n_params()


@choices
def test_a_cache_changes_nothing(change: dict) -> None:
    torch.manual_seed(0)
    model = without_zeros(GPT(replace(BASE, **change))).double().eval()
    prompt = tokens(20)
    with_cache, without = (
        generate(model, prompt, 30, temperature=0.0, cached=cached) for cached in (True, False)
    )
    assert torch.equal(with_cache, without)


@choices
def test_every_parameter_has_a_gradient(change: dict) -> None:
    model = without_zeros(GPT(replace(BASE, **change)))
    x = tokens()
    model(x, x).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_a_window_hides_earlier_tokens() -> None:
    torch.manual_seed(0)
    config = replace(BASE, n_layer=1, window_size=9)
    x, y = tokens(), tokens()
    y[:, :20] = (y[:, :20] + 1) % 61
    for model, differ in (
        (GPT(config).eval(), slice(0, 28)),  # the last token that attends to token 19
        (GPT(replace(config, n_layer=2, full_every=2)).eval(), slice(0, 64)),
    ):
        changed = (model(x) != model(y)).any(-1).any(0)
        assert changed[differ].all() and not changed[differ.stop :].any()


def test_a_window_grows_with_the_context_in_training_only() -> None:
    grows = {"context_schedule": [[16, 0.5], [64, 0.5]], "window_grows": True}
    config = replace(BASE, window_size=16, full_every=2, **grows)
    assert config.at_context(16).window_size == 4 and config.at_context(64).window_size == 16
    model = GPT(config).double()
    narrow = GPT(replace(BASE, window_size=4, full_every=2)).double()
    wide = GPT(replace(BASE, window_size=16, full_every=2)).double()
    for other in (narrow, wide):
        other.load_state_dict(model.state_dict())
    for length, training, expected in (
        (16, True, narrow), (16, False, wide), (64, True, wide), (32, True, wide)
    ):  # fmt: skip
        x = tokens(length)
        model.train(training)
        torch.testing.assert_close(model(x), expected(x))
        assert not torch.allclose(narrow(x), wide(x))


def test_grouped_heads_share_keys_and_values() -> None:
    """Grouped heads equal attention with repeated keys and values."""
    torch.manual_seed(0)
    model = GPT(replace(BASE, n_layer=1, n_kv_head=2, positions="learned")).double().eval()
    attention = model.blocks[0].attn
    x = torch.randn(2, 10, 32, dtype=torch.float64)
    qkv = F.linear(x, attention.qkv_proj.weight, attention.qkv_proj.bias)
    q, k, v = qkv.split([32, 16, 16], dim=-1)
    k, v = (t.view(2, 10, 2, 8).repeat_interleave(2, dim=2) for t in (k, v))
    out, _ = standard_attention(q.view(2, 10, 4, 8), k, v, causal=True)
    expected = F.linear(out.reshape(2, 10, 32), attention.out_proj.weight)
    torch.testing.assert_close(attention(x).branch, expected)


def test_norms_and_gates_match_pytorch() -> None:
    torch.manual_seed(0)
    model = GPT(replace(MODERN, n_layer=1)).double().eval()
    block = model.blocks[0]
    with torch.no_grad():
        for norm in (block.ln_1, block.ln_2, model.ln_f, block.attn.q_norm, block.attn.k_norm):
            norm.weight.copy_(torch.rand_like(norm.weight) + 0.5)
    x = torch.randn(2, 10, 32, dtype=torch.float64)
    normal = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * block.ln_2.weight
    gate, value = F.linear(normal, block.mlp.fc_in.weight).split(block.mlp.fc_out.in_features, -1)
    expected = F.linear(gate * torch.sigmoid(gate) * value, block.mlp.fc_out.weight)
    torch.testing.assert_close(block.mlp(block.ln_2(x)).branch, expected)
    assert block.mlp.fc_out.in_features == 128  # two thirds of 4 * 32, rounded up to 64s
    # scores are bounded: longer queries and keys change nothing
    tokens_ = tokens()
    before = model(tokens_)
    with torch.no_grad():
        block.attn.qkv_proj.weight[: 32 + 16] *= 8.0
    torch.testing.assert_close(model(tokens_), before, rtol=1e-4, atol=1e-5)


def test_logits_are_bounded_and_their_loss_is_that_of_the_logits() -> None:
    torch.manual_seed(0)
    free, capped = (GPT(replace(BASE, logit_softcap=cap)).double().eval() for cap in (None, 0.25))
    capped.load_state_dict(free.state_dict())
    x, y = tokens(), tokens().roll(1)
    logits = capped(x)
    torch.testing.assert_close(logits, 0.25 * torch.tanh(free(x) / 0.25))
    assert logits.abs().max() < 0.25 < free(x).abs().max()
    torch.testing.assert_close(capped(x, y), F.cross_entropy(logits.flatten(0, 1), y.flatten()))


def test_patterns_contain_their_blocks() -> None:
    def row(pattern: str, **fields: int) -> list[int]:
        config = MaskConfig(pattern=pattern, block_size=16, **fields)  # pyright: ignore
        mask = config.build(16 * 16)
        assert mask is not None
        return mask.layout[-1, 15].nonzero().flatten().tolist()

    assert row("window", window_blocks=3, global_blocks=0) == [13, 14, 15]
    assert row("global", window_blocks=1, global_blocks=2) == [0, 1, 15]
    assert row("strided", window_blocks=1, global_blocks=0, stride_blocks=4) == [3, 7, 11, 15]
    drawn = row("random", window_blocks=1, global_blocks=0, random_blocks=3)
    assert len(drawn) == 4 and 15 in drawn
    others = {
        tuple(row("random", window_blocks=1, global_blocks=0, random_seed=seed))
        for seed in range(5)
    }
    assert len(others) > 1


def test_random_blocks_do_not_depend_on_the_length() -> None:
    config = MaskConfig(pattern="random", block_size=16, random_blocks=2)
    whole, part = config.build(256), config.build(100, within=256)
    assert whole is not None and part is not None
    assert torch.equal(part.layout, whole.layout[:, :7, :7])


def test_flops_count_visible_pairs() -> None:
    alternating = replace(BASE, window_size=16, full_every=2)
    shares = [attention_share(alternating, layer, causal=True) for layer in range(4)]
    pairs = sum(min(i + 1, 16) for i in range(64)) / sum(i + 1 for i in range(64))
    assert shares == [pytest.approx(pairs), 1.0, pytest.approx(pairs), 1.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_kv_head": 3}, "model.n_kv_head=3 must divide model.n_head=4"),
        ({"n_kv_head": 0}, "model.n_kv_head=0 must divide"),
        ({"window_size": 0}, "model.window_size=0 must be at least 1"),
        ({"full_every": 2}, "model.full_every=2 has no effect"),
        ({"full_every": 1, "window_size": 4}, "model.full_every=1 must be 0, or at least 2"),
        ({"window_size": 4, "attention": "sdpa"}, "=4 is not supported with model.attention=sdpa"),
        ({"norm": "batch_norm"}, "model.norm='batch_norm' must be one of layer_norm, rms_norm"),
        ({"mlp": "relu"}, "model.mlp='relu' must be one of gelu, swiglu"),
        ({"window_grows": True}, "model.window_grows=true has no effect without"),
        ({"logit_softcap": 0.0}, "model.logit_softcap=0.0 must be a finite number above 0"),
        ({"head_size": 0}, "model.head_size=0 must be at least 1"),
        ({"head_size": 257}, "model.head_size=257 must be at most 256"),
        ({"head_size": 7}, "model.head_size=7 gives heads of 7, .* choose an even size"),
        ({"n_inner": 0}, "model.n_inner=0 must be at least 1"),
        ({"norm_eps": 0.0}, "model.norm_eps=0.0 must be above 0 and below 1. Try 1e-6"),
    ],
)
def test_invalid_options_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(BASE, **change)


@pytest.mark.parametrize("name", ["stride_blocks", "random_blocks", "random_seed"])
def test_invalid_masks_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"model.mask.{name}=-1 must be at least"):
        MaskConfig(**{name: -1})


@pytest.mark.gpu
@choices
def test_a_gpu_gives_the_losses_of_the_reference(change: dict) -> None:
    config = replace(BASE, n_embd=256, n_head=4, **change)
    torch.manual_seed(0)
    exact = GPT(replace(config, attention="reference")).cuda()
    ours = GPT(config).cuda()
    ours.load_state_dict(exact.state_dict())
    x = tokens().cuda()
    torch.compiler.reset()
    with torch.autocast("cuda", torch.bfloat16):
        compiled = torch.compile(ours, fullgraph=True, dynamic=False)
        loss = compiled(x, x)
    torch.testing.assert_close(loss, exact(x, x), rtol=5e-3, atol=5e-3)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in ours.parameters())


@pytest.mark.parametrize("name", ["strided", "masked and full", "modern"])
def test_compiles_without_a_graph_break(name: str) -> None:
    torch.compiler.reset()  # models with the same code count as recompilations
    torch.manual_seed(0)
    model = GPT(replace(BASE, n_layer=2, **CHOICES[name]))  # at most one layer has full attention
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens(), tokens()), model(tokens(), tokens()))
