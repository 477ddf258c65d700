import json
import sys
from types import SimpleNamespace

import pytest

import train
from experiments.train_steps import same_losses
from experiments.train_steps.same_losses import distances, summarise, train_all
from training.metrics import METRICS


def write_run(folder, losses, val_loss):
    rows = [
        {"step": i, "tokens": 100 * i, "loss": loss, "tokens_per_s": 10.0 * i}
        for i, loss in enumerate(losses, start=1)
    ]
    last = {"step": len(losses), "tokens": 100 * len(losses)}
    rows.append({**last, "val_loss": val_loss, "val_perplexity": 2.0, "val_tokens": 50})
    folder.mkdir()
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return summarise(folder)


def test_distances_within_and_between_implementations(tmp_path):
    runs = {
        "ours 1": write_run(tmp_path / "a", [5.0, 4.5, 4.0, 3.0, 2.0], 2.5),
        "sdpa 1": write_run(tmp_path / "b", [5.0, 4.0, 4.0, 3.5, 2.0], 2.25),
        "sdpa 2": write_run(tmp_path / "c", [5.0, 4.0, 4.0, 3.5, 2.5], 2.25),
    }
    assert distances(runs) == {
        "same": {"pairs": 1, "curve": 0.1, "validation": 0.0},
        "different": {"pairs": 2, "curve": 0.25, "validation": 0.25},
    }
    assert runs["ours 1"]["tokens_per_s"] == 45.0  # the median of steps 4 and 5


def test_finished_runs_are_not_trained_again_and_others_are_refused(run, tmp_path, monkeypatch):
    runs, repeats = tmp_path / "runs", {"ours": 0, "sdpa": 1}
    run("run.deterministic=false", "model.attention=sdpa", f"run.out_dir={runs / 'sdpa_1'}")
    monkeypatch.setattr(same_losses.subprocess, "run", None)
    assert train_all(str(run.config), [], runs, repeats) == {"sdpa 1": runs / "sdpa_1"}
    with pytest.raises(ValueError, match="sdpa_1 holds a run with other settings"):
        train_all(str(run.config), ["optim.max_steps=9"], runs, repeats)
    (runs / "sdpa_1").rename(runs / "moved")
    (runs / "moved").rename(tmp_path / "sdpa_1")
    assert train_all(str(run.config), [], tmp_path, repeats)


def test_trains_all_and_writes_the_result(run, tmp_path, monkeypatch):
    def train_here(command, check):
        assert command[:2] == [sys.executable, "train.py"] and check
        train.main(command[2:])

    monkeypatch.setattr(same_losses, "subprocess", SimpleNamespace(run=train_here))
    options = ["optim.max_steps=4", "optim.batch_tokens=64", "model.n_layer=1"]
    folders = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    same_losses.main([str(run.config), *options, "--name", "tiny", "--ours", "1", *folders])
    result = json.loads((tmp_path / "compare_training_tiny.json").read_text())
    assert set(result["runs"]) == {"ours 1", "sdpa 1", "sdpa 2"}
    assert result["distances"]["same"]["curve"] == 0.0  # a CPU adds in a fixed order
    assert result["distances"]["different"]["curve"] < 1e-4
    assert (tmp_path / "compare_training_tiny.png").exists()


def test_noise_needs_two_equal_runs(capsys):
    with pytest.raises(SystemExit):
        same_losses.main(["configs/quickstart.yaml", "--name", "x", "--sdpa", "1"])
    assert "without two equal runs the noise is unknown" in capsys.readouterr().err
