"""The clock of a command's first step, on commands that take no time."""

import pytest

from experiments.train_steps.first_step import Contender, first_step_table, medians, start

PROGRAM = """
import os, time
assert os.environ["TRITON_CACHE_DIR"].startswith(os.getcwd())
print("loading")
time.sleep(0.05)
print("ready: all of it")
time.sleep(0.3)
print("evaluated")
time.sleep(0.1)
print("step 1 is done")
time.sleep(60)
"""


def contender(tmp_path, program=PROGRAM):
    (tmp_path / "program.py").write_text(program)
    return Contender("one", ["program.py"], tmp_path, ["ready", "evaluated", "step 1"])


def test_start_up_and_step_without_the_evaluation_between_them(tmp_path):
    found = start(contender(tmp_path), tmp_path / "caches")
    assert found.keys() == {"start_s", "step_s"}
    assert found["start_s"] >= 0.05
    # neither the evaluation nor the rest of the run; the 0.1 s begin before their line is read
    assert 0.05 <= found["step_s"] < 30


def test_a_command_that_fails_is_shown(tmp_path):
    failing = contender(tmp_path, PROGRAM.replace('print("evaluated")', 'raise SystemExit("full")'))
    with pytest.raises(
        RuntimeError, match=r"one ended before its first step:\nloading\nready: all of it\nfull"
    ):
        start(failing, tmp_path / "caches")


def test_medians_and_table():
    starts = [{"start_s": 3.0, "step_s": 10.0}, {"start_s": 5.0, "step_s": 9.0}]
    row = {"name": "one", "caches": "cold", **medians(starts)}
    assert row["total_s"] == 13.5
    lines = first_step_table({"rows": [row]}).splitlines()
    assert lines[-1] == "| one | cold | 4.0 s | 9.5 s | 13.5 s |"
