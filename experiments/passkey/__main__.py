"""Which attention finds a pass key in a long text: dense, a window, a butterfly; 1K, 4K, 16K.

    python -m experiments.passkey --data out/data/books

Trains configs/passkey_4k.yaml at each context, with each attention, on the same tokens in all, one
run after the other on one GPU, and asks each for keys in prompts of its context and of shares of
it. A window has an eighth of the context. Documents that teach are up to two contexts long. What
was trained or asked before is not again; --resume goes on with a report that was stopped.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from configs.command_line import command_parser, errors_as_sentences, read_first

CONTEXTS = (1024, 4096, 16_384)
ATTENTIONS = ("dense", "window", "butterfly")


@read_first
def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = command_parser(__doc__, __spec__)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="token shards to train on")
    add("--contexts", type=int, nargs="+", default=CONTEXTS)
    add("--attentions", nargs="+", choices=ATTENTIONS, default=ATTENTIONS)
    add("--seeds", type=int, nargs="+", default=[1])
    add("--documents", type=int, default=60_000, help="with keys (default: %(default)s)")
    add("--trials", type=int, default=20, help="of each length and depth (default: %(default)s)")
    add("--set", nargs="+", default=[], metavar="key=value", help="for all runs, as for train.py")
    add("--runs", type=Path, default=Path("out/passkey"), help="(default: %(default)s)")
    add("--resume", action="store_true", help="go on with a report that was stopped")
    add("--out", type=Path, default=Path("docs/results/passkey.json"))
    return parser.parse_args(argv)


import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch

from data.text.passkey import PasskeySource
from data.text.prepare import prepare
from data.text.shards import TOKENIZER, TokenStream
from evaluation.passkey import Trials, by_length, draw, score
from evaluation.results import Row, collect_rows
from evaluation.runs import describe, open_run
from evaluation.style import save
from experiments.reports import table
from training.metrics import read_evaluations
from training.numerics import autocast

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONFIG = "configs/passkey_4k.yaml"
STEP_TOKENS = 65_536
SHARES = (8, 4, 2, 1)  # of a context
DEPTHS = tuple(n / 10 for n in range(11))


def changes_of(attention: str, context: int) -> list[str]:
    """What a run has beside the configuration's dense attention."""
    if attention == "window":
        return [f"model.window_size={context // 8}"]
    return ["model.mask.pattern=butterfly"] if attention == "butterfly" else []


def train(args: argparse.Namespace, context: int, attention: str, seed: int) -> Path:
    """The folder of a finished run."""
    taught = args.runs / f"text_{context}"
    source = PasskeySource(args.data, args.documents, longest=2 * context)
    prepare(source, taught, tokenizer=str(args.data / TOKENIZER))  # if it was not before
    folder = args.runs / f"{attention}_{context}_seed{seed}"
    if read_evaluations(folder):
        return folder
    overrides = [
        f"data.path={args.data}",
        f"data.mix=[{{path: {taught}, weight: 1.0}}]",
        f"model.context_length={context}",
        f"optim.micro_batch_size={STEP_TOKENS // context}",
        *changes_of(attention, context),
        *(f"run.seed={seed}", f"run.out_dir={folder}"),
        *args.set,
    ]
    subprocess.run([sys.executable, "train.py", CONFIG, *overrides], check=True)
    return folder


def measure(
    args: argparse.Namespace, context: int, attention: str, seed: int
) -> Iterator[list[Row]]:
    """A row for each length and depth."""
    run = open_run(train(args, context, attention, seed))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lengths = [context // share for share in SHARES]
    rows = score(
        run.model.to(device),
        run.tokenizer,
        TokenStream(args.data, "val"),
        Trials(lengths=lengths, depths=DEPTHS, n=args.trials),
        batch_tokens=STEP_TOKENS,
        context=partial(autocast, run.config.run.dtype, device),
    )
    told = describe(run)
    about = {
        "context": context,
        "attention": attention,
        "seed": seed,
        "gpu_hours": told["gpu_hours"],
        "val_loss": told["evaluations"][-1]["val_loss"],
    }
    yield [about | row for row in rows]


def passkey_table(result: Row) -> str:
    """Keys that are found by each run, at its context and at shares of it, in Markdown."""

    def line(rows: list[Row]) -> dict[str, str]:
        first = rows[0]
        cells = {
            f"{row['length'] / first['context']:g} of it": (
                f"{100 * row['found'] / row['of']:.0f} "
                f"({100 * row['low']:.0f} to {100 * row['high']:.0f})"
            )
            for row in by_length(rows)
        }
        return {
            "context": f"{first['context']:,}",
            "attention": first["attention"],
            "seed": str(first["seed"]),
            "minutes": f"{60 * first['gpu_hours']:.1f}",
            "loss": f"{first['val_loss']:.3f}",
            **cells,
        }

    return table(line(rows) for rows in _by_run(result["rows"]).values())


def draw_passkey(result: Row) -> "Figure":
    """Heat maps of the runs of the first seed, those of a context side by side."""
    rows = result["rows"]
    runs = {key: of_run for key, of_run in _by_run(rows).items() if key[2] == rows[0]["seed"]}
    return draw(
        {f"{attention}, {context:,}": of_run for (context, attention, _), of_run in runs.items()},
        columns=len({attention for _, attention, _ in runs}),
    )


def _by_run(rows: list[Row]) -> dict[tuple[int, str, int], list[Row]]:
    found: dict[tuple[int, str, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row["context"], row["attention"], row["seed"]), []).append(row)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = options(argv)
    stages = [
        partial(measure, args, context, attention, seed)
        for seed in args.seeds
        for context in args.contexts
        for attention in args.attentions
    ]
    rows = collect_rows(args.out, stages, resume=args.resume)
    save(draw_passkey({"rows": rows}), args.out.with_suffix(".png"))
    print(passkey_table({"rows": rows}))
    print(f"wrote {args.out} and its picture")


if __name__ == "__main__":
    with errors_as_sentences():
        main()
