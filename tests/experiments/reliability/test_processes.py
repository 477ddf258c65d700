"""Processes that are forked from a server."""

import gc
import sys
from pathlib import Path

from experiments.reliability.processes import start_process
from tests.kernels.context.processes import Processes  # noqa: F401  # uses the same server


def write_state(path: Path) -> None:
    path.write_text(" ".join([str(gc.get_freeze_count()), *sys.modules]))


def test_a_process_starts_with_training_loaded_and_frozen(tmp_path: Path) -> None:
    """Each of the many processes of the tests would otherwise need another second."""
    process = start_process(write_state, tmp_path / "state")
    process.join(60)
    assert process.exitcode == 0
    frozen, *loaded = (tmp_path / "state").read_text().split()
    assert {"train", "torch._inductor"} <= set(loaded)
    assert int(frozen) > 100_000
