"""The time that training takes, and nothing else."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
        """A step of so many tokens, over all processes, is done."""
        if self._at_first_step:
            self._at_first_step = False
            self._untimed_tokens = tokens
            self._start()
        else:
            self._tokens_here += tokens

    def expect_compilation(self) -> None:
        """The next step compiles anew: it is timed as the first one is."""
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
