"""What the tests of whole runs share."""

import os
import subprocess
import sys

from training.metrics import read_metrics

from train import record_step  # isort: skip


def losses(folder):
    return {r["step"]: r["loss"] for r in read_metrics(folder) if "loss" in r}


def stop_after(last_step):
    def record(log, config, processes, step, *rest):
        if step > last_step:
            raise KeyboardInterrupt
        record_step(log, config, processes, step, *rest)

    return record


def on_two_processes(run, *overrides):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
        "train.py", str(run.config), *overrides,
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
