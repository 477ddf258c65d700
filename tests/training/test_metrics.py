import json

import pytest

from training.metrics import METRICS, RunLog, read_metrics


def open_log(run, start_step=0, **options):
    options = {"is_main": True, "wandb": "disabled", **options}
    return RunLog(
        run, start_step=start_step, max_steps=10, wandb_project="papilio", config={}, **options
    )


def test_records_are_read_back(tmp_path, capsys):
    with open_log(tmp_path) as log:
        log.record("loss 3", step=1, loss=3.0, mfu_full=None)
        log.record("val", step=2, val_loss=2.5)
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 3.0}, {"step": 2, "val_loss": 2.5}]
    assert "step 1/10  loss 3" in capsys.readouterr().out


def test_resuming_drops_what_came_after_the_checkpoint(tmp_path):
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (1, 2, 3)]
    (tmp_path / METRICS).write_text("\n".join(lines) + '\n{"step": 4, "lo')
    with open_log(tmp_path, start_step=2) as log:
        log.record("again", step=3, loss=2.0)
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path)] == [(1, 1), (2, 1), (3, 2)]


def test_other_processes_write_nothing(tmp_path):
    with open_log(tmp_path, is_main=False) as log:
        log.say("hello")
        log.record("loss 3", step=1, loss=3.0)
    assert list(tmp_path.iterdir()) == []


def test_wandb_offline_writes_into_the_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with open_log(tmp_path, wandb="offline") as log:
        log.record("loss 3", step=1, loss=3.0)
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
