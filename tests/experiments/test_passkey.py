"""The sweep trains, asks, and tells."""

import json
import subprocess

import pytest

from experiments.passkey import __main__ as sweep

TINY = (
    *("model.n_layer=1", "model.n_embd=32", "model.n_head=2", "run.compile=false"),
    *("run.dtype=float32", "run.device=cpu", "optim.max_steps=2", "optim.warmup_steps=0"),
    *("run.eval_every=2", "run.log_every=1", "model.mask.block_size=16"),
)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(sweep, "STEP_TOKENS", 1024)
    monkeypatch.setattr(sweep, "SHARES", (2, 1))
    monkeypatch.setattr(sweep, "DEPTHS", (0.0, 1.0))


def test_runs_are_trained_once_and_all_are_asked(small, corpus, tmp_path, monkeypatch, capfd):
    out, runs = tmp_path / "passkey.json", tmp_path / "runs"
    command = [
        *("--data", str(corpus), "--contexts", "512", "--documents", "100", "--trials", "2"),
        *("--runs", str(runs), "--out", str(out)),
        *("--set", *TINY, "optim.batch_tokens=1024"),
    ]
    sweep.main(command)
    rows = json.loads(out.read_text())["rows"]
    assert [(row["attention"], row["length"], row["depth"]) for row in rows] == [
        (attention, length, depth)
        for attention in ("dense", "window", "butterfly")
        for length in (256, 512)
        for depth in (0.0, 1.0)
    ]
    assert all(row["of"] == 2 for row in rows) and out.with_suffix(".png").exists()
    assert len({row["val_loss"] for row in rows}) == 3  # three models
    printed = capfd.readouterr().out
    assert "| 512 | butterfly | 1 |" in printed and "model.window" not in printed

    call = subprocess.run

    def refuse(command, **keywords):
        assert "train.py" not in command
        return call(command, **keywords)

    monkeypatch.setattr("subprocess.run", refuse)
    sweep.main(command)  # nothing is trained again


def test_windows_have_an_eighth() -> None:
    assert sweep.changes_of("dense", 4096) == []
    assert sweep.changes_of("window", 4096) == ["model.window_size=512"]
    assert sweep.changes_of("butterfly", 4096) == ["model.mask.pattern=butterfly"]
