"""Protocol of a training task: data, a model, its loss and its evaluation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from training.metrics import Record
from training.step import LossOf
from training.stop import Stop


class Task(Protocol):
    """Training task. `train.py` decides when to step, validate, save and stop.

    Every process creates one, and all call the same methods in the same order.
    """

    model: nn.Module
    can_capture: bool
    """Whether a step can be captured in a CUDA graph."""
    value_names: Sequence[str]
    """Names of the values of a step, the loss first."""
    unit: str
    """Unit of the counts in records: tokens or examples."""
    must_match: dict[str, Any]
    """Settings that a run shares with the checkpoint from which it resumes."""
    n_shapes: int
    """Number of batch shapes that the model gets; each is compiled separately."""

    def load_initial_weights(self, run: Path) -> tuple[str, int | None]:
        """Load the weights of another run.

        Returns:
            Their source, and the step at which they were saved, or None if unknown.
        """
        ...

    def open(self, run: Path, first_step: int) -> None:
        """Read or write the task's own files in the run's folder."""
        ...

    def describe(self) -> str:
        """Lines for the console: the model, the data and the size of a step."""
        ...

    def samples(self, step: int) -> int:
        """Number of samples of all steps before `step`, over all processes."""
        ...

    def count(self, step: int) -> int:
        """Number of tokens or examples of all steps before `step`, over all processes."""
        ...

    def tokens(self, step: int) -> int:
        """Number of tokens of all steps before `step`, over all processes, padding included."""
        ...

    def stage(self, step: int) -> int:
        """Stage of the curriculum at `step`: each has its own loss and batch shapes."""
        ...

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """Data of this process for `step`, (M, ...) each, for M micro-batches."""
        ...

    def loss(self, stage: int) -> LossOf:
        """Loss of one micro-batch of `batch` in a stage."""
        ...

    def check_data(self, *, wait: bool) -> None:
        """Raise an error if a data check has failed; with `wait`, finish all checks first."""
        ...

    def speed(self, step: int, means: dict[str, float | None], per_s: float | None) -> Record:
        """Record of the means over steps and the speed, in tokens or examples per second."""
        ...

    def validate(self, model: nn.Module, step: int, stop: Stop) -> Record:
        """Evaluate after `step` steps; checks `stop` between batches."""
        ...

    def finish(self, model: nn.Module, validated: Record, stop: Stop) -> Record:
        """Final record of the run: the last validation and the task's own final evaluation."""
        ...
