"""Save checkpoints in the background: training waits for a copy of the tensors, not for the disk.

A checkpoint is good once a step was taken from it. Until then its weights may be ruined although
they are finite, so older checkpoints are not deleted in its favour.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn

from data.files import identity
from training.checkpoint.choice import best_checkpoint
from training.checkpoint.contents import (
    MODEL,
    OPTIMIZER,
    PROCESSES,
    Progress,
    optimizer_tensors,
    process_state,
    write_checkpoint,
)
from training.checkpoint.folders import checkpoints, delete_except, record_last_saved, step_of
from training.distributed import Processes, full_tensor


class CheckpointSaver:
    """Saves the checkpoints of a run in the background, and deletes older ones.

    The main process writes; all processes call the same methods at the same steps.
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
        """Start a saver; checkpoints that are not good yet are always kept.

        Args:
            run: folder of the run.
            processes: all processes of the run.
            must_match, config: see `write_checkpoint`.
            last_step: step from which the run resumes, already saved.
            keep_last: number of good checkpoints to keep, the newest ones.
            keep_best: also keep the good checkpoint with the lowest validation loss.
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
        """Copy the contents of a checkpoint and start writing it, once the previous one is written.

        `kept` are tensors of this process that `Checkpoint.restore` fills again.

        Raises:
            OSError: The previous one could not be written, or the folder of the run is missing; see
                `check`.
        """
        self.last_step = progress.step
        gathered = self._processes.gather(process_state(self._processes.device, kept))
        tensors = {MODEL: model.state_dict(), OPTIMIZER: optimizer_tensors(model, optimizer)}
        if gathered is None:  # not the main process: only takes part in gathering shards
            for file_tensors in tensors.values():
                for tensor in file_tensors.values():
                    full_tensor(tensor)
            return
        self.finish()
        self.check()
        tensors[PROCESSES] = {
            f"rank_{rank}.{name}": value
            for rank, state in enumerate(gathered)
            for name, value in state.items()
        }
        for file, file_tensors in tensors.items():
            self._copy(file, file_tensors)
        if self._processes.device.type == "cuda":
            torch.cuda.synchronize(self._processes.device)
        self._prunable = True
        self._pending.append(self._writer.submit(self._write, progress))

    def confirm(self, before: int) -> None:
        """Mark checkpoints of steps below `before` as good, and delete the older ones."""
        self._good_before = before
        if not self._processes.is_main or not self._prunable:
            return
        self._prunable = self.last_step >= before
        self._pending.append(self._writer.submit(self._prune))

    def check(self) -> None:
        """Raise an error if a save has failed, or if the folder of the run was replaced.

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
        """Whether no write or deletion is pending."""
        return all(work.done() for work in self._pending)

    def finish(self) -> None:
        """Wait until all pending writes and deletions are done.

        Raises:
            OSError: One of them failed.
        """
        for work in self._pending:
            work.result()
        self._pending.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """Complete pending writes, also if the run ends by an error."""
        wait(self._pending)
        if error_type is None:
            self.finish()

    def _check_folder(self) -> None:
        if identity(self._run) != self._identity:
            raise OSError(
                f"run.out_dir={self._run} was renamed, deleted or replaced during training, and "
                "nothing more is saved. If it was renamed, set run.out_dir to its new name to "
                "resume from its newest checkpoint"
            )

    def _copy(self, file: str, tensors: dict[str, Tensor]) -> None:
        """Copy tensors into buffers of the saver; copies from a GPU are asynchronous."""
        copies = self._copies.setdefault(file, {})
        for name, source in tensors.items():
            tensor = full_tensor(source)
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
            record_last_saved(
                write_checkpoint(self._run, progress, self._must_match, self._config, self._copies)
            )
        except OSError:
            self._check_folder()  # a missing folder is the more useful error
            raise
        self._prune()

    def _prune(self) -> None:
        existing = checkpoints(self._run)
        good = [folder for folder in existing if (step_of(folder) or 0) < self._good_before]
        kept = [*existing[len(good) :], *good[-self._keep_last :]]
        if self._keep_best:
            best = best_checkpoint(good)
            kept += [] if best is None else [best]
        delete_except(self._run, kept)
