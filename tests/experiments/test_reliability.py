"""The table of what was tried: a column for each kind of failure, and none is lost."""

from experiments.reliability.table import reliability_table


def test_each_failure_is_in_the_column_of_its_kind():
    failures = ["leak: a: b", "hang: c", "hang: d", "traceback: e", "silent: f", "not labelled"]
    rows = [
        {"what": "kills", "tries": 3, "failed": 0, "failures": []},
        {"what": "files", "tries": 9, "failed": 6, "failures": failures},
    ]
    *_, kills, files = reliability_table({"rows": rows}).splitlines()
    assert kills == "| kills | 3 | 0 | 0 | 0 | 0 |"
    assert files == "| files | 9 | 2 | 1 | 2 | 1 |"
