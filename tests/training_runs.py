"""Helpers for tests of whole runs."""

import os
import subprocess
import sys

from experiments.reliability.processes import call_on_processes
from training.command_line import user_errors_as_messages
from training.metrics import read_metrics

import train  # isort: skip


def losses(folder):
    return {r["step"]: r["loss"] for r in read_metrics(folder) if "loss" in r}


def stop_after(last_step):
    """Replacement of Trainer.record that ends the process, as Ctrl-C does, after a later step."""
    record = train.Trainer.record

    def stop(self, entry, **values):
        if self.step > last_step and "lr" in values:  # a step, not a validation
            raise KeyboardInterrupt
        record(self, entry, **values)

    return stop


def call_on_two_processes(folder, function, *arguments):
    """Call the function on two processes, with `call_on_processes`."""
    return call_on_processes(2, folder, function, *arguments)


def train_on_two_processes(run, *overrides):
    """Run train.py on two processes, as torchrun would. Returns as `call_on_two_processes`."""
    return call_on_two_processes(run.config.parent, _train, [str(run.config), *overrides])


def _train(argv):
    with user_errors_as_messages():
        train.main(argv)


def in_two_processes(run, *overrides):
    """Train to the end in two processes."""
    in_processes(2, run, *overrides)


def in_processes(n, run, *overrides):
    """Train to the end in n processes."""
    ends = call_on_processes(n, run.config.parent, _train, [str(run.config), *overrides])
    assert all(status == 0 for status, _ in ends), ends


def by_torchrun(run, *overrides):
    """Train to the end in two processes with the torchrun command that a user would type."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
        "train.py", str(run.config), *overrides,
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert "FutureWarning" not in done.stderr
