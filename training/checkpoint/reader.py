"""Read checkpoints: `Checkpoint.open(folder)` reads, checks and parses state.json once."""

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
from data.files import differing, leaves, parse_json
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
    set_own_state,
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


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A finished checkpoint. Tensors are read, and their files checked, when they are asked for."""

    folder: Path
    progress: Progress
    must_match: dict[str, Any]
    """Settings that a run must share to resume from it."""
    values: dict[str, Any]
    """Configuration of the run, as it was saved."""
    sums: dict[str, str]
    """sha256 by name of file."""

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read the state of the checkpoint in a folder.

        Raises:
            FileNotFoundError: There is no finished checkpoint in the folder.
            ValueError: It is damaged; the error names an older one that is whole.
        """
        with _naming_damage(folder):
            return cls._read(folder)

    @classmethod
    def _read(cls, folder: Path) -> Self:
        """As `open`, but a DamageError names no other checkpoint."""
        if (folder / ".metadata").exists():
            raise ValueError(
                f"{folder} was saved by version 0.2 or older, in a format that can hold code, "
                "which this version does not read: use the version that wrote it"
            )
        if not (folder / STATE).exists():
            raise FileNotFoundError(
                f"{folder} holds no finished checkpoint ({STATE} is missing): give a folder named "
                "checkpoints/step_... of a run"
            )
        sums = read_sums(folder)
        content = read_checked(folder / STATE, sums)
        with _naming_damage_of_state():
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
        """The task of the run; None if it is not recorded."""
        task = self.values.get("task")
        return task if isinstance(task, str) else None

    def optim(self) -> AdamWConfig:
        """Settings of the optimizer; those that are newer than the checkpoint have their defaults.

        Raises:
            ValueError: They are not such settings.
        """
        names = {field.name for field in fields(AdamWConfig)}
        with _naming_damage(self.folder), _naming_damage_of_state():
            saved = _section(self.values, "optim")
            known = {name: saved[name] for name in names & saved.keys()}
            return from_record(AdamWConfig, known, "optim")

    @classmethod
    def is_whole(cls, folder: Path) -> bool:
        """Whether every file that a checkpoint must have is as it was written."""
        try:
            checkpoint = cls._read(folder)
            names = (MODEL,) if checkpoint.progress.step == 0 else (MODEL, OPTIMIZER, PROCESSES)
            check_sums(folder, checkpoint.sums, names)
        except (ValueError, OSError):
            return False
        return True

    @classmethod
    def val_loss(cls, folder: Path) -> float | None:
        """The validation loss recorded in a checkpoint; None also where it is damaged.

        Raises:
            OSError: It cannot be read, which is not a reason to delete it.
        """
        try:
            return cls._read(folder).progress.val_loss
        except (ValueError, FileNotFoundError):
            return None

    def config(self, schema: type[C]) -> C:
        """The configuration of the run as it was saved.

        Raises:
            ValueError: It is of another task.
        """
        return from_record(schema, self.values, str(self.folder / STATE))

    def weights(self, like: Tensors | None = None) -> dict[str, Tensor]:
        """The weights by their names in the model, on the CPU.

        No other tensors are read, so the checkpoint need not have an optimizer.

        Args:
            like: tensors that it must have, of which only names, shapes and dtypes are looked at;
                None takes any.

        Raises:
            ValueError: They are damaged, or not those of the model, or not finite.
        """
        with _naming_damage(self.folder):
            if like is not None:
                check_declared(self.folder / MODEL, like)
            check_sums(self.folder, self.sums, [MODEL])
            weights = read_tensors(self.folder / MODEL)
            if like is not None:
                check_same_tensors(MODEL, weights, like)
        for name, weight in weights.items():
            if not weight.isfinite().all():
                raise ValueError(
                    f"{self.folder} is of a model that is broken: {name} has values that are not "
                    "finite. Take an older checkpoint"
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
        """Put model, optimizer, random state and the tensors `kept` back as they were saved.

        A process whose rank the saving run did not have keeps the random state it has. If the
        number of processes is another one, each takes the mean of what they kept.

        Raises:
            ValueError: The checkpoint is damaged, was made by a run that differs in `must_match`,
                or holds weights alone.
        """
        folder, run = self.folder, self.folder.parent.parent
        if self.progress.step == 0:
            raise ValueError(
                f"{folder} holds weights and no state of an optimizer, so no run can resume from "
                f"it: to start from its weights, choose another run.out_dir and set "
                f"run.init_from={run}"
            )
        if changes := differing(_with_later_settings(self.must_match, must_match), must_match):
            raise ValueError(
                f"{folder} is a checkpoint of another run: {'; '.join(changes)}. "
                "Give these the checkpoint's values to resume it. To start a new run with its "
                f"weights, set run.init_from={run} and another run.out_dir"
            )
        with _naming_damage(folder):
            check_declared(folder / MODEL, model.state_dict())
            check_declared(folder / OPTIMIZER, optimizer_tensors(model, optimizer))
            check_sums(folder, self.sums, (MODEL, OPTIMIZER, PROCESSES))
            weights = read_tensors(folder / MODEL)
            check_same_tensors(MODEL, weights, model.state_dict())
            put_weights(model, weights)
            load_optimizer(model, optimizer, read_tensors(folder / OPTIMIZER))
            set_own_state(read_tensors(folder / PROCESSES), processes, kept)


def _with_later_settings(saved: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """Settings of a checkpoint, with the defaults of those that are newer than it.

    A new setting's default is what was always so before.
    """
    defaults = {"model": asdict(ModelConfig()), "optim": asdict(AdamWConfig(max_steps=1))}
    known, always_so = dict(leaves(saved)), dict(leaves(defaults))
    later = (dict(leaves(wanted)).keys() - known.keys()) & always_so.keys()
    return known | {name: always_so[name] for name in later}


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    """A section of state.json, whose author may be anybody."""
    if not isinstance(values[name], dict):
        raise ValueError(f"{name} must be an object")
    return values[name]


@contextmanager
def _naming_damage_of_state() -> Iterator[None]:
    """Report whatever is wrong with the values of state.json as damage."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamageError(f"{STATE}: {type(error).__name__}: {error}") from error


@contextmanager
def _naming_damage(folder: Path) -> Iterator[None]:
    """Name the damaged checkpoint, and what to do about it."""
    try:
        yield
    except DamageError as error:
        run = folder.parent.parent
        older = takewhile(lambda other: other != folder, checkpoints(run))
        whole = next(filter(Checkpoint.is_whole, reversed([*older])), None)
        remedy = (
            f"copy it again, or resume from {whole}, which is whole, with run.resume=previous"
            if whole
            else "copy it again; no older one is whole"
        )
        raise ValueError(f"{folder} is damaged, or was copied in part ({error}): {remedy}") from (
            error
        )
