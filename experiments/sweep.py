"""Commands that train many runs: side by side, each on GPUs of its own, and then a report."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from experiments.gpu_pool import Task, groups_of_gpus, run_tasks


def add_options(parser: argparse.ArgumentParser, out: Path, seeds: Sequence[int]) -> None:
    """Add what all sweeps of runs have, with the folder `out` and `seeds` as defaults."""
    add = parser.add_argument
    add("--out", type=Path, default=out, help="folder of the runs")
    add(
        "--seeds", type=int, nargs="+", default=seeds, metavar="SEED", help="(default: %(default)s)"
    )
    add("--set", nargs="+", default=[], metavar="key=value", help="for all runs, as for train.py")
    add("--results", type=Path, default=Path("docs/results"), help="folder of the report")
    add("--report-only", action="store_true", help="report on what is finished")
    add(
        "--add", type=Path, nargs="+", default=[], metavar="FILE",
        help="reports, of other machines or earlier ones: tell of their runs that --out lacks, too",
    )  # fmt: skip


def refuse_overrides(overrides: Sequence[str], options: Mapping[str, str]) -> None:
    """Raise ValueError where --set names a setting that one of the sweep's options decides."""
    for override in overrides:
        key = override.partition("=")[0]
        if key in options:
            raise ValueError(
                f"--set {override}: the sweep itself sets {key} for each run, take {options[key]}"
            )


def train_and_report(
    tasks: Sequence[Task],
    report: Callable[[list[str]], object],
    *,
    gpus_per_run: int = 1,
    runs_per_gpu: int = 1,
) -> None:
    """Run tasks on the GPUs of this machine, then report, also where some of them failed.

    `report` gets the names of the tasks that failed. `gpus_per_run` GPUs share a run, or at most
    `runs_per_gpu` runs a GPU.

    Raises:
        SystemExit: stopped, or some tasks failed.
        ValueError: fewer GPUs than a run needs.
    """
    failed = []
    if tasks:
        # all GPUs once, then all once more: the first runs have one each
        groups = groups_of_gpus(gpus_per_run) * runs_per_gpu
        try:
            failed = run_tasks(tasks, groups, partial(print, flush=True))
        except SystemExit:
            print("stopped: the same command goes on from here", file=sys.stderr)
            raise
    if failed:
        print(f"these runs failed: {', '.join(failed)}")
    report(failed)
    if failed:
        raise SystemExit(1)
