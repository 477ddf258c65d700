"""Measure training speed and GPU-hours, and profile steps by the purpose of their kernels."""

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
"""Steps before the measured ones: the first 10 include compilation, 5 more warm the profiler up."""
_MAX_LINES = 15


class StepProfiler:
    """Profiler of a few steps of a run."""

    def __init__(self, folder: Path, n_steps: int, device: torch.device) -> None:
        """Profile `n_steps` steps after the first 15 of this start; results go into `folder`."""
        self._folder, self._n_steps, self._device = folder, n_steps, device
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        plan = schedule(wait=0, warmup=WARM_UP, active=n_steps, repeat=1)
        self._profile = profile(activities=activities, schedule=plan)
        self._count, self._started, self._step_ms = 0, 0.0, 0.0
        self._is_on = False

    def step(self) -> bool:
        """Count a finished step; returns True once the last profiled step is done."""
        self._count += 1
        profiled = self._count - SKIPPED
        if profiled == 0:
            self._profile.start()
            self._is_on = True
        elif 0 < profiled <= WARM_UP + self._n_steps:
            if profiled >= WARM_UP:
                self._wait()
            seconds = time.perf_counter() - self._started
            self._profile.step()
            if profiled == WARM_UP:
                self._started = time.perf_counter()
            if profiled == WARM_UP + self._n_steps:
                self._step_ms = 1000 * seconds / self._n_steps
                return True
        return False

    def unfinished(self) -> bool:
        """Whether steps to profile are still missing."""
        return self._count < SKIPPED + WARM_UP + self._n_steps

    def _stop(self) -> None:
        if self._is_on:
            self._is_on = False
            self._profile.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop profiling however the run ends: a process has only one PyTorch profiler."""
        self._stop()

    def _wait(self) -> None:
        """Wait for the GPU, so that measured steps are complete and contain nothing else."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def report(self) -> str:
        """Write the table and the trace; returns the table as text."""
        self._stop()
        self._folder.mkdir(exist_ok=True)
        trace, text = self._folder / "trace.json", self._folder / "table.txt"
        self._profile.export_chrome_trace(str(trace))
        measure = self._parts if self._device.type == "cuda" else self._operators
        lines = measure(self._step_ms)
        table = "\n".join(
            [f"{'ms':>10} {'calls':>8}  per step, mean of {self._n_steps} profiled steps"]
            + [f"{ms:10.2f} {calls:8.1f}  {name}" for name, ms, calls in lines]
        )
        text.write_text(table + "\n", encoding="utf-8")
        viewers = "ui.perfetto.dev or chrome://tracing"
        return f"{table}\nprofile: {text}; trace: {trace} (open in {viewers})"

    def _parts(self, step_ms: float) -> list[tuple[str, float, float]]:
        """Milliseconds and launches of kernels by purpose, and the idle time."""
        events = self._profile.key_averages()
        kernels = [
            (str(e.key), e.self_device_time_total / 1000, e.count)
            for e in events
            # Annotations span kernels that are already counted.
            if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation
        ]
        parts = sum_by_part(kernels, self._n_steps)
        idle = step_ms - sum(part.ms for part in parts.values())
        return [
            ("the whole step", step_ms, 1.0),
            *((name, part.ms, part.launches) for name, part in parts.items()),
            ("no kernel running", max(0.0, idle), 0.0),
        ]

    def _operators(self, step_ms: float) -> list[tuple[str, float, float]]:
        """Self time of PyTorch's operators on the CPU, longest first."""
        n = self._n_steps
        events = [
            (str(e.key), e.self_cpu_time_total / 1000 / n, e.count / n)
            for e in self._profile.key_averages()
            if not _is_step(e.key)
        ]
        events.sort(key=lambda event: -event[1])
        rest = step_ms - sum(ms for _, ms, _ in events[:_MAX_LINES])
        return [
            ("the whole step", step_ms, 1.0),
            *events[:_MAX_LINES],
            ("other operators, and Python", max(0.0, rest), 0.0),
        ]


def _is_step(key: str) -> bool:
    return key.startswith("ProfilerStep")


# Patterns of kernel names. The name of a torch.compile kernel lists all that it fuses; if several
# parts match, the first one here counts.
PARTS = {
    "matrix products": r"nvjet|gemm|cutlass|xmma|splitK|^product_kernel",
    "attention": r"^attn_|flash|sdpa|fmha|compute_dot_do_o|convert_dq",
    "loss": r"cross_entropy_kernel|softmax|nll_loss",
    "MLP: bias and GELU": r"gelu(?!_mlp)|tanh",
    "residuals and normalisation": r"(layer|rms)_norm|LayerNorm|layernorm|GammaBeta",
    "optimizer and clipping": r"multi_tensor_apply|lpnorm|adam|^(momentum|apply)_kernel",
}
REST = "casts, bias gradients, embedding and the rest"
IDLE = "nothing running"


class Part(NamedTuple):
    """Time and number of launches of a part of a step."""

    ms: float
    launches: float


def part_of(kernel: str) -> str:
    """Part of a step that a kernel belongs to, by its name."""
    return next((part for part, names in PARTS.items() if re.search(names, kernel)), REST)


def sum_by_part(kernels: Iterable[tuple[str, float, int]], steps: int) -> dict[str, Part]:
    """Mean time and launches by part of a step, from kernel names, milliseconds and launches."""
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
    """Profile a step: milliseconds and launches by part.

    The idle part is `step_ms`, the time of a step without the profiler, minus all other parts.

    Args:
        warmup: steps that the profiler runs without counting them. After the pause in which the
            profiler starts, a GPU runs faster than in a long run.
    """

    def synchronized_step() -> None:
        step()
        torch.cuda.synchronize()  # so that exactly these steps are counted

    kernels = profile_events(synchronized_step, ProfilerActivity.CUDA, steps, warmup)
    parts = sum_by_part(kernels, steps)
    busy = sum(part.ms for part in parts.values())
    return {**parts, IDLE: Part(max(0.0, step_ms - busy), 0)}


def profile_events(
    step: Callable[[], object], activity: ProfilerActivity, steps: int, warmup: int
) -> list[tuple[str, float, int]]:
    """Events of `steps` steps, after `warmup` others, counted by PyTorch's profiler.

    Returns:
        Name, milliseconds on the GPU and number of launches of each event.
    """
    plan = schedule(wait=0, warmup=warmup, active=steps, repeat=1)
    with profile(activities=[activity], schedule=plan) as profiler:
        for _ in range(warmup + steps):
            step()
            profiler.step()
    averages = profiler.key_averages()
    events = ((str(e.key), e.device_time_total / 1000, e.count) for e in averages)
    # A ProfilerStep event spans all events of its step.
    return [event for event in events if not _is_step(event[0])]


class Stopwatch:
    """Stopwatch for the speed and the GPU-hours of training; it stops while `paused`.

    Timed are batches, forward and backward pass, gradient communication and optimizer. Evaluation,
    saving and logging happen in pauses. The first step of a process compiles, so it is not timed.
    It counts instead as the mean of the steps after it, up to the first pause that follows any. If
    the process ends before that, the step is not counted. Each process has its own stopwatch; a run
    records the time of the main process, times the number of processes.
    """

    def __init__(
        self, device: torch.device, *, n_processes: int = 1, gpu_hours: float = 0.0
    ) -> None:
        """Start with the GPU-hours of a checkpoint; each reading synchronizes with `device`."""
        self._device = device
        self._n_processes = n_processes
        self.gpu_hours = gpu_hours
        """Hours of training up to the last pause, times the number of processes."""
        self._at_first_step = True
        self._untimed_tokens = 0  # tokens of the first step, until its time can be estimated
        self._tokens, self._seconds = 0, 0.0  # since the last reading of the speed
        self._start()

    def count(self, tokens: int) -> None:
        """Count a step of `tokens` tokens, summed over all processes."""
        if self._at_first_step:
            self._at_first_step = False
            self._untimed_tokens += tokens  # more than one if no step between them was timed
            self._start()
        else:
            self._interval_tokens += tokens

    def expect_compilation(self) -> None:
        """Exclude the next step from timing, as the first one: it will compile."""
        self._stop()
        self._start()
        self._at_first_step = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent in this context."""
        self._stop()
        yield
        self._start()

    def tokens_per_s(self) -> float | None:
        """Tokens per second of the whole run since the last call; None if no step was timed.

        Call it in a pause.
        """
        speed = self._tokens / self._seconds if self._tokens else None
        self._tokens, self._seconds = 0, 0.0
        return speed

    def _start(self) -> None:
        self._wait()
        self._interval_tokens, self._started = 0, time.perf_counter()

    def _stop(self) -> None:
        self._wait()
        seconds = time.perf_counter() - self._started
        if self._interval_tokens == 0:  # two pauses in a row, or only the first step
            return
        self._tokens += self._interval_tokens
        self._seconds += seconds
        scale = 1 + self._untimed_tokens / self._interval_tokens
        self._untimed_tokens = 0
        self.gpu_hours += seconds * scale * self._n_processes / 3600

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
