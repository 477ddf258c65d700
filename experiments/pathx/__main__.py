"""Path-X and Path-256, trained in stages: Table 6 of the FlashAttention paper.

    python -m experiments.pathx --stages path64 pathx          # 10 minutes on one GPU
    python -m experiments.pathx --gpus-per-run 8               # all stages
    python -m experiments.pathx --report-only

Generates the images of the stages and trains the stages in order (configs/pathx/STAGE.yaml), each
from the best weights of the previous one, every seed on its own GPUs. Then reports on all finished
runs in --out: accuracy with intervals next to the paper's, and baselines that do not follow a
contour. To resume, run the same command.
"""

from collections.abc import Sequence
from pathlib import Path

from experiments.harness import Command
from experiments.pathx.stages import STAGES
from experiments.sweep import add_options

SEEDS = (1111,)


command = Command(__name__)
command.add(
    "--stages", nargs="+", choices=tuple(STAGES), metavar="STAGE", default=tuple(STAGES),
    help=f"stages: {', '.join(STAGES)} (default: all)",
)  # fmt: skip
command.add("--gpus-per-run", type=int, default=1, metavar="N")
add_options(command.add, Path("out/pathx"), SEEDS)
command.read()

from argparse import Namespace
from itertools import product

from evaluation.runs import HOW, check_same_settings
from experiments.classifier_runs import is_finished
from experiments.example_sets import prepare_sets
from experiments.pathx.report import write_report
from experiments.sweep import Run, refuse_overrides, run_in, train_and_report
from training.classification.config import ClassifyConfig

CONFIGS = Path("configs/pathx")


def make_runs(
    stages: Sequence[str], seeds: Sequence[int], out: Path, overrides: Sequence[str] = ()
) -> list[Run[ClassifyConfig]]:
    """Build the runs of some STAGES with each seed, OUT/STAGE_seedN, earlier stages first.

    Raises:
        ValueError: the previous stage of a stage is neither selected nor finished, `overrides`
            (key=value) has a setting that the sweep controls, or a folder has a run with other
            settings.
    """
    refuse_overrides(overrides, {"run.init_from": "--out"})
    runs = []
    for seed, stage in product(dict.fromkeys(seeds), (s for s in STAGES if s in stages)):
        name = STAGES[stage].before
        settings = (str(CONFIGS / f"{stage}.yaml"), *overrides)
        run = run_in(out, stage, seed, ClassifyConfig, settings, before=name)
        check_same_settings(run.folder, run.config, may_differ=HOW)
        for before in run.needs:
            if name not in stages and not is_finished(before):
                raise ValueError(
                    f"{stage} starts from the weights of {name}, but {before} is not finished. Add "
                    f"{name} to --stages"
                )
        runs.append(run)
    return runs


@command.main
def main(args: Namespace) -> None:
    """Run the command."""
    unfinished = []
    if not args.report_only:
        runs = make_runs(args.stages, args.seeds, args.out, args.set)
        unfinished = [run for run in runs if not is_finished(run.folder)]
        prepare_sets(path for run in unfinished for path in run.config.data.training_paths)
    train_and_report(
        [run.task() for run in unfinished],
        lambda _: write_report(args.out, args.results, args.add),
        gpus_per_run=args.gpus_per_run,
    )
