"""What a run tells: metrics.jsonl, the console, and wandb where it is asked for."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

METRICS = "metrics.jsonl"
WandbMode = Literal["disabled", "offline", "online"]


class RunLog:
    """Writes the records of a run; on all processes but the main one it does nothing."""

    def __init__(
        self,
        run: Path,
        *,
        is_main: bool,
        start_step: int,
        max_steps: int,
        wandb: WandbMode,
        wandb_project: str,
        config: dict[str, Any],
    ) -> None:
        """Open metrics.jsonl, dropping records past `start_step` that a killed run left behind."""
        self.is_main = is_main
        if not is_main:
            return
        self._max_steps = max_steps
        kept = [r for r in read_metrics(run) if r["step"] <= start_step]
        _rewrite(run / METRICS, kept)
        self._file = (run / METRICS).open("a", encoding="utf-8")
        self._console = Console(file=sys.stdout)
        self._bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[latest]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            # A redirected run gets lines, not redrawn bars.
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=max_steps, completed=start_step, latest="")
        self._bar.start()
        self._wandb = None
        if wandb != "disabled":
            # Imported only here: the package is slow to load, and most runs do without.
            import wandb as wandb_package

            self._wandb = wandb_package.init(
                project=wandb_project,
                name=run.name,
                dir=run,
                mode=wandb,
                config=config,
            )

    def say(self, text: str) -> None:
        """Print a line."""
        if self.is_main:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def record(self, text: str, **values: float | int | None) -> None:
        """Keep one record, which has a "step", and show it on the console as `text`."""
        if not self.is_main:
            return
        known = {name: value for name, value in values.items() if value is not None}
        self._file.write(json.dumps(known) + "\n")
        self._file.flush()
        if self._wandb is not None:
            self._wandb.log(known, step=int(known["step"]))
        if self._console.is_terminal and "val_loss" not in known:
            self._bar.update(self._task, completed=known["step"], latest=text)
        else:
            self.say(f"step {known['step']}/{self._max_steps}  {text}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Leave the console and the files as they should be, also after an error."""
        if not self.is_main:
            return
        self._bar.stop()
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=0 if error_type is None else 1)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The records of a run, oldest first; a last line that was cut short is left out."""
    path = run / METRICS
    return list(_records(path)) if path.exists() else []


def _records(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").split("\n")
    # What follows the last newline is empty, or a record that a killed run did not finish.
    for line in lines[:-1]:
        yield json.loads(line)


def _rewrite(path: Path, records: list[dict[str, Any]]) -> None:
    new = path.with_suffix(".new")
    new.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    new.replace(path)
