"""Background saves are complete or absent, even if the process dies or the disk is full."""

import multiprocessing
import resource
import threading
import time
from contextlib import contextmanager, suppress

import pytest
import torch
from torch import nn

from experiments.reliability.processes import start_process
from tests.training.checkpoint.small import ALONE, MUST_MATCH, make, save, saver, take_steps
from training.checkpoint import contents
from training.checkpoint import saver as module
from training.checkpoint.contents import Progress, save_model
from training.checkpoint.folders import checkpoint_folder, checkpoints, latest_checkpoint
from training.checkpoint.reader import Checkpoint


def names(run):
    return [int(folder.name.removeprefix("step_")) for folder in checkpoints(run)]


def test_keeps_the_newest(tmp_path):
    model, optimizer = make(0)
    for step in (5, 10, 200):
        save(tmp_path, step, model, optimizer)
    assert names(tmp_path) == [10, 200]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_keeps_the_best(tmp_path):
    model, optimizer = make(0)
    losses = {5: 3.0, 10: 1.0, 15: None, 20: 1.0, 25: 2.0, 30: 0.5, 35: 4.0}
    kept = []
    for step, val_loss in losses.items():
        save(tmp_path, step, model, optimizer, keep_last=1, keep_best=True, val_loss=val_loss)
        kept.append(names(tmp_path))
    assert kept == [[5], [10], [10, 15], [10, 20], [10, 25], [30], [30, 35]]


def test_a_damaged_checkpoint_is_not_the_best(tmp_path):
    model, optimizer = make(0)
    first = save(tmp_path, 5, model, optimizer, keep_last=1, keep_best=True, val_loss=1.0)
    (first / "state.json").write_text("{")
    save(tmp_path, 10, model, optimizer, keep_last=1, keep_best=True, val_loss=2.0)
    assert names(tmp_path) == [10]


def test_an_unconfirmed_checkpoint_evicts_none(tmp_path):
    model, optimizer = make(0)
    save(tmp_path, 5, model, optimizer, keep_last=1)
    kept = []
    with saver(tmp_path, keep_last=1, keep_best=True) as saves:
        for step, before, val_loss in ((10, 6, 2.0), (15, 6, 1.0), (20, 16, 3.0)):
            saves.confirm(before)
            saves.save(Progress(step=step, val_loss=val_loss), model, optimizer)
            saves.finish()
            kept.append(names(tmp_path))
        saves.confirm(21)
    assert kept == [[5, 10], [5, 10, 15], [15, 20]]
    assert names(tmp_path) == [15, 20]  # the best, and the newest


def test_a_run_that_saves_nothing_deletes_nothing(tmp_path):
    """A finished run may be evaluated again with another run.keep_last."""
    for step in (5, 10, 15):
        save(tmp_path, step, *make(0), keep_last=3)
    with saver(tmp_path, keep_last=1) as saves:
        saves.confirm(16)
    assert names(tmp_path) == [5, 10, 15]


def test_nothing_is_deleted_if_the_best_cannot_be_read(tmp_path, monkeypatch):
    model, optimizer = make(0)
    save(tmp_path, 5, model, optimizer, keep_last=1, keep_best=True, val_loss=1.0)

    def denied(folders):
        raise PermissionError(f"{folders} cannot be read")

    monkeypatch.setattr(module, "best_checkpoint", denied)
    with pytest.raises(OSError, match="cannot be read"):
        save(tmp_path, 10, model, optimizer, keep_last=1, keep_best=True, val_loss=2.0)
    assert names(tmp_path) == [5, 10]


def test_later_steps_do_not_change_a_save_in_progress(tmp_path, monkeypatch):
    """`save` copies the state before it returns, and then only writing waits for the disk."""
    model, optimizer = make(0)
    take_steps(model, optimizer, 2)
    was = {name: value.clone() for name, value in model.state_dict().items()}
    may_write = threading.Event()
    write = module.write_checkpoint

    def slow(*arguments):
        assert may_write.wait(60)
        return write(*arguments)

    monkeypatch.setattr(module, "write_checkpoint", slow)
    with saver(tmp_path) as saves:
        saves.save(Progress(step=2), model, optimizer)
        take_steps(model, optimizer, 3)
        assert latest_checkpoint(tmp_path) is None
        may_write.set()
        saves.save(Progress(step=5), model, optimizer)
    saved = Checkpoint.open(checkpoint_folder(tmp_path, 2)).weights()
    for name, value in was.items():
        assert torch.equal(saved[name], value)
    assert names(tmp_path) == [2, 5]


@contextmanager
def limited_files(size):
    """Limit the files of this process to `size` bytes, to imitate a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:  # before pytest writes its own report, possibly to a file
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [200, 50_000], ids=["last file", "first file"])
def test_a_full_disk_leaves_the_older_checkpoint(tmp_path, size):
    model = nn.Linear(4, 4) if size == 200 else nn.Linear(500, 500)
    optimizer = torch.optim.AdamW(model.parameters())
    save(tmp_path, 1, model, optimizer)
    message = r"step_00000002 could not be written; .*disk may be full \(.*older .* are intact"
    with pytest.raises(OSError, match=message), saver(tmp_path) as saves:
        with limited_files(size):
            saves.save(Progress(step=2), model, optimizer)
            time.sleep(0.1)
            with pytest.raises(OSError, match=message):
                saves.finish()
        with pytest.raises(OSError, match=message):
            saves.check()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]
    save(tmp_path, 2, model, optimizer)
    assert latest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 2)


def test_a_full_disk_fails_save_model(tmp_path):
    with limited_files(300), pytest.raises(OSError, match="step_00000000 could not be written"):
        save_model(tmp_path, make(0)[0], config={}, tokenizer="a")
    assert latest_checkpoint(tmp_path) is None


@pytest.mark.parametrize("change", ["renamed", "deleted", "replaced"])
def test_a_missing_run_folder_is_an_error(tmp_path, change):
    run = tmp_path / "run"
    model, optimizer = make(0)
    run.mkdir()
    message = f"run.out_dir={run} was renamed, deleted or replaced"
    with pytest.raises(OSError, match=message), saver(run) as saves:
        saves.save(Progress(step=1), model, optimizer)
        saves.finish()
        run.rename(tmp_path / "moved")
        if change == "replaced":
            run.mkdir()
        saves.save(Progress(step=2), model, optimizer)
    assert not (run / "checkpoints").exists()
    assert names(tmp_path / "moved") == [1]


@pytest.mark.parametrize("before", ["clear_unfinished", "write_tensors"])
def test_renaming_the_run_folder_during_a_save_is_an_error(tmp_path, monkeypatch, before):
    run = tmp_path / "run"
    run.mkdir()
    work = getattr(contents, before)

    def renamed(*arguments):
        if run.exists():
            run.rename(tmp_path / "moved")
        work(*arguments)

    monkeypatch.setattr(contents, before, renamed)
    message = f"run.out_dir={run} was renamed, deleted or replaced"
    with pytest.raises(OSError, match=message), saver(run) as saves:
        saves.save(Progress(step=1), *make(0))
    assert not run.exists()
    assert names(tmp_path / "moved") == []


def save_forever(run, first, steps):
    model, optimizer = make(0)
    run.mkdir(exist_ok=True)
    with saver(run) as saves:
        for step in range(first, 10**6):
            take_steps(model, optimizer, 1)
            saves.save(Progress(step=step), model, optimizer)
            if step > first:
                steps.send(step - 1)


def test_a_process_killed_while_saving_leaves_a_loadable_checkpoint(tmp_path):
    """Whenever the process dies, a checkpoint loads that is as new as the last reported one."""
    run = tmp_path / "run"
    reported = 0
    for delay in (0.0, 0.003, 0.011, 0.017):
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = start_process(save_forever, run, reported + 1, sender)
        sender.close()  # the other process keeps the only open copy
        for _ in range(3):
            reported = receiver.recv()
        time.sleep(delay)
        process.kill()
        process.join()
        with suppress(EOFError):
            while True:
                reported = receiver.recv()
        newest = latest_checkpoint(run)
        assert newest is not None
        checkpoint = Checkpoint.open(newest)
        checkpoint.restore(*make(1), MUST_MATCH, ALONE)
        progress = checkpoint.progress
        assert progress.step >= reported
        reported = progress.step
