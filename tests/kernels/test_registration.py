"""Registration of the operators: schema, fake, autograd, torch.compile and FLOP counts."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from kernels import flash_attention
from kernels.mask.block_mask import BlockSparseMask
from kernels.mask.patterns import butterfly
from kernels.options import (
    MASKED_LOOP,
    N_OPERATOR_OPTIONS,
    OPTIONS_SCHEMA,
    AttentionOptions,
    Features,
)
from kernels.reference.standard import visible_keys
from kernels.testing import make_qkv
from tests.kernels.grids import each_of

on_gpu = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]
# device and backend: a machine without a GPU may have no C++ compiler
BACKENDS = [("cpu", "aot_eager"), pytest.param("cuda", "inductor", marks=on_gpu)]
MASK = BlockSparseMask(butterfly(3), 16)  # for 33 to 48 tokens
DOC_START = torch.tensor([0] * 17 + [17] * 16, dtype=torch.int32)


def all_options():
    """All features, for a sample of 17 tokens and 2 heads."""
    mask = BlockSparseMask(butterfly(2), 16)
    lists = mask.lists(17, 17, causal=True, window_size=9, all_partial=True)
    return {
        "dropout_seed": torch.tensor([3]),
        "doc_start": torch.tensor([[0] * 5 + [5] * 12], dtype=torch.int32),
        "kv_lengths": torch.tensor([16], dtype=torch.int32),
        "sinks": torch.tensor([0.5, -1.0]),
        "mask_rows": lists.rows,
        "mask_row_blocks": lists.row_blocks,
        "mask_cols": lists.cols,
        "mask_col_blocks": lists.col_blocks,
        "mask_block_size": mask.block_size,
        "mask_loops": MASKED_LOOP,
        "causal": True,
        "window_size": 9,
        "softcap": 2.0,
        "dropout_p": 0.1,
        "first_query": 16,
    }


def test_the_schema_lists_the_options():
    names = [entry.split(" ")[1] for entry in OPTIONS_SCHEMA.split(", ")]
    assert names == list(AttentionOptions._fields[:N_OPERATOR_OPTIONS])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("features", "needs_grad"),
    [("none", True), ("all", True), ("all", False)],
    ids=["no features", "all features", "no gradients"],
)
def test_operators_are_well_registered(features, needs_grad, device):
    q, k, v = make_qkv(1, 17, 17, 2, 1, 16, device=device, requires_grad=needs_grad)
    options = AttentionOptions(**(all_options() if features == "all" else {}))
    options = [
        x.to(device) if isinstance(x, torch.Tensor) else x for x in options[:N_OPERATOR_OPTIONS]
    ]
    sinks = AttentionOptions._fields.index("sinks")
    if features == "all":
        options[sinks].requires_grad_(needs_grad)
    torch.library.opcheck(torch.ops.papilio.attn_fwd.default, (q, k, v, "triton", *options))
    if not needs_grad:
        return

    out, lse = torch.ops.papilio.attn_fwd(q, k, v, "triton", *options)
    inputs = [t.detach() for t in (q, k, v, out, lse)]
    options = [t.detach() if isinstance(t, torch.Tensor) else t for t in options]
    dlse = torch.randn_like(lse) if features == "all" else None
    inputs = (torch.randn_like(out), dlse, *inputs, "triton", *options)
    torch.library.opcheck(torch.ops.papilio.attn_bwd.default, inputs)


def test_a_second_derivative_is_refused():
    q, k, v = make_qkv(1, 17, 17, 2, 1, 16, requires_grad=True)
    out = flash_attention(q, k, v, impl="triton")
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()


def test_features_follow_the_options():
    assert AttentionOptions().features == Features()
    assert AttentionOptions(**all_options()).features == Features(
        causal=True, window=True, documents=True, lengths=True, softcap=True, sinks=True,
        dropout=True, mask_block_size=16, unmasked_loop=False, masked_loop=True,
    )  # fmt: skip


COMPILED = {
    "causal": {"causal": True},
    "dropout": {"dropout_p": 0.2, "dropout_seed": torch.tensor([5])},
    "mask": {"causal": True, "mask": MASK},
    "all": {
        "causal": True, "mask": MASK, "window_size": 20, "doc_start": DOC_START.expand(1, -1),
        "kv_lengths": torch.tensor([31]), "softcap": 2.0,
        "dropout_p": 0.2, "dropout_seed": torch.tensor([5]),
    },
}  # fmt: skip


@each_of(
    ["name", "device", "backend"],
    [("causal", "cpu", "aot_eager"), ("all", "cpu", "aot_eager")],
    [(name, "cuda", "inductor") for name in COMPILED],
)
def test_compiles_without_a_graph_break(name, device, backend):
    options = {
        key: option.to(device) if isinstance(option, torch.Tensor) else option
        for key, option in COMPILED[name].items()
    }
    x = torch.randn(1, 33, 3, 2, 16, device=device, requires_grad=True)
    sinks = torch.randn(2, device=device, requires_grad=True)

    def f(x, sinks):
        out, lse = flash_attention(
            *x.unbind(2), **options, sinks=sinks, impl="triton", return_lse=True
        )
        return (out.square().sum(-1) + lse.transpose(1, 2)).sum()

    torch.compiler.reset()
    expected = f(x, sinks)
    got = torch.compile(f, fullgraph=True, backend=backend)(x, sinks)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        torch.autograd.grad(got, (x, sinks)),
        torch.autograd.grad(expected, (x, sinks)),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.mark.parametrize(("device", "backend"), BACKENDS)
def test_compiled_code_works_for_other_lengths(device, backend):
    torch.compiler.reset()
    counter = CompileCounterWithBackend(backend)

    @torch.compile(fullgraph=True, backend=counter)
    def f(q, k, v):
        return flash_attention(q, k, v, causal=True, window_size=9, impl="triton")

    for seq in (33, 40, 21, 48):
        q, k, v = make_qkv(1, seq, seq, 2, 1, 16, device=device)
        expected = flash_attention(q, k, v, causal=True, window_size=9, impl="triton")
        torch.testing.assert_close(f(q, k, v), expected)
    assert counter.frame_count <= 2  # once for one length, once for any


@pytest.mark.parametrize(("impl", "n_kv_head"), [("sdpa", 2), ("sdpa", 1), ("triton", 1)])
def test_compiles_with_dynamic_shapes(impl, n_kv_head):
    def f(q, k, v):
        # the comparison is a SymBool where shapes are dynamic
        return flash_attention(q, k, v, causal=q.shape[1] > 24, impl=impl)

    torch.compiler.reset()
    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager")
    for seq in (33, 20):
        inputs = make_qkv(1, seq, seq, 2, n_kv_head, 16, dtype=torch.float32, requires_grad=True)
        got, expected = compiled(*inputs), f(*inputs)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(
            torch.autograd.grad(got.square().sum(), inputs),
            torch.autograd.grad(expected.square().sum(), inputs),
        )


def flops(seq_q, seq_k, n_kv_head, **options):
    """FLOPs of the forward pass and of the backward pass, for B = 2, H = 4, D = 16."""
    # shapes are enough: nothing is computed
    q, k, v = make_qkv(2, seq_q, seq_k, 4, n_kv_head, 16, device="meta", requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        out = flash_attention(q, k, v, **options, impl="triton")
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("window_size", [None, 1, 3, 100])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(5, 5), (3, 7), (7, 3), (1, 6)])
def test_flops_of_the_visible_pairs(seq_q, seq_k, causal, window_size):
    masks = {"causal": causal, "window_size": window_size}
    pairs = visible_keys(seq_q, seq_k, **masks).sum().item()
    forward = 4 * 2 * 4 * 16 * pairs
    assert flops(seq_q, seq_k, 4, **masks) == (forward, 5 * forward // 2)


@pytest.mark.parametrize("n_mask_head", [1, 4], ids=["shared", "per head"])
@pytest.mark.parametrize("window_size", [None, 9])
def test_flops_of_the_blocks_of_a_mask(window_size, n_mask_head):
    layouts = [butterfly(3, n_factors=head % 3) for head in range(n_mask_head)]
    mask = BlockSparseMask(torch.stack(layouts), 16)
    visible = mask.to_dense(48, 48) & visible_keys(48, 48, causal=True, window_size=window_size)[0]
    visited = visible.view(n_mask_head, 3, 16, 3, 16).any(4).any(2)
    pairs_a_head = 16 * 16 * visited.sum().item() / n_mask_head
    forward = 4 * 2 * 4 * 16 * pairs_a_head
    counted = flops(48, 48, 2, causal=True, window_size=window_size, mask=mask)
    assert counted == (forward, 5 * forward / 2)
