"""The configuration of a classifier's run."""

from dataclasses import dataclass

from configs.schema import RunConfig
from data.lra.config import ExamplesConfig
from model.classifier_config import ClassifierConfig
from training.optim import ExampleOptimConfig


@dataclass(frozen=True, kw_only=True)
class ClassifyConfig:
    """Everything that `scripts.train_classifier` is told."""

    model: ClassifierConfig
    data: ExamplesConfig
    optim: ExampleOptimConfig
    run: RunConfig

    def __post_init__(self) -> None:
        phase_steps = sum(phase.steps for phase in self.data.phases)
        if phase_steps >= self.optim.max_steps:
            raise ValueError(
                f"data.phases take {phase_steps} steps and optim.max_steps={self.optim.max_steps}: "
                "some must be left for data.path"
            )
        if self.data.zeros == "padding" and self.model.grid_width is None:
            raise ValueError(
                "data.zeros=padding leaves pixels out, and where the others stand must be told: "
                "set model.grid_width to the pixels in a row"
            )
