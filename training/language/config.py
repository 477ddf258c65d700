"""Configuration of a GPT's run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from configs.reader import read_config
from data.text.config import DataConfig
from data.text.shards import MANIFEST, Manifest
from model.checks import check_positive
from model.config import ModelConfig
from model.hf.config import unsupported_reason
from training.config import AdamWConfig, ParallelConfig, RunConfig, counted
from training.language.stages import Stage, make_stages, tokens_before


@dataclass(frozen=True, kw_only=True)
class OptimConfig(AdamWConfig):
    """Optimizer of a language model and its batch size."""

    batch_tokens: int
    """Tokens per optimizer step, over all GPUs: a multiple of micro_batch_size * context_length *
    GPUs. If one micro-batch per GPU is not enough, gradients are accumulated over several."""
    micro_batch_size: int
    """Sequences per forward pass of one GPU; as many as fit its memory."""
    batch_schedule: list[list[int | float]] = field(default_factory=list, hash=False)
    """Tokens per step and their shares of max_steps: [[131072, 0.2], [524288, 0.8]] takes a quarter
    of the tokens in each of the first steps. The last one is batch_tokens. []: batch_tokens
    throughout. Shares in model.context_schedule also count steps, not tokens: a context that is
    trained with larger batches gets more tokens than its share."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "optim", "batch_tokens", "micro_batch_size")
        if self.batch_schedule:
            self._check_batch_schedule()

    def _check_batch_schedule(self) -> None:
        text = f"optim.batch_schedule={self.batch_schedule}"
        example = f"for example [[{self.batch_tokens // 4}, 0.2], [{self.batch_tokens}, 0.8]]"
        pairs = [pair for pair in self.batch_schedule if len(pair) == 2]
        whole = all(type(tokens) is int and tokens > 0 for tokens, _ in pairs)
        if len(pairs) < len(self.batch_schedule) or not whole:
            raise ValueError(f"{text} must be pairs of a number of tokens and its share, {example}")
        if pairs[-1][0] != self.batch_tokens:
            raise ValueError(
                f"{text} must end with optim.batch_tokens={self.batch_tokens}. Try "
                f"optim.batch_tokens={pairs[-1][0]}"
            )
        shares = [share for _, share in pairs]
        in_range = all(0 < share <= 1 for share in shares)
        if not in_range or not math.isclose(sum(shares), 1, abs_tol=1e-6):
            raise ValueError(f"{text} must have shares above 0 whose sum is 1, {example}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Configuration that `train.py` reads to train a GPT."""

    task: Literal["language"] = "language"
    """Type of model to train: language trains a GPT, classification a classifier."""
    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    run: RunConfig

    def __post_init__(self) -> None:
        reason = unsupported_reason(self.model)
        if self.run.exportable and reason is not None:
            raise ValueError(
                f"run.exportable=true must be false for this model. {reason} Change the model, or "
                "remove run.exportable"
            )
        self._check_contexts()
        for stage in self.stages:
            self.grad_accum_steps(self.parallel.context, stage.batch_tokens)
        if self.tokens >= 2**62:
            raise ValueError(
                f"optim.max_steps={self.optim.max_steps} steps of up to optim.batch_tokens="
                f"{self.optim.batch_tokens} are {self.tokens} tokens, which must be below 2^62"
            )

    @staticmethod
    def from_data(given: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults of settings that others determine.

        model.vocab_size is the size of the prepared data's tokenizer, if there is one, and
        model.context_length the last context of model.context_schedule.

        Raises:
            ValueError: the manifest of the data is damaged.
        """
        defaults = {}
        path, schedule = given.get("data.path"), given.get("model.context_schedule")
        if schedule and schedule[-1] and type(schedule[-1][0]) is int:
            defaults["model.context_length"] = schedule[-1][0]
            if given.get("model.rope_scaling", "none") != "none" and schedule[0][:1] > [0]:
                defaults["model.rope_factor"] = schedule[-1][0] / schedule[0][0]
        if "model.vocab_size" not in given and path and (Path(path) / MANIFEST).is_file():
            defaults["model.vocab_size"] = Manifest.load(Path(path)).tokenizer.vocab_size
        return defaults

    def check_prepared(self) -> None:
        """Check that the data are prepared.

        Raises:
            FileNotFoundError: they are missing; the message has the command that prepares them.
            ValueError: a manifest is damaged.
        """
        settings = [("data.path=", self.data.path)]
        settings += [("data.mix: ", corpus.path) for corpus in self.data.mix]
        for setting, path in settings:
            try:
                Manifest.load(Path(path))
            except FileNotFoundError as error:
                raise FileNotFoundError(f"{setting}{error}") from error

    def grad_accum_steps(self, world_size: int, batch_tokens: int | None = None) -> int:
        """Number of micro-batches of each GPU per step of `batch_tokens` (None: of the setting).

        Raises:
            ValueError: `batch_tokens` is not a multiple of the tokens of one micro-batch on all
                GPUs, or the number of GPUs is not a multiple of parallel.context.
        """
        context = self.parallel.context
        if world_size % context:
            raise ValueError(
                f"parallel.context={context} must divide the number of GPUs, {world_size}. Use a "
                f"multiple of {context} GPUs, or another parallel.context"
            )
        groups = world_size // context
        unit = self.optim.micro_batch_size * self.model.context_length * groups
        batch_tokens = self.optim.batch_tokens if batch_tokens is None else batch_tokens
        if batch_tokens % unit != 0:
            below = batch_tokens // unit * unit
            nearest = f"{below} or {below + unit}" if below else f"{unit}"
            setting = f"optim.batch_tokens={batch_tokens}"
            if batch_tokens != self.optim.batch_tokens:
                setting = f"a batch of {batch_tokens} tokens in optim.batch_schedule"
            raise ValueError(
                f"{setting} must be a multiple of {unit} "
                f"(optim.micro_batch_size={self.optim.micro_batch_size} x model.context_length="
                f"{self.model.context_length} x {self._readers(world_size, 'GPU')}). "
                f"Try {nearest}"
            )
        return batch_tokens // unit

    @property
    def stages(self) -> list[Stage]:
        """Stages of the run: one for each context, or for each batch size within it."""
        optim = self.optim
        return make_stages(
            self.model,
            optim.batch_schedule or [[optim.batch_tokens, 1.0]],
            max_steps=optim.max_steps,
            micro_batch_size=optim.micro_batch_size,
        )

    @property
    def tokens(self) -> int:
        """Number of tokens of the whole run, with repetitions."""
        return tokens_before(self.stages, self.optim.max_steps)

    def batch_lines(self, world_size: int, unit: str = "GPU") -> list[str]:
        """Composition of a step's batch, for the console: one line for each stage.

        Args:
            world_size: Number of GPUs.
            unit: Noun for them in the text.
        """
        readers = self._readers(world_size, unit)
        lines = [
            f"per step: {counted(n_micro, 'micro-batch')} x {readers} x "
            f"{counted(stage.micro_batch_size, 'sequence')} x {stage.context_length:,} tokens = "
            f"{stage.batch_tokens:,} tokens"
            for stage in self.stages
            for n_micro in [self.grad_accum_steps(world_size, stage.batch_tokens)]
        ]
        if len(lines) == 1:
            return lines
        has_contexts = len(self.model.contexts) > 1
        return [
            (f"context {stage.context_length:,}{self._scaling(stage)} for " if has_contexts else "")
            + f"steps {stage.first_step + 1:,} to {stage.last_step:,} "
            f"({stage.steps / self.optim.max_steps:.1%}), {line}"
            for stage, line in zip(self.stages, lines, strict=True)
        ]

    def _scaling(self, stage: Stage) -> str:
        """Scaling of the rotary positions in a stage, as text for messages."""
        model = self.model.at_context(stage.context_length)
        if model.rope_scaling == "none":
            return ""
        return f" ({model.rope_scaling}, rope_factor {model.rope_factor:g})"

    def scaling_notes(self) -> list[str]:
        """A warning if a new run scales its rotary positions by another factor than its context.

        A configuration that a run has written has the factor of that run's schedule.
        """
        model, first = self.model, self.model.contexts[0]
        grows = model.context_length / first
        is_scaled = model.context_schedule and model.rope_scaling != "none"
        if not is_scaled or self.run.init_from or model.rope_factor == grows:
            return []
        return [
            f"warning: model.rope_factor={model.rope_factor:g}, but contexts grow by {grows:g}, "
            f"from {first:,} to {model.context_length:,}. Set model.rope_factor={grows:g}, unless "
            "other positions are wanted"
        ]

    def _readers(self, world_size: int, unit: str) -> str:
        """Number of GPUs, or of groups that share a sequence, as text for messages."""
        context = self.parallel.context
        if context == 1:
            return counted(world_size, unit)
        return f"{counted(world_size // context, 'group')} of {counted(context, unit)}"

    def _check_contexts(self) -> None:
        """Check the stages of the run, and that sequences can be split for context parallelism."""
        if self.model.context_schedule and self.data.consecutive_windows > 1:
            raise ValueError(
                f"data.consecutive_windows={self.data.consecutive_windows} cannot be combined with "
                "model.context_schedule, which orders the samples itself. Remove one of them"
            )
        if self.model.window_grows and self.parallel.context > 1:
            raise ValueError(
                f"model.window_grows=true does not support parallel.context="
                f"{self.parallel.context}, which splits the sequences. Remove one of them"
            )
        for stage in self.stages:
            self._check_chunks(stage.context_length)

    def _check_chunks(self, length: int) -> None:
        """Check that sequences of `length` tokens can be split into chunks."""
        context = self.parallel.context
        if context == 1:
            return
        unit = 2 * context
        if self.model.mask.pattern != "dense":
            unit *= self.model.mask.block_size
        elif self.model.attention_dropout > 0:
            unit *= 16
        if length % unit:
            scheduled = self.model.context_schedule
            setting = "a context in model.context_schedule" if scheduled else "model.context_length"
            raise ValueError(
                f"{setting}={length} must be a multiple of {unit}: parallel.context={context} "
                f"splits sequences into {2 * context} chunks"
                + (" of whole blocks" if unit > 2 * context else "")
                + f". Try {-(-length // unit) * unit}"
            )
        if self.model.attention in ("sdpa", "eager"):
            raise ValueError(
                f"model.attention={self.model.attention} does not support parallel.context="
                f"{context}: only Papilio's kernels share sequences. Try model.attention=auto"
            )


def load_config(argv: Sequence[str]) -> TrainConfig:
    """Read the configuration of a GPT's run from a command line; see `read_config`."""
    return read_config(TrainConfig, argv)
