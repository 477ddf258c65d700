"""Rows are written as they are measured, and the result only when all of them are."""

import json

import pytest

from scripts.results import collect_rows


def measured(*batches):
    for batch in batches:
        if isinstance(batch, BaseException):
            raise batch
        yield [dict(row) for row in batch]


def share_of_first(rows):
    for row in rows:
        row["share"] = row["ms"] / rows[0]["ms"]


BATCHES = ([{"ms": 2.0}], [{"ms": 4.0}, {"ms": 6.0}])


def test_all_rows_are_written_and_related(tmp_path):
    path = tmp_path / "results" / "speed.json"
    rows = collect_rows(path, measured(*BATCHES), share_of_first, preset="x")
    assert [row["share"] for row in rows] == [1.0, 2.0, 3.0]
    result = json.loads(path.read_text())
    assert result["rows"] == rows and result["preset"] == "x" and result["environment"]["torch"]
    assert list(path.parent.iterdir()) == [path]


def test_a_stopped_run_leaves_its_rows_and_the_last_result(tmp_path):
    path = tmp_path / "speed.json"
    path.write_text("an earlier result")
    with pytest.raises(KeyboardInterrupt):
        collect_rows(path, measured(*BATCHES, KeyboardInterrupt()), share_of_first)
    assert path.read_text() == "an earlier result"
    unfinished = json.loads((tmp_path / "speed.unfinished.json").read_text())
    assert [row["share"] for row in unfinished["rows"]] == [1.0, 2.0, 3.0]
    collect_rows(path, measured(*BATCHES))  # the next run
    assert [file.name for file in tmp_path.iterdir()] == ["speed.json"]
