"""Options of the commands that train and score models of Table 4."""

from argparse import Namespace
from pathlib import Path

from experiments.harness import Command


def add_sweep_options(command: Command, out: str) -> None:
    """Add the options that are independent of models and budget; `out` describes the default."""
    add = command.add
    add("--data", type=Path, required=True, help="token shards to train on")
    add("--seeds", type=int, help="seeds per model (default: from the budget)")
    add(
        "--only", nargs="+", metavar="RUN",
        help="train and score only these, such as '*_seed2', in this order",
    )  # fmt: skip
    add("--gpus-per-run", type=int, default=1)
    add(
        "--jobs-per-gpu", type=int, default=1,
        help="runs that share a GPU: more runs per hour, but their times are not comparable",
    )  # fmt: skip
    add("--out", type=Path, help=f"folder (default: {out})")
    add("--score-on", type=Path, nargs="+", help="corpora to score on (default: --data)")
    add("--sums", type=Path, help="folder of scores that a report needs (default: OUT/sums)")
    add(
        "--add", type=Path, nargs="+", default=[], metavar="FOLDER",
        help="first copy the scores that --sums lacks from these folders (earlier, or of other "
        "machines)",
    )  # fmt: skip
    add("--stride", type=int, nargs="+", help="as in scripts.evaluate")
    add("--histories", type=int, nargs="+", help="histories to score with (default: all contexts)")
    add(
        "--key-tokens", type=Path, metavar="FILE",
        help="key tokens of LongPPL, as in scripts.evaluate",
    )  # fmt: skip
    add("--report-only", action="store_true", help="only report on finished and scored runs")
    add("--set", nargs="+", default=[], metavar="key=value", help="for all runs, as in train.py")


def check_sweep_options(args: Namespace) -> None:
    """Reject options that exclude each other."""
    if args.jobs_per_gpu < 1:
        raise ValueError(f"--jobs-per-gpu={args.jobs_per_gpu} must be at least 1")
    if args.jobs_per_gpu > 1 and args.gpus_per_run > 1:
        raise ValueError("argument --jobs-per-gpu: not allowed with argument --gpus-per-run")
    if args.only and args.report_only:
        raise ValueError("argument --report-only: not allowed with argument --only")
