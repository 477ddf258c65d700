"""Rows are written as they are measured, and the result only when all of them are."""

import json
from functools import partial

import pytest

from evaluation import results
from experiments.results import collect_rows


def measure(*batches):
    for batch in batches:
        if isinstance(batch, BaseException):
            raise batch
        yield [dict(row) for row in batch]


def share_of_first(rows):
    for row in rows:
        row["share"] = row["ms"] / rows[0]["ms"]


STAGES = [partial(measure, [{"ms": 2.0}]), partial(measure, [{"ms": 4.0}], [{"ms": 6.0}])]
STOPPED = [STAGES[0], partial(measure, [{"ms": 5.0}], KeyboardInterrupt()), *STAGES]


@pytest.fixture
def stopped(tmp_path):
    """speed.json in a folder where a run was stopped in its second stage."""
    path = tmp_path / "speed.json"
    path.write_text("an earlier result")
    with pytest.raises(KeyboardInterrupt):
        collect_rows(path, STOPPED, share_of_first)
    return path


def test_all_rows_are_written_and_related(tmp_path):
    path = tmp_path / "results" / "speed.json"
    rows = collect_rows(path, STAGES, share_of_first, preset="x")
    assert [row["share"] for row in rows] == [1.0, 2.0, 3.0]
    result = json.loads(path.read_text())
    assert result.pop("environment")["torch"]
    assert result == {"preset": "x", "rows": rows}
    assert list(path.parent.iterdir()) == [path]


def test_a_stopped_run_leaves_its_rows_and_the_last_result(stopped):
    assert stopped.read_text() == "an earlier result"
    unfinished = json.loads(stopped.with_suffix(".unfinished.json").read_text())
    assert [row["share"] for row in unfinished["rows"]] == [1.0, 2.5]
    collect_rows(stopped, STAGES)  # the next run
    assert [file.name for file in stopped.parent.iterdir()] == ["speed.json"]


def test_a_run_resumes_after_its_finished_stages(stopped):
    stages = [partial(measure, AssertionError("measured again")), *STAGES[1:]]
    rows = collect_rows(stopped, stages, share_of_first, resume=True)
    assert [row["ms"] for row in rows] == [2.0, 4.0, 6.0]
    assert [row["share"] for row in rows] == [1.0, 2.0, 3.0]
    assert [file.name for file in stopped.parent.iterdir()] == ["speed.json"]


def test_resuming_requires_a_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="--resume: .*speed.unfinished.json does not exist"):
        collect_rows(tmp_path / "speed.json", STAGES, resume=True)


@pytest.mark.parametrize("key", ["device", "torch", "commit", "command"])
def test_only_the_same_run_resumes(key, stopped, monkeypatch):
    here = results.environment()
    monkeypatch.setattr(
        "experiments.results.environment", lambda: {**here, key: "another", "date": "1999"}
    )
    with pytest.raises(ValueError, match=f"measured with {key} .*, but this run has another"):
        collect_rows(stopped, STAGES, resume=True)
    assert stopped.with_suffix(".unfinished.json").exists()


def test_only_a_run_on_the_same_values_resumes(tmp_path):
    path = tmp_path / "speed.json"
    with pytest.raises(KeyboardInterrupt):
        collect_rows(path, STOPPED, labels=(0, 1), means={"filled": "later"})
    with pytest.raises(ValueError, match=r"unfinished\.json was measured with other labels\."):
        collect_rows(path, STAGES, resume=True, labels=(0, 0), means={})
    assert len(collect_rows(path, STAGES, resume=True, labels=(0, 1), means={})) == 3


def test_the_command_may_differ_by_resume_alone(stopped, monkeypatch):
    here = results.environment()
    resumed = {**here, "command": f"{here['command']} --resume"}
    for module in ("evaluation", "experiments"):
        monkeypatch.setattr(f"{module}.results.environment", lambda: resumed)
    assert len(collect_rows(stopped, STAGES, resume=True)) == 3
    assert json.loads(stopped.read_text())["environment"] == resumed
