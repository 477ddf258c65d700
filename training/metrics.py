"""Log the records of a run to metrics.jsonl, the console, Weights & Biases and TensorBoard."""

import json
import os
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from data.files import check_size, identity, is_present, parse_json, read_text, write_atomically
from training.signals import TerminalStream
from training.tasks import RunConfiguration

METRICS = "metrics.jsonl"
_LISTS = ("skipped_samples",)
"""Values that are lists; all others are numbers."""


class Record(NamedTuple):
    """Result of training steps or of an evaluation."""

    text: str
    """Line for the console."""
    values: dict[str, Any]
    """Values for metrics.jsonl: numbers, or None if unknown."""


def loss_text(loss: float | None) -> str:
    """Training loss for the console; `loss` is None if all steps were skipped."""
    return "loss unknown" if loss is None else f"loss {loss:.4f}"


class RunLog:
    """Writer of a run's records; does nothing except on the main process."""

    def __init__(self, config: RunConfiguration, *, start_step: int, is_main: bool) -> None:
        """Open metrics.jsonl and drop the records that this start will write again."""
        self.is_main = is_main
        self._losses: list[float] = []
        if not is_main:
            return
        run = Path(config.run.out_dir)
        # a run that is already finished may be started with fewer steps than it has taken
        self._last_step = max(config.optim.max_steps, start_step)
        self._trackers: list[Tracker] = trackers(config, start_step)
        finished = start_step >= config.optim.max_steps  # only the last evaluation is left to do

        def is_stale(record: dict[str, Any]) -> bool:
            is_last_evaluation = record["step"] == start_step and "val_loss" in record
            return record["step"] > start_step or (finished and is_last_evaluation)

        kept = [r for r in read_metrics(run) if not is_stale(r)]
        self._losses = [r["loss"] for r in kept if "loss" in r]
        lines = "".join(json.dumps(r) + "\n" for r in kept)
        write_atomically(run / METRICS, lines.encode())
        self._path = run / METRICS
        self._open()
        self._console = Console(file=cast(TextIO, TerminalStream(sys.stdout)))
        self._bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[latest]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            # Records of a large model are minutes apart; by default rich forgets after 30 seconds.
            speed_estimate_period=3600,
            # Redirected output gets plain lines, not a progress bar.
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=self._last_step, completed=start_step, latest="")
        self._bar.start()

    def say(self, text: str) -> None:
        """Print a line."""
        if self.is_main:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def record(self, text: str, **values: Any) -> None:
        """Write one record, which has a "step", and show it on the console as `text`."""
        if not self.is_main:
            return
        self._keep_file()
        known = {name: value for name, value in values.items() if value is not None}
        self._file.write(json.dumps(known, allow_nan=False) + "\n")
        self._file.flush()
        self._size = os.fstat(self._file.fileno()).st_size
        for tracker in self._trackers:
            tracker.log(known)
        evaluated = "val_loss" in known
        if not evaluated:
            self._bar.update(self._task, completed=known["step"], latest=text)
        if evaluated or not self._console.is_terminal:
            left = self._bar.tasks[self._task].time_remaining
            until_end = "" if evaluated or left is None else f"  {timedelta(seconds=left)} left"
            self.say(f"step {known['step']}/{self._last_step}  {text}{until_end}")

    def _open(self) -> None:
        self._file = self._path.open("a+", encoding="utf-8")
        self._identity = identity(self._path)
        self._size = os.fstat(self._file.fileno()).st_size

    def _keep_file(self) -> None:
        """Write all records again if their file was deleted or renamed.

        The caller has checked that the folder of the run is still the same.

        Raises:
            OSError: another program wrote to the file, or replaced it.
        """
        current, size = identity(self._path), os.fstat(self._file.fileno()).st_size
        if size != self._size or current not in (None, self._identity):
            raise OSError(
                f"{self._path} was changed or replaced by another program during the run. Restore "
                "it, or leave it as it is, and start again with the same command"
            )
        if current is None:  # the open file still has all records
            content = os.pread(self._file.fileno(), size, 0)
            write_atomically(self._path, content)
            self._file.close()
            self._open()
            self.say(f"{self._path} was deleted or renamed; wrote all of its records again")

    def losses(self) -> list[float]:
        """Training losses of the kept records, oldest first."""
        return self._losses

    def sync(self) -> None:
        """Wait until all records are on disk.

        Raises:
            OSError: another program changed or replaced the file.
        """
        if self.is_main:
            self._keep_file()
            os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Close the progress bar, the file and the trackers, also after an error."""
        if not self.is_main:
            return
        try:
            if error_type is None:
                self._keep_file()
        finally:
            self._bar.stop()
            self._file.close()
            for tracker in self._trackers:
                tracker.close(failed=error_type is not None)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Records of a run, oldest first, without an incomplete last line.

    Raises:
        ValueError: another line is not a record, or the file is too large.
        OSError: the file cannot be read.
    """
    path = run / METRICS
    if not is_present(path):
        return []
    try:
        check_size(path)
    except ValueError as error:
        raise ValueError(f"{error}. Try the folder of another run") from error
    records = []
    # The text after the last newline is empty, or a record that a killed run did not finish.
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            record = parse_json(line)
            if not isinstance(record, dict) or type(record.get("step")) is not int:
                raise ValueError("it must be an object with a step")
            for name, value in record.items():
                if name not in _LISTS and not is_number(value):
                    raise ValueError("its values must be finite numbers")
        except ValueError as error:
            raise ValueError(
                f"{path}, line {number}, is not a record: {error}. Repair or remove the line"
            ) from error
        records.append(record)
    return records


def is_number(value: object) -> bool:
    """Whether a JSON value is a finite number; a boolean is not."""
    # 1e308: an integer may be too large for a float.
    return type(value) in (int, float) and -1e308 < value < 1e308  # pyright: ignore


def read_evaluations(run: Path, *, until: int | None = None) -> list[dict[str, Any]]:
    """Records of a run that have a validation loss: all, or those up to and including `until`.

    They have `tokens` if the run counts tokens.
    """
    names = ("step", "tokens", "gpu_hours", "val_loss")
    return [
        {name: r[name] for name in names if name in r}
        for r in read_metrics(run)
        if "val_loss" in r and (until is None or r["step"] <= until)
    ]


WANDB_ID = "wandb_id"
TENSORBOARD = "tensorboard"
"""Names of a file and a subfolder in the folder of a run."""


class Tracker(Protocol):
    """Sink for the records of a run, such as a dashboard."""

    def log(self, values: dict[str, Any]) -> None:
        """Log a record, which has a "step"."""
        ...

    def close(self, *, failed: bool) -> None:
        """Finish the log; `failed` if the run ended by an error."""
        ...


def trackers(config: RunConfiguration, start_step: int) -> list[Tracker]:
    """Trackers enabled in the configuration, for a run that starts or resumes at a step.

    Raises:
        ValueError: a package is missing.
    """
    enabled: list[Tracker] = []
    if config.run.wandb != "disabled":
        enabled.append(_WandB(config))
    if config.run.tensorboard:
        enabled.append(_TensorBoard(Path(config.run.out_dir) / TENSORBOARD, start_step))
    return enabled


class _WandB:
    def __init__(self, config: RunConfiguration) -> None:
        """Start a Weights & Biases run, or resume the one recorded in the folder."""
        # Imported only here: the package is slow to load, and most runs do not need it.
        import wandb

        run = Path(config.run.out_dir)
        id_file = run / WANDB_ID
        known_id = read_text(id_file) if id_file.exists() else None
        self._run: Any = wandb.init(
            project=config.run.wandb_project,
            name=run.name,
            id=known_id,
            resume="allow" if known_id else None,
            dir=run,
            mode=config.run.wandb,
            config=asdict(config),
            allow_val_change=True,
        )
        write_atomically(id_file, self._run.id.encode())
        # wandb's own counter must never decrease, but a killed run resumes at an earlier step.
        self._run.define_metric("*", step_metric="step")

    def log(self, values: dict[str, Any]) -> None:
        self._run.log(values)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _TensorBoard:
    def __init__(self, folder: Path, start_step: int) -> None:
        """Open a writer that hides the steps that this start will repeat."""
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise ValueError(
                f"run.tensorboard=true needs the package tensorboard ({error}). Try pip install "
                "tensorboard, or run.tensorboard=false"
            ) from error
        purge_step = start_step + 1 if folder.exists() else None
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def log(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if name != "step" and isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, values["step"])
        self._writer.flush()  # show a record as soon as the console does

    def close(self, *, failed: bool) -> None:
        self._writer.close()
