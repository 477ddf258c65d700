"""Score runs on the same validation tokens, and measure the benefit of their context.

    python -m scripts.evaluate out/gpt2_small_1k out/gpt2_small_4k [--data FOLDER [FOLDER ...]]
    torchrun --standalone --nproc_per_node=8 -m scripts.evaluate RUN [RUN ...]

There are four modes. Each makes one or more passes over the validation split, with all processes:

    chunk     as the FlashAttention paper evaluates: windows of the model's context that do not
              overlap. With a longer context, fewer tokens are near the start of a window. Part of
              its lower loss is due to that alone.
    strided   windows that slide by an eighth of their length or by --stride. All models and all
              histories score the same tokens, each with at least 7/8 of its history.
    cross     strided, with less history than in training: how good is a 4K model with 1K of
              context? With --histories, any lengths.
    control   the part of the window that is more than --near tokens away is left intact, shuffled,
              or replaced by other text. If the model uses that part, the loss must rise from the
              first to the others. Windows slide by a quarter of the context, or by --stride if that
              is more.

LongPPL (arXiv 2410.23771) is the perplexity on key tokens only: those that one run predicts well
with a long history, and much worse with a short one (--near). This choice favours the run that
makes it, so that run must not be compared, and its choice holds for all runs. By default, a seed of
the first model with the longest context chooses, and all runs of this seed are left out of LongPPL,
if each model then has another seed. Otherwise, pass a run with --key-tokens. To score runs one at a
time, let this run write its choice to a file first (--write-key-tokens FILE), and pass the file.

Runs named NAME_seed1, NAME_seed2 ... that otherwise have the same configuration count as one model
with several seeds. Differences are relative to the first model. Writes evaluation.json, report.md
and pictures to --out; for several --data, to a folder for each, with its name. Scores are kept in
the folder of the run and not computed again. With --sums, it writes a small file for each run, with
what a report needs of it, for experiments.table4.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from training.command_line import (
    add_checkpoint_option,
    command_parser,
    parse_before_imports,
    user_errors_as_messages,
)
from training.signals import on_interrupt


@parse_before_imports
def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_parser(__doc__, __spec__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    add_checkpoint_option(parser)
    add(
        "--data", type=Path, nargs="+", default=[], dest="corpora", metavar="FOLDER",
        help="token shards (default: the first run's); several get a report each",
    )  # fmt: skip
    add("--out", type=Path, help="folder of the report (default: out/evaluation)")
    add(
        "--modes", nargs="+", choices=("chunk", "strided", "cross", "control"),
        help="modes to score, all of which must apply (default: those that apply)",
    )  # fmt: skip
    add(
        "--stride", nargs="+", type=int, dest="strides",
        help="tokens by which windows slide (default: an eighth of their length)",
    )  # fmt: skip
    add("--histories", nargs="+", type=int, default=[], help="tokens of history, for cross")
    add(
        "--near", type=int,
        help="for control, and the short history of key tokens (default: the shortest context, or "
        "a quarter of it if all are equal)",
    )  # fmt: skip
    add("--first", type=int, help="position of the first token scored (default: longest context)")
    add(
        "--documents", choices=("trained", "packed", "masked", "both"), default="trained",
        help="packed: tokens attend to text before their document; masked: they do not "
        "(default: as in training)",
    )  # fmt: skip
    add(
        "--key-tokens", type=Path, metavar="RUN|FILE",
        help="run that chooses the key tokens of LongPPL at its newest checkpoint and is not "
        "compared, best a seed that no other run has; or a file that it wrote (default: one of the "
        "seeds, if possible)",
    )  # fmt: skip
    add(
        "--write-key-tokens", type=Path, metavar="FILE",
        help="let the only RUN choose key tokens and write them to FILE, without a report",
    )  # fmt: skip
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--batch-tokens", type=int, help="tokens per forward pass (default: as in training)")
    add(
        "--sums", type=Path, metavar="FOLDER",
        help="write what a report needs of each run to FOLDER/CORPUS/RUN.npz, and no report",
    )  # fmt: skip
    return parser.parse_args(argv)


import torch

from evaluation.evaluate import choose_key_tokens, evaluate_runs
from evaluation.key_tokens import write_key_tokens
from evaluation.plan import SLIDING, Plan
from evaluation.report import write_report
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
    if args.write_key_tokens is not None:
        check_writes_key_tokens(args)
    out = args.out or Path("out/evaluation")
    option, folder = ("--out", out) if args.sums is None else ("--sums", args.sums)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        raise ValueError(f"{option}={folder}: {existing} is a file, and must be a folder")
    names = [folder.resolve().name for folder in args.runs]
    if args.sums is not None and len(set(names)) < len(names):
        raise ValueError(
            "--sums keeps runs by the names of their folders, which must differ, but these are "
            f"{', '.join(names)}: rename the duplicates"
        )
    for option, is_given, modes in (
        ("--stride", args.strides is not None, SLIDING),
        ("--first", args.first is not None, SLIDING),
        ("--histories", args.histories != [], ("cross",)),
        ("--near", args.near is not None, ("control", "strided", "cross")),
        ("--key-tokens", args.key_tokens is not None, ("strided", "cross")),
        ("--documents", args.documents != "trained", ("chunk", "strided", "cross")),
    ):
        if is_given and args.modes and not set(modes) & set(args.modes):
            raise ValueError(
                f"{option} changes nothing with --modes {' '.join(args.modes)}: leave it out, or "
                f"add a mode that uses it ({', '.join(modes)})"
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
        on_interrupt(
            lambda: ": finished scores are kept in RUN/scores; the same command scores the rest"
        ),
        start_processes(args.device) as processes,
    ):
        how = plan, processes, args.corpora, args.batch_tokens, args.checkpoint
        if args.write_key_tokens is not None:
            key = choose_key_tokens(args.runs[0], *how)
            key.check_some()
            if processes.is_main:
                write_key_tokens(key, args.write_key_tokens)
                print(f"wrote {args.write_key_tokens}: {key.summary()}")
            return
        evaluated = evaluate_runs(args.runs, *how, args.key_tokens)
        if not processes.is_main:
            return
        for scored, text in evaluated:
            if args.sums is not None:
                for run in scored:
                    print(f"wrote {write_scored(run, text, args.sums)}")
            else:
                write_report(tabulate(scored, text), out / text.name if len(evaluated) > 1 else out)


def check_writes_key_tokens(args: argparse.Namespace) -> None:
    """Check that --write-key-tokens has one run, and no option that changes nothing with it."""
    if len(args.runs) > 1:
        raise ValueError(
            f"--write-key-tokens={args.write_key_tokens} needs the one run that chooses, not "
            f"{len(args.runs)} runs: pass the others later, with --key-tokens"
        )
    if args.write_key_tokens.is_dir():
        raise ValueError(f"--write-key-tokens={args.write_key_tokens} is a folder: name a file")
    for name in ("out", "sums", "key_tokens", "modes", "histories"):
        if getattr(args, name):
            raise ValueError(
                f"--{name.replace('_', '-')} changes nothing with --write-key-tokens: leave it out"
            )


if __name__ == "__main__":
    with user_errors_as_messages():
        main()
