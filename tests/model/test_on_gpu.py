"""Models on a GPU: compiled kernels with masks and documents, and the KV cache."""

from typing import Any

import pytest
import torch

from model.cache import KVCache
from model.config import ModelConfig
from model.gpt import GPT
from model.mask_config import MaskConfig
from model.positions import gather_rows

pytestmark = pytest.mark.gpu

VOCAB, CONTEXT = 509, 512
MASKS = {
    "dense": MaskConfig(),
    "butterfly": MaskConfig(pattern="butterfly", block_size=64, window_blocks=2, global_blocks=1),
}


def make_model(attention: str, **changes: Any) -> GPT:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=VOCAB, context_length=CONTEXT, n_layer=2, n_head=2, n_embd=128,
        attention=attention, **changes,
    )  # fmt: skip
    model = GPT(config).cuda()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model


@pytest.mark.parametrize("attention", ["auto", "triton"])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_compiled_step_equals_standard_attention(
    positions: str, mask: str, documents: bool, attention: str
) -> None:
    torch.compiler.reset()
    generator = torch.Generator("cuda").manual_seed(1)
    tokens, targets = torch.randint(VOCAB, (2, 3, CONTEXT), generator=generator, device="cuda")
    doc_start = None
    if documents:
        starts = torch.tensor([0, 1, 77, 300], device="cuda")
        lengths = torch.tensor([1, 76, 223, CONTEXT - 300], device="cuda")
        doc_start = starts.repeat_interleave(lengths).int().expand(3, -1).contiguous()
    losses, gradients = {}, {}
    for impl in (attention, "reference"):
        model = make_model(impl, positions=positions, mask=MASKS[mask])
        run = model if impl == "reference" else torch.compile(model, fullgraph=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = run(tokens, targets, doc_start=doc_start)
        loss.backward()
        losses[impl] = loss.detach()
        gradients[impl] = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(losses[attention], losses["reference"], rtol=2e-3, atol=0)
    for ours, theirs in zip(*gradients.values(), strict=True):
        assert (ours - theirs).norm() < 0.03 * theirs.norm()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("positions", ["learned", "rotary"])
@torch.no_grad()
def test_states_with_a_cache_equal_those_without(positions: str, mask: str) -> None:
    model = make_model("auto", positions=positions, mask=MASKS[mask]).eval()
    tokens = torch.randint(VOCAB, (2, 150), device="cuda")
    for dtype, error in ((torch.float32, 5e-3), (torch.bfloat16, 5e-2)):
        with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
            whole = model.hidden(tokens)
            cache = KVCache(model.config.n_layer, 150)
            parts = [model.hidden(tokens[:, :61], cache=cache)]
            parts += [model.hidden(tokens[:, i : i + 1], cache=cache) for i in range(61, 150)]
        assert (torch.cat(parts, dim=1) - whole).norm() < error * whole.norm()


@pytest.mark.parametrize("compiled", [False, True])
def test_gathered_rows_have_the_gradient_of_a_lookup(compiled: bool) -> None:
    torch.compiler.reset()
    B, T, N, C = 7, 131, 256, 48
    table = torch.randn(N, C, device="cuda", requires_grad=True)
    positions = torch.stack([torch.randperm(N, device="cuda")[:T] for _ in range(B)])
    padding = torch.arange(T, device="cuda") >= torch.arange(1, T + 1, 19, device="cuda")[:, None]
    positions = positions.masked_fill(padding, N - 1)  # a token may have the same position
    weights = torch.randn(B, T, C, device="cuda").masked_fill(padding[..., None], 0)
    look_up = torch.compile(gather_rows, fullgraph=True) if compiled else gather_rows
    gradients = []
    for rows in (look_up(table, positions), table[positions]):
        assert torch.equal(rows, table[positions])
        gradients.append(torch.autograd.grad((rows * weights).sum(), table)[0])
    # at most B rows are added per position, in another order
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-5)
