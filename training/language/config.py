"""The configuration of a GPT's run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from configs.reader import read_config
from data.text.config import DataConfig
from model.config import ModelConfig, check_positive
from training.config import AdamWConfig, RunConfig


@dataclass(frozen=True, kw_only=True)
class OptimConfig(AdamWConfig):
    """How a language model is optimized, and the size of a step."""

    batch_tokens: int
    """Tokens of one optimizer step, over all GPUs and accumulated micro-batches."""
    micro_batch_size: int
    """Sequences that one GPU takes through the model at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "optim", "batch_tokens", "micro_batch_size")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that `train.py` is told of a GPT."""

    task: Literal["language"] = "language"
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    run: RunConfig

    def __post_init__(self) -> None:
        self.grad_accum_steps(world_size=1)

    def grad_accum_steps(self, world_size: int) -> int:
        """Micro-batches that each GPU takes through the model in one optimizer step.

        Raises:
            ValueError: batch_tokens is no multiple of what the GPUs take at once.
        """
        at_once = self.optim.micro_batch_size * self.model.context_length * world_size
        if self.optim.batch_tokens % at_once != 0:
            below = self.optim.batch_tokens // at_once * at_once
            near = f"{below} or {below + at_once}" if below else f"{at_once}"
            raise ValueError(
                f"optim.batch_tokens={self.optim.batch_tokens} must be a multiple of "
                f"optim.micro_batch_size={self.optim.micro_batch_size} * "
                f"model.context_length={self.model.context_length} * {world_size} GPU(s) "
                f"= {at_once}: {near} would do"
            )
        return self.optim.batch_tokens // at_once


def load_config(argv: Sequence[str]) -> TrainConfig:
    """The configuration of a GPT's run from a command line, as `configs.reader.read_config`."""
    return read_config(TrainConfig, argv)
