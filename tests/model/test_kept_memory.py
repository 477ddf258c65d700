"""Memory saved for the backward pass by setting, as torch.compile splits a step on the CPU."""

import functools
from typing import Any

import torch
from torch._functorch import config as partitioner

from model.config import ModelConfig
from model.gpt import GPT

B, T, C, LAYERS = 4, 128, 64, 2
CONFIG: dict[str, Any] = {
    "n_layer": LAYERS, "n_embd": C, "n_head": 2, "context_length": T, "vocab_size": 50,
}  # fmt: skip


@functools.cache
def saved_for_backward(share: float = 1.0, **settings: Any) -> tuple[int, float]:
    """Bytes that a compiled forward pass under autocast saves for the backward, and the loss."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GPT(ModelConfig(**CONFIG, **settings))
    tokens = torch.randint(50, (B, T))
    sizes: dict[int, int] = {}

    def record(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return x

    compiled = torch.compile(model, backend="aot_eager_decomp_partition")
    with (
        partitioner.patch(activation_memory_budget=share),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        compiled(tokens, tokens).backward()
        with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
            loss = compiled(tokens, tokens)
    for parameter in model.parameters():
        sizes.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(sizes.values()), loss.item()


def test_a_recomputed_gelu_is_not_saved() -> None:
    (less, loss), (more, same_loss) = saved_for_backward(), saved_for_backward(recompute_gelu=False)
    assert more - less == LAYERS * B * T * 4 * C * 2  # (tokens, 4 C) in bfloat16, of each layer
    assert loss == same_loss


def test_a_residual_stream_in_bfloat16_takes_less() -> None:
    # each layer saves two sums for its norms; all other saved tensors are bfloat16 either way
    (more, _), (less, _) = saved_for_backward(residual_in_fp32=True), saved_for_backward()
    assert more - less >= LAYERS * 2 * B * T * C * 2


def test_the_memory_budget_limits_the_saved_bytes() -> None:
    results = [saved_for_backward(share) for share in (1.0, 0.9, 0.5)]
    (most, loss), (less, _), (least, _) = results
    assert most > less > least
    assert {same for _, same in results} == {loss}
