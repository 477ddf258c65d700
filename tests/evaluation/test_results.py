"""Results record the command that made them, without the folders of this machine."""

import json
import sys

import pytest

from evaluation import results


def test_a_result_contains_no_local_folders(tmp_path, monkeypatch):
    arguments = ["--data", "out/books", "--nanogpt", "/home/me/nanoGPT", "--tutorial=/tmp/06.py"]
    monkeypatch.setattr(sys, "argv", ["x", *arguments])
    results.write_result(tmp_path / "x.json", {})
    command = json.loads((tmp_path / "x.json").read_text())["environment"]["command"]
    assert command.endswith(" --data out/books --nanogpt nanoGPT --tutorial=06.py")


def test_a_command_includes_the_number_of_torchrun_processes(monkeypatch):
    monkeypatch.setattr("sys.argv", ["x", "--parts", "ddp"])
    assert results.environment()["command"].startswith("python -m ")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    command = results.environment()["command"]
    assert command.startswith("torchrun --standalone --nproc_per_node=2 -m ")
    assert command.endswith(" --parts ddp")


@pytest.mark.parametrize(
    ("starts", "name"),
    [
        ([], "GPU-hours"),
        ([{"cuda": None}, {"cuda": None}], "CPU hours"),
        ([{"cuda": None}, {"cuda": "13.0"}], "GPU-hours"),
    ],
)
def test_training_time_is_in_gpu_hours_or_cpu_hours(starts, name):
    assert results.hours_name(starts) == name
