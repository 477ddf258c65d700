"""Where the time of a training step goes, by what the GPU's kernels are for."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, schedule

# What kernels are called. Those that torch.compile writes have in their names all that they fuse:
# of several parts the first here counts.
PARTS = {
    "matrix products": r"nvjet|gemm|cutlass|xmma|splitK|^product_kernel",
    "attention": r"^attn_|flash|sdpa|fmha|compute_dot_do_o|convert_dq",
    "loss": r"cross_entropy_kernel|softmax|nll_loss",
    "MLP: bias and GELU": r"gelu(?!_mlp)|tanh",
    "residuals and normalisation": r"layer_norm|LayerNorm|layernorm|GammaBeta",
    "optimizer and clipping": r"multi_tensor_apply|lpnorm|adam",
}
REST = "casts, bias gradients, embedding and the rest"
IDLE = "nothing running"


class Part(NamedTuple):
    """A share of a step."""

    ms: float
    launches: float


def part_of(kernel: str) -> str:
    """What a kernel of this name is for."""
    return next((part for part, names in PARTS.items() if re.search(names, kernel)), REST)


def add_up(kernels: Iterable[tuple[str, float, int]], steps: int) -> dict[str, Part]:
    """Parts of one of `steps` steps, from names, milliseconds and launches of kernels."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, ms, launches in kernels:
        total = totals[part_of(name)]
        total[0] += ms
        total[1] += launches
    return {
        part: Part(totals[part][0] / steps, totals[part][1] / steps)
        for part in (*PARTS, REST)
        if part in totals
    }


def time_by_part(
    step: Callable[[], object], step_ms: float, steps: int = 3, warmup: int = 10
) -> dict[str, Part]:
    """Run a step a few times under PyTorch's profiler.

    What is left of `step_ms`, the time of a step without the profiler, is when nothing runs.

    Args:
        warmup: steps that the profiler sees and does not count: after the pause in which it begins
            a GPU runs faster than in a long run.
    """

    def synchronised() -> None:
        step()
        torch.cuda.synchronize()  # what is counted is all of its steps, and nothing else

    parts = add_up(recorded(synchronised, ProfilerActivity.CUDA, steps, warmup), steps)
    busy = sum(part.ms for part in parts.values())
    return {**parts, IDLE: Part(max(0.0, step_ms - busy), 0)}


def recorded(
    step: Callable[[], object], activity: ProfilerActivity, steps: int, warmup: int
) -> list[tuple[str, float, int]]:
    """What PyTorch's profiler counts in `steps` steps after `warmup` others.

    Returns:
        Names, milliseconds on the GPU, and launches.
    """
    plan = schedule(wait=0, warmup=warmup, active=steps, repeat=1)
    with profile(activities=[activity], schedule=plan) as found:
        for _ in range(warmup + steps):
            step()
            found.step()
    events = ((str(e.key), e.device_time_total / 1000, e.count) for e in found.key_averages())
    return [event for event in events if not event[0].startswith("ProfilerStep")]  # a whole step
