"""Whether processes that share a model or its sequences learn what one process learns.

python -m experiments.scale.same_losses --data out/data/openwebtext

Four layers of GPT-2 small at a context of 8,192, packed documents apart, trained by train.py for 50
steps on the same samples: on one GPU, and on two in each way of sharing. One GPU with other
micro-batches gives the same sums in another order. What it is off by is the noise of that order,
beside which the others stand. A run that is there is not trained again.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from training.command_line import command_parser, errors_as_sentences, read_first

# processes, and what they are told
WAYS: dict[str, tuple[int, list[str]]] = {
    "one GPU": (1, []),
    "one GPU, other micro-batches": (1, ["optim.micro_batch_size=1"]),
    "ddp": (2, []),
    "fsdp, float32": (2, ["parallel.mode=fsdp", "parallel.gather_dtype=float32"]),
    "fsdp": (2, ["parallel.mode=fsdp"]),
    "context": (2, ["parallel.context=2"]),
    "context and fsdp, float32": (
        2,
        ["parallel.context=2", "parallel.mode=fsdp", "parallel.gather_dtype=float32"],
    ),
}
BUTTERFLY = "model.mask.pattern=butterfly"
WAYS |= {
    "one GPU, butterfly": (1, [BUTTERFLY]),
    "context, butterfly": (2, [BUTTERFLY, "parallel.context=2"]),
}
STEPS = 50
SETTINGS = [
    *("configs/gpt2_small_8k.yaml", "model.n_layer=4"),
    *("model.dropout=0", "model.attention_dropout=0"),
    *("data.document_mask=true", "optim.batch_tokens=65536", "optim.micro_batch_size=2"),
    # so slow that the loss has no spikes, which enlarge every difference
    *(f"optim.max_steps={STEPS}", "optim.warmup_steps=20", "optim.lr=2e-4", "run.log_every=1"),
    *(f"run.eval_every={STEPS}", f"run.save_every={STEPS}"),
]


@read_first
def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = command_parser(__doc__, __spec__)
    add = parser.add_argument
    add("--data", required=True, help="folder of prepared text, by GPT-2's tokenizer")
    add("--ways", nargs="+", choices=[*WAYS], default=[*WAYS], help="of sharing; the first is one")
    add("--runs", type=Path, default=Path("out/same_losses"))
    add("--out", type=Path, default=Path("docs/results/scale_losses.json"))
    return parser.parse_args(argv)


import subprocess
import sys

import numpy as np

from evaluation.results import Row, write_result
from experiments.reports import table
from training.metrics import read_metrics


def train(way: str, data: str, folder: Path) -> list[float]:
    """Train as a user would; returns the loss of each step."""
    n_processes, changes = WAYS[way]
    found = _losses(folder)
    if len(found) < STEPS:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={n_processes}", "train.py", *SETTINGS, *changes]
        command += [f"data.path={data}", f"run.out_dir={folder}"]
        print(f"\n{way}: {' '.join(command[2:])}\n", flush=True)
        subprocess.run(command, check=True)
        found = _losses(folder)
    return found


def _losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder) if "loss" in record]


def compare(losses: dict[str, list[float]]) -> list[Row]:
    """Of each way its gap to one GPU under the same mask, nats: mean and largest over steps."""
    rows = []
    for way, found in losses.items():
        one = "one GPU, butterfly" if "butterfly" in way else "one GPU"
        gaps = np.abs(np.array(found) - np.array(losses[one]))
        if way != one:
            rows.append({"way": way, "mean": gaps.mean().item(), "most": gaps.max().item()})
    return rows


def losses_table(result: Row) -> str:
    """How far each way is from one GPU, in thousandths of a nat."""
    return table(
        {
            "way": row["way"],
            "mean gap, mnat": f"{1e3 * row['mean']:.2f}",
            "largest, mnat": f"{1e3 * row['most']:.2f}",
        }
        for row in result["gaps"]
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = options(argv)
    losses = {}
    for way in args.ways:
        name = way.replace(", ", "_").replace(" ", "_")
        losses[way] = train(way, args.data, args.runs / name)
    result = {"steps": STEPS, "losses": losses, "gaps": compare(losses)}
    write_result(args.out, result)
    print(losses_table(result))
    print(f"wrote {args.out}")


if __name__ == "__main__":
    with errors_as_sentences():
        main()
