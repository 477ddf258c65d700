"""Score runs on the same validation tokens, and say what their context is worth.

    python -m scripts.evaluate out/gpt2_small_1k out/gpt2_small_4k [--data FOLDER [FOLDER ...]]
    torchrun --standalone --nproc_per_node=8 -m scripts.evaluate RUN [RUN ...]

Four ways to score, of one or more passes over the validation split by all processes:

    chunk     as the FlashAttention paper evaluates: windows of the model's context that do not
              overlap. A longer context then also has fewer tokens at the start of a window, and
              part of its lower loss is only that.
    strided   windows that slide, by an eighth of what they read or by --stride. All models and all
              histories score the same tokens, each with at least 7/8 of its history.
    cross     strided with less history than the model was trained on: what does a 4K model make of
              1K? With --histories, any.
    control   the part of the window that is more than --near tokens away is left intact, shuffled,
              or replaced by other text: the loss must rise from the first to the others if that
              part was used. Windows slide by a quarter of the context, or --stride if that is more.

Runs named NAME_seed1, NAME_seed2 ... that were trained alike otherwise count as one model with
several seeds. Differences are to the first model. Written to --out: evaluation.json, report.md,
pictures; for several --data into a folder for each, of its name. What has been scored is kept in
the folder of the run and not scored again. With --sums, what a report needs of each run is written
instead, a small file each, for experiments.table4.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from training.command_line import (
    add_checkpoint_option,
    command_parser,
    errors_as_sentences,
    read_first,
)
from training.signals import if_interrupted


@read_first
def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = command_parser(__doc__, __spec__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    add_checkpoint_option(parser)
    add(
        "--data", type=Path, nargs="+", default=[], dest="corpora", metavar="FOLDER",
        help="token shards (default: the first run's); of several, each has a report",
    )  # fmt: skip
    add("--out", type=Path, help="folder of the report (default: out/evaluation)")
    add(
        "--modes", nargs="+", choices=("chunk", "strided", "cross", "control"),
        help="all of these must give something to score (default: whichever do)",
    )  # fmt: skip
    add(
        "--stride", nargs="+", type=int, dest="strides",
        help="by how many tokens windows slide (default: an eighth of what they read)",
    )  # fmt: skip
    add("--histories", nargs="+", type=int, default=[], help="for cross")
    add(
        "--near", type=int,
        help="for control (default: the shortest context; a quarter of it if there is no other)",
    )  # fmt: skip
    add("--first", type=int, help="position from which all score (default: the longest context)")
    add(
        "--documents", choices=("trained", "packed", "masked", "both"), default="trained",
        help="does a token see what stands before its document? (default: as in training)",
    )  # fmt: skip
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--batch-tokens", type=int, help="read at once (default: as in training)")
    add(
        "--sums", type=Path, metavar="FOLDER",
        help="write what a report needs of each run to FOLDER/CORPUS/RUN.npz, and no report",
    )  # fmt: skip
    return parser.parse_args(argv)


import torch

from evaluation.plan import SLIDING, Plan
from evaluation.report import write_report
from evaluation.score import evaluate_runs
from evaluation.sums import write_scored
from evaluation.tables import tabulate
from training.distributed import start_processes


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = options(argv)
    if args.batch_tokens is not None and args.batch_tokens < 1:
        raise ValueError(f"--batch-tokens={args.batch_tokens} must be at least 1")
    if args.sums is not None and args.out is not None:
        raise ValueError("--out is for a report, and --sums writes none: leave one of them out")
    out = args.out or Path("out/evaluation")
    option, folder = ("--out", out) if args.sums is None else ("--sums", args.sums)
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"{option}={folder}: {there} is a file, and must be a folder")
    names = [folder.resolve().name for folder in args.runs]
    if args.sums is not None and len(set(names)) < len(names):
        raise ValueError(
            f"--sums keeps runs by the names of their folders, and these are {', '.join(names)}: "
            "rename those that are called the same"
        )
    for option, is_given, modes in (
        ("--stride", args.strides is not None, SLIDING),
        ("--first", args.first is not None, SLIDING),
        ("--histories", args.histories != [], ("cross",)),
        ("--near", args.near is not None, ("control",)),
        ("--documents", args.documents != "trained", ("chunk", "strided", "cross")),
    ):
        if is_given and args.modes and not set(modes) & set(args.modes):
            raise ValueError(
                f"{option} changes nothing with --modes {' '.join(args.modes)}: leave it out, or "
                f"add a mode that it is for ({', '.join(modes)})"
            )
    masks = {"trained": None, "packed": (False,), "masked": (True,), "both": (False, True)}
    plan = Plan(
        modes=None if args.modes is None else tuple(args.modes),
        strides=tuple(args.strides) if args.strides else None,
        histories=tuple(args.histories),
        near=args.near,
        first=args.first,
        document_masks=masks[args.documents],
    )
    torch.set_float32_matmul_precision("high")  # as in training
    with (
        if_interrupted(lambda: ": what was scored is kept, and the same command scores the rest"),
        start_processes(args.device) as processes,
    ):
        evaluated = evaluate_runs(
            args.runs, plan, processes, args.corpora, args.batch_tokens, args.checkpoint
        )
        if not processes.is_main:
            return
        for scored, text in evaluated:
            if args.sums is not None:
                for run in scored:
                    print(f"wrote {write_scored(run, text, args.sums)}")
            else:
                write_report(tabulate(scored, text), out / text.name if len(evaluated) > 1 else out)


if __name__ == "__main__":
    with errors_as_sentences():
        main()
