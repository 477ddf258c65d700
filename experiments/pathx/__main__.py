"""Path-X and Path-256, stage by stage: the FlashAttention paper's Table 6.

    python -m experiments.pathx --stages path64 pathx          # 10 minutes on one GPU
    python -m experiments.pathx --gpus-per-run 8               # all stages
    python -m experiments.pathx --report-only

Makes the images that the stages need, trains them one after the other (configs/pathx/STAGE.yaml,
each from the best weights of the one before), every seed on GPUs of its own, and reports on all
finished runs in --out: accuracy with intervals beside the paper's, and what can be had without
following a contour. Stopped, the same command goes on.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from experiments.pathx.stages import STAGES
from experiments.sweep import add_options
from training.command_line import command_parser, errors_as_sentences, read_first

SEEDS = (1111,)


@read_first
def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = command_parser(__doc__, __spec__)
    parser.add_argument(
        "--stages", nargs="+", choices=tuple(STAGES), metavar="STAGE", default=tuple(STAGES),
        help=f"of {', '.join(STAGES)} (default: all)",
    )  # fmt: skip
    parser.add_argument("--gpus-per-run", type=int, default=1, metavar="N")
    add_options(parser, Path("out/pathx"), SEEDS)
    return parser.parse_args(argv)


from itertools import product

from experiments.classifier_runs import ClassifierRun, is_finished
from experiments.example_sets import prepare_sets
from experiments.pathx.report import write_report
from experiments.sweep import refuse_overrides, train_and_report

CONFIGS = Path("configs/pathx")
SET_HERE = {"run.seed": "--seeds", "run.out_dir": "--out", "run.init_from": "--out"}


def make_runs(
    stages: Sequence[str], seeds: Sequence[int], out: Path, overrides: Sequence[str] = ()
) -> list[ClassifierRun]:
    """The runs of some of STAGES with each seed, OUT/STAGE_seedN, earlier stages first.

    Raises:
        ValueError: a stage begins with one that is neither named nor finished, `overrides`,
            key=value, set what is set here, or a folder holds a run with other settings.
    """
    refuse_overrides(overrides, SET_HERE)
    runs = []
    for seed, stage in product(dict.fromkeys(seeds), (s for s in STAGES if s in stages)):
        name = STAGES[stage].before
        before = None if name is None else out / f"{name}_seed{seed}"
        if before is not None and name not in stages and not is_finished(before):
            raise ValueError(
                f"{stage} begins with the weights of {name}, and {before} is not finished: add "
                f"{name} to --stages"
            )
        folder, settings = out / f"{stage}_seed{seed}", (str(CONFIGS / f"{stage}.yaml"), *overrides)
        runs.append(ClassifierRun(seed=seed, folder=folder, settings=settings, before=before))
    for run in runs:
        run.check_folder()
    return runs


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = options(argv)
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
