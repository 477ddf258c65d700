"""Resumable measurements, and results merged from several machines."""

import json
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from data.files import parse_json, read_text
from evaluation.results import Row, environment, read_result, write_result

Stage = Callable[[], Iterable[list[Row]]]  # measures rows, a few at a time


def add_runs(runs: Iterable[Row], results: Iterable[Path], key: Callable[[Row], Any]) -> list[Row]:
    """Merge `runs` with those of other `results`, sorted by `key`; the first of each key wins.

    Raises:
        ValueError: a result is damaged, or has no `runs`.
    """
    all_runs = [*runs, *(run for path in results for run in read_result(path, "runs")["runs"])]
    by_key = {key(run): run for run in reversed(all_runs)}
    return [by_key[name] for name in sorted(by_key)]


def collect_rows(
    path: Path,
    stages: Iterable[Stage],
    relate: Callable[[list[Row]], None] = lambda rows: None,
    *,
    resume: bool = False,
    **values: Any,
) -> list[Row]:
    """Measure rows stage by stage; an interrupted run leaves its rows next to `path`.

    Args:
        path: NAME.json. Until all stages are measured, the rows are in NAME.unfinished.json.
        stages: the measurements. An interrupted stage is measured again as a whole, so that rows
            that are compared within a stage come from one process.
        relate: adds comparisons to all rows so far, or rejects the last row.
        resume: keep the finished stages of NAME.unfinished.json, and continue after them.
        values: entries of the result in addition to `rows`; `relate` may fill empty ones.

    Raises:
        FileNotFoundError: `resume` is set and NAME.unfinished.json does not exist.
        ValueError: `resume` is set and NAME.unfinished.json was measured on another device, by
            another command or commit, or with other versions or `values`.
    """
    unfinished = path.with_suffix(".unfinished.json")
    rows, finished = _finished(unfinished, values) if resume else ([], {"stages": 0, "rows": 0})

    def write() -> None:
        write_result(unfinished, {**values, "finished": finished, "rows": rows})

    for stage in islice(stages, finished["stages"], None):
        for new_rows in stage():
            rows += new_rows
            relate(rows)
            write()
        finished = {"stages": finished["stages"] + 1, "rows": len(rows)}
        write()
    write_result(path, {**values, "rows": rows})
    unfinished.unlink(missing_ok=True)
    return rows


def _finished(unfinished: Path, values: dict[str, Any]) -> tuple[list[Row], dict[str, int]]:
    """Rows of the finished stages of an interrupted run, and the number of stages and rows."""
    if not unfinished.exists():
        raise FileNotFoundError(f"--resume: {unfinished} does not exist. Leave --resume out")
    result = parse_json(read_text(unfinished))
    now = environment()
    for key, value in result["environment"].items():
        current, recorded = (v and v.replace(" --resume", "") for v in (now[key], value))
        if key != "date" and current != recorded:
            raise ValueError(
                f"--resume: {unfinished} was measured with {key} {value}, but this run has "
                f"{now[key]}. Leave --resume out to measure everything again"
            )
    for key, value in values.items():
        if value and result.get(key) != json.loads(json.dumps(value)):
            raise ValueError(
                f"--resume: {unfinished} was measured with other {key}. Leave --resume out to "
                "measure everything again"
            )
    finished = result["finished"]
    return result["rows"][: finished["rows"]], finished
