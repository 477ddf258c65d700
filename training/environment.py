"""On what a run was trained, kept in its folder: numbers mean little without it."""

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch

from data.files import write_atomically

ENVIRONMENT = "environment.json"
ROOT = Path(__file__).parents[1]


def machine() -> dict[str, str | None]:
    """Device, versions, commit and date, as far as they are known."""
    import triton

    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.processor(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def write_environment(run: Path) -> None:
    """Keep what this machine is in the folder of a run; what was there was of an earlier start."""
    text = json.dumps(machine(), indent=1) + "\n"
    write_atomically(run / ENVIRONMENT, text.encode())


def read_environment(run: Path) -> dict[str, str | None] | None:
    """What `write_environment` kept last, or None where it never did."""
    path = run / ENVIRONMENT
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def commit() -> str | None:
    """The commit of this checkout, "+" where files differ; PAPILIO_COMMIT in a copy without .git.

    None where neither tells: a downloaded archive is no checkout, and git may not be installed.
    """
    if "PAPILIO_COMMIT" in os.environ:
        return os.environ["PAPILIO_COMMIT"]
    # the parent of a downloaded copy may be a checkout of something else
    if not (ROOT / ".git").exists():
        return None
    try:
        changed = _git("status", "--porcelain", "--untracked-files=no")
        return _git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except FileNotFoundError:  # no git
        return None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
