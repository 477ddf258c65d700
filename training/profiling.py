"""Where the time of a run's steps goes: a trace, and a table by what kernels are for."""

import time
from pathlib import Path
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from training.parts import add_up

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
