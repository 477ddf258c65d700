"""How long a training step waits for a checkpoint of GPT-2 small, and what saving slows down.

python -m experiments.train_steps.saving [--folder FOLDER]

A run of steps of 32,768 tokens, compiled, saves several times into --folder. `DCP` is what
torch.distributed.checkpoint takes for the same tensors while training waits.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from training.command_line import command_parser, errors_as_sentences, read_first


@read_first
def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = command_parser(__doc__, __spec__)
    add = parser.add_argument
    add("--folder", type=Path, default=Path("out/saving"), help="on the disk to be measured")
    add("--saves", type=int, default=5)
    add("--out", type=Path, default=Path("docs/results/saving.json"))
    return parser.parse_args(argv)


import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
import torch.distributed.checkpoint as dcp

from evaluation.results import Row
from experiments.reports import table
from experiments.results import collect_rows
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


def seconds(work: Callable[[], object]) -> float:
    """Seconds that the GPU and what follows it are kept waiting."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(folder: Path, saves: int) -> Iterator[list[Row]]:
    """A row for each thing that takes time."""
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

    def row(name: str, found: list[float]) -> list[Row]:
        return [{"name": name, "seconds": median(found), "all": found}]

    for _ in range(5):
        step()
    alone = [seconds(step) for _ in range(30)]
    yield row("a step", alone)

    def save_by_dcp() -> None:
        tensors = {"model": model.state_dict(), "optim": optimizer_tensors(model, optimizer)}
        dcp.save(tensors, checkpoint_id=folder / "dcp", no_dist=True)
        shutil.rmtree(folder / "dcp")

    folder.mkdir(parents=True)
    save_by_dcp()
    yield row("DCP, training waits", [seconds(save_by_dcp) for _ in range(saves)])
    one = Processes(rank=0, world_size=1, device=device)
    waits, beside, written = [], [], []
    with CheckpointSaver(folder, one, {}, {}, keep_last=1, keep_best=False) as saver:
        for number in range(saves + 1):
            save = partial(saver.save, Progress(step=number), model, optimizer)
            start = time.perf_counter()
            waits.append(seconds(save))
            saver.confirm(number)  # so that the disk holds two of them
            while not saver.is_idle():
                beside.append(seconds(step))
            written.append(time.perf_counter() - start)
    yield row("ours, the first time", waits[:1])
    yield row("ours, a step waits", waits[1:])
    yield row("ours, until it is on disk", written[1:])
    yield row("a step meanwhile", beside)
    shutil.rmtree(folder)


def saving_table(result: Row) -> str:
    """Milliseconds by name, in Markdown."""
    return table(
        {"what": row["name"], "ms": f"{1000 * row['seconds']:.0f}"} for row in result["rows"]
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = options(argv)
    if not torch.cuda.is_available():
        raise SystemExit("steps are measured on a GPU, and PyTorch sees none")
    rows = collect_rows(args.out, [partial(measure, args.folder, args.saves)])
    print(saving_table({"rows": rows}))
    print(f"wrote {args.out}")


if __name__ == "__main__":
    with errors_as_sentences():
        main()
