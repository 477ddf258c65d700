"""The configuration of a classifier's run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data.lra.config import ExamplesConfig
from data.lra.request import command_for
from data.lra.store import MANIFEST, Manifest
from model.classifier_config import ClassifierConfig
from model.config import check_positive
from training.config import AdamWConfig, RunConfig

Objective = Literal["labels", "masked", "causal"]
HIDDEN_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class ExampleOptimConfig(AdamWConfig):
    """How a classifier is optimized, and the size of a step."""

    batch_size: int
    """Examples of one optimizer step, over all GPUs."""
    eval_batch_size: int | None = None
    """Examples that one GPU takes through the model at a time where it is scored; null: as many as
    in training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "optim", "batch_size")
        if self.eval_batch_size is not None:
            check_positive(self, "optim", "eval_batch_size")


@dataclass(frozen=True, kw_only=True)
class ClassifyConfig:
    """Everything that `train.py` is told of a classifier."""

    task: Literal["classification"] = "classification"
    """What is trained: classification is a classifier, language a GPT."""
    model: ClassifierConfig
    data: ExamplesConfig
    optim: ExampleOptimConfig
    run: RunConfig
    objective: Objective = "labels"
    """What is learned. labels: those of the examples. Or their tokens, so that another run may
    start with what was learned, masked: those hidden at random; causal: each from those before
    it."""
    hidden_share: float = HIDDEN_SHARE
    """objective=masked only: the share of tokens that is hidden, on average; between 0 and 1."""

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
        self._check_phases()
        self._check_objective()

    def check_prepared(self) -> None:
        """Refuse to start where examples to learn from are not prepared.

        Raises:
            FileNotFoundError: there are none; the message says how to make them.
            ValueError: their manifest is damaged.
        """
        folders = [Path(path) for path in self.data.training_paths]
        missing = [folder for folder in folders if not (folder / MANIFEST).is_file()]
        if missing:
            what, them = f"data.path={missing[0]} is", "it"
            if missing != [Path(self.data.path)]:
                what, them = f"{len(missing)} folders of data.path and data.phases are", "them"
            commands = "\n  ".join(command_for(folder) for folder in missing)
            raise FileNotFoundError(f"{what} not prepared; make {them} with:\n  {commands}")
        for folder in folders:
            Manifest.load(folder)

    def _check_phases(self) -> None:
        """What the phases of a curriculum may have as context_length and zeros_share."""
        model = self.model
        all_tokens = model.grid_width is not None and self.data.zeros == "tokens"
        for phase in self.data.phases:
            room, zeros = phase.context_length, phase.zeros_share
            if zeros is not None and (not all_tokens or room is None):
                raise ValueError(
                    f"data.phases: zeros_share={zeros} is of images with data.zeros=tokens, and "
                    "its phase needs a context_length, room for the pixels that are left: set "
                    "both, or leave it out"
                )
            if room is None:
                continue
            if all_tokens and zeros is None:
                raise ValueError(
                    "data.phases: context_length is room for pixels above zero, and with data."
                    "zeros=tokens every pixel is a token: leave it out, or set data.zeros=padding, "
                    "or the phase's zeros_share"
                )
            if model.mask.pattern != "dense":
                raise ValueError(
                    f"data.phases: context_length={room} and model.mask.pattern="
                    f"{model.mask.pattern}, which is made for model.context_length="
                    f"{model.context_length} tokens: leave it out"
                )
            if room > model.n_positions:
                raise ValueError(
                    f"data.phases: context_length={room} must be at most {model.n_positions}, the "
                    "places of the model"
                )

    def _check_objective(self) -> None:
        if not 0 < self.hidden_share < 1:
            raise ValueError(
                f"hidden_share={self.hidden_share} must lie between 0 and 1: some tokens are "
                "predicted from the others"
            )
        if self.objective != "masked" and self.hidden_share != HIDDEN_SHARE:
            raise ValueError(
                f"hidden_share={self.hidden_share} has no effect with objective={self.objective}: "
                "leave it out, or set objective=masked"
            )
        left_out = self.data.zeros == "padding" or any(p.zeros_share for p in self.data.phases)
        if self.objective == "causal" and left_out:
            raise ValueError(
                "objective=causal predicts the next token, and with data.zeros=padding, or the "
                "zeros_share of a phase, its place is not known: use objective=masked, or all "
                "pixels with data.zeros=tokens"
            )
