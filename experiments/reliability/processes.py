"""Call functions in separate processes, alone or in a group like that of torchrun."""

import faulthandler
import gc
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch.distributed import TCPStore

_FORKS = multiprocessing.get_context("forkserver")
# Starting to train imports the compiler, even without compiling. Each caller in this process shares
# one server: another call of set_forkserver_preload would replace this list.
_FORKS.set_forkserver_preload(["train", "torch._inductor"])
_stores: WeakKeyDictionary[ForkServerProcess, TCPStore] = WeakKeyDictionary()
"""Server of the rendezvous of each process's group, which ends with the last process object."""


def start_process(function: Callable[..., object], *arguments: object) -> ForkServerProcess:
    """Start a process that calls a function, forked from a server that has loaded PyTorch."""
    process = _FORKS.Process(target=_call, args=(function, arguments), daemon=True)
    process.start()
    return process


def _call(function: Callable[..., object], arguments: tuple[object, ...]) -> None:
    # The first full garbage collection would traverse, and copy, the objects of all loaded modules.
    gc.freeze()
    function(*arguments)


def print_to(stdout: Path, stderr: Path) -> None:
    """Redirect the output of this process to files."""
    for number, path in ((1, stdout), (2, stderr)):
        with path.open("a") as file:
            os.dup2(file.fileno(), number)


def start_group(
    n: int, logs: list[Path], function: Callable[..., object], *arguments: object
) -> list[ForkServerProcess]:
    """Start n processes that form a group like torchrun's; their stderr goes to `logs`."""
    # This process serves the rendezvous, as torchrun does: a port that rank 0 opened later could be
    # taken by then.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        start_process(_as_rank, rank, n, store.port, log, function, arguments)
        for rank, log in enumerate(logs)
    ]
    _stores.update(dict.fromkeys(processes, store))
    return processes


def call_on_processes(
    n: int, folder: Path, function: Callable[..., object], *arguments: object
) -> list[tuple[int | None, str]]:
    """Call a function in a group of n processes; return each exit status and stderr."""
    logs = [folder / f"stderr_{rank}.log" for rank in range(n)]
    processes = start_group(n, logs, function, *arguments)
    for process in processes:
        process.join(120)
        if process.is_alive():
            # It hangs, or waits for another process: have it print where to its stderr.
            assert process.pid is not None
            os.kill(process.pid, signal.SIGABRT)
            process.join(10)
            process.kill()
            process.join()
    return [
        (process.exitcode, log.read_text()) for process, log in zip(processes, logs, strict=True)
    ]


def _as_rank(
    rank: int,
    n: int,
    port: int,
    log: Path,
    function: Callable[..., object],
    arguments: tuple[object, ...],
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    torch.set_num_threads(1)
    log.write_text("")
    print_to(Path(os.devnull), log)
    faulthandler.enable()
    function(*arguments)
