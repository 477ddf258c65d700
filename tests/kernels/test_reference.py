"""The oracles against PyTorch, against each other, and against the error budget that uses them."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.reference import dropout_keep_mask, standard_attention
from kernels.reference_tiled import (
    flash_attention_1_backward,
    flash_attention_1_forward,
    flash_attention_2_backward,
    flash_attention_2_forward,
)
from kernels.testing import (
    assert_within_budget,
    check_attention,
    make_qkv,
    poison_empty,
    relative_error,
)

# fp64 throughout: the oracles must agree to rounding, and a wrong term is far larger than this
ATOL = 1e-11
# (T_q, T_k): one token, T below, at and beside powers of two, either side longer, rows with no key
LENGTHS = [(1, 1), (7, 7), (63, 63), (65, 65), (127, 127), (7, 65), (65, 7), (1, 63), (63, 1)]


def assert_close(actual: Tensor, expected: Tensor, name: str) -> None:
    def message(default: str) -> str:
        return f"{name}: {default}"

    torch.testing.assert_close(actual, expected, rtol=0, atol=ATOL, msg=message)


def random_grads(out: Tensor, lse: Tensor, *, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dout = torch.randn(out.shape, generator=generator, dtype=out.dtype)
    return dout, torch.randn(lse.shape, generator=generator, dtype=lse.dtype)


def autograd_gradients(
    q: Tensor, k: Tensor, v: Tensor, *, dout: Tensor, dlse: Tensor | None, **options: Any
) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = standard_attention(*leaves, **options)
    if dlse is None:
        return torch.autograd.grad(out, leaves, dout)
    return torch.autograd.grad((out, lse), leaves, (dout, dlse))


def check_flash_attention_1(
    q: Tensor, k: Tensor, v: Tensor, *, sram_floats: int, **options: Any
) -> None:
    expected_out, expected_lse = standard_attention(q, k, v, **options)
    dout, _ = random_grads(expected_out, expected_lse, seed=1)
    out, lse = flash_attention_1_forward(q, k, v, sram_floats=sram_floats, **options)
    grads = flash_attention_1_backward(q, k, v, out, lse, dout, sram_floats=sram_floats, **options)
    assert_close(out, expected_out, "out")
    assert_close(lse, expected_lse, "lse")
    expected_grads = autograd_gradients(q, k, v, dout=dout, dlse=None, **options)
    for name, grad, expected in zip(("dq", "dk", "dv"), grads, expected_grads, strict=True):
        assert_close(grad, expected, name)


def check_flash_attention_2(
    q: Tensor, k: Tensor, v: Tensor, *, block_m: int, block_n: int, **options: Any
) -> None:
    tiles = {"block_m": block_m, "block_n": block_n}
    expected_out, expected_lse = standard_attention(q, k, v, **options)
    out, lse = flash_attention_2_forward(q, k, v, **tiles, **options)
    assert_close(out, expected_out, "out")
    assert_close(lse, expected_lse, "lse")
    dout, random_dlse = random_grads(out, lse, seed=1)
    for dlse in (None, random_dlse):
        grads = flash_attention_2_backward(q, k, v, out, lse, dout, dlse=dlse, **tiles, **options)
        expected_grads = autograd_gradients(q, k, v, dout=dout, dlse=dlse, **options)
        for name, grad, expected in zip(("dq", "dk", "dv"), grads, expected_grads, strict=True):
            assert_close(grad, expected, name)


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
    assert_close(out, expected, "out")
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    expected_grads = torch.autograd.grad(expected, (q, k, v), dout)
    for name, grad, expected_grad in zip(("dq", "dk", "dv"), grads, expected_grads, strict=True):
        assert_close(grad, expected_grad, name)


def test_lse_is_the_logarithm_of_the_summed_exponentials() -> None:
    q, k, v = make_qkv(1, 3, 5, 2, 1, 8, dtype=torch.float64)
    _, lse = standard_attention(q, k, v, causal=True, softmax_scale=0.5)
    for head in range(2):
        for i in range(3):
            visible = k[0, : i + 3, 0]  # T_k - T_q = 2, and self
            expected = (0.5 * visible @ q[0, i, head]).exp().sum().log()
            assert_close(lse[0, head, i], expected, f"lse of head {head}, query {i}")


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("causal", [False, True])
def test_standard_attention_gradcheck(causal: bool, dropout_p: float) -> None:
    qkv = make_qkv(1, 3, 5, 4, 2, 4, dtype=torch.float64, requires_grad=True)

    def both_results(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return standard_attention(q, k, v, causal=causal, dropout_p=dropout_p, dropout_seed=11)

    assert torch.autograd.gradcheck(both_results, qkv)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rows_without_keys_are_zero(dtype: torch.dtype) -> None:
    q, k, v = make_qkv(2, 7, 3, 4, 2, 8, dtype=dtype, requires_grad=True)
    out, lse = standard_attention(q, k, v, causal=True)
    blind = 7 - 3
    assert (out[:, :blind] == 0).all()
    assert (lse[:, :, :blind] == -math.inf).all()
    assert lse[:, :, blind:].isfinite().all()
    # the first row with a key has only that key
    assert torch.equal(out[:, blind], v[:, 0].repeat_interleave(2, dim=1))

    dq, dk, dv = torch.autograd.grad(
        (out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse))
    )
    assert (dq[:, :blind] == 0).all()
    assert all(x.isfinite().all() and x.any() for x in (dq, dk, dv))
    # and the blind rows change nothing for the others
    q_seeing = q[:, blind:].detach().requires_grad_()
    out, lse = standard_attention(q_seeing, k, v, causal=True)
    alone = torch.autograd.grad(
        (out, lse), (q_seeing, k, v), (torch.ones_like(out), torch.ones_like(lse))
    )
    for name, grad, expected in zip(
        ("dq", "dk", "dv"), (dq[:, blind:], dk, dv), alone, strict=True
    ):
        torch.testing.assert_close(grad, expected, msg=lambda text, name=name: f"{name}: {text}")


def test_no_keys_at_all() -> None:
    q, k, v = make_qkv(1, 4, 0, 2, 1, 8, dtype=torch.float64)
    for out, lse in (
        standard_attention(q, k, v),
        flash_attention_1_forward(q, k, v, sram_floats=64),
        flash_attention_2_forward(q, k, v, block_m=2, block_n=2),
    ):
        assert torch.equal(out, torch.zeros_like(q))
        assert (lse == -math.inf).all()


@pytest.mark.parametrize(
    ("dtype", "lse_dtype"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_dtypes_and_shapes(dtype: torch.dtype, lse_dtype: torch.dtype) -> None:
    q, k, v = make_qkv(2, 5, 9, 4, 2, 8, dtype=dtype)
    for out, lse in (
        standard_attention(q, k, v),
        flash_attention_1_forward(q, k, v, sram_floats=64),
        flash_attention_2_forward(q, k, v, block_m=2, block_n=4),
    ):
        assert (out.shape, out.dtype) == ((2, 5, 4, 8), dtype)
        assert (lse.shape, lse.dtype) == ((2, 4, 5), lse_dtype)
    dout = torch.ones_like(out)
    for grads in (
        flash_attention_1_backward(q, k, v, out, lse, dout, sram_floats=64),
        flash_attention_2_backward(q, k, v, out, lse, dout, block_m=2, block_n=4),
    ):
        for grad, x in zip(grads, (q, k, v), strict=True):
            assert (grad.shape, grad.dtype) == (x.shape, dtype)


def test_misfits_are_refused() -> None:
    q, k, v = make_qkv(2, 5, 9, 4, 2, 8)
    with pytest.raises(ValueError, match="H_kv dividing 4"):
        standard_attention(q, *make_qkv(2, 5, 9, 4, 3, 8)[1:])
    with pytest.raises(ValueError, match="one shape"):
        standard_attention(q, k, v[:, :-1])
    with pytest.raises(ValueError, match="one shape"):
        flash_attention_2_forward(q, k[..., :4], v[..., :4], block_m=4, block_n=4)
    with pytest.raises(ValueError, match="dropout_seed"):
        standard_attention(q, k, v, dropout_p=0.1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sram_floats", [90, 150, 700])  # B_c = 3, 5, 22; B_r = 3, 5, 8
@pytest.mark.parametrize(("seq_q", "seq_k"), LENGTHS)
def test_flash_attention_1_is_standard_attention(
    seq_q: int, seq_k: int, sram_floats: int, causal: bool
) -> None:
    qkv = make_qkv(2, seq_q, seq_k, 4, 2, 8, dtype=torch.float64)
    check_flash_attention_1(*qkv, sram_floats=sram_floats, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("block_m", "block_n"), [(3, 4), (16, 5), (7, 16), (128, 128)])
@pytest.mark.parametrize(("seq_q", "seq_k"), LENGTHS)
def test_flash_attention_2_is_standard_attention(
    seq_q: int, seq_k: int, block_m: int, block_n: int, causal: bool
) -> None:
    qkv = make_qkv(2, seq_q, seq_k, 4, 2, 8, dtype=torch.float64)
    check_flash_attention_2(*qkv, block_m=block_m, block_n=block_n, causal=causal)


SHAPES = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 2),
        "seq_q": st.integers(1, 40),
        "seq_k": st.integers(1, 40),
        "n_kv_head": st.integers(1, 2),
        "head_dim": st.integers(1, 9),
        "seed": st.integers(0, 2**32),
    }
)
OPTIONS = st.fixed_dictionaries(
    {
        "causal": st.booleans(),
        "softmax_scale": st.none() | st.floats(0.01, 3),
        "dropout_p": st.sampled_from([0.0, 0.2, 0.9]),
        "dropout_seed": st.integers(0, 2**63 - 1),
    }
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    shape=SHAPES,
    options=OPTIONS,
    group=st.integers(1, 3),
    sram_floats=st.integers(20, 400),
    block_m=st.integers(1, 20),
    block_n=st.integers(1, 20),
)
def test_oracles_agree_on_any_shape(
    shape: dict[str, Any],
    options: dict[str, Any],
    group: int,
    sram_floats: int,
    block_m: int,
    block_n: int,
) -> None:
    qkv = make_qkv(**shape, n_head=group * shape["n_kv_head"], dtype=torch.float64)
    check_flash_attention_1(*qkv, sram_floats=sram_floats, **options)
    check_flash_attention_2(*qkv, block_m=block_m, block_n=block_n, **options)


@pytest.mark.parametrize("causal", [False, True])
def test_oracles_share_one_dropout(causal: bool) -> None:
    qkv = make_qkv(2, 37, 43, 4, 2, 8, dtype=torch.float64)
    options: dict[str, Any] = {"causal": causal, "dropout_p": 0.3, "dropout_seed": 2**35 + 9}
    check_flash_attention_1(*qkv, sram_floats=150, **options)
    check_flash_attention_2(*qkv, block_m=16, block_n=5, **options)
    out, _ = standard_attention(*qkv, **options)
    assert torch.equal(out, standard_attention(*qkv, **options)[0])
    options["dropout_seed"] = 1
    other, _ = standard_attention(*qkv, **options)
    assert relative_error(other, out) > 0.1


@pytest.mark.parametrize("causal", [False, True])
def test_large_logits_stay_finite(causal: bool) -> None:
    # scores of several thousand: exp of one overflows even fp64, and most of P underflows
    q, k, v = make_qkv(1, 33, 33, 2, 2, 8, dtype=torch.float32, scale=50.0)
    expected_out, expected_lse = standard_attention(
        q.double(), k.double(), v.double(), causal=causal
    )
    assert expected_lse.max() > 1000
    dout = torch.ones_like(q)
    for out, lse in (
        standard_attention(q, k, v, causal=causal),
        flash_attention_1_forward(q, k, v, sram_floats=100, causal=causal),
        flash_attention_2_forward(q, k, v, block_m=8, block_n=5, causal=causal),
    ):
        # fp32 scores of 10^4 are off by 10^-3, and so is their softmax
        assert relative_error(out, expected_out) < 1e-3
        assert relative_error(lse, expected_lse) < 1e-6
        for grads in (
            flash_attention_1_backward(q, k, v, out, lse, dout, sram_floats=100, causal=causal),
            flash_attention_2_backward(
                q, k, v, out, lse, dout, block_m=8, block_n=5, causal=causal
            ),
            autograd_gradients(q, k, v, dout=dout, dlse=None, causal=causal),
        ):
            assert all(grad.isfinite().all() for grad in grads)


def keep_mask(seed: int | Tensor, **changes: Any) -> Tensor:
    sizes = {"batch": 2, "n_head": 3, "seq_q": 128, "seq_k": 160, "dropout_p": 0.25}
    return dropout_keep_mask(seed, **(sizes | changes))


def assert_independent(a: Tensor, b: Tensor, what: str) -> None:
    """Correlations along the last dimension, as far from 0 as those of fair coins may be."""
    a, b = a.double(), b.double()
    a = a - a.mean(dim=-1, keepdim=True)
    b = b - b.mean(dim=-1, keepdim=True)
    z = (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1)) * math.sqrt(a.shape[-1])
    assert z.abs().max() < 5.5, f"{what}: {z.abs().max():.1f} standard deviations"
    # the z of n independent pairs have variance 1, up to sqrt(2 / n)
    n = z.numel()
    if n > 30:
        assert abs(z.square().mean() - 1) < 5 * math.sqrt(2 / n), f"{what}: z are not normal"


def test_dropout_mask_is_the_documented_function() -> None:
    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    def keeps(seed: int, head_index: int, query: int, key: int, dropout_p: float) -> bool:
        seed_key = mix(seed % 2**32) ^ mix((seed >> 32) ^ 0x85EBCA6B)
        head_key = mix((seed_key + 0x9E3779B9 * head_index) % 2**32)
        row_key = mix((head_key + 0x9E3779B9 * query) % 2**32)
        col_key = mix((0x85EBCA6B + 0x9E3779B9 * key) % 2**32)
        return mix(row_key ^ col_key) >= int(dropout_p * 2**32)

    for seed in (0, 1, 2**32 - 1, 2**32, 0xDEADBEEF12345678 >> 1, 2**63 - 1):
        keep = keep_mask(seed, seq_q=5, seq_k=7, dropout_p=0.4)
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
    for step in (1, 2, 64):
        assert_independent(rows[step:], rows[:-step], f"rows {step} apart")
        assert_independent(columns[step:], columns[:-step], f"columns {step} apart")
    for step in (1, 3):  # the next head; the same head of the next sample
        assert_independent(heads[step:], heads[:-step], f"heads {step} apart")
    for other in (seed + 1, seed ^ 2**31, seed ^ 2**32):
        other_heads = keep_mask(other).flatten(0, 1).flatten(1)
        assert_independent(heads, other_heads, f"seeds {seed} and {other}")
        # nor does one seed's head 0 turn up as another head of a neighbouring seed
        assert_independent(heads[1:], other_heads[:-1], f"seeds {seed} and {other}, next head")


def test_dropout_mask_does_not_depend_on_the_lengths() -> None:
    whole = keep_mask(5)
    assert torch.equal(whole, keep_mask(5))
    assert torch.equal(whole, keep_mask(torch.tensor([5])))
    assert torch.equal(whole[:1, :, :50, :70], keep_mask(5, batch=1, seq_q=50, seq_k=70))
    # what is dropped at a low rate is dropped at a higher one
    assert not (keep_mask(5, dropout_p=0.5) & ~whole).any()


def test_dropout_refuses_bad_arguments() -> None:
    for seed in (-1, 2**63):
        with pytest.raises(ValueError, match="seed"):
            keep_mask(seed)
    for dropout_p in (-0.1, 1.0):
        with pytest.raises(ValueError, match="dropout_p"):
            keep_mask(0, dropout_p=dropout_p)


def test_dropout_drops_after_the_normalisation() -> None:
    q, k, _ = make_qkv(2, 6, 9, 4, 2, 8, dtype=torch.float64)
    # with v the unit vectors, out is the dropped matrix of probabilities itself
    v = torch.eye(9, 8, dtype=torch.float64).view(1, 9, 1, 8).expand(2, 9, 2, 8)
    p, lse = standard_attention(q, k, v)
    dropped, lse_dropped = standard_attention(q, k, v, dropout_p=0.4, dropout_seed=3)
    keep = keep_mask(3, batch=2, n_head=4, seq_q=6, seq_k=9, dropout_p=0.4)
    assert_close(dropped, p * keep[..., :8].transpose(1, 2) / 0.6, "dropped probabilities")
    assert_close(lse_dropped, lse, "lse")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(1, 1), (65, 1), (63, 65), (65, 63)])
@pytest.mark.parametrize("causal", [False, True])
def test_tiled_oracle_is_within_budget(
    seq_q: int, seq_k: int, causal: bool, dtype: torch.dtype
) -> None:
    q, k, v = make_qkv(2, seq_q, seq_k, 4, 2, 32, dtype=dtype)
    errors = check_attention(_FlashAttention2.call, q, k, v, causal=causal, with_dlse=True)
    assert set(errors) >= {"out", "lse", "dq", "dk", "dv"}
    assert errors["dv"] < 10 * torch.finfo(dtype).eps


class _FlashAttention2(torch.autograd.Function):
    """The second oracle as `check_attention` wants its functions, with faults to put in."""

    fault = ""

    @staticmethod
    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return _FlashAttention2.apply(q, k, v, options)  # type: ignore[return-value]

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        out, lse = flash_attention_2_forward(q, k, v, block_m=16, block_n=16, **options)
        fault = _FlashAttention2.fault
        if fault == "out one row":
            out[0, -1, 0] *= 1.1
        if fault == "lse in base 2":
            lse = lse / math.log(2)
        if fault == "lse in bf16":
            lse = lse.bfloat16().float()
        if fault == "NaN":
            out[0, 0, 0, 0] = math.nan
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dout, dlse = grads
        q, k, v, out, lse = ctx.saved_tensors
        if _FlashAttention2.fault == "no dlse":
            dlse = torch.zeros_like(dlse)
        dq, dk, dv = flash_attention_2_backward(
            q, k, v, out, lse, dout, dlse=dlse, block_m=16, block_n=16, **ctx.options
        )
        if _FlashAttention2.fault == "dk one tile":
            dk[:, -1:] = 0
        return dq, dk, dv, None


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("out one row", "out"),
        ("lse in base 2", "lse"),
        ("lse in bf16", "lse"),
        ("NaN", "out"),
        ("no dlse", "dq"),
        ("dk one tile", "dk"),
    ],
)
def test_budget_finds_faults(monkeypatch: pytest.MonkeyPatch, fault: str, name: str) -> None:
    monkeypatch.setattr(_FlashAttention2, "fault", fault)
    q, k, v = make_qkv(2, 65, 65, 4, 2, 32, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match=rf"^{name}: max error \S+ exceeds the budget"):
        check_attention(_FlashAttention2.call, q, k, v, with_dlse=True)


def test_budget_message_and_infinities() -> None:
    exact = torch.tensor([1.0, -math.inf], dtype=torch.float64)
    half = torch.tensor([1.01, -math.inf], dtype=torch.float16)
    assert_within_budget(half, half, exact, factor=1.0, name="lse")
    for wrong in ([1.1, -math.inf], [1.0, 0.0], [1.0, math.nan], [1.0, math.inf]):
        with pytest.raises(AssertionError, match="lse: max error"):
            assert_within_budget(torch.tensor(wrong).half(), half, exact, factor=2.0, name="lse")
    # a reference that overflowed leaves no budget, rather than an infinite one
    overflown = torch.tensor([math.inf, -math.inf])
    with pytest.raises(AssertionError, match="budget inf"):
        assert_within_budget(half, overflown, exact, factor=2.0, name="lse")
    with pytest.raises(AssertionError, match="shape"):
        assert_within_budget(half[:1], half, exact, factor=2.0, name="lse")


def test_relative_error() -> None:
    exact = torch.tensor([3.0, 4.0, -math.inf])
    assert relative_error(exact, exact) == 0
    assert relative_error(torch.tensor([3.0, 4.5, -math.inf]), exact) == pytest.approx(0.1)
    assert math.isnan(relative_error(torch.tensor([3.0, math.nan, -math.inf]), exact))
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(torch.ones(2), torch.zeros(2)) == math.inf


def test_poison_empty() -> None:
    x = torch.ones(3, dtype=torch.bfloat16)
    with poison_empty():
        for poisoned in (
            torch.empty(2, 3),
            torch.empty(3, requires_grad=True),
            torch.empty_like(x),
            torch.empty_strided((2, 2), (1, 2)),
            x.new_empty(4),
        ):
            assert poisoned.isnan().all()
        assert torch.empty(3, dtype=torch.int32).shape == (3,)
    assert "new_empty" not in vars(torch.Tensor)


def test_make_qkv_is_the_same_in_every_dtype() -> None:
    exact = make_qkv(2, 3, 5, 4, 2, 8, dtype=torch.float64, seed=3, scale=2.0)
    rounded = make_qkv(2, 3, 5, 4, 2, 8, dtype=torch.bfloat16, seed=3, scale=2.0)
    for x, y in zip(exact, rounded, strict=True):
        assert torch.equal(x.bfloat16(), y)
    assert not torch.equal(exact[0], make_qkv(2, 3, 5, 4, 2, 8, dtype=torch.float64, seed=4)[0])
