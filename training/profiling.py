"""Time of training: a stopwatch of its speed, and profiles of its steps by what kernels are for."""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch.profiler import ProfilerActivity, profile, schedule

SKIPPED, WARM_UP = 10, 5
"""Steps before those that are counted: of them the first compile, and the last are watched, too."""
_MOST_LINES = 15


class StepProfiler:
    """Watches some steps of a run, and then no more."""

    def __init__(self, folder: Path, n_steps: int, device: torch.device) -> None:
        """Watch `n_steps` steps, after the first of this start; the results go into `folder`."""
        self._folder, self._n_steps, self._device = folder, n_steps, device
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        plan = schedule(wait=0, warmup=WARM_UP, active=n_steps, repeat=1)
        self._profile = profile(activities=activities, schedule=plan)
        self._count, self._started, self._step_ms = 0, 0.0, 0.0
        self._is_on = False

    def step(self) -> bool:
        """A step is done; whether it was the last that is watched, so that `report` can tell."""
        self._count += 1
        watched = self._count - SKIPPED
        if watched == 0:
            self._profile.start()
            self._is_on = True
        elif 0 < watched <= WARM_UP + self._n_steps:
            if watched >= WARM_UP:
                self._wait()
            seconds = time.perf_counter() - self._started
            self._profile.step()
            if watched == WARM_UP:
                self._started = time.perf_counter()
            if watched == WARM_UP + self._n_steps:
                self._step_ms = 1000 * seconds / self._n_steps
                return True
        return False

    def unfinished(self) -> bool:
        """Whether the steps that were to be watched have not all come."""
        return self._count < SKIPPED + WARM_UP + self._n_steps

    def _stop(self) -> None:
        if self._is_on:
            self._is_on = False
            self._profile.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Watch no more, wherever the run ends: PyTorch has one profiler for all of a process."""
        self._stop()

    def _wait(self) -> None:
        """Until the GPU has done the step: what is counted is all of some steps, and no other."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def report(self) -> str:
        """What the steps tell, as lines of text; writes the table and the trace."""
        self._stop()
        self._folder.mkdir(exist_ok=True)
        trace, text = self._folder / "trace.json", self._folder / "table.txt"
        self._profile.export_chrome_trace(str(trace))
        tell = self._parts if self._device.type == "cuda" else self._operators
        lines = tell(self._step_ms)
        table = "\n".join(
            [f"{'ms':>10} {'calls':>8}  of a step, mean of {self._n_steps} under the profiler"]
            + [f"{ms:10.2f} {calls:8.1f}  {name}" for name, ms, calls in lines]
        )
        text.write_text(table + "\n", encoding="utf-8")
        return f"{table}\nprofile: {text}, and {trace} for ui.perfetto.dev or chrome://tracing"

    def _parts(self, step_ms: float) -> list[tuple[str, float, float]]:
        """Kernels by what they are for, and the time in which none runs."""
        events = self._profile.key_averages()
        kernels = [
            (str(e.key), e.self_device_time_total / 1000, e.count)
            for e in events
            # annotations span kernels that are counted by themselves
            if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation
        ]
        parts = add_up(kernels, self._n_steps)
        idle = step_ms - sum(part.ms for part in parts.values())
        return [
            ("the whole step", step_ms, 1.0),
            *((name, part.ms, part.launches) for name, part in parts.items()),
            ("no kernel running", max(0.0, idle), 0.0),
        ]

    def _operators(self, step_ms: float) -> list[tuple[str, float, float]]:
        """PyTorch's operators on the CPU, the longest first, each without those that it calls."""
        n = self._n_steps
        events = [
            (str(e.key), e.self_cpu_time_total / 1000 / n, e.count / n)
            for e in self._profile.key_averages()
            if not _is_step(e.key)
        ]
        events.sort(key=lambda event: -event[1])
        rest = step_ms - sum(ms for _, ms, _ in events[:_MOST_LINES])
        return [
            ("the whole step", step_ms, 1.0),
            *events[:_MOST_LINES],
            ("others, and Python", max(0.0, rest), 0.0),
        ]


def _is_step(key: str) -> bool:
    return key.startswith("ProfilerStep")


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
    """Part of a step that a kernel of this name belongs to."""
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
    """Events that PyTorch's profiler counts in `steps` steps after `warmup` others.

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


class Stopwatch:
    """Speed and GPU-hours of training, counted from step to step and stopped while `paused`.

    Timed are batches, forward and backward pass, exchange of gradients and optimizer. Evaluating,
    saving and logging happen in pauses. The first step of a process compiles, so it is not timed:
    it counts as long as the steps after it take on average, up to the next pause that follows any.
    A process that is gone before that leaves it out. Each process has a watch of its own, and what
    a run records is the main process's time, times the number of processes.
    """

    def __init__(
        self, device: torch.device, *, n_processes: int = 1, gpu_hours: float = 0.0
    ) -> None:
        """Start it, with the GPU-hours of a checkpoint; `device` is waited for at each reading."""
        self._device = device
        self._n_processes = n_processes
        self.gpu_hours = gpu_hours
        """Hours of training up to the last pause, times the number of processes."""
        self._at_first_step = True
        self._untimed_tokens = 0  # of the first step, until its time can be told
        self._tokens, self._seconds = 0, 0.0  # since the last reading of the speed
        self._start()

    def count(self, tokens: int) -> None:
        """Count a step of this many tokens, over all processes."""
        if self._at_first_step:
            self._at_first_step = False
            self._untimed_tokens = tokens
            self._start()
        else:
            self._tokens_here += tokens

    def expect_compilation(self) -> None:
        """Announce that the next step compiles: it is timed as the first one is."""
        self._stop()
        self._start()
        self._at_first_step = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what happens in this context."""
        self._stop()
        yield
        self._start()

    def tokens_per_s(self) -> float | None:
        """Tokens a second of the whole run since the last call, None if no step was timed since.

        To be called in a pause.
        """
        speed = self._tokens / self._seconds if self._tokens else None
        self._tokens, self._seconds = 0, 0.0
        return speed

    def _start(self) -> None:
        self._wait()
        self._tokens_here, self._started = 0, time.perf_counter()

    def _stop(self) -> None:
        self._wait()
        seconds = time.perf_counter() - self._started
        if self._tokens_here == 0:  # pauses one after the other, or the first step alone
            return
        self._tokens += self._tokens_here
        self._seconds += seconds
        as_long = 1 + self._untimed_tokens / self._tokens_here
        self._untimed_tokens = 0
        self.gpu_hours += seconds * as_long * self._n_processes / 3600

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
