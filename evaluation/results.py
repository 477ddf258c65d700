"""Results that others can check: numbers with the machine, versions, commit and command."""

import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from data.files import parse_json, read_text, write_atomically
from training.environment import machine

Row = dict[str, Any]  # a case, a contender and what was measured of it
Stage = Callable[[], Iterable[list[Row]]]  # measures rows, some at a time
COST = ("tokens", "gpu_hours")  # of training


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


def add_runs(runs: Iterable[Row], results: Iterable[Path], key: Callable[[Row], Any]) -> list[Row]:
    """Runs and those of other `results`, by `key`: of each the first that is found.

    Raises:
        ValueError: a result is damaged, or has no `runs`.
    """
    every = [*runs, *(run for path in results for run in read_result(path, "runs")["runs"])]
    found = {key(run): run for run in reversed(every)}
    return [found[name] for name in sorted(found)]


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


def collect_rows(
    path: Path,
    stages: Iterable[Stage],
    relate: Callable[[list[Row]], None] = lambda rows: None,
    *,
    resume: bool = False,
    **values: Any,
) -> list[Row]:
    """Write rows as they are measured: a run that is stopped leaves them beside `path`.

    Args:
        path: NAME.json; until all is measured, the result is in NAME.unfinished.json.
        stages: what is measured. A stage that was stopped is measured anew as a whole, so that
            what is compared within it was measured by one process.
        relate: adds to all rows so far what compares them with each other, or refuses the last.
        resume: keep the finished stages of NAME.unfinished.json, and go on after them.
        values: what the result holds beside `rows`.

    Raises:
        FileNotFoundError: resume, and there is no NAME.unfinished.json.
        ValueError: resume, and it was measured on another device, by another command or commit, or
            with other versions.
    """
    unfinished = path.with_suffix(".unfinished.json")
    rows, finished = _finished(unfinished) if resume else ([], {"stages": 0, "rows": 0})

    def write() -> None:
        write_result(unfinished, {**values, "finished": finished, "rows": rows})

    for stage in islice(stages, finished["stages"], None):
        for some in stage():
            rows += some
            relate(rows)
            write()
        finished = {"stages": finished["stages"] + 1, "rows": len(rows)}
        write()
    write_result(path, {**values, "rows": rows})
    unfinished.unlink(missing_ok=True)
    return rows


def _finished(unfinished: Path) -> tuple[list[Row], dict[str, int]]:
    """The rows of the finished stages of a stopped run, and how many of both those are."""
    if not unfinished.exists():
        raise FileNotFoundError(f"--resume: there is no {unfinished} to go on from; leave it out")
    result = parse_json(read_text(unfinished))
    now = environment()
    for key, value in result["environment"].items():
        here, there = (v and v.replace(" --resume", "") for v in (now[key], value))
        if key != "date" and here != there:
            raise ValueError(
                f"--resume: {unfinished} was measured with {key} {value}, and this run has "
                f"{now[key]}: leave --resume out to measure everything anew"
            )
    finished = result["finished"]
    return result["rows"][: finished["rows"]], finished
