"""Run commands in parallel, each on its own GPUs."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

_USER_ERRORS = (ValueError, OSError)  # errors that the user can fix


@dataclass(frozen=True, kw_only=True)
class Task:
    """Commands to run in sequence after the tasks that they depend on."""

    name: str
    needs: frozenset[str]
    """Names of tasks that must succeed first."""
    commands: Callable[[int], Sequence[Sequence[str]]]
    """Return the command lines for a number of GPUs; called when the task starts."""
    log: Path
    """File for all output of the commands."""


def groups_of_gpus(per_group: int) -> list[list[str]]:
    """Split the visible GPUs into groups of `per_group`; one empty group if there is no GPU.

    Raises:
        ValueError: there are fewer GPUs than a group needs.
    """
    import torch  # imported here, because it would slow down the options of sweeps

    n_gpu = torch.cuda.device_count()  # respects CUDA_VISIBLE_DEVICES
    if n_gpu == 0 and per_group == 1:
        return [[]]
    if n_gpu < per_group:
        raise ValueError(f"--gpus-per-run={per_group} must be at most {n_gpu}, the number of GPUs")
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = allowed.split(",")[:n_gpu] if allowed else [str(gpu) for gpu in range(n_gpu)]
    starts = range(0, n_gpu - per_group + 1, per_group)
    return [gpus[start : start + per_group] for start in starts]


def run_tasks(
    tasks: Sequence[Task], groups: Sequence[list[str]], notify: Callable[[str], None] = print
) -> list[str]:
    """Run all tasks in order, one per group of GPUs at a time.

    A failed task does not stop the others, but tasks that depend on it are skipped.

    Returns:
        Names of the tasks that failed or were skipped, in order.
    """
    names = {task.name for task in tasks}
    assert all(task.needs <= names for task in tasks), "dependencies must be among the tasks"
    waiting = list(tasks)
    free = list(groups)
    running: dict[Future[str | None], tuple[Task, list[str]]] = {}
    done: set[str] = set()
    failed: set[str] = set()
    crashes: list[BaseException] = []
    children = _Children()
    with _terminated_with_us(children), ThreadPoolExecutor(len(groups)) as threads:
        while waiting or running:
            for task in [t for t in waiting if t.needs & failed]:
                waiting.remove(task)
                failed.add(task.name)
                notify(f"{task.name}: skipped, because {', '.join(task.needs & failed)} failed")
            ready = [t for t in waiting if t.needs <= done]
            while ready and free:
                task, gpus = ready.pop(0), free.pop(0)
                waiting.remove(task)
                device = f"GPU {', '.join(gpus)}" if gpus else "the CPU"
                notify(f"{task.name}: started on {device}, see {task.log}")
                running[threads.submit(_run, task, gpus, children)] = task, gpus
            if not running:
                continue
            # a short timeout, because a signal just before the wait does not interrupt it
            finished, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
            for future in finished:
                task, gpus = running.pop(future)
                free.append(gpus)
                problem = future.exception() or future.result()
                if isinstance(problem, BaseException) and not isinstance(problem, _USER_ERRORS):
                    crashes.append(problem)
                    problem = f"{type(problem).__name__}: {problem}"
                (failed if problem else done).add(task.name)
                notify(f"{task.name}: {f'FAILED: {problem}' if problem else 'done'}")
    if crashes:  # a bug: report it as such, but only after the other runs have finished
        raise crashes[0]
    return [task.name for task in tasks if task.name in failed]


def python_command(n_gpu: int, *arguments: str) -> list[str]:
    """Command line for python, or for torchrun with one process per GPU."""
    if n_gpu <= 1:
        return [sys.executable, *arguments]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, f"--nproc_per_node={n_gpu}", *arguments]


@dataclass(kw_only=True)
class _Children:
    """Child processes of this process.

    Uses no lock: a signal handler would deadlock on a lock that the interrupted code holds. A
    thread that starts a child adds it to `running` and then checks `stopping`. The handler sets
    `stopping` and then iterates over `running`. So at least one of them terminates the child.
    """

    running: set[subprocess.Popen] = field(default_factory=set)
    stopping: bool = False


def _run(task: Task, gpus: list[str], children: _Children) -> str | None:
    """Run the commands of a task; return the error, or None."""
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
    task.log.parent.mkdir(parents=True, exist_ok=True)
    commands = task.commands(len(gpus))
    with task.log.open("a", encoding="utf-8") as log:
        for command in commands:
            if children.stopping:
                return "stopped by a signal"
            process = _start(command, log, environment)
            children.running.add(process)
            if children.stopping:  # the handler may have missed the child
                process.terminate()
            code = process.wait()
            children.running.discard(process)
            if code != 0:
                output = task.log.read_text(encoding="utf-8", errors="replace").strip()
                # train.py prints the error in the last line
                end = f", which ends with: {output.splitlines()[-1].strip()}" if output else ""
                return f"exit code {code}, see {task.log}{end}"
    return None


def _start(command: Sequence[str], log: IO[str], environment: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


@contextmanager
def _terminated_with_us(children: _Children) -> Iterator[None]:
    """Terminate the children when this process gets a stop signal."""

    def stop(number: int, _: FrameType | None) -> None:
        children.stopping = True
        for child in list(children.running):
            child.terminate()
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can handle signals
        return
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        numbers.append(signal.SIGHUP)  # the terminal is gone
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
