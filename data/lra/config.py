"""What a classifier is trained and scored on."""

from dataclasses import dataclass, field
from typing import Literal

Zeros = Literal["tokens", "padding"]
Order = Literal["raster", "tiles"]
Augment = Literal["none", "mirror", "dihedral"]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of training that draws from its own folders."""

    paths: list[str]
    """Prepared tasks whose training examples take turns: equal shares of each batch."""
    steps: int
    """Optimizer steps that the phase lasts."""
    batch_size: int | None = None
    """Examples of one step, over all GPUs; null: optim.batch_size."""
    context_length: int | None = None
    """Tokens of an example: of an image whose zero pixels are left out, which may have no more, or
    the first ones of a text. null: model.context_length."""
    zeros_share: float | None = None
    """Share of an image's zero pixels that are tokens where data.zeros=tokens, each with this
    probability; context_length has room for them and for those above zero. So a model that learned
    without them meets them little by little. null: all."""

    def __post_init__(self) -> None:
        if not self.paths:
            raise ValueError("data.phases: a phase needs at least one folder in its paths")
        for name in ("steps", "batch_size", "context_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"data.phases: {name} must be at least 1, got {value}")
        if self.zeros_share is not None and not 0 < self.zeros_share < 1:
            raise ValueError(
                f"data.phases: zeros_share={self.zeros_share} must lie between 0 and 1: leave it "
                "out for all zero pixels, or set data.zeros=padding for none"
            )


@dataclass(frozen=True, kw_only=True)
class ExamplesConfig:
    """A prepared task, how its images become tokens, and what else is trained on before it."""

    path: str
    """Folder of a prepared task: its examples are those of validation and test, and of training
    after all phases. `python -m scripts.prepare_lra TASK --out FOLDER` makes it as FOLDER/TASK."""
    phases: list[Phase] = field(default_factory=list)
    """A curriculum: what is trained on before data.path, one phase after the other, each with the
    settings data.phases[]."""
    zeros: Zeros = "tokens"
    """tokens: every pixel is one. padding: pixels of 0 are hidden, as the benchmark's own code
    does; we leave them out, which is the same and far cheaper."""
    order: Order = "raster"
    """In which order pixels that are tokens follow each other. raster: row by row. tiles: in
    patches of 8 x 16 (for block-sparse masks)."""
    augment: Augment = "none"
    """What happens to training images at random. mirror: left to right. dihedral: turned and
    mirrored in all 8 ways."""
    shift: int = 0
    """Pixels by which training images are moved at most, up or down and left or right, at random;
    what comes in repeats the edge."""
    val_examples: int | None = None
    """How many of the validation examples, the first ones, choose the best weights; null: all."""

    def __post_init__(self) -> None:
        if self.val_examples is not None and self.val_examples < 1:
            raise ValueError(f"data.val_examples must be at least 1, got {self.val_examples}")
        if self.shift < 0:
            raise ValueError(f"data.shift must be at least 0 pixels, got {self.shift}")
        if self.zeros == "padding" and self.order != "raster":
            raise ValueError(
                f"data.order={self.order} has no effect with data.zeros=padding: leave it out"
            )

    @property
    def training_paths(self) -> list[str]:
        """All folders that are trained on, each once."""
        phases = (path for phase in self.phases for path in phase.paths)
        return list(dict.fromkeys((self.path, *phases)))
