"""Run commands side by side, each on GPUs of its own."""

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

_MENDABLE = (ValueError, OSError)  # by the user


@dataclass(frozen=True, kw_only=True)
class Task:
    """Commands to run one after the other, once what they need is done."""

    name: str
    needs: frozenset[str]
    """Names of tasks that must have succeeded before."""
    commands: Callable[[int], Sequence[Sequence[str]]]
    """From the number of GPUs to the command lines; called when the task starts."""
    log: Path
    """Gets all that they print."""


def groups_of_gpus(per_group: int) -> list[list[str]]:
    """The GPUs that we may use, in groups of `per_group`; an empty group where there is none.

    Raises:
        ValueError: fewer GPUs than a group needs.
    """
    import torch  # slow to load, and the sweeps' options need not wait for it

    n_gpu = torch.cuda.device_count()  # of those in CUDA_VISIBLE_DEVICES
    if n_gpu == 0 and per_group == 1:
        return [[]]
    if n_gpu < per_group:
        raise ValueError(f"--gpus-per-run={per_group}, and there are {n_gpu} GPU(s): ask for fewer")
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = allowed.split(",")[:n_gpu] if allowed else [str(gpu) for gpu in range(n_gpu)]
    starts = range(0, n_gpu - per_group + 1, per_group)
    return [gpus[start : start + per_group] for start in starts]


def run_tasks(
    tasks: Sequence[Task], groups: Sequence[list[str]], say: Callable[[str], None] = print
) -> list[str]:
    """Run all tasks, as many at a time as there are groups, earlier ones first.

    A task that fails does not stop the others, but those that need it are left out.

    Returns:
        Names of the tasks that failed or were left out, in their order.
    """
    names = {task.name for task in tasks}
    assert all(task.needs <= names for task in tasks), "what is needed must be among the tasks"
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
                say(f"{task.name}: left out, because {', '.join(task.needs & failed)} failed")
            ready = [t for t in waiting if t.needs <= done]
            while ready and free:
                task, gpus = ready.pop(0), free.pop(0)
                waiting.remove(task)
                where = f"GPU {', '.join(gpus)}" if gpus else "the CPU"
                say(f"{task.name}: started on {where}, see {task.log}")
                running[threads.submit(_run, task, gpus, children)] = task, gpus
            if not running:
                continue
            # not for long: a signal that comes just before the wait does not interrupt it
            finished, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
            for future in finished:
                task, gpus = running.pop(future)
                free.append(gpus)
                problem = future.exception() or future.result()
                if isinstance(problem, BaseException) and not isinstance(problem, _MENDABLE):
                    crashes.append(problem)
                    problem = f"{type(problem).__name__}: {problem}"
                (failed if problem else done).add(task.name)
                say(f"{task.name}: {f'FAILED: {problem}' if problem else 'done'}")
    if crashes:  # a defect, which must not go by as a run that failed, nor stop the other runs
        raise crashes[0]
    return [task.name for task in tasks if task.name in failed]


def python_command(n_gpu: int, *arguments: str) -> list[str]:
    """A command line for python, or for torchrun with one process a GPU."""
    if n_gpu <= 1:
        return [sys.executable, *arguments]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, f"--nproc_per_node={n_gpu}", *arguments]


@dataclass(kw_only=True)
class _Children:
    """The processes that run for us.

    A plain bool and a plain set, and no lock: the handler of a signal would wait forever for a lock
    that the code which it interrupts holds. Whoever starts a child adds it and then looks at
    `stopping`; the handler sets `stopping` and then looks for children. So one of them stops it.
    """

    running: set[subprocess.Popen] = field(default_factory=set)
    stopping: bool = False


def _run(task: Task, gpus: list[str], children: _Children) -> str | None:
    """Run the commands of a task; returns what went wrong."""
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})
    task.log.parent.mkdir(parents=True, exist_ok=True)
    commands = task.commands(len(gpus))
    with task.log.open("a", encoding="utf-8") as log:
        for command in commands:
            if children.stopping:
                return "stopped, because we were asked to stop"
            process = _start(command, log, environment)
            children.running.add(process)
            if children.stopping:  # maybe too late for the handler to see the child
                process.terminate()
            code = process.wait()
            children.running.discard(process)
            if code != 0:
                said = task.log.read_text(encoding="utf-8", errors="replace").strip()
                # train.py says in the last line what is wrong
                end = f", which ends with: {said.splitlines()[-1].strip()}" if said else ""
                return f"exit code {code}, see {task.log}{end}"
    return None


def _start(command: Sequence[str], log: IO[str], environment: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


@contextmanager
def _terminated_with_us(children: _Children) -> Iterator[None]:
    """Stop the children when this process is asked to stop; nothing must go on unseen."""

    def stop(number: int, _: FrameType | None) -> None:
        children.stopping = True
        for child in list(children.running):
            child.terminate()
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup asks for
        numbers.append(signal.SIGHUP)  # the terminal is gone
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
