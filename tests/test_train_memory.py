"""How much a compiled model may keep between the passes, as the configuration says."""

from types import SimpleNamespace

import torch
import torch._functorch.config as partitioner

from train import ways_to_run
from training.distributed import Processes
from training.language.config import load_config


def test_the_share_reaches_torch_compile(monkeypatch):
    monkeypatch.setattr(partitioner, "activation_memory_budget", 1.0)
    alone = Processes(rank=0, world_size=1, device=torch.device("cpu"))
    task = SimpleNamespace(model=torch.nn.Linear(2, 2), n_shapes=1)
    for share in (0.9, 1.0):
        config = load_config(["configs/gpt2_small_1k.yaml", f"run.activation_memory={share}"])
        ways_to_run(task, config, alone)
        assert partitioner.activation_memory_budget == share
