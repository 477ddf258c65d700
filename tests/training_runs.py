"""What the tests of whole runs share."""

import multiprocessing
import os
import socket
import subprocess
import sys

import torch

from training.command_line import errors_as_sentences
from training.metrics import read_metrics

import train  # isort: skip

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["train"])


def losses(folder):
    return {r["step"]: r["loss"] for r in read_metrics(folder) if "loss" in r}


def stop_after(last_step):
    """Replacement of Trainer.record that ends the process, as Ctrl-C does, after a later step."""
    record = train.Trainer.record

    def stop(self, what, **values):
        if self.step > last_step and "lr" in values:  # a step, not a validation
            raise KeyboardInterrupt
        record(self, what, **values)

    return stop


def start_process(function, *arguments):
    """Start a process of our own to call a function: a fork of one that loaded PyTorch once."""
    process = _FORKS.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def call_on_two_processes(folder, function, *arguments):
    """As `call_on_processes`, two of them."""
    return call_on_processes(2, folder, function, *arguments)


def call_on_processes(n, folder, function, *arguments):
    """Call a function in processes that find each other as those of torchrun do.

    Returns the exit status of each, and what it wrote to stderr. Loads PyTorch for neither of them.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    logs = [folder / f"stderr_{rank}.log" for rank in range(n)]
    all_of_them = [
        start_process(_as_rank, r, n, port, log, function, arguments) for r, log in enumerate(logs)
    ]
    for process in all_of_them:
        process.join(120)
        if process.is_alive():  # it waits for another one, which may have said why
            process.kill()
            process.join()
    return [
        (process.exitcode, log.read_text()) for process, log in zip(all_of_them, logs, strict=True)
    ]


def _as_rank(rank, n, port, log, function, arguments):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere, log.open("w") as file:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(file.fileno(), 2)
    function(*arguments)


def train_on_two_processes(run, *overrides):
    """What torchrun would do with train.py; returns as `call_on_two_processes` does."""
    return call_on_two_processes(run.config.parent, _train, [str(run.config), *overrides])


def _train(argv):
    with errors_as_sentences():
        train.main(argv)


def in_two_processes(run, *overrides):
    """Train to the end in two processes."""
    in_processes(2, run, *overrides)


def in_processes(n, run, *overrides):
    """Train to the end in so many processes."""
    ends = call_on_processes(n, run.config.parent, _train, [str(run.config), *overrides])
    assert all(status == 0 for status, _ in ends), ends


def by_torchrun(run, *overrides):
    """The same by the command that a user gives, with a process of Python's for each."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
        "train.py", str(run.config), *overrides,
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert "FutureWarning" not in done.stderr
