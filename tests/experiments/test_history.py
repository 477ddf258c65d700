"""Headline numbers of the published results, and rows appended by a measurement."""

import csv
from pathlib import Path

from evaluation.results import read_result
from experiments import history

RESULTS = Path(__file__).parents[2] / "docs/results"


def rows_of(file):
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_the_published_results_have_twelve_headline_numbers(tmp_path):
    for name in history.NUMBERS:
        history.append(tmp_path / f"{name}.json", read_result(RESULTS / f"{name}.json"))
    rows = rows_of(tmp_path / "history.csv")
    columns = [name for numbers in history.NUMBERS.values() for name in numbers]
    assert len(columns) == 12
    assert all(sum(float(row[name] or 0) > 0 for row in rows) == 1 for name in columns)


def test_a_measurement_appends_a_row_to_the_file_next_to_it(tmp_path):
    result = read_result(RESULTS / "attention_host.json")
    history.append(tmp_path / "attention_host.json", result)
    result["environment"]["commit"] = "abc"
    history.append(tmp_path / "attention_host.json", result)
    first, second = rows_of(tmp_path / "history.csv")
    assert (first["result"], second["commit"]) == ("attention_host", "abc")
    assert {**first, "commit": "abc"} == second


def test_missing_numbers_are_left_empty(tmp_path):
    result = read_result(RESULTS / "train_speed.json")
    result["rows"] = [row for row in result["rows"] if not row["name"].startswith("nanoGPT")]
    history.append(tmp_path / "train_speed.json", result)
    (row,) = rows_of(tmp_path / "history.csv")
    assert float(row["4K step, tokens/s"]) > 1e5 and row["1K step / nanoGPT"] == ""


def test_other_results_append_nothing(tmp_path):
    history.append(tmp_path / "other.json", {"rows": []})
    assert not (tmp_path / "history.csv").exists()


def test_the_published_history_has_these_columns():
    rows = rows_of(RESULTS / "history.csv")
    assert tuple(rows[0]) == history.COLUMNS
    latest = {row["result"]: row for row in rows}
    for name in history.NUMBERS:
        environment = read_result(RESULTS / f"{name}.json")["environment"]
        assert latest[name]["commit"] == environment["commit"], f"{name} has no row"
