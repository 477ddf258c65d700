"""Reference attention against PyTorch's, and its dropout against chance."""

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.mask.block_mask import BlockSparseMask
from kernels.reference.standard import dropout_keep_mask, standard_attention, visible_keys
from kernels.testing import make_qkv, relative_error

# fp64: results agree up to rounding, and a wrong term is far larger than this
assert_exact = partial(torch.testing.assert_close, rtol=0, atol=1e-11)


@pytest.mark.parametrize("softmax_scale", [None, 0.3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n_head", "n_kv_head"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(1, 1), (33, 33), (5, 37)])
def test_standard_attention_is_sdpa(
    seq_q: int,
    seq_k: int,
    n_head: int,
    n_kv_head: int,
    causal: bool,
    softmax_scale: float | None,
) -> None:
    q, k, v = make_qkv(
        2, seq_q, seq_k, n_head, n_kv_head, 16, dtype=torch.float64, requires_grad=True
    )
    out, _ = standard_attention(q, k, v, causal=causal, softmax_scale=softmax_scale)
    # an explicit mask: the is_causal of SDPA aligns at the top left
    mask = torch.ones(seq_q, seq_k, dtype=torch.bool).tril(seq_k - seq_q) if causal else None
    expected = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        scale=softmax_scale,
        enable_gqa=True,
    ).transpose(1, 2)
    assert_exact(out, expected)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    expected_grads = torch.autograd.grad(expected, (q, k, v), dout)
    assert_exact(grads, expected_grads)


def test_lse_is_the_logarithm_of_the_summed_exponentials() -> None:
    q, k, v = make_qkv(1, 3, 5, 2, 1, 8, dtype=torch.float64)
    _, lse = standard_attention(q, k, v, causal=True, softmax_scale=0.5)
    for head in range(2):
        for i in range(3):
            visible = k[0, : i + 3, 0]  # T_k - T_q = 2, and self
            expected = (0.5 * visible @ q[0, i, head]).exp().sum().log()
            assert_exact(lse[0, head, i], expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(5, 5), (3, 7), (7, 3)])
def test_visible_keys_match_the_definition(seq_q: int, seq_k: int, causal: bool) -> None:
    doc_start = torch.tensor([[0, 0, 2, 1, 2, 5, 9]])[:, :seq_q].expand(2, -1)
    kv_lengths = torch.tensor([seq_k, 2])
    layout = torch.tensor([[[1]], [[0]], [[1]]], dtype=torch.bool)
    visible = visible_keys(
        seq_q,
        seq_k,
        causal=causal,
        window_size=3,
        mask=BlockSparseMask(layout, 16),
        doc_start=doc_start,
        kv_lengths=kv_lengths,
    )
    assert visible.shape == (2, 3, seq_q, seq_k)
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, visible.shape)).tolist():
        p = i + seq_k - seq_q
        expected = h != 1 and -3 < p - j < 3 and doc_start[b, i] <= j < kv_lengths[b]
        assert visible[b, h, i, j] == (expected and (j <= p or not causal)), (b, h, i, j)


def test_every_mask_hides_keys_from_standard_attention() -> None:
    q, k, v = make_qkv(2, 20, 20, 2, 1, 8, dtype=torch.float64)
    masks: dict[str, Any] = {
        "window_size": 5,
        "mask": BlockSparseMask(torch.tensor([[True, False], [True, True]]), 16),
        "doc_start": (torch.arange(20) // 7 * 7).expand(2, -1),
        "kv_lengths": torch.tensor([20, 15]),
    }
    for name, option in masks.items():
        visible = visible_keys(20, 20, **{name: option})
        assert not visible.all(), name
        out, _ = standard_attention(q, k, v, **{name: option})
        expected = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=visible, enable_gqa=True
        )
        assert_exact(out[:, :15], expected.transpose(1, 2)[:, :15])


def test_a_sink_is_a_key_without_a_value() -> None:
    q, k, v = make_qkv(2, 5, 7, 4, 4, 8, dtype=torch.float64)
    sinks = torch.tensor([0.5, -3.0, 40.0, 0.0], dtype=torch.float64)
    # in one more dimension, each query gets the score of its head's sink
    q_sink = torch.cat((q, sinks[None, None, :, None].expand(2, 5, 4, 1)), dim=-1)
    k_sink = F.pad(F.pad(k, (0, 1)), (0, 0, 0, 0, 0, 1))
    k_sink[:, -1, :, -1] = 1 / 0.3
    v_sink = F.pad(v, (0, 1, 0, 0, 0, 1))
    expected, expected_lse = standard_attention(q_sink, k_sink, v_sink, softmax_scale=0.3)
    out, lse = standard_attention(q, k, v, softmax_scale=0.3, sinks=sinks)
    assert_exact((out, lse), (expected[..., :-1], expected_lse))
    # a row without keys has only the sink
    out, lse = standard_attention(q, k[:, :1], v[:, :1], causal=True, sinks=sinks)
    assert (out[:, :4] == 0).all()
    assert_exact(lse[..., :4], sinks[:, None].expand(2, 4, 4))


def test_a_softcap_bends_the_scores() -> None:
    q, k, _ = make_qkv(1, 5, 6, 1, 1, 8, dtype=torch.float64, scale=3.0)
    _, lse = standard_attention(q, k, k, softmax_scale=0.5, softcap=2.0)
    scores = 2.0 * torch.tanh(0.5 * q[0, :, 0] @ k[0, :, 0].T / 2.0)
    assert_exact(lse[0, 0], scores.exp().sum(-1).log())


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("causal", [False, True])
def test_standard_attention_gradcheck(causal: bool, dropout_p: float) -> None:
    qkv = make_qkv(1, 3, 5, 4, 2, 4, dtype=torch.float64, requires_grad=True)

    def both_results(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return standard_attention(q, k, v, causal=causal, dropout_p=dropout_p, dropout_seed=11)

    assert torch.autograd.gradcheck(both_results, qkv)


def test_standard_attention_gradcheck_with_all_options() -> None:
    qkv = make_qkv(2, 3, 5, 2, 1, 4, dtype=torch.float64, requires_grad=True)
    sinks = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)

    def both_results(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        return standard_attention(
            q,
            k,
            v,
            causal=True,
            window_size=3,
            doc_start=torch.tensor([[0, 3, 3]]).expand(2, -1),
            kv_lengths=torch.tensor([5, 0]),
            sinks=sinks,
            softcap=1.5,
            dropout_p=0.3,
            dropout_seed=11,
        )

    assert torch.autograd.gradcheck(both_results, (*qkv, sinks))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rows_without_keys_are_zero(dtype: torch.dtype) -> None:
    q, k, v = make_qkv(2, 7, 3, 4, 2, 8, dtype=dtype, requires_grad=True)
    out, lse = standard_attention(q, k, v, causal=True)
    n_empty = 7 - 3
    assert (out[:, :n_empty] == 0).all()
    assert (lse[:, :, :n_empty] == -math.inf).all()
    assert lse[:, :, n_empty:].isfinite().all()
    # the first row with a key has only that key
    assert torch.equal(out[:, n_empty], v[:, 0].repeat_interleave(2, dim=1))

    dq, dk, dv = torch.autograd.grad(
        (out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse))
    )
    assert (dq[:, :n_empty] == 0).all()
    assert all(x.isfinite().all() and x.any() for x in (dq, dk, dv))
    # rows without keys do not change the others
    q_seeing = q[:, n_empty:].detach().requires_grad_()
    out, lse = standard_attention(q_seeing, k, v, causal=True)
    alone = torch.autograd.grad(
        (out, lse), (q_seeing, k, v), (torch.ones_like(out), torch.ones_like(lse))
    )
    torch.testing.assert_close((dq[:, n_empty:], dk, dv), alone)


def test_no_keys_at_all() -> None:
    q, k, v = make_qkv(1, 4, 0, 2, 1, 8, dtype=torch.float64)
    out, lse = standard_attention(q, k, v)
    assert torch.equal(out, torch.zeros_like(q))
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_shapes(dtype: torch.dtype) -> None:
    out, lse = standard_attention(*make_qkv(2, 5, 9, 4, 2, 8, dtype=dtype))
    assert (out.shape, out.dtype) == ((2, 5, 4, 8), dtype)
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    assert (lse.shape, lse.dtype) == ((2, 4, 5), lse_dtype)


def test_mismatched_inputs_are_refused() -> None:
    q, k, v = make_qkv(2, 5, 9, 4, 2, 8)
    with pytest.raises(ValueError, match="H_kv dividing 4"):
        standard_attention(q, *make_qkv(2, 5, 9, 4, 3, 8)[1:])
    with pytest.raises(ValueError, match="one shape"):
        standard_attention(q, k, v[:, :-1])
    with pytest.raises(ValueError, match="dropout_seed"):
        standard_attention(q, k, v, dropout_p=0.1)


@pytest.mark.parametrize("causal", [False, True])
def test_large_logits_stay_finite(causal: bool) -> None:
    # scores of several thousand: exp of one overflows even fp64, and most of P underflows
    qkv = make_qkv(1, 33, 33, 2, 2, 8, dtype=torch.float32, scale=50.0, requires_grad=True)
    expected_out, expected_lse = standard_attention(*(x.double() for x in qkv), causal=causal)
    assert expected_lse.max() > 1000
    out, lse = standard_attention(*qkv, causal=causal)
    # fp32 scores of 10^4 are off by 10^-3, and so is their softmax
    assert relative_error(out, expected_out) < 1e-3
    assert relative_error(lse, expected_lse) < 1e-6
    grads = torch.autograd.grad(out, qkv, torch.ones_like(out))
    assert all(grad.isfinite().all() for grad in grads)


def keep_mask(seed: int | Tensor, **changes: Any) -> Tensor:
    sizes = {"batch": 2, "n_head": 3, "seq_q": 128, "seq_k": 160, "dropout_p": 0.25}
    return dropout_keep_mask(seed, **(sizes | changes))


def assert_independent(a: Tensor, b: Tensor, label: str) -> None:
    """Assert that correlations along the last dimension are as small as those of fair coins."""
    a, b = a.double(), b.double()
    a = a - a.mean(dim=-1, keepdim=True)
    b = b - b.mean(dim=-1, keepdim=True)
    z = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1)) * math.sqrt(a.shape[-1])
    assert z.abs().max() < 5.5, f"{label}: {z.abs().max():.1f} standard deviations"
    # the z of n independent pairs have variance 1, up to sqrt(2 / n)
    n = z.numel()
    if n > 30:
        assert abs(z.square().mean() - 1) < 5 * math.sqrt(2 / n), f"{label}: z are not normal"


def test_dropout_mask_is_the_documented_function() -> None:
    def stir(x: int) -> int:
        return (x ^ x >> 16) * 0x7FEB352D % 2**32

    def mix(x: int) -> int:
        x = stir(x)
        x = (x ^ x >> 15) * 0x846CA68B % 2**32
        return x ^ x >> 16

    def keeps(seed: int, head_index: int, query: int, key: int, dropout_p: float) -> bool:
        seed_key = mix(seed % 2**32) ^ mix((seed >> 32) ^ 0x85EBCA6B)
        head_key = mix((seed_key + 0x9E3779B9 * head_index) % 2**32)
        multipliers = ((0x846CA68B, 0x915F77F5), (0x93D765DD, 0xADB4A92D))
        multiplier = multipliers[query // 8 % 2][key // 8 % 2]
        row_key = stir((head_key + 0x9E3779B9 * (query & ~8)) % 2**32)
        x = stir(row_key ^ 0x9E3779B9 * (key & ~8) % 2**32)
        return (x ^ x >> 15) * multiplier % 2**32 >= int(dropout_p * 2**32)

    for seed in (0, 1, 2**32 - 1, 2**32, 0xDEADBEEF12345678 >> 1, 2**63 - 1):
        keep = keep_mask(seed, seq_q=13, seq_k=26, dropout_p=0.4)
        for b, h, i, j in torch.cartesian_prod(*map(torch.arange, keep.shape)).tolist():
            assert keep[b, h, i, j] == keeps(seed, b * 3 + h, i, j, 0.4), (seed, b, h, i, j)


@pytest.mark.parametrize("dropout_p", [0.0, 0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, 2**40 + 7])
def test_dropout_keep_rate(seed: int, dropout_p: float) -> None:
    keep = keep_mask(seed, dropout_p=dropout_p).double()
    if dropout_p == 0:
        assert keep.all()
        return
    for dims in ((0, 1, 2, 3), (2, 3), (3,), (2,)):  # in all, per head, per row, per column
        rates = keep.mean(dim=dims)
        n = keep.numel() // rates.numel()
        sigma = math.sqrt(dropout_p * (1 - dropout_p) / n)
        # a binomial tail of small n is longer than the normal one
        allowed = 5.5 * sigma + 2 / n
        assert (rates - (1 - dropout_p)).abs().max() < allowed, dims


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**33 + 1])
def test_dropout_is_independent(seed: int) -> None:
    keep = keep_mask(seed)
    rows = keep.flatten(0, 2)  # (B * H * T_q, T_k)
    columns = keep.mT.flatten(0, 2)
    heads = keep.flatten(0, 1).flatten(1)  # (B * H, T_q * T_k)
    for step in (1, 2, 8, 16, 64):
        assert_independent(rows[step:], rows[:-step], f"rows {step} apart")
        assert_independent(columns[step:], columns[:-step], f"columns {step} apart")
    for step in (1, 3):  # the next head; the same head of the next sample
        assert_independent(heads[step:], heads[:-step], f"heads {step} apart")
    for other in (seed + 1, seed ^ 2**31, seed ^ 2**32):
        other_heads = keep_mask(other).flatten(0, 1).flatten(1)
        assert_independent(heads, other_heads, f"seeds {seed} and {other}")
        # head 0 of one seed must not equal another head of a neighboring seed
        assert_independent(heads[1:], other_heads[:-1], f"seeds {seed} and {other}, next head")


@pytest.mark.parametrize("dropout_p", [0.02, 0.1, 0.5])
def test_elements_that_share_a_hash_are_independent(dropout_p: float) -> None:
    """Four elements whose query and key differ only in bit 3 are dropped independently."""
    dropped = ~keep_mask(9, batch=4, n_head=8, seq_q=256, seq_k=512, dropout_p=dropout_p)
    # (query bit 3, key bit 3, group)
    groups = dropped.view(32, 16, 2, 8, 32, 2, 8).permute(2, 5, 0, 1, 3, 4, 6).flatten(2)
    elements = groups.flatten(0, 1)
    n = elements.shape[1]
    for size in (1, 2, 3, 4):
        for subset in itertools.combinations(elements, size):
            count = int(torch.stack(subset).all(0).sum())
            expected = n * dropout_p**size
            # a Poisson tail of small counts is longer than the normal one
            assert abs(count - expected) < 5 * math.sqrt(expected) + 5, size


def test_dropout_mask_does_not_depend_on_the_lengths() -> None:
    whole = keep_mask(5)
    assert torch.equal(whole, keep_mask(5))
    assert torch.equal(whole, keep_mask(torch.tensor([5])))
    assert torch.equal(whole[:1, :, :50, :70], keep_mask(5, batch=1, seq_q=50, seq_k=70))
    # elements dropped at a low rate are also dropped at a higher one
    assert not (keep_mask(5, dropout_p=0.5) & ~whole).any()


def test_dropout_refuses_bad_arguments() -> None:
    for seed in (-1, 2**63):
        with pytest.raises(ValueError, match="seed"):
            keep_mask(seed)
    for dropout_p in (-0.1, 1.0):
        with pytest.raises(ValueError, match="dropout_p"):
            keep_mask(0, dropout_p=dropout_p)


def test_dropout_drops_after_the_normalization() -> None:
    q, k, _ = make_qkv(2, 6, 9, 4, 2, 8, dtype=torch.float64)
    # if v holds the unit vectors, out is the matrix of probabilities after dropout
    v = torch.eye(9, 8, dtype=torch.float64).view(1, 9, 1, 8).expand(2, 9, 2, 8)
    p, lse = standard_attention(q, k, v)
    dropped, lse_dropped = standard_attention(q, k, v, dropout_p=0.4, dropout_seed=3)
    keep = keep_mask(3, batch=2, n_head=4, seq_q=6, seq_k=9, dropout_p=0.4)
    assert_exact(dropped, p * keep[..., :8].transpose(1, 2) / 0.6)
    assert_exact(lse_dropped, lse)


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_repeats_and_depends_on_the_seed(causal: bool) -> None:
    qkv = make_qkv(2, 37, 43, 4, 2, 8, dtype=torch.float64)
    out, again, other = (
        standard_attention(*qkv, causal=causal, dropout_p=0.3, dropout_seed=seed)[0]
        for seed in (2**35 + 9, 2**35 + 9, 1)
    )
    assert torch.equal(out, again)
    assert relative_error(other, out) > 0.1
