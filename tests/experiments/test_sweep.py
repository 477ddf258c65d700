"""A sweep always ends with a report, or says how to resume."""

import sys
from pathlib import Path

import pytest
import torch

from experiments import sweep
from experiments.gpu_pool import Task
from experiments.sweep import train_and_report


def task(name: str, folder: Path, code: int = 0) -> Task:
    """Ends with an exit code."""
    command = [sys.executable, "-c", f"raise SystemExit({code})"]
    return Task(name=name, needs=frozenset(), commands=lambda _: [command], log=folder / name)


def test_a_report_follows_what_failed(tmp_path, capsys):
    reported = []
    with pytest.raises(SystemExit, match="1"):
        train_and_report([task("a", tmp_path), task("b", tmp_path, 3)], reported.append)
    assert reported == [["b"]]
    assert "these runs failed: b\n" in capsys.readouterr().out
    train_and_report([task("c", tmp_path)], reported.append)
    assert reported == [["b"], []]


def test_runs_share_gpus_and_gpus_runs(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    seen = []
    monkeypatch.setattr(sweep, "run_tasks", lambda _, groups, notify: seen.append(groups))
    train_and_report([task("a", tmp_path)], print, gpus_per_run=2)
    train_and_report([task("a", tmp_path)], print, gpus_per_run=4, runs_per_gpu=2)
    assert seen == [[["0", "1"], ["2", "3"]], [["0", "1", "2", "3"]] * 2]


def test_only_training_needs_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    reported = []
    train_and_report([], reported.append, gpus_per_run=8)
    assert reported == [[]]
    with pytest.raises(ValueError, match="--gpus-per-run=8 must be at most 1"):
        train_and_report([task("a", tmp_path)], reported.append, gpus_per_run=8)


def test_stopping_prints_how_to_resume(tmp_path, monkeypatch, capsys):
    def stop(*_):
        raise SystemExit(143)

    monkeypatch.setattr(sweep, "run_tasks", stop)
    reported = []
    with pytest.raises(SystemExit, match="143"):
        train_and_report([task("a", tmp_path)], reported.append)
    assert capsys.readouterr().err == "stopped; run the same command to resume\n"
    assert reported == []
