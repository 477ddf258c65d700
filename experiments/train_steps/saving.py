"""Time that training waits for a checkpoint of GPT-2 small, and the cost of saving meanwhile.

python -m experiments.train_steps.saving [--folder FOLDER]

A compiled training step of 32,768 tokens runs while checkpoints are saved into --folder. `DCP` is
the time that torch.distributed.checkpoint takes for the same tensors while training waits.
"""

from pathlib import Path

from experiments.harness import Command, measure_rows

command = Command(__name__, on_gpu=True)
command.add("--folder", type=Path, default=Path("out/saving"), help="folder on the disk to measure")
command.add("--saves", type=int, default=5)
command.read(out="docs/results/saving.json")

import shutil
import time
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from statistics import median

import torch
import torch.distributed.checkpoint as dcp

from evaluation.markdown import dict_table
from evaluation.results import Row
from experiments.timing import wall_seconds
from experiments.train_steps.contenders import TOKENS_A_STEP, training_step
from model.config import GPT2_SIZES, ModelConfig
from model.gpt import GPT
from training.checkpoint.contents import Progress, optimizer_tensors
from training.checkpoint.saver import CheckpointSaver
from training.config import AdamWConfig
from training.distributed import Processes
from training.numerics import deterministic_algorithms
from training.optim import make_optimizer

CONTEXT = 1024


def measure(folder: Path, saves: int) -> Iterator[list[Row]]:
    """Yield a row for each operation."""
    device = torch.device("cuda")
    config = ModelConfig(context_length=CONTEXT, **GPT2_SIZES["small"])
    model = GPT(config).to(device)
    optimizer = make_optimizer(model, AdamWConfig(max_steps=1))
    shape = (TOKENS_A_STEP // CONTEXT, CONTEXT)
    tokens = torch.randint(0, config.vocab_size, shape, device=device)
    step = training_step(
        torch.compile(model),
        optimizer,
        lambda run: run(tokens, tokens),
        partial(deterministic_algorithms, True),
    )

    def row(name: str, seconds: list[float]) -> list[Row]:
        return [{"name": name, "seconds": median(seconds), "all": seconds}]

    for _ in range(5):
        step()
    yield row("a step", [wall_seconds(step) for _ in range(30)])

    def save_by_dcp() -> None:
        tensors = {"model": model.state_dict(), "optim": optimizer_tensors(model, optimizer)}
        dcp.save(tensors, checkpoint_id=folder / "dcp", no_dist=True)
        shutil.rmtree(folder / "dcp")

    folder.mkdir(parents=True)
    save_by_dcp()
    yield row("DCP, training waits", [wall_seconds(save_by_dcp) for _ in range(saves)])
    one = Processes(rank=0, world_size=1, device=device)
    waits, meanwhile, written = [], [], []
    with CheckpointSaver(folder, one, {}, {}, keep_last=1, keep_best=False) as saver:
        for number in range(saves + 1):
            save = partial(saver.save, Progress(step=number), model, optimizer)
            start = time.perf_counter()
            waits.append(wall_seconds(save))
            saver.confirm(number)  # two checkpoints stay on disk
            while not saver.is_idle():
                meanwhile.append(wall_seconds(step))
            written.append(time.perf_counter() - start)
    yield row("ours, the first time", waits[:1])
    yield row("ours, a step waits", waits[1:])
    yield row("ours, until it is on disk", written[1:])
    yield row("a step meanwhile", meanwhile)
    shutil.rmtree(folder)


DISPLAYED = {
    "a step": "training step",
    "DCP, training waits": "torch.distributed.checkpoint, training waits",
    "ours, the first time": "Papilio, training waits, first save",
    "ours, a step waits": "Papilio, training waits",
    "ours, until it is on disk": "Papilio, until the checkpoint is on disk",
    "a step meanwhile": "training step during a save",
}
"""Names of operations in the table, by their names in results."""


def saving_table(result: Row) -> str:
    """Markdown table of milliseconds by operation."""
    return dict_table(
        {"operation": DISPLAYED[row["name"]], "ms": f"{1000 * row['seconds']:.0f}"}
        for row in result["rows"]
    )


@command.main
def main(args: Namespace) -> None:
    """Run the measurement."""
    measure_rows(args, [partial(measure, args.folder, args.saves)], saving_table)
