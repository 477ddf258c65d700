"""Configuration of a classifier's run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from data.lra.config import ExamplesConfig
from data.lra.request import command_for
from data.lra.store import MANIFEST, Manifest
from model.checks import check_positive
from model.classifier_config import ClassifierConfig
from training.config import AdamWConfig, RunConfig

Objective = Literal["labels", "masked", "causal"]
HIDDEN_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class ExampleOptimConfig(AdamWConfig):
    """Optimizer of a classifier and its batch size."""

    batch_size: int
    """Examples per optimizer step, over all GPUs."""
    eval_batch_size: int | None = None
    """Examples per forward pass of one GPU in evaluation; null: as many as in training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "optim", "batch_size")
        if self.eval_batch_size is not None:
            check_positive(self, "optim", "eval_batch_size")


@dataclass(frozen=True, kw_only=True)
class ClassifyConfig:
    """Configuration that `train.py` reads to train a classifier."""

    task: Literal["classification"] = "classification"
    """Type of model to train: classification trains a classifier, language a GPT."""
    model: ClassifierConfig
    data: ExamplesConfig
    optim: ExampleOptimConfig
    run: RunConfig
    objective: Objective = "labels"
    """Training objective. labels: classify the examples. masked: predict randomly hidden tokens;
    causal: predict each next token. The last two pretrain a model for another run to start from."""
    hidden_share: float = HIDDEN_SHARE
    """objective=masked only: average share of hidden tokens, between 0 and 1."""

    def __post_init__(self) -> None:
        if self.run.exportable:
            raise ValueError(
                "run.exportable=true must be false for a classifier: only GPTs can be exported. "
                "Remove it"
            )
        phase_steps = sum(phase.steps for phase in self.data.phases)
        if phase_steps >= self.optim.max_steps:
            raise ValueError(
                f"data.phases take {phase_steps} steps and must take fewer than optim.max_steps="
                f"{self.optim.max_steps}, as the other steps train on data.path. Raise "
                "optim.max_steps, or shorten the phases"
            )
        if self.data.zeros == "padding" and self.model.grid_width is None:
            raise ValueError(
                "data.zeros=padding leaves pixels out, so the model needs the positions of the "
                "others. Set model.grid_width to the number of pixels in a row"
            )
        self._check_phases()
        self._check_objective()

    def check_prepared(self) -> None:
        """Check that all training examples are prepared.

        Raises:
            FileNotFoundError: some are missing; the message has the commands that prepare them.
            ValueError: a manifest is damaged.
        """
        folders = [Path(path) for path in self.data.training_paths]
        missing = [folder for folder in folders if not (folder / MANIFEST).is_file()]
        if missing:
            problem = f"data.path={missing[0]} is not prepared; make it with"
            if missing != [Path(self.data.path)]:
                problem = (
                    f"{len(missing)} folders of data.path and data.phases are not prepared; make "
                    "them with"
                )
            commands = "\n  ".join(command_for(folder) for folder in missing)
            raise FileNotFoundError(f"{problem}:\n  {commands}")
        for folder in folders:
            Manifest.load(folder)

    def _check_phases(self) -> None:
        """Check context_length and zeros_share of the phases of a curriculum."""
        model = self.model
        all_tokens = model.grid_width is not None and self.data.zeros == "tokens"
        for phase in self.data.phases:
            length, zeros = phase.context_length, phase.zeros_share
            if zeros is not None and (not all_tokens or length is None):
                raise ValueError(
                    f"data.phases: zeros_share={zeros} needs images with data.zeros=tokens, and a "
                    "context_length of its phase for the pixels that are left. Set both, or remove "
                    "zeros_share"
                )
            if length is None:
                continue
            if all_tokens and zeros is None:
                raise ValueError(
                    f"data.phases: context_length={length} has no effect with data.zeros=tokens, "
                    "where every pixel is a token. Remove it, or set data.zeros=padding or the "
                    "phase's zeros_share"
                )
            if model.mask.pattern != "dense":
                raise ValueError(
                    f"data.phases: context_length={length} needs model.mask.pattern=dense: the "
                    f"{model.mask.pattern} mask is built for model.context_length="
                    f"{model.context_length} tokens. Remove context_length"
                )
            if length > model.n_positions:
                raise ValueError(
                    f"data.phases: context_length={length} must be at most {model.n_positions}, "
                    "the number of positions of the model"
                )

    def _check_objective(self) -> None:
        if not 0 < self.hidden_share < 1:
            raise ValueError(
                f"hidden_share={self.hidden_share} must be above 0 and below 1: hidden tokens are "
                "predicted from the others"
            )
        if self.objective != "masked" and self.hidden_share != HIDDEN_SHARE:
            raise ValueError(
                f"hidden_share={self.hidden_share} has no effect with objective={self.objective}. "
                "Remove it, or set objective=masked"
            )
        drops_pixels = self.data.zeros == "padding" or any(p.zeros_share for p in self.data.phases)
        if self.objective == "causal" and drops_pixels:
            raise ValueError(
                "objective=causal predicts the next token, but data.zeros=padding, or the "
                "zeros_share of a phase, hides its position. Try objective=masked, or all pixels "
                "with data.zeros=tokens"
            )
