"""Results of measurements that can be stopped and resumed, and of runs on several machines."""

from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from data.files import parse_json, read_text
from evaluation.results import Row, environment, read_result, write_result

Stage = Callable[[], Iterable[list[Row]]]  # measures rows, some at a time


def add_runs(runs: Iterable[Row], results: Iterable[Path], key: Callable[[Row], Any]) -> list[Row]:
    """Merge `runs` with those of other `results`, sorted by `key`; the first of a key wins.

    Raises:
        ValueError: a result is damaged, or has no `runs`.
    """
    every = [*runs, *(run for path in results for run in read_result(path, "runs")["runs"])]
    found = {key(run): run for run in reversed(every)}
    return [found[name] for name in sorted(found)]


def collect_rows(
    path: Path,
    stages: Iterable[Stage],
    relate: Callable[[list[Row]], None] = lambda rows: None,
    *,
    resume: bool = False,
    **values: Any,
) -> list[Row]:
    """Write rows as they are measured: a run that is stopped leaves them next to `path`.

    Args:
        path: NAME.json; until all is measured, the result is in NAME.unfinished.json.
        stages: what is measured. A stage that was stopped is measured again as a whole, so
            that what is compared within it was measured by one process.
        relate: adds to all rows so far what compares them with each other, or refuses the last.
        resume: keep the finished stages of NAME.unfinished.json, and continue after them.
        values: what the result holds besides `rows`.

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
        raise FileNotFoundError(f"--resume: there is no {unfinished}; leave it out")
    result = parse_json(read_text(unfinished))
    now = environment()
    for key, value in result["environment"].items():
        here, there = (v and v.replace(" --resume", "") for v in (now[key], value))
        if key != "date" and here != there:
            raise ValueError(
                f"--resume: {unfinished} was measured with {key} {value}, and this run has "
                f"{now[key]}: leave --resume out to measure everything again"
            )
    finished = result["finished"]
    return result["rows"][: finished["rows"]], finished
