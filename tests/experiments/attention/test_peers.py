from dataclasses import replace

import pytest
import torch

from experiments.attention import peers
from experiments.attention.cases import DROPOUT_SEED, Case, Sparsity, make_tensors
from experiments.attention.check import RESULTS, answer, errors, visible_keys
from experiments.attention.peers import (
    CONTENDERS,
    TENSORS,
    TUTORIAL,
    UnsupportedError,
    load_tutorial,
    triton_tutorial,
)

CPU = torch.device("cpu")
SMALL = Case(batch=2, seq_len=48, n_head=2, head_dim=16, dtype=torch.float16)
BUTTERFLY = Sparsity("butterfly", 1, 16)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["standard", "SDPA math", "SDPA flash"])
def test_peers_are_right(name, padded):
    case = replace(SMALL, padded=padded)
    tensors = make_tensors(case, CPU)
    expected = answer(case, tensors)
    found = errors(CONTENDERS[name](case, CPU), tensors, expected)
    assert all(0 < found[x] < expected.budgets[x] < 0.01 for x in RESULTS)


def test_flex_gets_the_causal_mask(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    case = replace(SMALL, dtype=torch.float32, causal=True)
    tensors = make_tensors(case, CPU)
    with peers.functorch_config.patch(donated_buffer=True):
        attention = peers.flex(case, CPU)
        assert peers.functorch_config.donated_buffer is False
    out = attention(*(x.detach() for x in tensors[:3]))
    expected = answer(case, tensors)
    for number, (b, h) in enumerate(expected.heads):
        torch.testing.assert_close(out[b, :, h], expected.exact["out"][number].float())


def test_flex_gets_the_listed_blocks_and_their_mask(monkeypatch):
    # Compiled, it visits listed blocks only, and asks mask_mod in partial ones.
    given = []

    def attend(q, k, v, block_mask):
        given.append(block_mask)
        return q

    monkeypatch.setattr(torch, "compile", lambda function, **options: attend)
    case = replace(SMALL, causal=True, sparsity=BUTTERFLY)
    peers.flex(case, CPU)(*[torch.zeros(1, 1, 1, 1)] * 3)
    (mask,) = given
    size, at = BUTTERFLY.block_size, torch.arange(SMALL.seq_len)
    blocks = mask.to_dense()[0, 0].bool()
    seen = blocks[at[:, None] // size, at // size] & mask.mask_mod(0, 0, at[:, None], at)
    expected = visible_keys(case, slice(0, SMALL.seq_len), 0, CPU)
    assert torch.equal(seen, expected)


def test_ours_passes_the_options_on(monkeypatch):
    calls = []
    monkeypatch.setattr(peers, "flash_attention", lambda q, k, v, **options: calls.append(options))
    peers.ours(SMALL, CPU)(*[torch.zeros(())] * 3)
    case = replace(SMALL, causal=True, padded=True, dropout_p=0.1, sparsity=BUTTERFLY)
    peers.ours(case, CPU)(*[torch.zeros(())] * 3)
    assert calls[0] == {"causal": False, "impl": "triton"}
    options = calls[1]
    assert options.pop("mask").layout.shape == (1, 3, 3)
    assert options.pop("kv_lengths").equal(case.kv_lengths("cpu"))
    assert options.pop("dropout_seed").tolist() == [DROPOUT_SEED]
    assert options == {"causal": True, "dropout_p": 0.1, "impl": "triton"}


# ---- the tutorial


@pytest.fixture
def tutorial(tmp_path):
    """A stand-in for Triton's tutorial, loaded: plain PyTorch, as particular; keeps its calls."""
    file = tmp_path / "06-fused-attention.py"
    file.write_text(
        """
import math
import torch
from types import SimpleNamespace

_attn_fwd = SimpleNamespace(cache={"tuned": "for another mask"})
calls = []

class _attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, sm_scale, warp_specialize):
        calls.append((q, k, v, causal, sm_scale, warp_specialize))
        ctx.save_for_backward(q, k, v)
        ctx.attend = lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=sm_scale
        )
        return ctx.attend(q, k, v).half()

    @staticmethod
    def backward(ctx, do):
        q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        assert do.is_contiguous() and do.dtype == torch.float16 and do.stride() == q.stride()
        with torch.enable_grad():
            out = ctx.attend(q, k, v)
        return *torch.autograd.grad(out, (q, k, v), do), None, None, None

attention = _attention.apply
"""
    )
    return load_tutorial(file)


def test_the_tutorials_tensors_are_the_same_values_in_its_layout():
    tensors = make_tensors(Case(2, 256, 3, 16, causal=True), CPU)
    converted = TENSORS[TUTORIAL](tensors)
    for theirs, ours in zip(converted, tensors, strict=True):
        assert theirs.dtype == torch.float16
        assert theirs.shape == ours.shape
        assert theirs.transpose(1, 2).is_contiguous()
        assert theirs.is_leaf and theirs.requires_grad == ours.requires_grad
        torch.testing.assert_close(theirs.float(), ours.float(), rtol=0, atol=2**-25)
    # also where the dtype is right already
    half = make_tensors(Case(2, 128, 3, 16, torch.float16), CPU)
    assert TENSORS[TUTORIAL](half).q.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("causal", [False, True])
def test_the_tutorial_gets_what_it_takes_and_is_right(causal, tutorial):
    case = Case(2, 128, 3, 16, causal=causal)
    tensors = make_tensors(case, CPU)
    attention = triton_tutorial(tutorial, case, CPU)
    assert tutorial._attn_fwd.cache == {}
    expected = answer(case, tensors)
    converted = TENSORS[TUTORIAL](tensors)
    found = errors(attention, converted, expected)
    assert all(0 < found[x] < expected.budgets[x] < 0.03 for x in RESULTS)
    ((*given, is_causal, scale, warp_specialize),) = tutorial.calls
    for x in given:
        assert (x.shape, x.dtype) == ((2, 3, 128, 16), torch.float16)
        assert x.is_contiguous()
    assert given[0].data_ptr() == converted.q.data_ptr()  # no copy that would be timed
    assert (is_causal, scale, warp_specialize) == (causal, 0.25, False)
    assert attention(*converted[:3]).shape == tensors.q.shape


@pytest.mark.parametrize(
    "option",
    [{"sparsity": BUTTERFLY}, {"dropout_p": 0.1}, {"padded": True}, {"seq_len": 192}],
    ids=str,
)
def test_the_tutorial_lacks(option, tutorial):
    case = replace(Case(1, 256, 1, 16), **option)
    with pytest.raises(UnsupportedError, match="the tutorial (has no|takes multiples of 128)"):
        triton_tutorial(tutorial, case, CPU)


def test_a_file_that_is_not_the_tutorial(tmp_path):
    advice = "give Triton's 06-fused-attention.py"
    for path in (tmp_path, tmp_path / "missing.py"):
        with pytest.raises(FileNotFoundError, match=f"--tutorial={path} is no file: {advice}"):
            load_tutorial(path)
    (tmp_path / "text.md").write_text("attention = _attn_fwd = None")
    with pytest.raises(ValueError, match=f"text.md is no Python file: {advice}"):
        load_tutorial(tmp_path / "text.md")
    (tmp_path / "other.py").write_text("attention = None")
    with pytest.raises(ValueError, match=f"other.py has no attention or no _attn_fwd: {advice}"):
        load_tutorial(tmp_path / "other.py")
