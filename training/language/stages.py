"""Stages of a run whose context grows: their steps and the shape of their batches."""

from collections.abc import Sequence
from dataclasses import dataclass

from model.config import ModelConfig
from model.flops import train_flops_per_token


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Steps [first_step, last_step) of a run, with one context length."""

    context_length: int
    micro_batch_size: int
    """Sequences per forward pass of one GPU: as many tokens as in every other stage."""
    first_step: int
    last_step: int

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.last_step - self.first_step

    def steps_before(self, step: int) -> int:
        """Number of steps of this stage before `step` of the run."""
        return min(max(step - self.first_step, 0), self.steps)


def context_stages(model: ModelConfig, *, max_steps: int, micro_batch_size: int) -> list[Stage]:
    """Stages of a run in order: one for each context of model.context_schedule, or a single one.

    Args:
        model: model to train.
        max_steps: optimizer steps of the run.
        micro_batch_size: sequences per forward pass at the longest context.

    Raises:
        ValueError: a stage has no step.
    """
    shares = [share for _, share in model.context_schedule] or [1.0]
    ends = [round(sum(shares[: n + 1]) * max_steps) for n in range(len(shares))]
    stages = [
        Stage(
            context_length=context_length,
            micro_batch_size=micro_batch_size * model.context_length // context_length,
            first_step=first,
            last_step=last,
        )
        for context_length, first, last in zip(model.contexts, [0, *ends[:-1]], ends, strict=True)
    ]
    for stage, share in zip(stages, shares, strict=True):
        if stage.steps < 1:
            raise ValueError(
                f"model.context_schedule={model.context_schedule} leaves no step for a context of "
                f"{stage.context_length}: {share} of optim.max_steps={max_steps} must be at least "
                "one step. Give it a larger share, or raise optim.max_steps"
            )
    return stages


def flops_per_token(model: ModelConfig, stages: Sequence[Stage], *, causal: bool) -> float:
    """Training FLOPs per token, the mean over all stages; see `train_flops_per_token`."""
    flops = sum(
        stage.steps * train_flops_per_token(model.at_context(stage.context_length), causal=causal)
        for stage in stages
    )
    return flops / sum(stage.steps for stage in stages)
