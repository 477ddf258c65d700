"""Steps skipped on the device if a loss or gradient is not finite, and detection of loss spikes.

One bad batch, or one overflow in bfloat16, would otherwise put NaN into every weight for good.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from training.checkpoint.choice import last_good
from training.checkpoint.saver import CheckpointSaver
from training.distributed import Processes, local

_NAMED = 16
"""Skipped steps that are known by number; of more, between two readings, only how many."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """What the steps since the last reading gave."""

    means: dict[str, float | None]
    """Over the steps that were taken, and over all processes; None where none was."""
    grad_norm: float | None
    """Of the last step, before clipping; None if it is not finite."""
    n_skipped: int
    """Steps that were skipped."""
    skipped: list[int]
    """Their numbers, from 0 for the first step of the run; the first 16 of them."""
    in_a_row: int
    """Steps that were skipped without one that was taken since."""


class FiniteSteps:
    """An optimizer that skips steps with a loss or gradient that is not finite, and counts them.

    Attributes:
        optimizer: a fused one: its kernels look at a tensor whether to change anything, and at
            another for what to divide gradients by, which saves clipping a pass over them.
        processes: that step together.
        kept: what a run that goes on in the middle of a window must have again, all on the device.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        processes: Processes,
        names: Sequence[str],
        *,
        grad_clip: float = 0.0,
    ) -> None:
        """Nothing is done yet.

        Args:
            optimizer: fused, over parameters on the processes' device.
            processes: that step together.
            names: of the values that each step has besides its gradient, the loss first.
            grad_clip: largest norm of the gradient, which is scaled down to it; 0 turns it off.
        """
        self.optimizer, self.processes, self._names = optimizer, processes, tuple(names)
        self._grad_clip = grad_clip
        device = processes.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # What a CUDA graph writes to must be there before, and stay.
        self._sums = zeros(len(names), dtype=torch.float32)
        self._step, self._taken, self._skipped, self._in_a_row = (zeros() for _ in range(4))
        self._numbers = zeros(_NAMED)
        self._grad_norm = zeros(dtype=torch.float32)
        self.kept = {
            "sums": self._sums,
            "step": self._step,
            "taken": self._taken,
            "skipped": self._skipped,
            "in_a_row": self._in_a_row,
            "numbers": self._numbers,
        }

    def __call__(self, *values: Tensor) -> None:
        """Take the step, or skip it on all processes if a number of one of them is not finite.

        Args:
            values: () each, of this process's batch, in the order of their names.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        grad_norm = self._norm([p.grad for p in parameters if p.grad is not None])
        if self._grad_clip:
            # as nn.utils.clip_grad_norm_, which would read and write all gradients once more
            scale = ((grad_norm + 1e-6) / self._grad_clip).clamp(min=1.0)
            self.optimizer.grad_scale = scale  # pyright: ignore[reportAttributeAccessIssue]
        here = torch.stack([value.detach().float() for value in values])
        finite = torch.isfinite(here).all() & torch.isfinite(grad_norm)
        skip = self.processes.max((~finite).float())
        self.optimizer.found_inf = skip  # pyright: ignore[reportAttributeAccessIssue]
        self.optimizer.step()
        is_skipped = skip > 0
        self._sums += torch.where(is_skipped, 0.0, here)
        slot = self._skipped.clamp(max=_NAMED - 1).view(1)
        is_named = is_skipped & (self._skipped < _NAMED)
        number = torch.where(is_named, self._step, self._numbers.gather(0, slot))
        self._numbers.scatter_(0, slot, number)
        self._step += 1
        self._taken += ~is_skipped
        self._skipped += is_skipped
        self._in_a_row.add_(1).mul_(is_skipped)
        self._grad_norm.copy_(grad_norm.detach())

    def _norm(self, grads: Sequence[Tensor]) -> Tensor:
        """The norm of the whole gradient, of which all processes may have a part each."""
        parts = [local(x) for x in grads if isinstance(x, DTensor)]
        if not parts:
            return get_total_norm(grads)
        shared = self.processes.sum(get_total_norm(parts).square())
        others = get_total_norm([x for x in grads if not isinstance(x, DTensor)])
        return (shared + others.square()).sqrt()

    def skipped_in_a_row(self) -> int:
        """Number of steps that were skipped since the last one that was taken (synchronizes)."""
        return int(self._in_a_row)

    def read(self) -> Window:
        """What has been since the last call, which this one waits for, and begin anew."""
        sums = self.processes.sum(self._sums.clone()).tolist()
        counts = torch.stack([self._taken, self._skipped, self._in_a_row]).tolist()
        n_taken, n_skipped, in_a_row = counts
        grad_norm = self._grad_norm.item()
        n_means = n_taken * self.processes.world_size
        window = Window(
            means={
                name: total / n_means if n_means else None
                for name, total in zip(self._names, sums, strict=True)
            },
            grad_norm=grad_norm if math.isfinite(grad_norm) else None,
            n_skipped=n_skipped,
            skipped=self._numbers[:n_skipped].tolist(),
            in_a_row=in_a_row,
        )
        for counted in (self._sums, self._taken, self._skipped):
            counted.zero_()
        return window


_WINDOW, _ENOUGH = 50, 20
_SIGMA = 1.4826
"""A normal distribution's standard deviation over its median absolute deviation."""
HIGH = 8.0
"""Robust z-score from which a loss is called a spike: noise of a falling loss stays below it."""


class LossSpikeDetector:
    """How far each loss lies above the last 50, in a unit that outliers among those do not stretch.

    The robust z-score: distance from the median, over the median of such distances, scaled so that
    it is the usual z-score where losses are normally distributed.
    """

    def __init__(self, losses: Iterable[float] = ()) -> None:
        """`losses` came before, oldest first."""
        self._losses = deque(losses, maxlen=_WINDOW)

    def z_score(self, loss: float) -> float | None:
        """Robust z-score of the next loss; None for the first 20, or if all before are the same."""
        before = [*self._losses]
        self._losses.append(loss)
        if len(before) < _ENOUGH:
            return None
        middle = median(before)
        spread = _SIGMA * median(abs(other - middle) for other in before)
        return (loss - middle) / spread if spread else None


def check_validation(
    values: Mapping[str, Any], finite: FiniteSteps, saver: CheckpointSaver, run: Path, step: int
) -> None:
    """End the run where a validation loss is not finite, and name a checkpoint that is good.

    Args:
        values: of the record of the validation, with a loss of each corpus.
        finite: counts the skipped steps of the run.
        saver: finishes what it is writing first.
        run: folder of the run.
        step: number of steps so far.

    Raises:
        FloatingPointError: a validation loss is not finite.
    """
    losses = {name: loss for name, loss in values.items() if name.startswith("val_loss")}
    ruined = next((name for name, loss in losses.items() if not math.isfinite(loss)), None)
    if ruined is None:
        return
    saver.finish()
    # The last step that was taken has ruined the weights.
    good = last_good(run, step - finite.skipped_in_a_row())
    raise FloatingPointError(
        f"the validation loss is not finite, {ruined}={losses[ruined]} at step {step}: lower "
        f"optim.lr or raise optim.warmup_steps; {good}"
    )


def check_skipped(window: Window, most: int, saver: CheckpointSaver, run: Path, step: int) -> None:
    """End the run where too many steps in a row were skipped, and name a checkpoint that is good.

    Args:
        window: statistics of the last steps.
        most: run.max_skipped.
        saver: finishes what it is writing first.
        run: folder of the run.
        step: number of steps so far.

    Raises:
        FloatingPointError: the last `most` steps or more were skipped.
    """
    if window.in_a_row < most:
        return
    saver.finish()
    good = last_good(run, step - window.in_a_row)
    raise FloatingPointError(
        f"the last {window.in_a_row} steps up to {step} were skipped, as their loss or gradient is "
        f"not finite (run.max_skipped={most}): lower optim.lr, raise optim.warmup_steps, or look "
        f"at these samples; {good}"
    )
