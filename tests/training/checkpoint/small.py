"""A model of 31 weights, and helpers that save its checkpoints."""

import torch
from torch import nn

from training.checkpoint.contents import Progress
from training.checkpoint.folders import checkpoint_folder
from training.checkpoint.saver import CheckpointSaver
from training.distributed import Processes

ALONE = Processes(rank=0, world_size=1, device=torch.device("cpu"))
MUST_MATCH = {"model.n_layer": 2}


def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def take_steps(model, optimizer, n):
    for _ in range(n):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save(run, step, model, optimizer, **options):
    val_loss = options.pop("val_loss", None)
    run.mkdir(exist_ok=True)
    now = {"step": step, "samples": 8 * step, "tokens": 64 * step, "gpu_hours": step / 7}
    with saver(run, **options) as saves:
        saves.save(Progress(**now, val_loss=val_loss), model, optimizer)
        saves.confirm(step + 1)
    return checkpoint_folder(run, step)


def saver(run, *, must_match=MUST_MATCH, config=None, keep_last=2, keep_best=False):
    return CheckpointSaver(
        run, ALONE, must_match, config or {}, keep_last=keep_last, keep_best=keep_best
    )
