"""Where a run is followed beside metrics.jsonl: Weights & Biases and TensorBoard."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from data.files import read_text, write_atomically
from training.tasks import RunConfiguration

WANDB_ID = "wandb_id"
TENSORBOARD = "tensorboard"
"""File, and folder, in the folder of a run."""


class Tracker(Protocol):
    """Shows the records of a run as they come."""

    def log(self, values: dict[str, Any]) -> None:
        """Keep a record, which has a "step"."""
        ...

    def close(self, *, failed: bool) -> None:
        """There are no more."""
        ...


def trackers(config: RunConfiguration, start_step: int) -> list[Tracker]:
    """Those that the configuration asks for, of a run that begins or goes on at a step.

    Raises:
        ValueError: a package is missing.
    """
    found: list[Tracker] = []
    if config.run.wandb != "disabled":
        found.append(_WandB(config))
    if config.run.tensorboard:
        found.append(_TensorBoard(Path(config.run.out_dir) / TENSORBOARD, start_step))
    return found


class _WandB:
    def __init__(self, config: RunConfiguration) -> None:
        """Start a run there, or go on with the one that this folder began."""
        # Imported only here: the package is slow to load, and most runs do without.
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
        # wandb's own counter must never go back, and a killed run goes on from an earlier step.
        self._run.define_metric("*", step_metric="step")

    def log(self, values: dict[str, Any]) -> None:
        self._run.log(values)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _TensorBoard:
    def __init__(self, folder: Path, start_step: int) -> None:
        """Hide what an earlier start wrote of steps that come again."""
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise ValueError(
                f"run.tensorboard=true needs the package tensorboard ({error}): pip install "
                "tensorboard, or leave it out"
            ) from error
        purge_step = start_step + 1 if folder.exists() else None
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def log(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if name != "step" and isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, values["step"])
        self._writer.flush()  # who looks on sees a record when the console does

    def close(self, *, failed: bool) -> None:
        self._writer.close()
