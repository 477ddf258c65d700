"""Fused linear layer and cross-entropy: losses, gradients, and logits that it never stores."""

import math

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from kernels import limits
from kernels.fused.cross_entropy import linear_cross_entropy
from kernels.fused.reference import cross_entropy as reference
from kernels.testing import assert_within_budget, at_least_fp32, poison_empty

on_gpu = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]
IGNORED = -100


@pytest.fixture(params=["triton", "reference"])
def impl(request):
    return request.param


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of four rows of 131 numbers in fp32, eight in 16 bits."""
    monkeypatch.setattr(limits, "CHUNK_BYTES", 4 * 131 * 4)


def inputs(n=37, width=24, rows=131, *, vocab=127, dtype=torch.float32, device="cpu", scale=1.0):
    """Hidden states, a table whose last rows are padding, and targets, some of them ignored."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(n, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(rows, width, generator=generator, dtype=torch.float64) * scale
    targets = torch.randint(vocab, (n,), generator=generator)
    targets[::5] = IGNORED
    hidden, weight = (x.to(device, dtype).requires_grad_() for x in (hidden, weight))
    return hidden, weight, targets.to(device)


def plain(hidden, weight, targets, *, reduction="mean", vocab_size=None, softcap=None, z_loss=0.0):
    """The same loss with all logits in memory, rounded to the dtype of `hidden`."""
    logits = F.linear(hidden, weight)[:, :vocab_size].to(at_least_fp32(hidden.dtype))
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    losses = F.cross_entropy(logits, targets, reduction="none")
    losses = losses + (z_loss * logits.logsumexp(1) ** 2).where(targets != IGNORED, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() / ((targets != IGNORED).sum() if reduction == "mean" else 1)


def results(function, hidden, weight, targets, **options):
    """Loss and gradients; the gradient of each loss is a random factor."""
    hidden, weight = (x.detach().requires_grad_() for x in (hidden, weight))
    loss = function(hidden, weight, targets, **options)
    generator = torch.Generator().manual_seed(2)
    grad = torch.randn(loss.shape, generator=generator).to(loss)
    loss.backward(grad)
    return {"loss": loss.detach(), "dhidden": hidden.grad, "dweight": weight.grad}


def check(impl, hidden, weight, targets, factor=2.0, **options):
    with poison_empty():
        actual = results(linear_cross_entropy, hidden, weight, targets, impl=impl, **options)
    same_dtype = results(plain, hidden, weight, targets, **options)
    exact = results(plain, hidden.double(), weight.double(), targets, **options)
    for name, value in actual.items():
        assert value.dtype == same_dtype[name].dtype, name
        assert_within_budget(value, same_dtype[name], exact[name], factor=factor, name=name)


@pytest.mark.parametrize(
    ("dtype", "device"),
    [
        (torch.float32, "cpu"),
        (torch.float16, "cpu"),
        pytest.param(torch.float32, "cuda", marks=on_gpu),
        pytest.param(torch.float16, "cuda", marks=on_gpu),
        pytest.param(torch.bfloat16, "cuda", marks=on_gpu),
    ],
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 3.0}, {"z_loss": 0.1}, {"softcap": 5.0, "z_loss": 0.01}],
    ids=["plain", "softcap", "z-loss", "both"],
)
def test_losses_and_gradients(impl, dtype, device, reduction, options, small_chunks):
    tensors = inputs(dtype=dtype, device=device)
    check(impl, *tensors, reduction=reduction, vocab_size=127, **options)


@pytest.mark.parametrize(("n", "width", "rows", "vocab"), [(1, 3, 1, 1), (2, 1, 9000, 8500)])
def test_odd_shapes(impl, n, width, rows, vocab):
    hidden, weight, targets = inputs(n, width, rows, vocab=vocab)
    check(impl, hidden, weight, targets.clamp(min=0), vocab_size=vocab, reduction="sum")


def test_large_logits_do_not_overflow(impl):
    hidden, weight, targets = inputs(scale=1e4)
    check(impl, hidden, weight, targets)


@pytest.mark.parametrize("softcap", [1.0, 32.0, 33.0, 1e6, 1e9])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 30.0])
def test_a_softcap_far_below_and_far_above_the_logits(impl, scale, softcap):
    hidden, weight, targets = inputs(scale=scale)
    check(impl, hidden, weight, targets, factor=8.0, softcap=softcap)


def test_losses_have_the_shape_of_the_targets(impl):
    hidden, weight, targets = inputs(n=36)
    losses = linear_cross_entropy(
        hidden.view(4, 9, 24), weight, targets.view(4, 9), reduction="none", impl=impl
    )
    expected = linear_cross_entropy(hidden, weight, targets, reduction="none", impl=impl)
    assert torch.equal(losses, expected.view(4, 9))
    assert torch.equal(losses.flatten() == 0, targets == IGNORED)


def test_no_rows_at_all(impl):
    hidden, weight, targets = inputs(n=0)
    for reduction in ("sum", "none"):
        values = results(
            linear_cross_entropy, hidden, weight, targets, reduction=reduction, impl=impl
        )
        assert values["loss"].sum() == 0 and values["dhidden"].shape == (0, 24)
        assert torch.equal(values["dweight"], torch.zeros_like(weight))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("call", ["eager", "compiled"])
def test_without_targets_loss_and_gradients_match_pytorch(impl, reduction, call):
    hidden, weight, targets = inputs()
    no_targets = torch.full_like(targets, IGNORED)

    def loss_of_logits(hidden, weight, targets):
        return F.cross_entropy(hidden @ weight.T, targets, reduction=reduction)

    def ours(hidden, weight, targets):
        return linear_cross_entropy(hidden, weight, targets, reduction=reduction, impl=impl)

    torch.compiler.reset()
    function = torch.compile(ours, backend="aot_eager") if call == "compiled" else ours
    expected = results(loss_of_logits, hidden, weight, no_targets)  # a mean of NaN, gradients of 0
    for name, value in results(function, hidden, weight, no_targets).items():
        torch.testing.assert_close(value, expected[name], equal_nan=True)


def test_a_target_beyond_the_vocabulary_is_detected():
    hidden, weight, targets = inputs()
    targets[3] = 127
    losses = linear_cross_entropy(
        hidden, weight, targets, vocab_size=127, reduction="none", impl="triton"
    )
    assert losses.isnan().nonzero().tolist() == [[3]]
    with pytest.raises(IndexError, match=r"targets lie in \[.*, 127\] and must lie in \[0, 127\)"):
        linear_cross_entropy(hidden, weight, targets, vocab_size=127, impl="reference")


def test_inputs_that_are_not_finite_show_in_the_loss(impl):
    hidden, weight, targets = inputs()
    with torch.no_grad():
        hidden[1, 0], hidden[2, 0] = math.nan, math.inf
    losses = linear_cross_entropy(hidden, weight, targets, reduction="none", impl=impl)
    assert losses[[1, 2]].isnan().all()
    assert losses.isfinite().sum() == len(losses) - 2


def test_the_table_may_have_another_dtype(impl):
    """If weights are fp32 and activations are not, the gradient is never rounded to 16 bits."""
    hidden, weight, targets = inputs(dtype=torch.float16)
    whole = weight.detach().float().requires_grad_()
    linear_cross_entropy(hidden, whole, targets, impl=impl).backward()
    linear_cross_entropy(hidden, weight, targets, impl=impl).backward()
    assert whole.grad.dtype == torch.float32
    torch.testing.assert_close(whole.grad.half(), weight.grad)
    assert not torch.equal(whole.grad, whole.grad.half().float())


def test_autocast_chooses_the_dtype():
    hidden, weight, targets = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets, impl="reference")
    assert torch.equal(
        loss, linear_cross_entropy(hidden.bfloat16(), weight, targets, impl="reference")
    )


@pytest.mark.parametrize("device", DEVICES)
def test_repeated_calls_give_the_same_bits(impl, device, small_chunks):
    tensors = inputs(device=device)
    first, again = (results(linear_cross_entropy, *tensors, impl=impl) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_logits_of_all_rows_are_never_in_memory(impl, reduction, small_chunks):
    hidden, weight, targets = inputs(n=64)
    with torch.profiler.profile(profile_memory=True) as profile:
        loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction, impl=impl)
        loss.sum().backward()
    allocated = [event.self_cpu_memory_usage for event in profile.events()]
    # the largest allocation is the gradient of the table, not 64 rows of 131 logits
    assert 4 * weight.numel() <= max(allocated) < 4 * 64 * 131


def test_chunks_are_few_and_of_equal_size(monkeypatch, small_chunks):
    sizes = []
    row_loss = reference.row_cross_entropy
    monkeypatch.setattr(
        reference,
        "row_cross_entropy",
        lambda logits, *others: sizes.append(len(logits)) or row_loss(logits, *others),
    )
    linear_cross_entropy(*inputs(n=9), reduction="sum", impl="reference")
    assert sizes == [3, 3, 3]  # although four rows fit


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_compiles_without_a_graph_break(reduction, device):
    counter = CompileCounterWithBackend("aot_eager" if device == "cpu" else "inductor")
    compiled = torch.compile(linear_cross_entropy, backend=counter, fullgraph=True)
    tensors = inputs(device=device)
    options = {"reduction": reduction, "vocab_size": 127, "impl": "triton"}
    actual = results(compiled, *tensors, **options)
    expected = results(linear_cross_entropy, *tensors, **options)
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], msg=name)
    assert counter.frame_count == 1


@pytest.mark.parametrize("device", DEVICES)
def test_operators_are_well_registered(device):
    hidden, weight, targets = inputs(device=device)
    tensors = (hidden, weight, targets, "triton", 127, 3.0, 0.1, IGNORED)
    torch.library.opcheck(torch.ops.papilio.linear_cross_entropy.default, tensors)
    row_weights = torch.rand(len(targets), device=device)
    tensors = (*(x.detach() for x in tensors[:2]), *tensors[2:], row_weights)
    torch.library.opcheck(torch.ops.papilio.linear_cross_entropy_grad.default, tensors)


def test_flops_match_three_gemms():
    hidden, weight, targets = inputs()
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(hidden, weight, targets).backward()
    assert counter.get_total_flops() == 3 * 2 * 37 * 131 * 24


def test_a_second_derivative_is_refused():
    hidden, weight, targets = inputs()
    loss = linear_cross_entropy(hidden, weight, targets)
    (dhidden,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dhidden.sum().backward()


def test_errors_name_argument_and_value():
    hidden, weight, targets = inputs()
    cases = [
        ({"hidden": hidden[0]}, r"hidden must be \(..., C\) and weight \(V, C\), got \(24,\)"),
        ({"weight": weight[:, :5]}, r"got \(37, 24\) and \(131, 5\)"),
        ({"weight": weight.int()}, "floating-point, got torch.float32 and torch.int32"),
        ({"targets": targets[1:]}, r"targets must be int64 and \(37,\).*got torch.int64 and \(36"),
        ({"targets": targets.int()}, "got torch.int32"),
        ({"targets": targets.to("meta")}, "must be on one device, got cpu, cpu and meta"),
        ({"reduction": "max"}, "reduction must be 'mean', 'sum' or 'none', got 'max'"),
        ({"vocab_size": 132}, r"vocab_size must lie in \[1, 131\].*got 132"),
        ({"softcap": 0.0}, "softcap must be None or a finite number above 0, got 0.0"),
        ({"z_loss": -1.0}, "z_loss must be a finite number of at least 0, got -1.0"),
        ({"impl": "cuda"}, "impl must be None or one of"),
        ({"hidden": hidden.double(), "impl": "triton"}, "hidden is float64"),
    ]
    for change, message in cases:
        with pytest.raises(ValueError, match=message):
            linear_cross_entropy(
                **({"hidden": hidden, "weight": weight, "targets": targets} | change)
            )
