"""Skip steps on the device if a loss or gradient is not finite, and detect loss spikes.

Otherwise one bad batch, or one overflow in bfloat16, would turn every weight into NaN for good.
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

from training.checkpoint.choice import good_checkpoint_hint
from training.checkpoint.saver import CheckpointSaver
from training.distributed import Processes, local_tensor

_MAX_LISTED = 16
"""Skipped steps whose numbers are recorded between two readings; further ones are only counted."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """Statistics of the steps since the last reading."""

    means: dict[str, float | None]
    """Means over the steps taken and over all processes; None if no step was taken."""
    grad_norm: float | None
    """Gradient norm of the last step, before clipping; None if it is not finite."""
    n_skipped: int
    """Number of skipped steps."""
    skipped: list[int]
    """Indices of the first 16 skipped steps; the first step of the run is 0."""
    in_a_row: int
    """Number of consecutive skipped steps up to now."""


class FiniteSteps:
    """Optimizer wrapper that skips and counts steps whose loss or gradient is not finite.

    Attributes:
        optimizer: a fused one. Its kernels read from tensors whether to skip the step and what to
            divide gradients by, which saves a separate clipping pass.
        processes: all processes that step together.
        kept: tensors on the device that a run must restore to resume in the middle of a window.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        processes: Processes,
        names: Sequence[str],
        *,
        grad_clip: float = 0.0,
    ) -> None:
        """Allocate the counters.

        Args:
            optimizer: fused, over parameters on the processes' device.
            processes: all processes that step together.
            names: names of the values that each step reports, the loss first.
            grad_clip: maximum gradient norm; 0 turns clipping off.
        """
        self.optimizer, self.processes, self._names = optimizer, processes, tuple(names)
        self._grad_clip = grad_clip
        device = processes.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # A CUDA graph writes to these tensors: they must exist before capture, and never move.
        self._sums = zeros(len(names), dtype=torch.float32)
        self._step, self._taken, self._skipped, self._in_a_row = (zeros() for _ in range(4))
        self._numbers = zeros(_MAX_LISTED)
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
        """Take the step, or skip it on all processes if any value or gradient is not finite.

        Args:
            values: () each, of this process's batch, in the order of `names`.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        grad_norm = self._norm([p.grad for p in parameters if p.grad is not None])
        if self._grad_clip:
            # Same scale as nn.utils.clip_grad_norm_, without its extra pass over all gradients.
            scale = ((grad_norm + 1e-6) / self._grad_clip).clamp(min=1.0)
            self.optimizer.grad_scale = scale  # pyright: ignore[reportAttributeAccessIssue]
        stacked = torch.stack([value.detach().float() for value in values])
        finite = torch.isfinite(stacked).all() & torch.isfinite(grad_norm)
        skip = self.processes.max((~finite).float())
        self.optimizer.found_inf = skip  # pyright: ignore[reportAttributeAccessIssue]
        self.optimizer.step()
        is_skipped = skip > 0
        self._sums += torch.where(is_skipped, 0.0, stacked)
        slot = self._skipped.clamp(max=_MAX_LISTED - 1).view(1)
        is_listed = is_skipped & (self._skipped < _MAX_LISTED)
        number = torch.where(is_listed, self._step, self._numbers.gather(0, slot))
        self._numbers.scatter_(0, slot, number)
        self._step += 1
        self._taken += ~is_skipped
        self._skipped += is_skipped
        self._in_a_row.add_(1).mul_(is_skipped)
        self._grad_norm.copy_(grad_norm.detach())

    def _norm(self, grads: Sequence[Tensor]) -> Tensor:
        """Norm of the full gradient, which may be sharded over the processes."""
        parts = [local_tensor(x) for x in grads if isinstance(x, DTensor)]
        if not parts:
            return get_total_norm(grads)
        sharded = self.processes.sum(get_total_norm(parts).square())
        unsharded = get_total_norm([x for x in grads if not isinstance(x, DTensor)])
        return (sharded + unsharded.square()).sqrt()

    def skipped_in_a_row(self) -> int:
        """Number of consecutive skipped steps up to now (synchronizes)."""
        return int(self._in_a_row)

    def read(self) -> Window:
        """Return and reset the statistics since the last call (synchronizes)."""
        sums = self.processes.sum(self._sums.clone()).tolist()
        counts = torch.stack([self._taken, self._skipped, self._in_a_row]).tolist()
        n_taken, n_skipped, in_a_row = counts
        grad_norm = self._grad_norm.item()
        n_means = n_taken * self.processes.world_size
        window = Window(
            means={
                name: value / n_means if n_means else None
                for name, value in zip(self._names, sums, strict=True)
            },
            grad_norm=grad_norm if math.isfinite(grad_norm) else None,
            n_skipped=n_skipped,
            skipped=self._numbers[:n_skipped].tolist(),
            in_a_row=in_a_row,
        )
        for total in (self._sums, self._taken, self._skipped):
            total.zero_()
        return window


_WINDOW, _MIN_LOSSES = 50, 20
_SIGMA = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
HIGH = 8.0
"""Robust z-score at which a loss counts as a spike; the noise of a falling loss stays below it."""


class LossSpikeDetector:
    """Robust z-score of each loss relative to the 50 losses before it.

    The score is the distance from the median over the median absolute deviation. It is scaled to
    equal the usual z-score for normally distributed losses, and outliers do not inflate its unit.
    """

    def __init__(self, losses: Iterable[float] = ()) -> None:
        """Start from earlier `losses`, oldest first."""
        self._losses = deque(losses, maxlen=_WINDOW)

    def z_score(self, loss: float) -> float | None:
        """Robust z-score of the next loss; None for the first 20, or if all before it are equal."""
        before = [*self._losses]
        self._losses.append(loss)
        if len(before) < _MIN_LOSSES:
            return None
        center = median(before)
        spread = _SIGMA * median(abs(other - center) for other in before)
        return (loss - center) / spread if spread else None


def check_validation(
    values: Mapping[str, Any], finite: FiniteSteps, saver: CheckpointSaver, run: Path, step: int
) -> None:
    """End the run if a validation loss is not finite; the error names a good checkpoint.

    Args:
        values: values of the validation record, with a loss per corpus.
        finite: counter of skipped steps.
        saver: finishes its pending writes first.
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
    # The last step taken has ruined the weights.
    good = good_checkpoint_hint(run, step - finite.skipped_in_a_row())
    raise FloatingPointError(
        f"{ruined}={losses[ruined]} at step {step} is not finite. Lower optim.lr or raise "
        f"optim.warmup_steps; {good}"
    )


def check_skipped(
    window: Window, max_skipped: int, saver: CheckpointSaver, run: Path, step: int
) -> None:
    """End the run if too many consecutive steps were skipped; the error names a good checkpoint.

    Args:
        window: statistics of the last steps.
        max_skipped: run.max_skipped.
        saver: finishes its pending writes first.
        run: folder of the run.
        step: number of steps so far.

    Raises:
        FloatingPointError: the last `max_skipped` steps or more were skipped.
    """
    if window.in_a_row < max_skipped:
        return
    saver.finish()
    good = good_checkpoint_hint(run, step - window.in_a_row)
    raise FloatingPointError(
        f"the last {window.in_a_row} steps up to step {step} were skipped because their loss or "
        f"gradient is not finite (run.max_skipped={max_skipped}). Lower optim.lr, raise "
        f"optim.warmup_steps, or inspect these samples; {good}"
    )
