"""Options of `flash_attention`, one at a time and several at once.

Compared with standard attention, as in test_attention.py. test_sparse.py has block-sparse masks.
"""

import itertools
import math
from functools import partial

import pytest
import torch

from kernels import flash_attention
from kernels.reference.standard import dropout_keep_mask, standard_attention, visible_keys
from kernels.testing import check_attention, make_qkv
from tests.kernels.grids import CAUSAL_OR_FULL, each_of, each_pair, each_value, on_gpu
from tests.kernels.implementations import IMPLS

triton_attention = partial(flash_attention, impl="triton", return_lse=True)
TOLERANCE = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
}
assert_close = partial(torch.testing.assert_close, **TOLERANCE[torch.float32])

pytestmark = pytest.mark.usefixtures("copy_engines")
# one token, an odd length, and more queries or more keys, so that some rows or columns see nothing
SLOPES = torch.tensor([0.5, 0.25, 0.03, 0.0])
LENGTHS = [(1, 65), (70, 70), (33, 100), (100, 33)]


def packed(*lengths, repeat=1):
    """doc_start of documents of these lengths, one after the other: (repeat, T)."""
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    return starts.repeat_interleave(torch.tensor(lengths)).int().repeat(repeat, 1)


# All combinations: whether a bound falls on the edge of a tile depends on all three.
@each_value(window=list(itertools.product(CAUSAL_OR_FULL, [1, 2, 33, 10**6], LENGTHS)))
def test_window(check, window, dtype):
    causal, window_size, lengths = window
    check(1, *lengths, 2, 1, 16, dtype, causal=causal, window_size=window_size)


DOCUMENTS = {
    "one": packed(70),
    "cut inside of tiles": packed(5, 1, 27, 37),
    "one token each": packed(*[1] * 70),
    "from the last key of a tile": torch.cat((packed(31, 39), packed(63, 7))),
    "other ones in each sample": torch.cat((packed(30, 40), packed(1, 68, 1))),
    "int64": packed(5, 28, 37).long(),
    "expanded": packed(64, 6).expand(2, 70),
    "transposed": packed(16, 54, repeat=2).T.contiguous().T,
    "in no order": torch.randint(
        0, 70, (1, 70), generator=torch.Generator().manual_seed(0), dtype=torch.int32
    ),
    "after the query": packed(30, 40) + 20,
    "after all keys": torch.full((1, 70), 70, dtype=torch.int32),
}


@each_pair(name=list(DOCUMENTS), causal=CAUSAL_OR_FULL)
def test_documents(check, name, causal, dtype):
    doc_start = DOCUMENTS[name]
    check(len(doc_start), 70, 70, 1, 1, 16, dtype, causal=causal, doc_start=doc_start)


@each_pair(lengths=[(33, 100), (100, 33), (1, 65)], causal=CAUSAL_OR_FULL)
def test_documents_start_at_key_positions(check, lengths, causal, dtype):
    # as in autoregressive generation: the last queries of a longer sequence
    seq_q, seq_k = lengths
    longest = max(seq_q, seq_k)
    doc_start = packed(longest // 3, longest - longest // 3)[:, -seq_q:] + seq_k - longest
    check(1, seq_q, seq_k, 2, 1, 16, dtype, causal=causal, doc_start=doc_start)


def test_positions_of_one_row_serve_a_batch():
    q, k, v = make_qkv(3, 40, 40, 2, 1, 16)
    row = {"doc_start": packed(15, 25), "kv_lengths": lengths(35)}
    rows = {"doc_start": packed(15, 25, repeat=3), "kv_lengths": lengths(35, 35, 35)}
    for _ in range(2):  # decided, then cached
        out, expected = (triton_attention(q, k, v, causal=True, **x)[0] for x in (row, rows))
        assert torch.equal(out, expected)


def test_a_packed_document_matches_the_document_alone(device_for, attention, precise):
    q, k, v = make_qkv(1, 100, 100, 2, 1, 16, dtype=precise, device=device_for(precise))
    lengths = (33, 1, 66)
    out, lse = attention(q, k, v, causal=True, doc_start=packed(*lengths).to(q.device))
    documents = zip(*(x.split(lengths, dim=1) for x in (q, k, v, out)), strict=True)
    for (qi, ki, vi, got), got_lse in zip(documents, lse.split(lengths, dim=2), strict=True):
        assert_close((got, got_lse), attention(qi, ki, vi, causal=True), **TOLERANCE[precise])


@each_pair(lengths=LENGTHS, causal=CAUSAL_OR_FULL)
def test_padding(check, lengths, causal, dtype):
    seq_q, seq_k = lengths
    # no key, every key, and all but the last key of a tile
    kv_lengths = torch.tensor([0, seq_k, 31], dtype=torch.int32)
    check(3, seq_q, seq_k, 1, 1, 16, dtype, causal=causal, kv_lengths=kv_lengths)


def test_padding_is_hidden(device_for, attention, precise):
    q, k, v = make_qkv(2, 40, 100, 2, 1, 16, dtype=precise, device=device_for(precise))
    lengths = torch.tensor([37, 64], device=q.device)  # int64
    expected = [attention(q[i : i + 1], k[i : i + 1, :n], v[i : i + 1, :n])
                for i, n in enumerate((37, 64))]  # fmt: skip
    k[0, 37:], k[1, 64:] = 1e4, 1e4
    v[0, 37:], v[1, 64:] = 1e4, 1e4
    out, lse = attention(q, k, v, kv_lengths=lengths)
    for i, alone in enumerate(expected):
        assert_close((out[i : i + 1], lse[i : i + 1]), alone, **TOLERANCE[precise])


# sinks at the level of the scores, above it and below
@each_pair(level=[0.0, 10.0, -10.0], causal=CAUSAL_OR_FULL)
def test_sinks(check, level, causal, dtype):
    check(1, 70, 70, 2, 1, 16, dtype, causal=causal, sinks=torch.randn(2) + level)


@each_value(lengths=[(1, 65), (100, 33)])
def test_sinks_of_rows_without_keys(check, lengths, dtype):
    check(1, *lengths, 2, 2, 16, dtype, causal=True, sinks=torch.randn(2))


@each_value(lengths=[(1, 65), (100, 33)])
def test_a_sink_of_minus_infinity_is_ignored(check, lengths, dtype):
    check(1, *lengths, 2, 2, 16, dtype, causal=True, sinks=torch.tensor([-math.inf, 0.5]))


@pytest.mark.parametrize("attend", [triton_attention, standard_attention])
@pytest.mark.parametrize("lengths", [[0, 0], [0, 5]])
def test_a_sink_of_minus_infinity_has_no_gradient(device_for, attend, lengths):
    device = device_for(torch.float32)
    q, k, v = make_qkv(2, 5, 5, 2, 2, 16, dtype=torch.float32, device=device, requires_grad=True)
    sinks = torch.tensor([-math.inf, 0.5], device=device, requires_grad=True)
    kv_lengths = torch.tensor(lengths, device=device)
    out, lse = attend(q, k, v, sinks=sinks, kv_lengths=kv_lengths)
    loss = out.square().sum() + lse.clamp(min=-100).sum()
    *grads, dsinks = torch.autograd.grad(loss, (q, k, v, sinks))
    assert all(grad.isfinite().all() for grad in grads)
    assert dsinks[0] == 0 and dsinks[1] != 0 and dsinks.isfinite().all()


def test_the_gradient_of_sinks_has_a_gradient(device_for):
    q, k, v = make_qkv(1, 5, 5, 2, 2, 8, dtype=torch.float32, device=device_for(torch.float32))
    sinks = torch.tensor([0.5, -1.0], device=q.device, requires_grad=True)

    def second_derivative(impl):
        out = flash_attention(q, k, v, sinks=sinks, impl=impl)
        first = torch.autograd.grad(out.pow(2).sum(), sinks, create_graph=True)[0]
        return torch.autograd.grad(first.sum(), sinks)[0]

    torch.testing.assert_close(second_derivative("triton"), second_derivative("reference"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_sinks_of_any_dtype(device_for, dtype):
    q, k, v = make_qkv(1, 33, 33, 2, 2, 16, device=device_for(torch.float32))
    sinks = torch.randn(2).to(q.device, dtype).requires_grad_()
    grad, expected = (
        torch.autograd.grad(fn(q, k, v, sinks=sinks)[0].square().sum(), sinks)[0]
        for fn in (triton_attention, standard_attention)
    )
    assert grad.dtype == dtype
    assert_close(grad, expected, rtol=1e-2 if dtype == torch.bfloat16 else 2e-3)


# scale: standard deviation of the scores, far below the cap, around it, or all cut off by it
@each_pair(scale=[1e-2, 1.0, 30.0], softcap=[0.5, 30.0])
def test_softcap(check, softcap, scale, dtype):
    check(1, 70, 70, 2, 1, 16, dtype, causal=True, softcap=softcap, scale=scale)


def test_a_cap_far_above_the_scores(check, precise):
    check(1, 70, 70, 2, 1, 16, precise, softcap=1000.0, scale=1e-2)


# The sign of a distance and its offset depend on the mask and on the lengths.
@each_pair(lengths=LENGTHS, causal=CAUSAL_OR_FULL)
def test_alibi(check, lengths, causal, dtype):
    check(2, *lengths, 4, 2, 16, dtype, causal=causal, alibi_slopes=SLOPES)


def lengths(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


SINKS = torch.tensor([0.5])
# Each option with dropout, and with the others, for T = 70, a batch of 2 and one head.
COMBINATIONS = {
    "nothing": {},
    "window": {"window_size": 20},
    "causal window": {"causal": True, "window_size": 20},
    "documents": {"causal": True, "doc_start": packed(5, 28, 37, repeat=2)},
    "padding": {"kv_lengths": lengths(0, 41)},
    "sinks": {"causal": True, "sinks": SINKS},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": SLOPES[1:2]},
    "window, documents": {"window_size": 9, "doc_start": packed(5, 28, 37, repeat=2)},
    "window, padding": {"window_size": 30, "kv_lengths": lengths(40, 3)},
    "documents, padding": {"doc_start": packed(33, 37, repeat=2), "kv_lengths": lengths(33, 34)},
    "sinks, softcap, padding": {
        "sinks": SINKS, "softcap": 2.0, "kv_lengths": lengths(0, 41),
    },
    "alibi, window, documents, sinks": {
        "causal": True, "window_size": 20, "doc_start": packed(5, 28, 37, repeat=2),
        "alibi_slopes": SLOPES[2:3], "sinks": SINKS, "softmax_scale": 0.1,
    },
    "all": {
        "causal": True, "window_size": 20, "doc_start": packed(5, 28, 37, repeat=2),
        "kv_lengths": lengths(1, 65), "sinks": SINKS, "softcap": 2.0,
        "softmax_scale": 0.4,
    },
}  # fmt: skip


SEVERAL = [name for name in COMBINATIONS if "," in name or name == "all"]


@each_of(
    ["name", "dropout_p", "dtype"],
    # single options without dropout have tests of their own above
    [(name, 0.3, torch.float16) for name in COMBINATIONS]
    + [(name, 0.0, torch.float32) for name in SEVERAL],
    itertools.product(COMBINATIONS, [0.0, 0.3], [torch.bfloat16]),
)
def test_combinations(check, name, dropout_p, dtype):
    options = {**COMBINATIONS[name], "dropout_p": dropout_p, "dropout_seed": 2**40 + 11}
    check(2, 70, 70, 1, 1, 16, dtype, **options)


@each_value(dropout_p=[0.01, 0.5, 0.9])
def test_dropout_of_any_rate(check, dropout_p, dtype):
    check(1, 67, 70, 2, 1, 16, dtype, dropout_p=dropout_p, dropout_seed=2**63 - 1)


@pytest.mark.parametrize("impl", [None, "sdpa", "reference", "eager", *IMPLS])
def test_dropout_without_a_seed_draws_from_the_generator(device_for, impl):
    dtype = torch.float16 if impl == "hopper" else torch.float32
    q, k, v = make_qkv(1, 33, 33, 2, 2, 16, dtype=dtype, device=device_for(dtype))

    def drop(**options):
        return flash_attention(q, k, v, dropout_p=0.5, impl=impl, **options)

    torch.manual_seed(1)
    first = drop()
    assert not torch.equal(drop(), first)
    torch.manual_seed(1)
    assert torch.equal(drop(), first)
    if impl in ("triton", "hopper", "reference"):
        torch.manual_seed(1)
        seed = torch.randint(2**63 - 1, (1,), device=q.device)
        assert torch.equal(drop(dropout_seed=seed), first)


@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("inductor", marks=on_gpu)])
@pytest.mark.parametrize("impl", IMPLS)
def test_a_seed_may_change_before_the_backward_pass(device_for, impl, backend):
    """A captured step may advance its seed in place."""
    dtype = torch.float16 if impl == "hopper" else torch.float32
    q, k, v = make_qkv(1, 33, 33, 2, 2, 16, dtype=dtype, device=device_for(dtype))
    q.requires_grad_()
    seed = torch.tensor([7], device=q.device)

    def attend(added):
        out = flash_attention(q, k, v, dropout_p=0.5, dropout_seed=seed, impl=impl)
        seed.add_(added)
        return out

    def gradient(added_in_attend, added):
        torch.compiler.reset()
        call = torch.compile(attend, backend=backend, fullgraph=True) if backend else attend
        out = call(added_in_attend)
        seed.add_(added)
        return torch.autograd.grad(out.sum(), q)[0]

    expected = gradient(0, 0)
    assert torch.equal(gradient(1, 0), expected)
    seed.sub_(1)
    assert torch.equal(gradient(0, 1), expected)
    assert not torch.equal(gradient(0, 0), expected)


@each_value(dropout_p=[0.0, 0.3])
def test_a_nan_in_a_query_stays_in_its_row_and_reaches_its_keys(
    device_for, attention, dropout_p, dtype
):
    qkv = make_qkv(1, 100, 100, 2, 2, 16, dtype=dtype, device=device_for(dtype), requires_grad=True)
    with torch.no_grad():
        qkv[0][0, 70, 1, 3] = float("nan")
    out, lse = attention(*qkv, causal=True, dropout_p=dropout_p, dropout_seed=0)
    dq, dk, dv = torch.autograd.grad(out.sum(), qkv)
    nan_rows = torch.zeros(1, 100, 2, dtype=torch.bool, device=out.device)
    nan_rows[0, 70, 1] = True
    for row_result in (out, lse.mT[..., None], dq):
        assert torch.equal(row_result.isnan().all(-1), nan_rows)
        assert torch.equal(row_result.isnan().any(-1), nan_rows)
    for key_grad in (dk, dv):
        assert key_grad[0, :71, 1].isnan().all()
        assert key_grad[0, :, 0].isfinite().all()


@pytest.mark.parametrize("name", ["nothing", *SEVERAL])
def test_no_option_changes_what_dropout_keeps(device_for, attention, precise, name):
    q, k, _ = make_qkv(2, 64, 64, 1, 1, 64, dtype=precise, device=device_for(precise))
    options = {
        key: option.to(q.device) if isinstance(option, torch.Tensor) else option
        for key, option in COMBINATIONS[name].items()
    }
    if "doc_start" in options:
        options["doc_start"] = options["doc_start"][:, :64]
    # if v holds the unit vectors, the output is the matrix of probabilities
    v = torch.eye(64, device=q.device, dtype=precise).view(1, 64, 1, 64).repeat(2, 1, 1, 1)
    p, _ = attention(q, k, v, **options, dropout_p=0.4, dropout_seed=7)
    sizes = {"batch": 2, "n_head": 1, "seq_q": 64, "seq_k": 64}
    kept = dropout_keep_mask(7, **sizes, dropout_p=0.4, device=q.device)
    masks = {
        x: options[x]
        for x in options.keys() - {*("sinks", "softcap", "softmax_scale", "alibi_slopes")}
    }
    visible = visible_keys(64, 64, device=q.device, **masks)
    assert torch.equal(p.transpose(1, 2) != 0, kept & visible)


@each_pair(layout=["views of one projection", "odd offset"], name=["window, documents", "all"])
def test_strides_with_options(device_for, attention, name, layout, dtype):
    device = device_for(dtype)
    if layout == "odd offset":
        q, k, v = (torch.randn(2, 70, 1, 24, dtype=dtype, device=device) for _ in range(3))
        q, k, v = q[..., 1:17], k[..., 1:17], v[..., 3:19]
    else:
        q, k, v = torch.randn(2, 70, 3, 1, 16, dtype=dtype, device=device).unbind(2)
    options = {
        key: option.to(device) if isinstance(option, torch.Tensor) else option
        for key, option in COMBINATIONS[name].items()
    }
    check_attention(attention, q, k, v, with_dlse=True, **options)


@pytest.mark.parametrize("impl", ["reference", None])
@pytest.mark.parametrize("name", COMBINATIONS)
def test_implementations_agree_with_options(device_for, impl, name):
    q, k, v = make_qkv(2, 70, 70, 1, 1, 16, device=device_for(torch.float32))
    options = {
        key: option.to(q.device) if isinstance(option, torch.Tensor) else option
        for key, option in COMBINATIONS[name].items()
    }
    expected = standard_attention(q, k, v, **options)[0]
    assert_close(flash_attention(q, k, v, **options, impl=impl), expected)


@on_gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seq", [1000, 4097])
@pytest.mark.parametrize("name", [*COMBINATIONS, "far window"])
def test_long_sequences_with_options(check, name, seq, head_dim):
    options = {
        "far window": {"window_size": 600},
        "documents": {"causal": True, "doc_start": packed(300, 1, seq - 301)},
        "window, documents": {"window_size": 129, "doc_start": packed(300, 1, seq - 301)},
        "padding": {"kv_lengths": lengths(seq // 2 + 1)},
        "window, padding": {"window_size": 30, "kv_lengths": lengths(seq // 2 + 1)},
        "documents, padding": {
            "doc_start": packed(300, seq - 300), "kv_lengths": lengths(seq - 30),
        },
        "sinks, softcap, padding": {
            "sinks": SINKS, "softcap": 2.0, "kv_lengths": lengths(0),
        },
        "alibi": {"alibi_slopes": SLOPES[:2] / 10},
        "alibi, window, documents, sinks": {
            "causal": True, "window_size": 200, "doc_start": packed(300, 1, seq - 301),
            "alibi_slopes": SLOPES[1:2] / 10, "sinks": SINKS,
        },
        "all": {
            "causal": True, "window_size": 200, "doc_start": packed(300, 1, seq - 301),
            "kv_lengths": lengths(seq - 30), "sinks": SINKS, "softcap": 2.0,
        },
    }.get(name) or COMBINATIONS[name]  # fmt: skip
    n_head = 1 if "sinks" in options else 2
    dropout = {"dropout_p": 0.2, "dropout_seed": 5}
    check(1, seq, seq, n_head, 1, head_dim, torch.bfloat16, **options)
    check(1, seq, seq, n_head, 1, head_dim, torch.bfloat16, **options, **dropout)
