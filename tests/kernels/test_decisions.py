"""Cached decisions: a repeated call skips its checks and choices, a different call never does."""

import gc
from unittest import mock

import pytest
import torch

from kernels import BlockSparseMask, attention, flash_attention, flash_attention_packed
from kernels.mask.patterns import butterfly
from kernels.reference.standard import standard_attention
from kernels.testing import make_qkv

MASKS = [BlockSparseMask(butterfly(3, n_factors=n), 16) for n in (1, 2)]
DOC_START = torch.tensor([[0] * 20 + [20] * 20])


@pytest.fixture(autouse=True)
def decisions(monkeypatch):
    """Empty cache of decisions for one test."""
    decisions = {}
    monkeypatch.setattr(attention, "_DECISIONS", decisions)
    return decisions


@pytest.fixture
def qkv():
    return make_qkv(1, 40, 40, 2, 1, 16)


OPTIONS = [
    {},
    {"causal": True},
    {"softmax_scale": 0.5},
    {"window_size": 7},
    {"softcap": 2.0},
    {"mask": MASKS[0]},
    {"mask": MASKS[1]},
    {"doc_start": DOC_START},
    {"doc_start": DOC_START.int() + 5},
    {"kv_lengths": torch.tensor([30])},
    {"kv_lengths": torch.tensor([11])},
    {"sinks": torch.tensor([0.5, -1.0])},
    {"alibi_slopes": torch.tensor([0.5, 0.1])},
    {"alibi_slopes": torch.tensor([0.2, 0.3])},
    {"dropout_p": 0.3, "dropout_seed": 3},
    {"dropout_p": 0.3, "dropout_seed": 4},
    {"dropout_p": 0.4, "dropout_seed": torch.tensor([4])},
]


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_each_call_has_its_own_options(impl, qkv):
    for _ in range(2):  # first decided, then cached
        for options in OPTIONS:
            actual = flash_attention(*qkv, **options, impl=impl)
            expected = standard_attention(*qkv, **options)[0]
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_repeated_call_is_neither_checked_nor_decided_again(qkv):
    flash_attention(*qkv, causal=True, mask=MASKS[0], impl="triton")
    other = [x + 1 for x in qkv]
    with mock.patch.object(attention, "make_options", side_effect=AssertionError):
        actual = flash_attention(*other, causal=True, mask=MASKS[0], impl="triton")
    expected = standard_attention(*other, causal=True, mask=MASKS[0])[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_gradients_of_a_repeated_call(qkv):
    sinks = torch.tensor([0.5, -1.0])
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for x in (*qkv, sinks)]
        grads = []
        for function in (flash_attention, standard_attention):
            impl = {"impl": "triton"} if function is flash_attention else {}
            out = function(*leaves[:3], sinks=leaves[3], causal=True, **impl)
            out = out if isinstance(out, torch.Tensor) else out[0]
            grads.append(torch.autograd.grad(out.square().sum(), leaves))
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("valid", "malformed", "message"),
    [
        ({"causal": True}, {"causal": 1}, "causal must be True or False, got 1"),
        ({"softmax_scale": 1.0}, {"softmax_scale": True}, "softmax_scale must be a number"),
        ({"window_size": 1}, {"window_size": True}, "window_size must be the number of keys"),
        ({"window_size": 1}, {"window_size": 1.0}, "window_size must be the number of keys"),
        ({"dropout_p": 0.0}, {"dropout_p": False}, "dropout_p must be a number"),
        (
            {"dropout_p": 0.5, "dropout_seed": 1},
            {"dropout_p": 0.5, "dropout_seed": -1},
            r"dropout_seed must lie in \[0, 2\^63\), got -1",
        ),
        (
            {"sinks": torch.zeros(2)},
            {"sinks": torch.tensor([0.0, torch.inf])},
            r"sinks must be below \+inf",
        ),
        ({"doc_start": DOC_START}, {"doc_start": DOC_START[:, :3]}, "doc_start must have shape"),
        ({"impl": "triton"}, {"impl": ["triton"]}, "impl must be None or one of"),
        ({}, {"softcap": [1.0]}, "softcap must be a number"),
    ],
)
def test_malformed_arguments_are_refused_after_equal_ones(valid, malformed, message, qkv):
    for _ in range(2):
        flash_attention(*qkv, **{"impl": "triton", **valid})
        with pytest.raises(ValueError, match=message):
            flash_attention(*qkv, **{"impl": "triton", **malformed})


def test_other_tensors_are_decided_again(qkv):
    q, k, v = qkv
    flash_attention(q, k, v, impl="triton")
    for inputs in ((q, k.double(), v), (q, k[:, :9], v), (q[:, :, :, ::2], k, v), (q, k, None)):
        with pytest.raises(ValueError):
            flash_attention(*inputs, impl="triton")
    half = flash_attention(*(x.half() for x in qkv), impl="triton")
    assert half.dtype == torch.float16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flash_attention(q, k, v, impl="triton").dtype == torch.bfloat16
    assert flash_attention(q, k, v, impl="triton").dtype == torch.float32


def test_packed_calls_do_not_confuse_options_of_equal_value(qkv):
    """Options of packed calls come in any order, and only those that are passed."""
    q, k, v = (x.expand(-1, -1, 2, -1) for x in qkv)
    packed = torch.stack([q, k, v], 2)
    lengths = torch.tensor([11])
    for options in (
        *({"softmax_scale": 0.5}, {"softcap": 0.5}, {"dropout_p": 0.5, "dropout_seed": 1}),
        *({"window_size": 2}, {"softcap": 2.0}, {"softcap": 2}, {"softmax_scale": 2.0}),
        *({"softmax_scale": 0.25, "softcap": 3.0}, {"softcap": 0.25, "softmax_scale": 3.0}),
        *({"dropout_seed": lengths}, {"kv_lengths": lengths}),
    ):
        actual = flash_attention_packed(packed, impl="triton", **options)
        expected = standard_attention(q, k, v, **options)[0]
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_fp64_stays_exact_with_sinks(qkv):
    q, k, v = (x[:, :3].double().requires_grad_() for x in qkv)
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)

    def attend(q, k, v, sinks):
        return flash_attention(q, k, v, sinks=sinks, causal=True, impl="reference")

    for _ in range(2):
        assert torch.autograd.gradcheck(attend, (q, k, v, sinks))


def test_tensors_that_need_the_dispatcher_go_through_it(qkv):
    flash_attention(*qkv, causal=True, impl="triton")
    negative = torch._neg_view(qkv[0])
    actual = flash_attention(negative, *qkv[1:], causal=True, impl="triton")
    expected = standard_attention(-qkv[0], *qkv[1:], causal=True)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    meta = [x.to("meta") for x in qkv]
    assert flash_attention(*meta, causal=True, impl="triton").shape == qkv[0].shape

    def attend(*qkv):
        return flash_attention(*qkv, causal=True, impl="triton")

    with torch.no_grad():
        traced = torch.jit.trace(attend, qkv)
        torch.testing.assert_close(traced(*(x + 1 for x in qkv)), attend(*(x + 1 for x in qkv)))


@pytest.mark.parametrize("name", ["sinks", "doc_start"])
def test_subclasses_in_any_argument_see_the_operator(name, qkv):
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, x):
            return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)

        def __init__(self, x):
            self.x = x

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            functions.append(function)
            unwrap = [x.x if isinstance(x, Wrapper) else x for x in args]
            return function(*unwrap, **(kwargs or {}))

    functions = []
    x = {"sinks": torch.zeros(2), "doc_start": DOC_START.int()}[name]
    flash_attention(*qkv, **{name: x}, impl="triton")
    flash_attention(*qkv, **{name: Wrapper(x)}, impl="triton")
    assert torch.ops.papilio.attn_fwd.default in functions


def test_a_gradient_may_have_any_strides(qkv):
    q, k, v = (x.clone().requires_grad_() for x in qkv)
    out = flash_attention(q, k, v, causal=True, impl="triton")
    stacked = torch.stack([out, *[out.detach()] * 7], -1)  # the gradient's last stride is 8
    weight = torch.randn_like(stacked)
    actual = torch.autograd.grad((stacked * weight).sum(), (q, k, v))
    expected = standard_attention(q, k, v, causal=True)[0]
    expected = torch.autograd.grad((expected * weight[..., 0]).sum(), (q, k, v))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_gradients_with_a_negative_bit(qkv):
    leaves = [x.clone().requires_grad_() for x in qkv]
    out, lse = flash_attention(*leaves, causal=True, return_lse=True, impl="triton")
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = []
    for view in (torch._neg_view, torch.neg):
        douts = view(dout), view(dlse)
        grads.append(torch.autograd.grad((out, lse), leaves, douts, retain_graph=True))
    torch.testing.assert_close(*grads)


def test_a_packed_tensor_and_three_do_not_share_a_decision(qkv):
    packed = torch.stack([qkv[0], *(x.expand(-1, -1, 2, -1) for x in qkv[1:])], 2)
    for _ in range(2):
        out = flash_attention_packed(packed, causal=True, impl="triton")
        torch.testing.assert_close(out, flash_attention(*qkv, causal=True, impl="triton"))


def test_decisions_are_freed_with_their_mask_and_others_are_bounded(qkv, decisions, monkeypatch):
    monkeypatch.setattr(attention, "_MAX_DECISIONS", 3)
    mask = BlockSparseMask(butterfly(3), 16)
    flash_attention(*qkv, mask=mask, impl="triton")
    assert not decisions and len(mask.decisions) == 1
    assert mask not in gc.get_referents(*mask.decisions.values(), *mask.decisions)
    for n in range(1, 8):
        flash_attention(*(x[:, :n] for x in qkv), impl="reference")
        assert 1 <= len(decisions) <= 3
