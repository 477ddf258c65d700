"""Trackers get the records of a run, also after it resumes."""

import sys

import pytest

pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.training.test_metrics import open_log
from training.metrics import TENSORBOARD, WANDB_ID


def scalars(folder) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags}


def test_wandb_offline_resumes_the_same_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for start_step in (0, 1):
        with open_log(tmp_path, start_step, wandb="offline") as log:
            log.record("loss 3", step=start_step + 1, loss=3.0)
    run_id = (tmp_path / WANDB_ID).read_text()
    files = [path.name for path in (tmp_path / "wandb").glob("offline-run-*/*.wandb")]
    assert files == [f"run-{run_id}.wandb"] * len(files)
    assert files


def test_tensorboard_has_each_step_once(tmp_path):
    with open_log(tmp_path, tensorboard=True) as log:
        for step in (1, 2, 3):
            log.record("", step=step, loss=3.0 + step, mfu=None, skipped_samples=[[1, 2]])
    with open_log(tmp_path, 1, tensorboard=True) as log:  # as after a crash
        log.record("", step=2, loss=9.0, val_loss=8.0)
    assert scalars(tmp_path / TENSORBOARD) == {"loss": [(1, 4.0), (2, 9.0)], "val_loss": [(2, 8.0)]}


def test_a_run_writes_curves_to_tensorboard(run):
    run("run.tensorboard=true")
    curves = scalars(run.out_dir / TENSORBOARD)
    assert [step for step, _ in curves["loss"]] == [*range(1, 9)]
    assert {"lr", "grad_norm", "val_loss", "tokens_per_s"} <= curves.keys()


def test_a_missing_package_is_reported(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(ValueError, match="needs the package tensorboard .*pip install tensorboard"):
        open_log(tmp_path, tensorboard=True)
