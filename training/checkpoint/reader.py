"""Read and restore checkpoints, starting with `Checkpoint.open(folder)`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from configs.reader import from_record
from configs.renamed import OF_WEIGHTS, REMOVED, current_settings, removed_settings
from data.files import differing, leaves, parse_json
from data.text.config import DataConfig
from model.config import ModelConfig
from training.checkpoint.contents import (
    MODEL,
    OPTIMIZER,
    PROCESSES,
    STATE,
    Progress,
    Tensors,
    check_same_tensors,
    load_optimizer,
    optimizer_tensors,
    put_weights,
    restore_process_state,
)
from training.checkpoint.files import (
    DamageError,
    check_declared,
    check_sums,
    read_checked,
    read_sums,
    read_tensors,
)
from training.checkpoint.folders import checkpoints
from training.config import AdamWConfig
from training.distributed import Processes
from training.tasks import RunConfiguration

C = TypeVar("C", bound=RunConfiguration)
Optim = TypeVar("Optim", bound=AdamWConfig)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Finished checkpoint with its parsed state.json; tensors are read and verified on demand."""

    folder: Path
    progress: Progress
    must_match: dict[str, Any]
    """Settings that must match to resume from it."""
    values: dict[str, Any]
    """Configuration of the run, as it was saved."""
    sums: dict[str, str]
    """sha256 by name of file."""

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read and verify state.json of a checkpoint.

        Raises:
            FileNotFoundError: The folder has no finished checkpoint.
            ValueError: It is damaged; the error names an older intact one.
        """
        with _with_remedy(folder):
            return cls._read(folder)

    @classmethod
    def _read(cls, folder: Path) -> Self:
        """Implementation of `open`; its DamageError names no other checkpoint."""
        if (folder / ".metadata").exists():
            raise ValueError(
                f"{folder} was saved by version 0.2 or older, in a format that can contain code. "
                "This version does not read it; use the version that wrote it"
            )
        if not (folder / STATE).exists():
            raise FileNotFoundError(
                f"{folder} is not a finished checkpoint ({STATE} is missing). Give a folder "
                "checkpoints/step_... of a run"
            )
        sums = read_sums(folder)
        content = read_checked(folder / STATE, sums)
        with _state_errors_as_damage():
            state = parse_json(content)
            return cls(
                folder=folder,
                progress=Progress(**state["progress"]),
                must_match=_section(state, "must_match"),
                values=_section(state, "config"),
                sums=sums,
            )

    @property
    def task(self) -> str | None:
        """Task of the run; None if it is not recorded."""
        task = self.values.get("task")
        return task if isinstance(task, str) else None

    def optim(self, schema: type[Optim]) -> Optim:
        """Settings of the optimizer; settings newer than the checkpoint have their defaults.

        Raises:
            ValueError: They are damaged.
        """
        names = {field.name for field in fields(schema)}
        with _with_remedy(self.folder), _state_errors_as_damage():
            saved = _section(self.values, "optim")
            known = {name: saved[name] for name in names & saved.keys()}
            return from_record(schema, known, "optim")

    def removed_settings(self) -> list[str]:
        """Log lines about settings of the run that do not exist any more."""
        return [
            f"{key} was {value}, and is no longer a setting"
            for key, value in removed_settings(self.values).items()
        ]

    @classmethod
    def is_intact(cls, folder: Path) -> bool:
        """Whether every file that a checkpoint must have is present and undamaged."""
        try:
            checkpoint = cls._read(folder)
            names = (MODEL,) if checkpoint.progress.step == 0 else (MODEL, OPTIMIZER, PROCESSES)
            check_sums(folder, checkpoint.sums, names)
        except (ValueError, OSError):
            return False
        return True

    @classmethod
    def val_loss(cls, folder: Path) -> float | None:
        """Validation loss recorded in a checkpoint; None if there is none or it is damaged.

        Raises:
            OSError: It cannot be read. That is not damage, so callers must not delete it.
        """
        try:
            return cls._read(folder).progress.val_loss
        except (ValueError, FileNotFoundError):
            return None

    def config(self, schema: type[C]) -> C:
        """Configuration of the run as it was saved.

        Raises:
            ValueError: The run has another task.
        """
        return from_record(schema, self.values, str(self.folder / STATE))

    def weights(self, like: Tensors | None = None) -> dict[str, Tensor]:
        """Read the weights by their names in the model, on the CPU.

        No other tensors are read, so the checkpoint may lack optimizer state.

        Args:
            like: tensors whose names, shapes and dtypes must match; None accepts any weights.

        Raises:
            ValueError: The weights are damaged, do not match, or are not finite.
        """
        with _with_remedy(self.folder):
            if like is not None:
                check_declared(self.folder / MODEL, like)
            check_sums(self.folder, self.sums, [MODEL])
            weights = read_tensors(self.folder / MODEL)
            if like is not None:
                check_same_tensors(MODEL, weights, like)
        for name, weight in weights.items():
            if not weight.isfinite().all():
                raise ValueError(
                    f"{self.folder} has values in {name} that are not finite. Try an older "
                    "checkpoint"
                )
        return weights

    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        must_match: dict[str, Any],
        processes: Processes,
        kept: Tensors = MappingProxyType({}),
    ) -> None:
        """Restore model, optimizer, RNG state and the tensors `kept`.

        A process whose rank did not exist in the saving run keeps its current RNG state. If the
        number of processes changed, each gets the mean of all saved `kept` tensors.

        Raises:
            ValueError: The checkpoint is damaged, differs in `must_match`, or has only weights.
        """
        folder, run = self.folder, self.folder.parent.parent
        if self.progress.step == 0:
            raise ValueError(
                f"{folder} has weights but no optimizer state, so a run cannot resume from it. To "
                f"start from its weights, choose another run.out_dir and set run.init_from={run}"
            )
        if changes := differing(_with_later_settings(self.must_match, must_match), must_match):
            raise ValueError(
                f"{folder} does not match this configuration: {'; '.join(changes)}. Use the "
                "checkpoint's values to resume from it. To start a new run with its weights, set "
                f"run.init_from={run} and another run.out_dir"
            )
        with _with_remedy(folder):
            check_declared(folder / MODEL, model.state_dict())
            check_declared(folder / OPTIMIZER, optimizer_tensors(model, optimizer))
            check_sums(folder, self.sums, (MODEL, OPTIMIZER, PROCESSES))
            weights = read_tensors(folder / MODEL)
            check_same_tensors(MODEL, weights, model.state_dict())
            put_weights(model, weights)
            load_optimizer(model, optimizer, read_tensors(folder / OPTIMIZER))
            restore_process_state(read_tensors(folder / PROCESSES), processes, kept)


def _with_later_settings(saved: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Settings of a checkpoint in current names, with defaults for settings newer than it.

    Removed settings are left out, except where the weights need them. The default of a new setting
    is the behaviour before it existed.
    """
    defaults = {
        "model": asdict(ModelConfig()),
        "data": asdict(DataConfig(path="")),
        "optim": asdict(AdamWConfig(max_steps=1)),
    }
    known, old_behaviour = dict(leaves(saved)), dict(leaves(defaults))
    for name, value in [*known.items()]:
        known |= current_settings(name, value)
        if name in REMOVED and (name not in OF_WEIGHTS or value == REMOVED[name]):
            del known[name]  # it has no effect on a run that is resumed
    later = (dict(leaves(wanted)).keys() - known.keys()) & old_behaviour.keys()
    return known | {name: old_behaviour[name] for name in later}


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Section of state.json, validated because the file is untrusted input."""
    if not isinstance(values[name], dict):
        raise ValueError(f"{name} must be an object")
    return values[name]


@contextmanager
def _state_errors_as_damage() -> Iterator[None]:
    """Convert errors about the values of state.json to DamageError."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamageError(f"{STATE}: {type(error).__name__}: {error}") from error


@contextmanager
def _with_remedy(folder: Path) -> Iterator[None]:
    """Convert a DamageError to a ValueError that names the checkpoint and a remedy."""
    try:
        yield
    except DamageError as error:
        run = folder.parent.parent
        older = takewhile(lambda other: other != folder, checkpoints(run))
        intact = next(filter(Checkpoint.is_intact, reversed([*older])), None)
        remedy = (
            f"Copy it again, or resume from the intact {intact} with run.resume=previous"
            if intact
            else "Copy it again; no older checkpoint is intact"
        )
        raise ValueError(f"{folder} is damaged or incomplete ({error}). {remedy}") from error
