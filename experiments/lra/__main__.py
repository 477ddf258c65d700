"""Long Range Arena with standard attention and Papilio's: Table 3 of the FlashAttention paper.

    python -m experiments.lra --data out/data/lra --jobs-per-gpu 3
    python -m experiments.lra --tasks listops image --seeds 1111 --attentions dense
    python -m experiments.lra --recipe pretrained --tasks text --attentions dense
    python -m experiments.lra --report-only

Trains every task of --tasks with every attention and seed, --jobs-per-gpu runs at a time on each
GPU of this machine (train.py, configs/lra/TASK.yaml). Then reports on all finished runs in --out:
accuracy with intervals next to the paper's, and the speedups that speed.py measured. To resume, run
the same command. Retrieval is skipped if its texts are not prepared. The in-house tasks, pairs
and aclsum, are trained only if --tasks has them. Missing images for data.phases are generated.
--recipe rotary uses configs/lra/TASK_rotary.yaml. --recipe pretrained also does, and trains on
hidden tokens first.
"""

from collections.abc import Sequence
from pathlib import Path

from experiments.harness import Command
from experiments.lra.tasks import ATTENTIONS, BENCHMARK, IN_HOUSE, RECIPES, TASKS
from experiments.sweep import add_options

SEEDS = (1111, 1112, 1113)


command = Command(__name__)
command.add("--data", type=Path, default=Path("out/data/lra"), help="folder of the prepared tasks")
command.add(
    "--tasks", nargs="+", choices=TASKS, metavar="TASK", default=BENCHMARK,
    help=f"tasks: {', '.join(TASKS)} (default: all except the in-house {' and '.join(IN_HOUSE)})",
)  # fmt: skip
command.add(
    "--attentions", nargs="+", choices=ATTENTIONS, metavar="ATTENTION",
    default=tuple(ATTENTIONS), help=f"attentions: {', '.join(ATTENTIONS)} (default: all)",
)  # fmt: skip
command.add("--recipe", choices=RECIPES, default="paper")
command.add("--jobs-per-gpu", type=int, default=1, metavar="N")
add_options(command.add, Path("out/lra"), SEEDS)
command.read()

from argparse import Namespace
from functools import partial
from itertools import product

from evaluation.runs import HOW, check_same_settings, note_sharing
from experiments.classifier_runs import is_finished
from experiments.example_sets import prepare_sets
from experiments.lra.report import write_report
from experiments.lra.tasks import arguments_of, suffix_of, trainable_tasks
from experiments.sweep import Run, refuse_overrides, run_in, train_and_report
from training.classification.config import ClassifyConfig

PRETRAINING_LR = {"text": ("optim.lr=0.0005",)}
"""Learning rates on hidden tokens, for tasks where they differ from those on labels."""

SET_HERE = {
    "data.path": "--data",
    "model.attention": "--attentions",
    "model.mask.pattern": "--attentions",
    "objective": "--recipe",
    "run.init_from": "--recipe",
}
"""Settings that the name of a run determines, and the options that control them."""


def make_runs(
    tasks: Sequence[str],
    attentions: Sequence[str],
    seeds: Sequence[int],
    *,
    data: Path,
    out: Path,
    recipe: str = "paper",
    overrides: Sequence[str] = (),
) -> list[Run[ClassifyConfig]]:
    """Build all runs, by seed, and then the most expensive first.

    Each task, attention and seed has a run in `out`: TASK_ATTENTION_seedN or
    TASK_RECIPE_ATTENTION_seedN. The recipe pretrained adds TASK_masked_ATTENTION_seedN before each.
    `overrides`, key=value, come last in all of them.

    Raises:
        ValueError: a configuration is invalid, `overrides` has a setting that the sweep controls,
            or a folder has a run with other settings.
    """
    refuse_overrides(overrides, SET_HERE)
    runs = []
    cases = product(dict.fromkeys(tasks), dict.fromkeys(attentions), dict.fromkeys(seeds))
    for task, attention, seed in cases:
        path, *shared = arguments_of(task, attention, data, recipe=recipe, overrides=overrides)
        stages = {suffix_of(recipe): ()}
        if recipe == "pretrained":
            stages = {"_masked": ("objective=masked", *PRETRAINING_LR.get(task, ()))} | stages
        before = None
        for suffix, changes in stages.items():
            name, settings = f"{task}{suffix}_{attention}", (path, *changes, *shared)
            run = run_in(out, name, seed, ClassifyConfig, settings, before=before)
            check_same_settings(run.folder, run.config, may_differ=HOW)
            runs.append(run)
            before = name
    return sorted(runs, key=lambda run: (seeds.index(run.seed), -cost(run.config)))


def cost(config: ClassifyConfig) -> float:
    """Approximate duration of a run in arbitrary units, used to start the longest runs first.

    A token has a fixed cost, and a cost per visible key. The latter is several times as high if the
    scores are written to memory.
    """
    model, optim = config.model, config.optim
    T = model.context_length
    keys = model.mask.density(T, causal=False) * T * (8 if model.attention == "eager" else 1)
    return optim.max_steps * optim.batch_size * model.documents * T * (1000 + keys)


@command.main
def main(args: Namespace) -> None:
    """Run the command."""
    waiting = []
    if not args.report_only:
        if args.jobs_per_gpu < 1:
            raise ValueError(f"--jobs-per-gpu={args.jobs_per_gpu} must be at least 1")
        runs = make_runs(
            trainable_tasks(args.tasks, args.data, args.recipe), args.attentions, args.seeds,
            data=args.data, out=args.out, recipe=args.recipe, overrides=args.set,
        )  # fmt: skip
        waiting = [run for run in runs if not is_finished(run.folder)]
        finished = [run.folder.name for run in runs if run not in waiting]
        if finished:
            print(f"already finished: {', '.join(finished)}")
        prepare_sets(
            path for run in waiting for phase in run.config.data.phases for path in phase.paths
        )
    train_and_report(
        [run.task(partial(note_sharing, run.folder, args.jobs_per_gpu)) for run in waiting],
        lambda _: write_report(args.out, args.recipe, args.data, args.results, args.add),
        runs_per_gpu=args.jobs_per_gpu,
    )
