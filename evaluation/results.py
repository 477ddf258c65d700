"""Results that others can check: numbers with the machine, versions, commit and command."""

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

Row = dict[str, Any]  # a case, a contender and what was measured of it
COST = ("tokens", "gpu_hours")  # of training


def hours_name(starts: Sequence[Mapping[str, Any]]) -> str:
    """Unit of the training time of runs: "GPU-hours", or "CPU hours" if every start had no GPU."""
    on_cpu = bool(starts) and all(start.get("cuda", "") is None for start in starts)
    return "CPU hours" if on_cpu else "GPU-hours"


def cost_before(run: Row) -> dict[str, float]:
    """Of the run whose weights this one started with: zeros if there is none, NaN if not known."""
    if run["before"] is not None:
        return {name: run["before"][name] for name in COST}
    return dict.fromkeys(COST, 0 if run.get("init_from") is None else math.nan)


def read_result(path: Path, *names: str) -> dict[str, Any]:
    """Read a result that `write_result` wrote, which must have values of these names.

    Raises:
        ValueError: the file is damaged, or of another kind.
    """
    try:
        values = parse_json(read_text(path))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): make it anew") from error
    missing = [name for name in names if not isinstance(values, dict) or name not in values]
    if missing:
        raise ValueError(f"{path} has no {', '.join(missing)}: give a file of the right kind")
    return values


def environment() -> dict[str, str | None]:
    """Machine and command of a measurement, to be kept beside its numbers.

    Folders of this machine mean nothing on another: of absolute paths, the name is kept.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).name
    parts = [arg.rpartition("=") for arg in sys.argv[1:]]  # also --option=/folder/file
    arguments = [
        option + equals + (Path(value).name if Path(value).is_absolute() else value)
        for option, equals, value in parts
    ]
    # as torchrun tells the processes that it starts
    processes = os.environ.get("LOCAL_WORLD_SIZE")
    launcher = f"torchrun --standalone --nproc_per_node={processes}" if processes else "python"
    return {**machine(), "command": f"{launcher} -m {module} {shlex.join(arguments)}".strip()}


def write_result(path: Path, values: dict[str, Any]) -> None:
    """Write a result as JSON, with the environment that it was measured in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"environment": environment(), **values}, indent=1) + "\n"
    write_atomically(path, text.encode())


def without_nan(values: Any) -> Any:
    """`values` as JSON holds them, with null for NaN and what is infinite."""
    return json.loads(json.dumps(values), parse_constant=lambda _: None)
