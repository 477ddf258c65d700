"""Path-X and Path-256, stage by stage: the FlashAttention paper's Table 6.

    python -m experiments.pathx --stages path64 pathx          # 10 minutes on one GPU
    python -m experiments.pathx --gpus-per-run 8               # all stages
    python -m experiments.pathx --report-only

Makes the images that the stages need, trains them one after the other (configs/pathx/STAGE.yaml,
each from the best weights of the one before), every seed on GPUs of its own, and reports on all
finished runs in --out: accuracy with intervals beside the paper's, and what can be had without
following a contour. Stopped, the same command goes on.
"""

from collections.abc import Sequence
from pathlib import Path

from configs.command_line import command_parser, errors_as_sentences
from experiments.classifier_runs import is_finished, prepare_sets
from experiments.pathx.report import write_report
from experiments.pathx.stages import BEFORE, make_runs
from experiments.sweep import add_options, train_and_report

SEEDS = (1111,)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = command_parser(__doc__, __spec__)
    parser.add_argument(
        "--stages", nargs="+", choices=tuple(BEFORE), metavar="STAGE", default=tuple(BEFORE),
        help=f"of {', '.join(BEFORE)} (default: all)",
    )  # fmt: skip
    parser.add_argument("--gpus-per-run", type=int, default=1, metavar="N")
    add_options(parser, Path("out/pathx"), SEEDS)
    args = parser.parse_args(argv)
    unfinished = []
    if not args.report_only:
        runs = make_runs(args.stages, args.seeds, args.out, args.set)
        unfinished = [run for run in runs if not is_finished(run.folder)]
        prepare_sets(path for run in unfinished for path in run.config.data.training_paths)
    train_and_report(
        [run.gpu_task(unfinished) for run in unfinished],
        lambda _: write_report(args.out, args.results, args.add),
        gpus_per_run=args.gpus_per_run,
    )


if __name__ == "__main__":
    with errors_as_sentences():
        main()
