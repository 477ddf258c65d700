import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import train
from experiments import same_losses
from experiments.same_losses import WAYS, attention_runs, distances, gaps, summarise, train_all
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
    found = attention_runs([str(run.config)], runs, repeats)
    assert {name: run.folder for name, run in found.items()} == {"sdpa 1": runs / "sdpa_1"}
    train_all(found)
    with pytest.raises(ValueError, match="sdpa_1 holds a run with other settings"):
        train_all(attention_runs([str(run.config), "optim.max_steps=9"], runs, repeats))
    (runs / "sdpa_1").rename(tmp_path / "sdpa_1")
    train_all(attention_runs([str(run.config)], tmp_path, repeats))


def test_trains_all_and_writes_the_result(run, tmp_path, monkeypatch):
    def train_here(command, check):
        assert command[:2] == [sys.executable, "train.py"] and check
        train.main(command[2:])

    monkeypatch.setattr(same_losses, "subprocess", SimpleNamespace(run=train_here))
    options = ["optim.max_steps=4", "optim.batch_tokens=64", "model.n_layer=1"]
    folders = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    repeats = ["--name", "tiny", "--ours", "1"]
    same_losses.main(["attention", str(run.config), *options, *repeats, *folders])
    result = json.loads((tmp_path / "compare_training_tiny.json").read_text())
    assert set(result["runs"]) == {"ours 1", "sdpa 1", "sdpa 2"}
    assert result["distances"]["same"]["curve"] == 0.0  # a CPU adds in a fixed order
    assert result["distances"]["different"]["curve"] < 1e-4
    assert (tmp_path / "compare_training_tiny.png").exists()


def test_noise_needs_two_equal_runs(capsys):
    with pytest.raises(SystemExit):
        same_losses.main(["attention", "configs/quickstart.yaml", "--name", "x", "--sdpa", "1"])
    assert "the noise is the distance of two equal runs" in capsys.readouterr().err


def test_a_comparison_of_attention_has_a_name(capsys):
    with pytest.raises(SystemExit):
        same_losses.main(["attention", "configs/quickstart.yaml"])
    assert "attention needs --name" in capsys.readouterr().err


def test_each_way_of_sharing_is_trained(tmp_path, monkeypatch, capsys):
    commands = []

    def train(command, check):
        assert command[0] == sys.executable and check
        commands.append(command[1:])
        (folder,) = [x.removeprefix("run.out_dir=") for x in command if x.startswith("run.out_dir")]
        write_run(Path(folder), [3.0] * 49 + [2.0 + len(commands) / 100], 2.5)

    monkeypatch.setattr(same_losses, "subprocess", SimpleNamespace(run=train))
    (tmp_path / "sharing").mkdir()
    folders = ["--runs", str(tmp_path), "--out", str(tmp_path)]
    ways = ["--ways", "one GPU", "context"]
    for _ in range(2):  # the second time all are finished
        same_losses.main(["sharing", "data.path=unused", *folders, *ways])
    assert [command[3] for command in commands] == ["--nproc_per_node=1", "--nproc_per_node=2"]
    assert all(command[4] == "train.py" and "data.path=unused" in command for command in commands)
    assert "parallel.context=2" in commands[1] and "parallel.context=2" not in commands[0]
    assert "| context parallel | 0.20 | 10.00 |" in capsys.readouterr().out
    result = json.loads((tmp_path / "scale_losses.json").read_text())
    assert result["steps"] == 50 and len(result["losses"]["context"]) == 50


def test_losses_are_held_to_one_gpu_under_the_same_mask():
    losses = {way: [3.0, 2.0] for way in WAYS}
    losses["ddp"] = [3.0, 2.25]
    losses["one GPU, butterfly"] = losses["context, butterfly"] = [4.0, 1.0]
    found = {row["way"]: (row["mean"], row["most"]) for row in gaps(losses)}
    assert found.pop("ddp") == (0.125, 0.25)
    assert set(found) == {*WAYS} - {"one GPU", "one GPU, butterfly", "ddp"}
    assert set(found.values()) == {(0.0, 0.0)}
