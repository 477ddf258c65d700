"""What a run loses when something goes wrong: nothing that it does not say."""

import re

import pytest

from tests.training_runs import in_two_processes, losses
from training.checkpoint.folders import checkpoints
from training.language.task import LanguageTask
from training.metrics import Record, read_metrics


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


@pytest.mark.parametrize("n_processes", [1, pytest.param(2, marks=pytest.mark.distributed)])
def test_goes_on_from_the_checkpoint_before_a_damaged_one(run, tmp_path, n_processes, capsys):
    def train(*options):
        return run(*options) if n_processes == 1 else in_two_processes(run, *options)

    train(f"run.out_dir={tmp_path / 'whole'}")
    train()
    older, newest = checkpoints(run.out_dir)
    flip_a_bit(newest / "optimizer.safetensors")
    message = f"{newest} is damaged, .* go on from {older}, which is whole, with run.resume=prev"
    with pytest.raises(ValueError, match=message):
        run()
    capsys.readouterr()
    train("run.resume=previous")
    aside = newest.with_name(f"damaged_{newest.name}")
    if n_processes == 1:
        assert f"set aside as damaged: {aside}\ngoing on from {older}\n" in capsys.readouterr().out
    assert aside.exists() and checkpoints(run.out_dir) == [older, newest]
    assert losses(run.out_dir) == losses(tmp_path / "whole")


def test_no_checkpoint_is_whole(run):
    run("optim.max_steps=4")
    flip_a_bit(checkpoints(run.out_dir)[0] / "model.safetensors")
    with pytest.raises(ValueError, match=r"run.resume=previous, and no checkpoint in .* is whole:"):
        run("run.resume=previous")


def test_a_validation_loss_that_is_none_ends_the_run(run, monkeypatch):
    def validate(self, step):
        return Record("", {"val_loss": float("nan") if step == 8 else 1.0})

    monkeypatch.setattr(LanguageTask, "validate", validate)
    with pytest.raises(FloatingPointError, match="the validation loss is nan at step 8: lower"):
        run("run.eval_every=4")
    assert "NaN" not in (run.out_dir / "metrics.jsonl").read_text()
    assert [folder.name for folder in checkpoints(run.out_dir)] == ["step_00000004"]


def test_a_run_whose_folder_is_renamed_ends(run, tmp_path, monkeypatch):
    validate = LanguageTask.validate

    def renamed(self, step):
        run.out_dir.rename(tmp_path / "renamed")
        return validate(self, step)

    monkeypatch.setattr(LanguageTask, "validate", renamed)
    message = re.escape(f"run.out_dir={run.out_dir} was renamed, deleted or replaced while it was")
    with pytest.raises(OSError, match=message):
        run("run.eval_every=6")
    assert not run.out_dir.exists()
    assert [r["step"] for r in read_metrics(tmp_path / "renamed") if "loss" in r][-1] == 6
    monkeypatch.undo()
    run(f"run.out_dir={tmp_path / 'renamed'}")


def test_what_killed_processes_left_is_cleared(run):
    run("optim.max_steps=4")
    left = [run.out_dir / "metrics.jsonl.77.unfinished", run.out_dir / "checkpoints"]
    left[1] = left[1] / ".unfinished_step_00000005"
    left[0].touch()
    left[1].mkdir()
    mine = run.out_dir / "mine.unfinished"
    mine.touch()
    run()
    assert [path.exists() for path in (*left, mine)] == [False, False, True]
