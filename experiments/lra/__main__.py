"""Long Range Arena with standard attention and with ours: the FlashAttention paper's Table 3.

    python -m experiments.lra --data out/data/lra --jobs-per-gpu 3
    python -m experiments.lra --tasks listops image --seeds 1111 --attentions dense
    python -m experiments.lra --recipe pretrained --tasks text --attentions dense
    python -m experiments.lra --report-only

Trains every task of --tasks with every attention of --attentions and every seed, --jobs-per-gpu at
a time on each GPU of this machine (train.py, configs/lra/TASK.yaml), and reports
on all finished runs in --out: accuracy with intervals beside the paper's, and speed-ups where
speed.py measured them. Stopped, the same command goes on. Retrieval is left out where its
texts are not prepared; the in-house task of pairs is trained where it is asked for. The images that
data.phases begin with are made where they are missing. With --recipe rotary the configurations are
configs/lra/TASK_rotary.yaml; with --recipe pretrained these, too, each twice: first on hidden
tokens.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from experiments.lra.tasks import ATTENTIONS, BENCHMARK, RECIPES, TASKS
from experiments.sweep import add_options
from training.command_line import command_parser, errors_as_sentences, read_first

SEEDS = (1111, 1112, 1113)


@read_first
def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = command_parser(__doc__, __spec__)
    add = parser.add_argument
    add("--data", type=Path, default=Path("out/data/lra"), help="folder of the prepared tasks")
    add(
        "--tasks", nargs="+", choices=TASKS, metavar="TASK", default=BENCHMARK,
        help=f"of {', '.join(TASKS)} (default: all but the last, which is in-house)",
    )  # fmt: skip
    add(
        "--attentions", nargs="+", choices=ATTENTIONS, metavar="ATTENTION",
        default=tuple(ATTENTIONS), help=f"of {', '.join(ATTENTIONS)} (default: all)",
    )  # fmt: skip
    add("--recipe", choices=RECIPES, default="paper")
    add("--jobs-per-gpu", type=int, default=1, metavar="N")
    add_options(parser, Path("out/lra"), SEEDS)
    return parser.parse_args(argv)


from functools import partial

from experiments.classifier_runs import is_finished
from experiments.example_sets import prepare_sets
from experiments.lra.jobs import make_jobs, trainable_tasks
from experiments.lra.report import note_sharing, write_report
from experiments.sweep import train_and_report


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = options(argv)
    waiting = []
    if not args.report_only:
        if args.jobs_per_gpu < 1:
            raise ValueError(f"--jobs-per-gpu={args.jobs_per_gpu} must be at least 1")
        names = trainable_tasks(args.tasks, args.data, args.recipe)
        folders = {"data": args.data, "out": args.out}
        jobs = make_jobs(
            names, args.attentions, args.seeds, **folders, recipe=args.recipe, overrides=args.set
        )
        waiting = [job for job in jobs if not is_finished(job.folder)]
        finished = [job.folder.name for job in jobs if job not in waiting]
        if finished:
            print(f"finished before: {', '.join(finished)}")
        prepare_sets(
            path for job in waiting for phase in job.config.data.phases for path in phase.paths
        )
    train_and_report(
        [job.task(partial(note_sharing, job.folder, args.jobs_per_gpu)) for job in waiting],
        lambda _: write_report(args.out, args.recipe, args.data, args.results, args.add),
        runs_per_gpu=args.jobs_per_gpu,
    )


if __name__ == "__main__":
    with errors_as_sentences():
        main()
