"""Data settings of classifiers."""

from dataclasses import dataclass, field
from typing import Literal

Zeros = Literal["tokens", "padding"]
Order = Literal["raster", "tiles"]
Augment = Literal["none", "mirror", "dihedral"]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase of training with its own folders of examples."""

    paths: list[str]
    """Prepared tasks to train on; each contributes an equal share of every batch."""
    steps: int
    """Number of optimizer steps of the phase."""
    batch_size: int | None = None
    """Examples per step, over all GPUs; null: optim.batch_size."""
    context_length: int | None = None
    """Tokens per example. Longer texts are truncated; images without their zero pixels must not
    have more. null: model.context_length."""
    zeros_share: float | None = None
    """With data.zeros=tokens: probability that a zero pixel of an image becomes a token. The
    context_length must hold these and all nonzero pixels. It introduces zero pixels gradually to a
    model that was trained without them. null: all."""

    def __post_init__(self) -> None:
        if not self.paths:
            raise ValueError("data.phases: a phase needs at least one folder in its paths")
        for name in ("steps", "batch_size", "context_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"data.phases: {name}={value} must be at least 1")
        if self.zeros_share is not None and not 0 < self.zeros_share < 1:
            raise ValueError(
                f"data.phases: zeros_share={self.zeros_share} must lie between 0 and 1. Leave it "
                "out for all zero pixels, or set data.zeros=padding for none."
            )


@dataclass(frozen=True, kw_only=True)
class ExamplesConfig:
    """Prepared task, mapping from its images to tokens, and curriculum."""

    path: str
    """Folder of a prepared task, for validation, test, and training after all phases.
    `python -m scripts.prepare_lra TASK --out FOLDER` creates it as FOLDER/TASK."""
    phases: list[Phase] = field(default_factory=list)
    """Curriculum: phases that are trained one after the other before data.path, each with the
    settings data.phases[]."""
    zeros: Zeros = "tokens"
    """tokens: every pixel is a token. padding: zero pixels are hidden, as in the benchmark's own
    code. Papilio leaves them out, which gives the same result at far lower cost."""
    min_level: int = 1
    """zeros=padding only: grey level from which pixels are tokens, 1 to 255. Above 1, faint pixels
    are left out with the black ones, for example the halo of lines; this makes training cheaper."""
    order: Order = "raster"
    """Order of the pixels that are tokens. raster: row by row. tiles: in patches of 8 x 16 (for
    block-sparse masks)."""
    augment: Augment = "none"
    """Random augmentation of training images. mirror: swap left and right. dihedral: all 8
    rotations and reflections."""
    shift: int = 0
    """Maximum random shift of training images in pixels, vertically and horizontally; edge pixels
    are repeated to fill the gap."""
    val_examples: int | None = None
    """Number of validation examples, from the first on, that select the best weights; null: all."""

    def __post_init__(self) -> None:
        if self.val_examples is not None and self.val_examples < 1:
            raise ValueError(f"data.val_examples={self.val_examples} must be at least 1")
        if self.shift < 0:
            raise ValueError(f"data.shift={self.shift} must be at least 0 pixels")
        if not 1 <= self.min_level <= 255:
            raise ValueError(
                f"data.min_level={self.min_level} must be a grey level from 1 to 255. Try 1, which "
                "leaves out black pixels only."
            )
        if self.zeros == "tokens" and self.min_level > 1:
            raise ValueError(
                f"data.min_level={self.min_level} has no effect with data.zeros=tokens, where all "
                "pixels are tokens. Remove it, or set data.zeros=padding."
            )
        if self.zeros == "padding" and self.order != "raster":
            raise ValueError(
                f"data.order={self.order} has no effect with data.zeros=padding: leave it out"
            )

    @property
    def training_paths(self) -> list[str]:
        """All folders to train on, without duplicates."""
        phase_paths = (path for phase in self.phases for path in phase.paths)
        return list(dict.fromkeys((self.path, *phase_paths)))
