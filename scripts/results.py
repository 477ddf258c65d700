"""Results that others can check: numbers with the machine, versions, commit and command."""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from data.files import write_atomically

Row = dict[str, Any]  # a case, a contender and what was measured of it


def environment() -> dict[str, str | None]:
    """What a measurement depends on, to be kept beside its numbers."""
    import triton

    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.processor(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": _commit(),
        "command": f"python -m {_module()} {shlex.join(sys.argv[1:])}".strip(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def write_result(path: Path, values: dict[str, Any]) -> None:
    """Write a result as JSON, with the environment that it was measured in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"environment": environment(), **values}, indent=1) + "\n"
    write_atomically(path, text.encode())


def collect_rows(
    path: Path,
    measured: Iterable[list[Row]],
    relate: Callable[[list[Row]], None] = lambda rows: None,
    **values: Any,
) -> list[Row]:
    """Write rows as they are measured: a run that is stopped leaves them beside `path`.

    Args:
        path: NAME.json; until all is measured, the result is in NAME.unfinished.json.
        measured: rows, some at a time.
        relate: adds to all rows so far what compares them with each other.
        values: what the result holds beside `rows`.
    """
    unfinished = path.with_suffix(".unfinished.json")
    rows: list[Row] = []
    for some in measured:
        rows += some
        relate(rows)
        write_result(unfinished, {**values, "rows": rows})
    unfinished.replace(path)
    return rows


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec else Path(sys.argv[0]).name


def _commit() -> str | None:
    """The commit of the checkout, "+" where files differ; PAPILIO_COMMIT in a copy without .git."""
    if "PAPILIO_COMMIT" in os.environ:
        return os.environ["PAPILIO_COMMIT"]

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
