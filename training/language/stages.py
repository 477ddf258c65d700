"""Stages of a run: steps with one context length and one batch size."""

from collections.abc import Sequence
from dataclasses import dataclass

from model.config import ModelConfig
from model.flops import train_flops_per_token

Schedule = Sequence[Sequence[int | float]]
"""Pairs of a value and its share of the steps, in order."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Steps [first_step, last_step) of a run, with one context length and one batch size."""

    context_length: int
    micro_batch_size: int
    """Sequences per forward pass of one GPU: as many tokens as in every other stage."""
    batch_tokens: int
    """Tokens per step."""
    first_step: int
    last_step: int

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.last_step - self.first_step

    @property
    def tokens(self) -> int:
        """Number of tokens of all steps."""
        return self.steps * self.batch_tokens

    def steps_before(self, step: int) -> int:
        """Number of steps of this stage before `step` of the run."""
        return min(max(step - self.first_step, 0), self.steps)


def make_stages(
    model: ModelConfig, batches: Schedule, *, max_steps: int, micro_batch_size: int
) -> list[Stage]:
    """Stages of a run in order: a new one begins with each context and with each batch size.

    Args:
        model: model to train; model.context_schedule has its contexts.
        batches: tokens per step and shares of max_steps.
        max_steps: optimizer steps of the run.
        micro_batch_size: sequences per forward pass at the longest context.

    Raises:
        ValueError: a context or a batch size has no step.
    """
    contexts = model.context_schedule or [[model.context_length, 1.0]]
    context_ends = _last_steps("model.context_schedule", "a context", contexts, max_steps)
    batch_ends = _last_steps("optim.batch_schedule", "a batch", batches, max_steps)
    ends = sorted({*context_ends, *batch_ends})
    stages = []
    for first, last in zip([0, *ends[:-1]], ends, strict=True):
        context_length = next(c for end, c in context_ends.items() if last <= end)
        stages.append(
            Stage(
                context_length=context_length,
                micro_batch_size=micro_batch_size * model.context_length // context_length,
                batch_tokens=next(b for end, b in batch_ends.items() if last <= end),
                first_step=first,
                last_step=last,
            )
        )
    return stages


def _last_steps(name: str, noun: str, schedule: Schedule, max_steps: int) -> dict[int, int]:
    """Values of a schedule by the step at which each of them ends."""
    shares = [share for _, share in schedule]
    ends = [round(sum(shares[: n + 1]) * max_steps) for n in range(len(shares))]
    for (value, share), first, last in zip(schedule, [0, *ends[:-1]], ends, strict=True):
        if first == last:
            raise ValueError(
                f"{name}={schedule} leaves no step for {noun} of {value}: {share} of "
                f"optim.max_steps={max_steps} must be at least one step. Give it a larger share, "
                "or raise optim.max_steps"
            )
    return dict(zip(ends, (int(value) for value, _ in schedule), strict=True))


def tokens_before(stages: Sequence[Stage], step: int) -> int:
    """Number of tokens of all steps before `step`."""
    return sum(stage.steps_before(step) * stage.batch_tokens for stage in stages)


def flops_per_token(model: ModelConfig, stages: Sequence[Stage], *, causal: bool) -> float:
    """Training FLOPs per token, the mean over all stages; see `train_flops_per_token`."""
    flops = sum(
        stage.tokens * train_flops_per_token(model.at_context(stage.context_length), causal=causal)
        for stage in stages
    )
    return flops / sum(stage.tokens for stage in stages)
