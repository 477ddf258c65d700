import math
import sys
from dataclasses import replace

import pytest
import torch

from experiments.attention import approximate, measure
from experiments.attention.approximate import (
    EAGER,
    SETTINGS,
    TENSORS,
    bfloat16_autocast,
    on_given_tensors,
)
from experiments.attention.cases import Case, Tensors, UnsupportedError, make_tensors
from experiments.attention.measure import measure_case
from experiments.attention.report import approximate_table, approximate_verdict_table
from kernels.testing import relative_error

CPU = torch.device("cpu")
TIMES = ("forward_ms", "backward_ms", "both_ms")


def case_of(seq_len, dtype=torch.float32, **options):
    return Case(2, seq_len, 2, 16, dtype, **options)


def passes(attention, tensors):
    out = attention(*tensors[:3])
    return out, *torch.autograd.grad(out, tensors[:3], tensors.dout)


def exact(visible, tensors, key_of=lambda k: k):
    """Attention in plain PyTorch, in fp64; `visible` is (T, T) bool."""
    q, k, v = (x.double().transpose(1, 2) for x in tensors[:3])
    scores = q @ key_of(k).mT * q.shape[-1] ** -0.5
    out = (scores.masked_fill(~visible, -math.inf).softmax(-1) @ v).transpose(1, 2)
    return out, *torch.autograd.grad(out, tensors[:3], tensors.dout.double())


def all_keys(seq_len):
    return torch.ones(seq_len, seq_len, dtype=torch.bool)


def neighbours(seq_len, window):
    """Keys in the window of a query, and in the windows next to it."""
    window_of = torch.arange(seq_len) // window
    return (window_of[:, None] - window_of).abs() <= 1


def band(seq_len, width):
    position = torch.arange(seq_len)
    return (position[:, None] - position).abs() <= width


@pytest.mark.parametrize(
    ("name", "seq_len", "visible"),
    [
        ("Local", 640, neighbours(640, 128)),
        ("Longformer", 1024, band(1024, 256)),
        ("Nystromformer", 64, all_keys(64)),  # as many landmarks as tokens
    ],
)
def test_an_approximation_is_exact_on_the_keys_that_it_sees(name, seq_len, visible):
    case = case_of(seq_len)
    tensors = make_tensors(case, CPU)
    results = passes(EAGER[name](case, CPU), tensors)
    for result, expected in zip(results, exact(visible, tensors), strict=True):
        assert relative_error(result, expected) < 1e-5


def test_linformer_is_exact_if_it_projects_to_all_keys(monkeypatch):
    pytest.importorskip("linformer")
    monkeypatch.setattr("linformer.linformer.init_", lambda x: torch.eye(*x.shape))
    case = case_of(256)
    tensors = make_tensors(case, CPU)
    results = passes(EAGER["Linformer"](case, CPU), tensors)
    for result, expected in zip(results, exact(all_keys(256), tensors), strict=True):
        assert relative_error(result, expected) < 1e-5


def test_reformer_attends_from_queries_to_normalised_queries():
    case = case_of(64)  # one chunk: it does not hash
    tensors = TENSORS["Reformer"](make_tensors(case, CPU))
    results = passes(EAGER["Reformer"](case, CPU), tensors)

    def normalised(k):
        return k * k.square().mean(-1, keepdim=True).add(1e-6).rsqrt()

    # A query sees itself only if it sees no other key
    others = ~torch.eye(64, dtype=torch.bool)
    for result, expected in zip(results, exact(others, tensors, normalised), strict=True):
        assert relative_error(result, expected) < 1e-4


@pytest.mark.parametrize("name", approximate.CAPTURABLE)
def test_an_approximation_compiles_to_one_graph(name):
    case = case_of(512)
    tensors = TENSORS.get(name, lambda x: x)(make_tensors(case, CPU))
    attention = EAGER[name](case, CPU)
    torch.compiler.reset()
    fast = torch.compile(attention, fullgraph=True, backend="aot_eager")
    results = []
    for attend in (attention, fast):
        torch.manual_seed(0)
        results.append(passes(attend, tensors))
    for result, expected in zip(*results, strict=True):
        assert relative_error(result, expected) < 1e-5


def test_performer_approaches_attention_with_many_features():
    pytest.importorskip("performer_pytorch")
    case = case_of(96)
    tensors = Tensors(*(x.detach().mul(0.3).requires_grad_() for x in make_tensors(case, CPU)))
    attention = EAGER["Performer"](case, CPU)
    torch.manual_seed(0)
    (peer,) = (cell.cell_contents for cell in attention.__closure__)
    peer.projection_matrix = torch.randn(20_000, 16)
    results = passes(attention, tensors)
    for result, expected in zip(results, exact(all_keys(96), tensors), strict=True):
        assert relative_error(result, expected) < 0.35


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EAGER)
def test_each_head_attends_to_its_own_keys_and_values(name, dtype):
    case = case_of(1024, dtype)
    tensors = make_tensors(case, CPU)
    tensors = TENSORS.get(name, lambda x: x)(tensors)
    with SETTINGS.get(name, bfloat16_autocast)() if dtype == torch.bfloat16 else torch.no_grad():
        attention = EAGER[name](case, CPU)
        torch.manual_seed(0)
        before = attention(*tensors[:3]).detach()
        changed = [x.detach().clone() for x in tensors[:3]]
        for x in changed:
            x[1, :, 0] += 1
        torch.manual_seed(0)
        after = attention(*changed).detach()
    assert before.shape == tensors.q.shape and before.dtype == dtype
    changes = (before - after).float().norm(dim=(1, 3)) / before.float().norm(dim=(1, 3))
    *others, changed, last = changes.flatten().tolist()
    # All heads of the Nystromformer share one factor of its inverse
    allowed = changed / 2 if name == "Nystromformer" else 0.0
    assert changed > 0.1 and max(*others, last) <= allowed


@pytest.mark.parametrize(
    ("name", "seq_len", "reason"),
    [
        ("Longformer", 128, "requires a multiple of 512 tokens"),
        ("BigBird", 704, "requires more than 704 tokens"),
        ("Local", 576, "requires a multiple of 128 tokens"),
    ],
)
def test_a_length_that_an_approximation_cannot_take_is_reported(name, seq_len, reason):
    with pytest.raises(UnsupportedError, match=reason):
        EAGER[name](case_of(seq_len), CPU)


def test_a_missing_package_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "local_attention", None)
    with pytest.raises(UnsupportedError, match=r"cannot be imported \(.*local_attention"):
        EAGER["Local"](case_of(128), CPU)


def test_an_approximation_may_differ_but_must_be_finite(monkeypatch):
    monkeypatch.setattr(measure, "speeds", lambda *args: dict.fromkeys(TIMES, 1.0))
    (row,) = measure_case(case_of(640), ["Local"], device="cpu")
    assert row["status"] == "ok" and row["errors"]["out"] > 0.1
    monkeypatch.setitem(
        measure.CONTENDERS, "Local", lambda case, device: lambda q, k, v: (q + k + v) * math.nan
    )
    (row,) = measure_case(case_of(640), ["Local"], device="cpu")
    assert row["status"].startswith("wrong: error nan of out")


def test_bigbird_sees_neighbours_two_global_blocks_and_random_ones():
    case = replace(case_of(1024), batch=1)
    q, k, v, _ = make_tensors(case, CPU)
    out = EAGER["BigBird"](case, CPU)(q, k, v)
    seen = []
    for block in range(2, 14):
        (dv,) = torch.autograd.grad(out[0, 64 * block, 1].sum(), v, retain_graph=True)
        blocks = dv[0, :, 1].abs().sum(1).view(16, 64).sum(1).nonzero()[:, 0].tolist()
        assert {0, block - 1, block, block + 1, 15} <= {*blocks} and len(blocks) <= 8
        seen.append(tuple(blocks))
    assert sum(map(len, seen)) > 12 * 6  # of three random blocks, few are among the others


def test_replaced_layers_keep_no_tensor():
    # In a compiled graph it would be one more output, with a gradient of its own
    module = torch.nn.Module()
    module.forward = lambda x: module.q(x) + module.k(x) + module.v(x)
    case = case_of(8)
    attention = on_given_tensors(module, ("q", "k", "v"), case, CPU)
    q, k, v, _ = make_tensors(case, CPU)
    assert attention(q, k, v).equal(q + k + v)
    assert [getattr(module, name).tensor for name in "qkv"] == [None] * 3


@pytest.mark.gpu
def test_linear_attention_of_fla():
    # In float32, because the gradient of q is a small difference of large terms
    case = Case(2, 192, 2, 64, torch.float32, causal=True)
    # Positive queries and keys, because its weights are divided by their sums
    tensors = Tensors(*(x.detach().abs().requires_grad_() for x in make_tensors(case)))
    results = passes(approximate.fla_linear(case, tensors.q.device), tensors)
    q, k, v = (x.double().transpose(1, 2) for x in tensors[:3])
    weights = (q @ k.mT / 8).tril()
    out = (weights @ v / weights.sum(-1, keepdim=True)).transpose(1, 2)
    expected = out, *torch.autograd.grad(out, tensors[:3], tensors.dout.double())
    for result, exact_result in zip(results, expected, strict=True):
        assert relative_error(result, exact_result) < 0.02


def row_of(name, both_ms, seq_len=1024, mask="dense", **options):
    sparsity = None if mask == "dense" else {"pattern": mask}
    same = {"status": "ok", "causal": False, "seq_len": seq_len, "mask": mask}
    return {**same, "name": name, "sparsity": sparsity, "both_ms": both_ms, **options}


def test_tables_of_approximations():
    rows = [
        row_of("ours", 2.0),
        row_of("ours", 0.5, mask="butterfly 1"),
        row_of("ours", 0.7, mask="butterfly"),
        row_of("Local", 1.5),
        row_of("Local, compiled", 1.0),
        row_of("BigBird", 3.0),
        row_of("Reformer", None, status="out of memory"),
        row_of("ours", 9.0, seq_len=512),
        row_of("ours", 8.0, seq_len=512, mask="butterfly 0"),
        row_of("BigBird", None, seq_len=512, status="not supported: too short"),
    ]
    from experiments.attention.report import add_over_block_sparse

    add_over_block_sparse(rows)
    assert [row.get("over_block_sparse") for row in rows] == [None] * 3 + [3, 2, 6] + [None] * 4
    lines = approximate_table({"rows": rows}).splitlines()
    assert lines[0] == "| forward and backward, ms | 512 | 1,024 |"
    assert "| Papilio, block-sparse | 8.00 | 0.50 |" in lines
    assert "| BigBird | - | 3.00 |" in lines and "| Reformer | - | OOM |" in lines
    verdict = approximate_verdict_table({"rows": rows}).splitlines()
    assert verdict[2:] == ["| 1,024 | full | Local, compiled | 2.00 | 0.50 | Local |"]
