import json
import multiprocessing
import resource
import time
from contextlib import contextmanager, suppress

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.training_runs import start_process
from training.checkpoint import (
    Progress,
    checkpoint_folder,
    latest_checkpoint,
    load_checkpoint,
    read_optim,
    read_progress,
    read_weights,
    save_checkpoint,
    save_model,
)
from training.config import AdamWConfig
from training.distributed import Processes

ALONE = Processes(rank=0, world_size=1, device=torch.device("cpu"))


def make(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def take_steps(model, optimizer, n):
    for _ in range(n):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save(run, step, model, optimizer, **options):
    options = {"keep_last": 2, "must_match": {"model.n_layer": 2}, "config": {}, **options}
    progress = Progress(step=step, samples=8 * step, tokens=64 * step, gpu_hours=step / 7)
    return save_checkpoint(run, progress, model, optimizer, processes=ALONE, **options)


def test_goes_on_bit_for_bit(tmp_path):
    model, optimizer = make(0)
    take_steps(model, optimizer, 3)
    folder = save(tmp_path, 3, model, optimizer)
    take_steps(model, optimizer, 3)

    again, again_optimizer = make(1)
    progress = load_checkpoint(folder, again, again_optimizer, {"model.n_layer": 2}, ALONE)
    assert progress == Progress(step=3, samples=24, tokens=192, gpu_hours=3 / 7)
    take_steps(again, again_optimizer, 3)  # the inputs come from the restored random state
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("saved_as_tensor", [False, True])
def test_the_learning_rate_may_be_a_tensor_on_one_side(tmp_path, saved_as_tensor):
    """As it is where steps are captured in a CUDA graph: others must be able to go on from it."""

    def make_one(seed, as_tensor):
        model, optimizer = make(seed)
        if as_tensor:
            optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
        return model, optimizer

    model, optimizer = make_one(0, saved_as_tensor)
    take_steps(model, optimizer, 3)
    folder = save(tmp_path, 3, model, optimizer)
    rate = optimizer.param_groups[0]["lr"]
    assert isinstance(rate, torch.Tensor) == saved_as_tensor  # saving leaves it as it is
    take_steps(model, optimizer, 3)
    again, again_optimizer = make_one(1, not saved_as_tensor)
    rate = again_optimizer.param_groups[0]["lr"]
    load_checkpoint(folder, again, again_optimizer, {"model.n_layer": 2}, ALONE)
    assert again_optimizer.param_groups[0]["lr"] is rate  # a captured step reads this tensor
    take_steps(again, again_optimizer, 3)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_settings_of_the_optimizer_are_the_new_runs(tmp_path):
    model, optimizer = make(0)
    take_steps(model, optimizer, 1)
    folder = save(tmp_path, 1, model, optimizer)
    again, again_optimizer = make(1)
    again_optimizer.param_groups[0].update(weight_decay=0.5, betas=(0.1, 0.2))
    load_checkpoint(folder, again, again_optimizer, {"model.n_layer": 2}, ALONE)
    group = again_optimizer.param_groups[0]
    assert (group["weight_decay"], group["betas"]) == (0.5, (0.1, 0.2))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_by_name_from_a_checkpoint_that_has_nothing_else(tmp_path):
    model, _ = make(0)
    dcp.save({"model": model.half().state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "state.json").write_text('{"progress": {}, "must_match": {}}')
    weights = read_weights(tmp_path)
    assert weights.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert weights[name].dtype == torch.float16
        assert torch.equal(weights[name], value)


def test_weights_by_name_leave_the_optimizer_out(tmp_path):
    model, optimizer = make(0)
    take_steps(model, optimizer, 1)
    weights = read_weights(save(tmp_path, 1, model, optimizer))
    assert weights.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(weights[name], value)


def test_keeps_the_newest(tmp_path):
    model, optimizer = make(0)
    assert latest_checkpoint(tmp_path) is None
    for step in (5, 10, 200):
        save(tmp_path, step, model, optimizer)
    assert latest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 200)
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_00000010", "step_00000200"]


def test_another_run_is_refused_with_both_values(tmp_path):
    model, optimizer = make(0)
    folder = save(tmp_path, 1, model, optimizer)
    with pytest.raises(ValueError, match=r"model.n_layer is 2 there and 3 here"):
        load_checkpoint(folder, model, optimizer, {"model.n_layer": 3}, ALONE)


def test_folder_without_a_finished_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="no finished checkpoint"):
        read_weights(tmp_path)


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_checkpoint_that_was_copied_in_part(tmp_path, file, damage):
    model, optimizer = make(0)
    folder = save(tmp_path, 3, model, optimizer)
    path = folder / file
    if damage == "cut":
        path.write_bytes(path.read_bytes()[: 50 if file != "__0_0.distcp" else 0])
    else:
        path.unlink()
    if (file, damage) == ("state.json", "gone"):
        expected, message = FileNotFoundError, "holds no finished checkpoint"
    else:
        expected, message = ValueError, rf"^{folder} is damaged, or was copied in part \(\w+: "
    for read in (
        lambda: read_weights(folder),
        lambda: load_checkpoint(folder, model, optimizer, {"model.n_layer": 2}, ALONE),
    ):
        with pytest.raises(expected, match=message):
            read()


def test_no_checkpoint_is_called_damaged_for_another_reason(tmp_path, monkeypatch):
    model, optimizer = make(0)
    folder = save(tmp_path, 3, model, optimizer)
    failed = dcp.CheckpointException("", {0: (torch.OutOfMemoryError("none left"), None)})

    def fail(*_, **__):
        raise failed

    monkeypatch.setattr("training.checkpoint.dcp.load", fail)
    for read in (
        lambda: read_weights(folder),
        lambda: load_checkpoint(folder, model, optimizer, {"model.n_layer": 2}, ALONE),
    ):
        with pytest.raises(dcp.CheckpointException) as caught:
            read()
        assert caught.value is failed


def test_a_failed_save_leaves_the_older_checkpoint(tmp_path, monkeypatch):
    model, optimizer = make(0)
    save(tmp_path, 1, model, optimizer)

    def disk_full(*_, **__):
        cause = OSError(28, "No space left on device")
        raise dcp.CheckpointException("write", {0: (cause, None)})

    with monkeypatch.context() as patched:
        patched.setattr("training.checkpoint.dcp.save", disk_full)
        with pytest.raises(OSError, match=r"step_00000002 could not .*No space left.*make room"):
            save(tmp_path, 2, model, optimizer)
    assert latest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 1)
    save(tmp_path, 2, model, optimizer)
    assert latest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 2)


@contextmanager
def limited_files(size):
    """Let no file of this process grow past so many bytes: torch meets a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:  # before pytest writes its own report, into a file perhaps
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("width", "cause"), [(4, OSError), (500, RuntimeError)], ids=["in Python", "in torch"]
)
def test_a_full_disk_is_a_sentence(tmp_path, width, cause):
    model = nn.Linear(width, width)
    message = rf"^{tmp_path}/checkpoints/step_00000000 could not be written, .*disk may be full \("
    with limited_files(100 * width), pytest.raises(OSError, match=message) as caught:
        save_model(tmp_path, model, config={})
    assert isinstance(caught.value.__cause__, dcp.CheckpointException)
    assert type(caught.value.__cause__.failures[0][0]) is cause
    assert latest_checkpoint(tmp_path) is None


def test_no_disk_is_called_full_for_another_reason(tmp_path, monkeypatch):
    failed = dcp.CheckpointException("", {0: (torch.OutOfMemoryError("none left"), None)})

    def fail(*_, **__):
        raise failed

    monkeypatch.setattr("training.checkpoint.dcp.save", fail)
    with pytest.raises(dcp.CheckpointException) as caught:
        save_model(tmp_path, make(0)[0], config={})
    assert caught.value is failed


def test_weights_alone_can_be_loaded_and_not_gone_on_from(tmp_path):
    model, _ = make(0)
    folder = save_model(tmp_path, model, config={"a": 1})
    assert folder == latest_checkpoint(tmp_path) == checkpoint_folder(tmp_path, 0)
    again, again_optimizer = make(1)
    message = rf"holds weights and no state of an optimizer.*run.init_from={tmp_path}$"
    with pytest.raises(ValueError, match=message):
        load_checkpoint(folder, again, again_optimizer, {"model.n_layer": 2}, ALONE)
    assert read_progress(folder)[0] == Progress()
    again.load_state_dict(read_weights(folder))
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_weights_alone_do_not_replace_a_checkpoint(tmp_path):
    model, optimizer = make(0)
    save(tmp_path, 3, model, optimizer)
    with pytest.raises(ValueError, match="already has step_00000003: choose another folder"):
        save_model(tmp_path, model, config={})


def save_forever(run, first, steps):
    model, optimizer = make(0)
    for step in range(first, 10**6):
        save(run, step, model, optimizer)
        steps.send(step)


def test_killed_while_saving(tmp_path):
    """Whenever the process dies, what is found can be loaded, and is no older than was reported."""
    run = tmp_path / "run"
    reported = 0
    for delay in (0.0, 0.003, 0.011, 0.017):
        receiver, sender = multiprocessing.Pipe(duplex=False)
        process = start_process(save_forever, run, reported + 1, sender)
        sender.close()  # the other process has the only one that is left
        for _ in range(3):
            reported = receiver.recv()
        time.sleep(delay)
        process.kill()
        process.join()
        with suppress(EOFError):
            while True:
                reported = receiver.recv()
        found = latest_checkpoint(run)
        assert found is not None
        model, optimizer = make(1)
        progress = load_checkpoint(found, model, optimizer, {"model.n_layer": 2}, ALONE)
        assert progress.step >= reported
        reported = progress.step


def test_settings_that_are_newer_than_a_checkpoint_have_their_defaults(tmp_path):
    optim = {"max_steps": 5, "lr": 0.25, "betas": [0.5, 0.75], "batch_tokens": 64}
    state = {"config": {"optim": optim}}
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert read_optim(tmp_path) == AdamWConfig(max_steps=5, lr=0.25, betas=[0.5, 0.75])
    (tmp_path / "state.json").write_text(json.dumps({"config": {"optim": {"lr": 0.25}}}))
    with pytest.raises(ValueError, match="damaged"):
        read_optim(tmp_path)
