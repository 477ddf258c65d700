"""How much a compiled model keeps between the passes, as the configuration says."""

from types import SimpleNamespace

import pytest
import torch

from model.config import ModelConfig
from model.gpt import GPT
from train import ways_to_run
from training.distributed import Processes
from training.language.config import load_config
from training.numerics import autocast

GPU = Processes(rank=0, world_size=1, device=torch.device("cuda"))


def kept(budget, **changes):
    """Bytes that are kept for the backward pass of a GPT, and its first gradient."""
    config = load_config(["configs/quickstart.yaml", f"run.activation_memory={budget}"])
    torch.manual_seed(0)
    shape = {"vocab_size": 512, "context_length": 1024, "n_layer": 4, "n_head": 8, "n_embd": 512}
    model = GPT(ModelConfig(**shape, **changes)).cuda()
    fast, _ = ways_to_run(SimpleNamespace(model=model, n_shapes=1), config, GPU)
    tokens = torch.randint(512, (8, 1024), device="cuda")
    for _ in range(2):  # the first compiles
        model.zero_grad()
        before = torch.cuda.memory_allocated()
        with autocast("bfloat16", GPU.device):
            loss = fast(tokens, tokens)
        found = torch.cuda.memory_allocated() - before
        loss.backward()
    return found, model.blocks[0].mlp.fc_in.weight.grad


@pytest.mark.gpu
def test_less_is_kept_where_the_configuration_says_so():
    usual, gradient = kept(1.0)
    without_norms, same = kept(0.9)
    with_gelu, again = kept(1.0, recompute_gelu=False)
    in_float32, close = kept(1.0, residual_in_fp32=True)
    assert without_norms < 0.95 * usual
    n_numbers = 4 * 8 * 1024 * 4 * 512  # of the GELUs of all layers
    assert with_gelu - usual == pytest.approx(2 * n_numbers, rel=0.1)
    assert in_float32 > 1.05 * usual
    torch.testing.assert_close(same, gradient, rtol=0.05, atol=1e-5)
    assert torch.equal(again, gradient)
    torch.testing.assert_close(close, gradient, rtol=0.2, atol=1e-4)
