"""Path-X and Path-256, stage by stage: the FlashAttention paper's Table 6.

    python -m scripts.reproduce_pathx --stages path64 pathx          # 10 minutes on one GPU
    python -m scripts.reproduce_pathx --gpus-per-run 8               # all stages
    python -m scripts.reproduce_pathx --report-only

Makes the images that the stages need, trains them one after the other (configs/pathx/STAGE.yaml,
each from the best weights of the one before), every seed on GPUs of its own, and reports on all
finished runs in --out: accuracy with intervals beside the paper's, and what can be had without
following a contour. Stopped, the same command goes on.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from configs.command_line import errors_as_sentences
from scripts.curriculum_sets import prepare_sets
from scripts.gpu_pool import Task, groups_of_gpus, python_command, run_tasks
from scripts.pathx_plan import BEFORE, StageRun, make_runs, run_folder
from scripts.pathx_report import write_report

SEEDS = (1111,)


def task_of(run: StageRun, waiting: set[str]) -> Task:
    """Train a stage, or go on with it, and score its best weights.

    Args:
        run: the stage.
        waiting: names of all tasks of this call.
    """
    before = BEFORE[run.stage]
    name = None if before is None else run_folder(run.folder.parent, before, run.seed).name

    def commands(n_gpu: int) -> list[list[str]]:
        return [python_command(n_gpu, "-m", "scripts.train_classifier", *run.arguments)]

    return Task(
        name=run.folder.name,
        needs=frozenset(waiting & {name}),
        commands=commands,
        log=run.folder.with_suffix(".log"),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.reproduce_pathx",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("out/pathx"), help="folder of the runs")
    parser.add_argument(
        "--stages", nargs="+", choices=tuple(BEFORE), metavar="STAGE", default=tuple(BEFORE),
        help=f"of {', '.join(BEFORE)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=SEEDS, metavar="SEED", help="(default: %(default)s)"
    )
    parser.add_argument("--gpus-per-run", type=int, default=1, metavar="N")
    parser.add_argument(
        "--results", type=Path, default=Path("docs/results"), help="folder of the report"
    )
    parser.add_argument("--report-only", action="store_true", help="report on what is finished")
    parser.add_argument(
        "--add", type=Path, nargs="+", default=[], metavar="FILE",
        help="reports whose runs --out lacks, of other machines or earlier ones: tell of them, too",
    )  # fmt: skip
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="key=value",
        help="for all runs, as for scripts.train_classifier",
    )  # fmt: skip
    args = parser.parse_args(argv)
    failed = []
    if not args.report_only:
        runs = make_runs(args.stages, args.seeds, args.out, args.set)
        unfinished = [run for run in runs if not run.is_finished]
        prepare_sets(path for run in unfinished for path in run.config.data.training_paths)
        names = {run.folder.name for run in unfinished}
        try:
            failed = run_tasks(
                [task_of(run, names) for run in unfinished],
                groups_of_gpus(args.gpus_per_run),
                partial(print, flush=True),
            )
        except SystemExit:
            print("stopped: the same command goes on from here", file=sys.stderr)
            raise
    if failed:
        print(f"these runs failed: {', '.join(failed)}")
    write_report(args.out, args.results, args.add)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    with errors_as_sentences():
        main()
