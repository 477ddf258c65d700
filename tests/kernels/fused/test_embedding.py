import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from kernels.fused import embedding as module
from kernels.fused.embedding import embedding

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def inputs(n_rows, width, shape, device, dtype=torch.float32):
    """A table, and indices of which half are the same."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(n_rows, width, generator=generator).to(device, dtype)
    indices = torch.randint(n_rows, shape, generator=generator)
    indices[torch.rand(shape, generator=generator) < 0.5] = n_rows - 1
    return indices.to(device), table


def results(function, indices, table):
    table = table.detach().requires_grad_()
    rows = function(indices, table)
    weights = torch.arange(rows.numel(), device=rows.device) % 7 - 3.0
    (grad,) = torch.autograd.grad((rows * weights.view(rows.shape)).sum(), table)
    return rows.detach(), grad


@pytest.mark.parametrize(
    ("function", "device"),
    [
        (module._Embedding.apply, "cpu"),
        *(
            pytest.param(f, "cuda", marks=pytest.mark.gpu)
            for f in (embedding, module._Embedding.apply)
        ),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (3, 0), (2, 33), (2, 2, 1100)])
def test_rows_and_gradient(shape, function, device):
    indices, table = inputs(11, 5, shape, device)
    rows, grad = results(function, indices, table)
    expected_rows, expected = results(F.embedding, indices.cpu(), table.cpu().double())
    torch.testing.assert_close(rows.cpu().double(), expected_rows)
    torch.testing.assert_close(grad.cpu().double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_compiles_without_a_graph_break(device):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager" if device == "cpu" else "inductor")
    compiled = torch.compile(module._Embedding.apply, backend=counter, fullgraph=True)
    indices, table = inputs(50, 8, (4, 300), device)
    torch.testing.assert_close(
        results(compiled, indices, table), results(F.embedding, indices, table)
    )
    assert counter.frame_count == 1


@pytest.mark.parametrize("device", DEVICES)
def test_the_operator_is_well_registered(device):
    indices, table = inputs(11, 5, (2, 33), device)
    grad = F.embedding(indices, table)
    torch.library.opcheck(torch.ops.papilio.embedding_bwd.default, (grad, indices, 11))


@pytest.mark.gpu
def test_the_compiled_gradient_repeats_and_can_be_captured():
    torch.compiler.reset()
    indices, table = inputs(50_257, 768, (8, 4096), "cuda")
    table.requires_grad_()
    grad = torch.randn(*indices.shape, 768, device="cuda")
    compiled = torch.compile(embedding, fullgraph=True)

    def gradient():
        return torch.autograd.grad(compiled(indices, table), table, grad)[0]

    torch.use_deterministic_algorithms(True)
    try:
        first = gradient()
        with torch.profiler.profile() as profiler:
            again = gradient()
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first, again)
    gradient()  # compiled again, because the flag has changed
    names = {event.key for event in profiler.key_averages()}
    assert "papilio::embedding_bwd" in names and not any("index_put" in name for name in names)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradient()
    graph.replay()
    assert torch.equal(captured, first)
