"""Reproducible results: JSON files with numbers, machine, versions, commit and command."""

import json
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.files import parse_json, read_text, write_atomically
from training.environment import machine

Row = dict[str, Any]  # one measurement: the case, the contender and the numbers
COST = ("tokens", "gpu_hours")  # keys of the training cost


def hours_name(starts: Sequence[Mapping[str, Any]]) -> str:
    """Unit of the training time of runs: "GPU-hours", or "CPU hours" if every start had no GPU."""
    on_cpu = bool(starts) and all(start.get("cuda", "") is None for start in starts)
    return "CPU hours" if on_cpu else "GPU-hours"


def cost_before(run: Row) -> dict[str, float]:
    """Training cost of the run that this one was initialized from.

    Zeros if there is none, NaN if its cost is unknown.
    """
    if run["before"] is not None:
        return {name: run["before"][name] for name in COST}
    return dict.fromkeys(COST, 0 if run.get("init_from") is None else math.nan)


def on_own_gpu(runs: Sequence[Row]) -> list[Row]:
    """Runs whose times count, because they shared their GPU with no other run."""
    return [run for run in runs if (run.get("jobs_per_gpu") or 1) == 1]  # None if not recorded


def read_result(path: Path, *names: str) -> dict[str, Any]:
    """Read a result of `write_result` and check that it has these keys.

    Raises:
        ValueError: the file is damaged or a different kind of result.
    """
    try:
        values = parse_json(read_text(path))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): create it again") from error
    missing = [name for name in names if not isinstance(values, dict) or name not in values]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}: pass a file of the right kind")
    return values


def environment() -> dict[str, str | None]:
    """Machine and command of a measurement, to store alongside its numbers.

    Absolute paths are shortened to their last part, as they mean nothing on another machine.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).name
    parts = [arg.rpartition("=") for arg in sys.argv[1:]]  # handles --option=/folder/file
    arguments = [
        option + equals + (Path(value).name if Path(value).is_absolute() else value)
        for option, equals, value in parts
    ]
    # torchrun sets this for the processes that it starts
    processes = os.environ.get("LOCAL_WORLD_SIZE")
    launcher = f"torchrun --standalone --nproc_per_node={processes}" if processes else "python"
    return {**machine(), "command": f"{launcher} -m {module} {shlex.join(arguments)}".strip()}


def write_result(path: Path, values: dict[str, Any]) -> None:
    """Write a result as JSON, together with the environment of the measurement."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"environment": environment(), **values}, indent=1) + "\n"
    write_atomically(path, text.encode())


def without_nan(values: Any) -> Any:
    """Convert `values` to plain JSON types, with None for NaN and infinities."""
    return json.loads(json.dumps(values), parse_constant=lambda _: None)
