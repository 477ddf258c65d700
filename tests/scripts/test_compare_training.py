import json

import pytest

from scripts import compare_training
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
    return folder


def test_distances_are_from_the_first_sdpa_run(tmp_path):
    folders = {
        "triton": write_run(tmp_path / "a", [5.0, 4.5, 4.0, 3.0, 2.0], 2.5),
        "sdpa": write_run(tmp_path / "b", [5.0, 4.0, 4.0, 3.5, 2.0], 2.25),
        "sdpa again": write_run(tmp_path / "c", [5.0, 4.0, 4.0, 3.5, 2.0], 2.25),
    }
    result = compare_training.compare(folders)
    triton = result["distance_from_sdpa"]["triton"]
    assert triton == {"mean": 0.2, "largest": 0.5, "final_validation": 0.25}
    assert set(result["distance_from_sdpa"]["sdpa again"].values()) == {0.0}
    assert result["runs"]["triton"]["tokens_per_s"] == 45.0  # the median of steps 4 and 5
    compare_training.draw(result, tmp_path / "curves.png", "a title")
    assert (tmp_path / "curves.png").stat().st_size > 0


def test_refuses_runs_with_other_settings(run, tmp_path):
    runs = tmp_path / "runs"
    run("model.attention=triton", "optim.max_steps=4", f"run.out_dir={runs / 'triton'}")
    with pytest.raises(ValueError, match="triton holds a run with other settings"):
        compare_training.train_all(str(run.config), ["optim.max_steps=8"], runs)


def test_trains_all_three(run, tmp_path):
    options = ("optim.max_steps=4", "optim.batch_tokens=64")
    folders = compare_training.train_all(str(run.config), options, tmp_path / "runs")
    result = compare_training.compare(folders)
    assert result["distance_from_sdpa"]["sdpa again"]["largest"] == 0.0
    assert result["distance_from_sdpa"]["triton"]["largest"] < 1e-4
