"""Recovery of a run from failures: nothing is lost without a message."""

import re
import shutil
from collections import deque

import pytest

from data.text.batches import TrainBatches
from model.gpt import GPT
from tests.training_runs import in_two_processes, losses, stop_after
from training.checkpoint.folders import checkpoints, step_of
from training.checkpoint.reader import Checkpoint
from training.language.task import LanguageTask
from training.metrics import Record, read_metrics


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


@pytest.mark.parametrize("n_processes", [1, pytest.param(2, marks=pytest.mark.distributed)])
def test_resumes_from_the_checkpoint_before_a_damaged_one(run, n_processes, capsys):
    def train(*options):
        return run(*options) if n_processes == 1 else in_two_processes(run, *options)

    train()
    expected = losses(run.out_dir)
    older, newest = checkpoints(run.out_dir)
    flip_a_bit(newest / "optimizer.safetensors")
    message = f"{newest} is damaged .* resume from the intact {older} with run.resume=previous"
    with pytest.raises(ValueError, match=message):
        run()
    capsys.readouterr()
    train("run.resume=previous")
    aside = newest.with_name(f"damaged_{newest.name}")
    if n_processes == 1:
        said = f"damaged checkpoint renamed to {aside}\nresuming from {older}\n"
        assert said in capsys.readouterr().out
    assert aside.exists() and checkpoints(run.out_dir) == [older, newest]
    assert losses(run.out_dir) == expected


def test_resume_previous_needs_an_intact_checkpoint(run):
    run("optim.max_steps=4")
    flip_a_bit(checkpoints(run.out_dir)[0] / "model.safetensors")
    with pytest.raises(ValueError, match=r"previous needs an intact checkpoint, and .* has none\."):
        run("run.resume=previous")


def test_a_validation_loss_that_is_not_finite_ends_the_run(run, monkeypatch):
    def validate(self, model, step, stop):
        return Record("", {"val_loss": float("nan") if step == 8 else 1.0})

    monkeypatch.setattr(LanguageTask, "validate", validate)
    with pytest.raises(FloatingPointError, match=r"val_loss=nan at step 8 is not finite\. Lower"):
        run("run.eval_every=4")
    assert "NaN" not in (run.out_dir / "metrics.jsonl").read_text()
    assert [folder.name for folder in checkpoints(run.out_dir)] == ["step_00000004"]


@pytest.mark.usefixtures("waits_for_saves")
def test_renaming_the_run_folder_ends_the_run(run, tmp_path, monkeypatch):
    validate = LanguageTask.validate

    def renamed(self, model, step, stop):
        run.out_dir.rename(tmp_path / "renamed")
        return validate(self, model, step, stop)

    monkeypatch.setattr(LanguageTask, "validate", renamed)
    message = re.escape(f"run.out_dir={run.out_dir} was renamed, deleted or replaced during")
    with pytest.raises(OSError, match=message):
        run("run.eval_every=6")
    assert not run.out_dir.exists()
    assert [r["step"] for r in read_metrics(tmp_path / "renamed") if "loss" in r][-1] == 6
    monkeypatch.undo()
    run(f"run.out_dir={tmp_path / 'renamed'}")


@pytest.mark.parametrize("state", ["not mounted", "a file", "removed", "empty"])
def test_records_without_their_checkpoints_are_not_dropped(run, tmp_path, state):
    run("optim.max_steps=4")
    records = (run.out_dir / "metrics.jsonl").read_bytes()
    folder = (run.out_dir / "checkpoints").rename(tmp_path / "elsewhere")
    checkpoints_path = run.out_dir / "checkpoints"
    if state == "not mounted":
        checkpoints_path.symlink_to("/not/mounted")
    elif state == "a file":
        checkpoints_path.touch()
    elif state == "empty":  # like the mount point of an unmounted disk
        checkpoints_path.mkdir()
    with pytest.raises((ValueError, OSError)) as refused:
        run()
    reason = {
        "not mounted": f"{checkpoints_path} links to /not/mounted, which does not exist: mount its "
        "disk",
        "a file": f"{checkpoints_path} cannot be listed (Not a directory)",
    }
    missing = (
        f"{checkpoints_path} has no checkpoint, but this run saved step_00000004. Copy its "
        "checkpoints"
    )
    assert reason.get(state, missing) in str(refused.value)
    assert (run.out_dir / "metrics.jsonl").read_bytes() == records
    if state == "empty":
        checkpoints_path.rmdir()
    checkpoints_path.unlink(missing_ok=True)
    folder.rename(checkpoints_path)
    run()
    assert [*losses(run.out_dir)] == [*range(1, 9)]


def test_records_of_an_earlier_version_are_not_dropped(run):
    """They have no last_saved file; records past the second save prove that it existed."""
    run("optim.max_steps=5", "run.save_every=2")
    shutil.rmtree(run.out_dir / "checkpoints")
    (run.out_dir / "last_saved").unlink()
    with pytest.raises(ValueError, match="has no checkpoint, but this run saved some, with"):
        run("run.save_every=2")
    assert [*losses(run.out_dir)] == [*range(1, 6)]
    run("run.save_every=4")  # such a run may have been killed before its second save
    assert [*losses(run.out_dir)] == [*range(1, 9)]


def test_a_run_without_its_checkpoints_starts_again_once_its_records_are_deleted(run, monkeypatch):
    run("optim.max_steps=4")
    shutil.rmtree(run.out_dir / "checkpoints")
    (run.out_dir / "metrics.jsonl").unlink()
    monkeypatch.setattr("train.Trainer.record", stop_after(2))  # before it saves
    with pytest.raises(KeyboardInterrupt):
        run()
    monkeypatch.undo()
    assert [r["step"] for r in read_metrics(run.out_dir)] == [1, 2]
    run()
    assert [*losses(run.out_dir)] == [*range(1, 9)]


def test_leftovers_of_killed_processes_are_removed(run):
    run("optim.max_steps=4")
    left = [run.out_dir / "metrics.jsonl.77.unfinished", run.out_dir / "checkpoints"]
    left[1] = left[1] / ".unfinished_step_00000005"
    left[0].touch()
    left[1].mkdir()
    mine = run.out_dir / "mine.unfinished"
    mine.touch()
    run()
    assert [path.exists() for path in (*left, mine)] == [False, False, True]


def test_no_checkpoint_is_saved_after_damaged_data(run, corpus, tmp_path):
    data = shutil.copytree(corpus, tmp_path / "data")
    flip_a_bit(data / "train_00000.bin")
    with pytest.raises(ValueError, match=r"train_00000.bin has sha256=.* the file is damaged"):
        run(f"data.path={data}", "run.log_every=100", "run.save_every=1")
    assert checkpoints(run.out_dir) == []


@pytest.fixture
def spoil(monkeypatch):
    """Make the loss NaN for micro-batches that contain one of these training samples."""
    batch, forward, numbers = TrainBatches.batch, GPT.forward, set()
    spoilt = deque()  # flags of micro-batches that were read but not yet used

    def spoil(*samples):
        numbers.update(samples)

    def flagged_batch(self, first, size):
        spoilt.append(bool(numbers & {*range(first, first + size)}))
        return batch(self, first, size)

    def spoilt_forward(self, *args, **options):
        loss = forward(self, *args, **options)
        return loss * float("nan") if self.training and spoilt.popleft() else loss

    monkeypatch.setattr(TrainBatches, "batch", flagged_batch)
    monkeypatch.setattr(GPT, "forward", spoilt_forward)
    return spoil


def test_a_step_with_a_bad_sample_is_skipped_and_the_sample_named(run, spoil, capsys):
    spoil(17, 43)  # of steps 3 and 6, each of 8 samples
    run("run.log_every=2")
    records = {r["step"]: r for r in read_metrics(run.out_dir) if "lr" in r}
    assert [r.get("skipped_samples") for r in records.values()] == [
        None,
        [[16, 23]],
        [[40, 47]],
        None,
    ]
    assert all(r["loss"] > 0 for r in records.values())
    said = "skipped 1 step(s) up to step 4: loss or gradient not finite, samples 16 to 23"
    assert said in capsys.readouterr().out


def test_consecutive_bad_samples_end_the_run(run, spoil):
    spoil(41, 49, 57)
    message = (
        "last 3 steps up to step 8 were skipped .*max_skipped=3.*step_00000004 is the newest with"
    )
    with pytest.raises(FloatingPointError, match=message):
        run("run.max_skipped=3")
    assert [r["step"] for r in read_metrics(run.out_dir) if "loss" in r] == [1, 2, 3, 4, 5]
    assert "NaN" not in (run.out_dir / "metrics.jsonl").read_text()


RUINED = ("optim.lr=1e20", "optim.schedule=constant", "optim.warmup_steps=0", "optim.max_steps=40")


@pytest.mark.parametrize("ended_by", ["skipped steps", "val_loss="])
@pytest.mark.usefixtures("waits_for_saves")
def test_a_checkpoint_of_ruined_weights_is_not_good(run, ended_by):
    """The step that ruins the weights is finite and taken; all later steps are skipped."""
    few = ("run.save_every=1", "run.keep_last=1", "run.max_skipped=6")
    run("optim.max_steps=4", "optim.schedule=constant", *few)
    eval_every = 9 if ended_by == "val_loss=" else 99
    with pytest.raises(FloatingPointError, match=ended_by if eval_every == 9 else "were skip") as e:
        run(*RUINED, *few, f"run.eval_every={eval_every}")
    records = [r for r in read_metrics(run.out_dir) if "lr" in r]
    first_skipped = next(r["step"] for r in records if "skipped" in r)
    kept = {step_of(folder): folder for folder in checkpoints(run.out_dir)}
    # none is saved while steps are skipped, and the one before the last taken step is kept
    assert [*kept] == [first_skipped - 2, first_skipped - 1]
    good, ruined = kept.values()
    assert f"{good} is the newest with a good step after it" in str(e.value)
    assert f"to resume from it, delete {ruined.name}" in str(e.value)
    assert all(x.isfinite().all() for x in Checkpoint.open(good).weights().values())
    shutil.rmtree(ruined)
    run(*few, "optim.schedule=constant")
    assert [*losses(run.out_dir)] == [*range(1, 9)]


def test_a_save_waits_while_steps_are_skipped(run, spoil):
    spoil(25, 33)  # of steps 4 and 5
    run("run.eval_every=100")
    assert [step_of(folder) for folder in checkpoints(run.out_dir)] == [6, 8]


def test_a_loss_of_one_corpus_that_is_not_finite_ends_the_run(run, monkeypatch):
    def validate(self, model, step, stop):
        return Record("", {"val_loss": 1.0, "val_loss_birds": float("inf")})

    monkeypatch.setattr(LanguageTask, "validate", validate)
    with pytest.raises(FloatingPointError, match=r"val_loss_birds=inf at step 4 is not finite"):
        run()


def test_sums_since_the_last_record_are_saved(run, spoil, tmp_path):
    """A checkpoint between two records changes neither of them."""
    spoil(17, 43)
    options = ("run.log_every=3", "run.save_every=5", "run.keep_last=9")
    run(*options, f"run.out_dir={tmp_path / 'whole'}")
    run(*options)
    shutil.rmtree(checkpoints(run.out_dir)[-1])
    run(*options)
    records = [
        [{k: v for k, v in r.items() if k in ("step", "loss", "skipped_samples")} for r in lines]
        for lines in (read_metrics(tmp_path / "whole"), read_metrics(run.out_dir))
    ]
    assert records[0] == records[1]
