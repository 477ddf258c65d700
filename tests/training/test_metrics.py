import json
import os
import re

import pytest

from training.language.config import load_config
from training.metrics import METRICS, RunLog, read_metrics


def open_log(run, start_step=0, *, is_main=True, wandb="disabled", tensorboard=False):
    overrides = [f"run.out_dir={run}", f"run.wandb={wandb}", "optim.max_steps=10"]
    overrides += [f"run.tensorboard={str(tensorboard).lower()}"]
    config = load_config(["configs/quickstart.yaml", "optim.warmup_steps=0", *overrides])
    return RunLog(config, start_step=start_step, is_main=is_main)


def test_records_are_read_back(tmp_path, capsys):
    with open_log(tmp_path) as log:
        log.record("loss 3", step=1, loss=3.0, mfu_full=None)
        log.record("val", step=2, val_loss=2.5)
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 3.0}, {"step": 2, "val_loss": 2.5}]
    assert "step 1/10  loss 3" in capsys.readouterr().out


def test_a_damaged_line_is_reported(tmp_path):
    (tmp_path / METRICS).write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2, is not a record: Unterminated"):
        read_metrics(tmp_path)


def test_resuming_drops_what_came_after_the_checkpoint(tmp_path):
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (1, 2, 3)]
    (tmp_path / METRICS).write_text("\n".join(lines) + '\n{"step": 4, "lo')
    with open_log(tmp_path, start_step=2) as log:
        log.record("again", step=3, loss=2.0)
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path)] == [(1, 1), (2, 1), (3, 2)]


def test_finished_run_keeps_one_last_evaluation(tmp_path):
    for _ in range(2):
        with open_log(tmp_path, start_step=10) as log:
            log.record("val", step=10, val_loss=2.5)
    assert read_metrics(tmp_path) == [{"step": 10, "val_loss": 2.5}]


def test_resuming_keeps_the_last_evaluation(tmp_path):
    with open_log(tmp_path) as log:
        log.record("val", step=5, val_loss=2.5)
    open_log(tmp_path, start_step=5).__exit__(None)
    assert read_metrics(tmp_path) == [{"step": 5, "val_loss": 2.5}]


def test_redirected_output_shows_the_time_left(tmp_path, capsys, monkeypatch):
    clock = iter(range(0, 10_000, 60))
    monkeypatch.setattr("rich.console.monotonic", lambda: float(next(clock)))
    with open_log(tmp_path) as log:
        for step in (1, 2, 3):
            log.record("loss 3", step=step, loss=3.0)
        log.record("val", step=3, val_loss=2.5)
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"step 3/10  loss 3  \d:\d\d:\d\d left", lines[2])
    assert lines[3] == "step 3/10  val"


def test_other_processes_write_nothing(tmp_path):
    with open_log(tmp_path, is_main=False) as log:
        log.say("hello")
        log.record("loss 3", step=1, loss=3.0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "is not a record: Expecting property name"),
        (b"[1]", "is not a record: it must be an object with a step"),
        (b'{"step": "1"}', "is not a record: it must be an object with a step"),
        (b'{"step": 1, "loss": "s3cr3t"}', "is not a record: its values must be finite"),
        (b'{"step": 1, "loss": null}', "is not a record: its values must be finite numbers"),
        (b'{"step": 1, "loss": NaN}', "is not a record: its values must be finite"),
        (b'{"step": 1, "tokens": 1e999}', "is not a record: its values must be finite"),
        (b'{"step": 1, "val_loss": true}', "is not a record: its values must be finite"),
        (b'{"step": 1, "gpu_hours": [1]}', "is not a record: its values must be finite"),
        (b"\xff", "is not a record: "),
        (b"[" * 100_000, "is not a record: it is nested too deeply"),
        (b'{"step": ' + b"1" * 5000 + b"}", "is not a record: Exceeds the limit"),
    ],
)
def test_a_line_that_is_not_a_record_is_reported(tmp_path, line, reason):
    (tmp_path / METRICS).write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    with pytest.raises(ValueError, match=f"metrics.jsonl, line 2, {reason}"):
        read_metrics(tmp_path)


def test_a_file_too_large_for_records_is_not_read(tmp_path):
    with (tmp_path / METRICS).open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(ValueError, match=f"metrics.jsonl has {1 << 40} bytes, but at most"):
        read_metrics(tmp_path)


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / METRICS)
    with pytest.raises(ValueError, match="metrics.jsonl is not a regular file"):
        read_metrics(tmp_path)


@pytest.mark.parametrize("change", ["deleted", "renamed"])
def test_a_missing_file_is_written_again(tmp_path, change, capsys):
    path = tmp_path / METRICS
    with open_log(tmp_path) as log:
        for step in (1, 2, 3):
            log.record("loss 3", step=step, loss=3.0)
            if step == 2:
                path.unlink() if change == "deleted" else path.rename(tmp_path / "mine")
        path.unlink()  # after the last record
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3]
    assert "wrote all of its records again" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["replaced", "cut"])
def test_a_file_that_another_program_changes_is_not_written_to(tmp_path, change):
    path, other = tmp_path / METRICS, tmp_path / "other"
    other.write_text('{"step": 1}\n')
    message = "metrics.jsonl was changed or replaced by another program"
    with pytest.raises(OSError, match=message), open_log(tmp_path) as log:
        log.record("loss 3", step=1, loss=3.0)
        os.replace(other, path) if change == "replaced" else path.write_text("")
        log.record("loss 3", step=2, loss=3.0)


def test_records_on_an_unmounted_disk_are_an_error(tmp_path):
    (tmp_path / METRICS).symlink_to("/not/mounted")
    with pytest.raises(OSError, match="metrics.jsonl links to /not/mounted, which does not exist"):
        read_metrics(tmp_path)
