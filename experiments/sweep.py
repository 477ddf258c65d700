"""Commands that train many runs in parallel, each on its own GPUs, and then write a report."""

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
    """One run of train.py in a sweep, and the command after it."""

    schema: type[C]
    """Class of the configuration."""
    name: str
    """Name of the model and its settings, shared by all seeds."""
    seed: int
    folder: Path
    arguments: tuple[str, ...]
    """Arguments of train.py."""
    needs: tuple[Path, ...] = ()
    """Folders of the runs or data that must be finished first."""
    then: tuple[str, ...] = ()
    """Arguments of python for the command after training, if any."""

    @cached_property
    def config(self) -> C:
        """Configuration from the arguments."""
        return read_config(self.schema, self.arguments)

    def task(self, started: Callable[[], object] = lambda: None) -> Task:
        """Task that trains or resumes, then runs `then`; calls `started` when it starts."""

        def commands(n_gpu: int) -> list[list[str]]:
            started()
            parts = ("train.py", *self.arguments), self.then
            return [python_command(n_gpu, *part) for part in parts if part]

        return task_of(self.folder, commands, self.needs)


def task_of(
    folder: Path, commands: Callable[[int], Sequence[Sequence[str]]], needs: Sequence[Path] = ()
) -> Task:
    """Task that fills a folder and has its name; its output is logged to FOLDER.log."""
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
    """Run in OUT/NAME_seedN that starts from the best weights of OUT/BEFORE_seedN, if given."""
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
    """Add the options of all sweeps, with `out` and `seeds` as defaults."""
    add("--out", type=Path, default=out, help="folder of the runs")
    add(
        "--seeds", type=int, nargs="+", default=seeds, metavar="SEED", help="(default: %(default)s)"
    )
    add("--set", nargs="+", default=[], metavar="key=value", help="for all runs, as in train.py")
    add("--results", type=Path, default=Path("docs/results"), help="folder of the report")
    add("--report-only", action="store_true", help="only report on finished runs")
    add(
        "--add", type=Path, nargs="+", default=[], metavar="FILE",
        help="add the runs of these reports (earlier, or of other machines) that --out lacks",
    )  # fmt: skip


def refuse_overrides(overrides: Sequence[str], options: Mapping[str, str]) -> None:
    """Raise ValueError if --set names a setting that an option of the sweep controls.

    `options` maps settings to options; --seeds and --out are added.
    """
    options = {"run.seed": "--seeds", "run.out_dir": "--out", **options}
    for override in overrides:
        key = override.partition("=")[0]
        if key in options:
            raise ValueError(
                f"--set {override}: the sweep sets {key} for each run. Use {options[key]}"
            )


def train_and_report(
    tasks: Sequence[Task],
    report: Callable[[list[str]], object],
    *,
    gpus_per_run: int = 1,
    runs_per_gpu: int = 1,
) -> None:
    """Run tasks on the GPUs of this machine, then report, even if some tasks failed.

    Dependencies that are not among the tasks count as finished. `report` gets the names of failed
    tasks. Each run uses `gpus_per_run` GPUs, or up to `runs_per_gpu` runs share a GPU.

    Raises:
        SystemExit: the sweep was stopped, or a task failed.
        ValueError: there are fewer GPUs than a run needs.
    """
    failed = []
    if tasks:
        names = {task.name for task in tasks}
        tasks = [replace(task, needs=task.needs & names) for task in tasks]
        # all GPUs once before any of them twice: the first runs do not share a GPU
        groups = groups_of_gpus(gpus_per_run) * runs_per_gpu
        try:
            failed = run_tasks(tasks, groups, partial(print, flush=True))
        except SystemExit:
            print("stopped; run the same command to resume", file=sys.stderr)
            raise
    if failed:
        print(f"these runs failed: {', '.join(failed)}")
    report(failed)
    if failed:
        raise SystemExit(1)
