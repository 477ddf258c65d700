"""The configuration of a GPT's run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from configs.reader import read_config
from data.text.config import DataConfig
from data.text.shards import MANIFEST, Manifest
from model.config import ModelConfig, check_positive
from training.config import AdamWConfig, ParallelConfig, RunConfig


@dataclass(frozen=True, kw_only=True)
class OptimConfig(AdamWConfig):
    """How a language model is optimized, and the size of a step."""

    batch_tokens: int
    """Tokens of one optimizer step, over all GPUs: a multiple of micro_batch_size * context_length
    * GPUs. What a GPU does not take at once, it takes in several micro-batches, whose gradients add
    up."""
    micro_batch_size: int
    """Sequences that one GPU takes through the model at a time: as many as its memory holds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "optim", "batch_tokens", "micro_batch_size")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that `train.py` is told of a GPT."""

    task: Literal["language"] = "language"
    """What is trained: language is a GPT, classification a classifier."""
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    run: RunConfig

    def __post_init__(self) -> None:
        if self.parallel.mode == "fsdp" and self.optim.name == "muon":
            raise ValueError(
                "optim.name=muon with parallel.mode=fsdp: Muon needs whole matrices, and with fsdp "
                "a GPU holds parts of them; use parallel.mode=ddp, or optim.name=adamw"
            )
        self._check_context()
        self.grad_accum_steps(world_size=self.parallel.context)
        if (tokens := self.optim.max_steps * self.optim.batch_tokens) >= 2**62:
            raise ValueError(
                f"optim.max_steps={self.optim.max_steps} * optim.batch_tokens="
                f"{self.optim.batch_tokens} = {tokens} tokens must be below 2^62"
            )

    @staticmethod
    def from_data(given: Mapping[str, Any]) -> dict[str, Any]:
        """model.vocab_size, where it is not given and prepared data are: that of their tokenizer.

        Raises:
            ValueError: their manifest is damaged.
        """
        path = given.get("data.path")
        if "model.vocab_size" in given or path is None or not (Path(path) / MANIFEST).is_file():
            return {}
        return {"model.vocab_size": Manifest.load(Path(path)).tokenizer.vocab_size}

    def check_prepared(self) -> None:
        """Refuse to start where the data are not prepared.

        Raises:
            FileNotFoundError: there are none; the message says how to make them.
            ValueError: their manifest is damaged.
        """
        places = [("data.path=", self.data.path)]
        places += [("data.mix: ", corpus.path) for corpus in self.data.mix]
        for name, path in places:
            try:
                Manifest.load(Path(path))
            except FileNotFoundError as error:
                raise FileNotFoundError(f"{name}{error}") from error

    def grad_accum_steps(self, world_size: int) -> int:
        """Micro-batches that each GPU takes through the model in one optimizer step.

        Raises:
            ValueError: batch_tokens is no multiple of what the GPUs take at once, or their number
                none of those that share a sequence.
        """
        context = self.parallel.context
        if world_size % context:
            raise ValueError(
                f"parallel.context={context} GPUs share each sequence, and {world_size} are not a "
                f"multiple of {context}: take so many, or set another"
            )
        groups = world_size // context
        at_once = self.optim.micro_batch_size * self.model.context_length * groups
        if self.optim.batch_tokens % at_once != 0:
            below = self.optim.batch_tokens // at_once * at_once
            near = f"{below} or {below + at_once}" if below else f"{at_once}"
            raise ValueError(
                f"optim.batch_tokens={self.optim.batch_tokens} must be a multiple of "
                f"optim.micro_batch_size={self.optim.micro_batch_size} * "
                f"model.context_length={self.model.context_length} * {self.readers(world_size)} "
                f"= {at_once}: {near} would do"
            )
        return self.optim.batch_tokens // at_once

    def readers(self, world_size: int) -> str:
        """How many GPUs, or groups of them, read sequences of their own, for readers."""
        context = self.parallel.context
        if context == 1:
            return f"{world_size} GPU(s)"
        return f"{world_size // context} group(s) of {context} GPUs"

    def _check_context(self) -> None:
        """Whether sequences can be cut into the chunks that GPUs share."""
        context, length = self.parallel.context, self.model.context_length
        if context == 1:
            return
        unit = 2 * context
        if self.model.mask.pattern != "dense":
            unit *= self.model.mask.block_size
        elif self.model.attention_dropout > 0:
            unit *= 16
        if length % unit:
            raise ValueError(
                f"parallel.context={context} cuts sequences into {2 * context} chunks"
                + (" of whole blocks" if unit > 2 * context else "")
                + f", and model.context_length={length} is no multiple of {unit}: "
                f"{-(-length // unit) * unit} would do"
            )
        if self.model.attention in ("sdpa", "unfused"):
            raise ValueError(
                f"model.attention={self.model.attention} with parallel.context={context}: of "
                "sequences that GPUs share only our kernels know: use model.attention=auto"
            )


def load_config(argv: Sequence[str]) -> TrainConfig:
    """The configuration of a GPT's run from a command line, as `configs.reader.read_config`."""
    return read_config(TrainConfig, argv)
