"""Commands that train many runs: side by side, each on GPUs of its own, and then a report."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Generic, TypeVar

from configs.reader import read_config
from experiments.gpu_pool import Task, groups_of_gpus, python_command, run_tasks
from training.classification.config import ClassifyConfig
from training.language.config import TrainConfig

C = TypeVar("C", TrainConfig, ClassifyConfig)


@dataclass(frozen=True, kw_only=True)
class Run(Generic[C]):
    """One run of train.py in a sweep, and the command that follows it."""

    schema: type[C]
    """Class of its configuration."""
    name: str
    """Name of the model and its settings, the same for all seeds."""
    seed: int
    folder: Path
    arguments: tuple[str, ...]
    """Arguments of train.py."""
    needs: tuple[Path, ...] = ()
    """Folders of what must be finished before it starts."""
    then: tuple[str, ...] = ()
    """Arguments of python after training, if anything follows."""

    @cached_property
    def config(self) -> C:
        """The configuration that the arguments give."""
        return read_config(self.schema, self.arguments)

    def task(self, started: Callable[[], object] = lambda: None) -> Task:
        """Train or resume, then run what follows; `started` is called at the start."""

        def commands(n_gpu: int) -> list[list[str]]:
            started()
            parts = ("train.py", *self.arguments), self.then
            return [python_command(n_gpu, *part) for part in parts if part]

        return task_of(self.folder, commands, self.needs)


def task_of(
    folder: Path, commands: Callable[[int], Sequence[Sequence[str]]], needs: Sequence[Path] = ()
) -> Task:
    """A task that fills a folder, and is called like it; FOLDER.log gets all that it prints."""
    names = frozenset(need.name for need in needs)
    return Task(name=folder.name, needs=names, commands=commands, log=folder.with_suffix(".log"))


def run_in(
    out: Path,
    name: str,
    seed: int,
    schema: type[C],
    settings: Sequence[str],
    *,
    before: str | None = None,
    needs: tuple[Path, ...] = (),
    then: tuple[str, ...] = (),
) -> Run[C]:
    """A run in OUT/NAME_seedN that starts with the best weights of OUT/BEFORE_seedN, if given."""
    folder = out / f"{name}_seed{seed}"
    arguments = [*settings, f"run.seed={seed}", f"run.out_dir={folder}"]
    if before is not None:
        needs = *needs, (origin := out / f"{before}_seed{seed}")
        arguments.append(f"run.init_from={origin}")
    return Run(
        schema=schema, name=name, seed=seed, folder=folder, arguments=tuple(arguments),
        needs=needs, then=then,
    )  # fmt: skip


def add_options(add: Callable[..., object], out: Path, seeds: Sequence[int]) -> None:
    """Add what all sweeps of runs have, with the folder `out` and `seeds` as defaults."""
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
    """Raise ValueError where --set names a setting that one of the sweep's options decides.

    `options` are by setting; --seeds and --out are those of every sweep.
    """
    options = {"run.seed": "--seeds", "run.out_dir": "--out", **options}
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

    What a task needs and is not among the tasks is finished. `report` gets the names of the tasks
    that failed. `gpus_per_run` GPUs share a run, or at most `runs_per_gpu` runs a GPU.

    Raises:
        SystemExit: stopped, or some tasks failed.
        ValueError: fewer GPUs than a run needs.
    """
    failed = []
    if tasks:
        names = {task.name for task in tasks}
        tasks = [replace(task, needs=task.needs & names) for task in tasks]
        # all GPUs once before any of them a second time: the first runs have one each
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
