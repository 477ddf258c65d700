"""Machines and software versions that a run was trained with, recorded in its folder."""

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from data.files import parse_json, read_text, write_atomically
from training.metrics import is_number, read_evaluations

ENVIRONMENTS = "environments.json"
ROOT = Path(__file__).parents[1]


def machine() -> dict[str, str | None]:
    """Device, versions, commit and date; None for each that is unknown."""
    processor = platform.processor() or platform.machine()
    has_gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if has_gpu else processor,
        "torch": torch.__version__,
        "triton": _triton_version(),
        # PyTorch's usual build has a CUDA version also where there is no GPU.
        "cuda": torch.version.cuda if has_gpu else None,
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:  # Triton is for Linux only
        return None
    return triton.__version__


def record_start(
    run: Path,
    step: int,
    *,
    world_size: int = 1,
    origin: Path | None = None,
    origin_step: int | None = None,
) -> None:
    """Record that a run starts, or resumes, at `step` on this machine with `world_size` processes.

    Earlier starts at `step` or later are dropped: none of their steps are left in the run. If the
    run starts with weights of the run `origin` after `origin_step`, that run's last evaluation up
    to there is stored as `before`. Its tokens and GPU-hours include all runs before it, so the
    total cost of this run stays known even if their folders move.
    """
    earlier = [start for start in read_starts(run) if start["from_step"] < step]
    start: dict[str, Any] = {"from_step": step, **machine(), "world_size": world_size}
    if origin is not None:
        start["before"] = total_cost(origin, until=origin_step)
    starts = [*earlier, start]
    write_atomically(run / ENVIRONMENTS, (json.dumps(starts, indent=1) + "\n").encode())


def total_cost(run: Path, *, until: int | None = None) -> dict[str, Any] | None:
    """Last evaluation of a run, or the last one up to step `until`.

    Its tokens and GPU-hours include all runs whose weights led to it; None if they are unknown.
    """
    last = next(reversed(read_evaluations(run, until=until)), None)
    before = [start["before"] for start in read_starts(run) if "before" in start]
    if last is None or not before:
        return last
    if before[0] is None:
        return None
    names = [name for name in ("tokens", "gpu_hours") if name in last]
    return last | {name: last[name] + before[0][name] for name in names}


def read_starts(run: Path) -> list[dict[str, Any]]:
    """Entries that `record_start` wrote for each start of a run; empty if there are none."""
    path = run / ENVIRONMENTS
    if not path.exists():
        return []
    try:
        starts = parse_json(read_text(path))
        if not isinstance(starts, list) or not all(
            isinstance(start, dict) and type(start.get("from_step")) is int for start in starts
        ):
            raise ValueError("it must be a list of objects with a from_step")
        for start in starts:
            _check_start(start)
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged ({error}). Copy it again. Or delete it, which loses the record of "
            "where the run was trained"
        ) from error
    return starts


def _check_start(start: dict[str, Any]) -> None:
    """Raise ValueError if a value has another type than `record_start` writes."""
    before = start.get("before")
    if before is not None and not (
        isinstance(before, dict) and "step" in before and all(map(is_number, before.values()))
    ):
        raise ValueError("before must be null, or an evaluation in numbers")
    for name in ("device", "torch", "triton", "cuda", "python", "commit", "date"):
        if not isinstance(start.get(name), str | None):
            raise ValueError(f"{name} must be text or null")
    if type(start.get("world_size", 1)) is not int:
        raise ValueError("world_size must be a whole number")


def commit() -> str | None:
    """Commit of this checkout, with "+" if files were changed; else None.

    PAPILIO_COMMIT takes precedence, for copies without .git. The commit is unknown in a downloaded
    archive, without git, and if git refuses a folder of another user, as in a container.
    """
    if "PAPILIO_COMMIT" in os.environ:
        return os.environ["PAPILIO_COMMIT"]
    # A parent folder may be the checkout of another project.
    if not (ROOT / ".git").exists():
        return None
    try:
        changed = _git("status", "--porcelain", "--untracked-files=no")
        return _git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
