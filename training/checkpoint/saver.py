"""Saving in the background: a step waits for a copy of the tensors, and not for the disk.

A checkpoint is good once a step was taken from it. Until then its weights may be ruined, although
they are finite, so older checkpoints are not deleted for it.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn

from data.files import identity
from training.checkpoint.choice import best_of
from training.checkpoint.contents import (
    MODEL,
    OPTIMIZER,
    PROCESSES,
    Progress,
    optimizer_tensors,
    own_state,
    write_checkpoint,
)
from training.checkpoint.folders import checkpoints, keep_only, note_saved, step_of
from training.distributed import Processes, whole


class CheckpointSaver:
    """Saves the checkpoints of one run, each in the background, and deletes older ones.

    The main process writes them; all processes call the same methods at the same steps.
    """

    def __init__(
        self,
        run: Path,
        processes: Processes,
        must_match: dict[str, Any],
        config: dict[str, Any],
        *,
        last_step: int = 0,
        keep_last: int,
        keep_best: bool,
    ) -> None:
        """Nothing is saved yet but `last_step`, from which the run goes on.

        `must_match` and `config` are those of `write_checkpoint`. Of the good checkpoints, the
        newest `keep_last` are kept and, if `keep_best`, that with the lowest validation loss. Those
        that are not good yet are kept as well.
        """
        self._run, self._processes = run, processes
        self._must_match, self._config = must_match, config
        self._keep_last, self._keep_best = keep_last, keep_best
        self.last_step = last_step
        """The newest step that is saved, or is being saved in the background."""
        self._copies: dict[str, dict[str, Tensor]] = {}
        self._pending: list[Future[None]] = []
        self._good_before, self._prunable = 0, False  # a start that saves nothing deletes nothing
        if processes.is_main:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._identity = identity(run)

    def save(
        self,
        progress: Progress,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        kept: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Copy what a checkpoint holds and begin to write it, when the one before is written.

        `kept` are tensors of this process alone that `Checkpoint.restore` is to fill again.

        Raises:
            OSError: The one before could not be written, or the folder of the run is gone: see
                `check`.
        """
        self.last_step = progress.step
        own = own_state(self._processes.device, kept)
        gathered = self._processes.gather(own)
        tensors = {MODEL: model.state_dict(), OPTIMIZER: optimizer_tensors(model, optimizer)}
        if gathered is None:  # not the main process, which needs its parts
            for of_file in tensors.values():
                for part in of_file.values():
                    whole(part)
            return
        self.finish()
        self.check()
        tensors[PROCESSES] = {
            f"rank_{r}.{k}": v for r, of in enumerate(gathered) for k, v in of.items()
        }
        for file, of_file in tensors.items():
            self._copy(file, of_file)
        if self._processes.device.type == "cuda":
            torch.cuda.synchronize(self._processes.device)
        self._prunable = True
        self._pending.append(self._writer.submit(self._write, progress))

    def confirm(self, before: int) -> None:
        """Count the checkpoints of steps below `before` as good; deletes older ones for them."""
        self._good_before = before
        if not self._processes.is_main or not self._prunable:
            return
        self._prunable = self.last_step >= before
        self._pending.append(self._writer.submit(self._prune))

    def check(self) -> None:
        """Tell of a save that failed in the background, and of a folder that is another one now.

        Raises:
            OSError: A checkpoint could not be written; or the run's folder was renamed, deleted or
                replaced since it was locked.
        """
        if not self._processes.is_main:
            return
        for work in self._pending:
            if work.done():
                work.result()
        self._pending = [work for work in self._pending if not work.done()]
        self._check_folder()

    def is_idle(self) -> bool:
        """Whether nothing is being written or deleted."""
        return all(work.done() for work in self._pending)

    def finish(self) -> None:
        """Wait until what was begun is written.

        Raises:
            OSError: It could not be.
        """
        for work in self._pending:
            work.result()
        self._pending.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Let what was begun be written, also where the run ends by an error."""
        wait(self._pending)
        if error_type is None:
            self.finish()

    def _check_folder(self) -> None:
        if identity(self._run) != self._identity:
            raise OSError(
                f"run.out_dir={self._run} was renamed, deleted or replaced while it was trained: "
                "nothing more is saved. Where the folder still is, "
                "run.out_dir with its new name resumes from its newest checkpoint"
            )

    def _copy(self, file: str, tensors: dict[str, Tensor]) -> None:
        """Copy tensors into memory of our own; a GPU's are on their way when this returns."""
        copies = self._copies.setdefault(file, {})
        for name, part in tensors.items():
            tensor = whole(part)
            copy = copies.get(name)
            if copy is None or copy.shape != tensor.shape:
                copies[name] = torch.empty_like(
                    tensor,
                    device="cpu",
                    pin_memory=tensor.is_cuda,
                    memory_format=torch.contiguous_format,
                )
            copies[name].copy_(tensor, non_blocking=True)

    def _write(self, progress: Progress) -> None:
        try:
            note_saved(
                write_checkpoint(self._run, progress, self._must_match, self._config, self._copies)
            )
        except OSError:
            self._check_folder()  # that it is gone says more than what could not be written
            raise
        self._prune()

    def _prune(self) -> None:
        there = checkpoints(self._run)
        good = [folder for folder in there if (step_of(folder) or 0) < self._good_before]
        kept = [*there[len(good) :], *good[-self._keep_last :]]
        if self._keep_best:
            best = best_of(good)
            kept += [] if best is None else [best]
        keep_only(self._run, kept)
