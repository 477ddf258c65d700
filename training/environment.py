"""On what machines a run was trained, kept in its folder: numbers mean little without it."""

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from data.files import parse_json, read_text, write_atomically
from training.metrics import is_number, read_evaluations

ENVIRONMENTS = "environments.json"
ROOT = Path(__file__).parents[1]


def machine() -> dict[str, str | None]:
    """Device, versions, commit and date, as far as they are known."""
    processor = platform.processor() or platform.machine()
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else processor,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # Triton is for Linux only
        return None


def note_start(
    run: Path,
    step: int,
    *,
    world_size: int = 1,
    origin: Path | None = None,
    origin_step: int | None = None,
) -> None:
    """Add this machine, and how many processes train on it, to those of a run from `step` on.

    Starts that made no step which is left, as they were stopped before the next checkpoint, go.
    Where the run starts with the weights of the run `origin` after `origin_step`, the last
    evaluation of that one up to there is noted as `before`, with tokens and GPU-hours of what that
    one started with: what they took belongs to this run, wherever their folders go.
    """
    earlier = [start for start in read_starts(run) if start["from_step"] < step]
    start: dict[str, Any] = {"from_step": step, **machine(), "world_size": world_size}
    if origin is not None:
        start["before"] = whole_cost(origin, until=origin_step)
    starts = [*earlier, start]
    write_atomically(run / ENVIRONMENTS, (json.dumps(starts, indent=1) + "\n").encode())


def whole_cost(run: Path, *, until: int | None = None) -> dict[str, Any] | None:
    """The last evaluation of a run, or the last up to a step `until`.

    It has tokens and GPU-hours of all runs that led to it; None where that is not known.
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
    """What `note_start` noted of each start of a run; nothing where it did not."""
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
            f"{path} is damaged ({error}): copy it again, or delete it, and where the run was "
            "trained is not known"
        ) from error
    return starts


def _check_start(start: dict[str, Any]) -> None:
    """Refuse values of other types than those that `note_start` notes."""
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
    """The commit of this checkout, "+" where files differ; PAPILIO_COMMIT in a copy without .git.

    None where neither tells: a downloaded archive is no checkout, git may not be installed, or
    refuse a folder that belongs to another user, as in a container.
    """
    if "PAPILIO_COMMIT" in os.environ:
        return os.environ["PAPILIO_COMMIT"]
    # the parent of a downloaded copy may be a checkout of something else
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
