"""A checkpoint by name: best, a step or a folder."""

import shutil

import pytest

from tests.training.checkpoint.small import make, save
from training.checkpoint.choice import find_checkpoint
from training.checkpoint.folders import checkpoint_folder

LOSSES = {5: 3.0, 10: 1.0, 15: None, 20: 1.0, 25: 2.0}


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    for step, val_loss in LOSSES.items():
        save(folder, step, *make(0), keep_last=9, val_loss=val_loss)
    return folder


@pytest.mark.parametrize(
    ("choice", "step"),
    [(None, 25), ("best", 10), (15, 15), ("20", 20), ("step_00000005", 5), ("00000005", 5)],
)
def test_finds_the_chosen_checkpoint(run, choice, step):
    assert find_checkpoint(run, choice) == checkpoint_folder(run, step)


def test_a_folder_may_be_anywhere(run, tmp_path):
    mine = shutil.copytree(checkpoint_folder(run, 15), tmp_path / "mine")
    assert find_checkpoint(run, str(mine)) == mine
    copied = shutil.copytree(mine, run / "checkpoints" / "step_00000015_mine")
    assert find_checkpoint(run, copied.name) == copied


def test_a_name_is_looked_for_in_the_run_first(run, tmp_path, monkeypatch):
    shutil.copytree(checkpoint_folder(run, 15), tmp_path / "step_00000005")
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint(run, "step_00000005") == checkpoint_folder(run, 5)


@pytest.mark.parametrize("choice", ["7", 7, "worst", "step_7", "/", "-5"])
def test_errors_list_the_existing_checkpoints(run, choice):
    names = "step_00000005, step_00000010, step_00000015, step_00000020, step_00000025"
    with pytest.raises(FileNotFoundError, match=f"run has no checkpoint {choice}: it has {names}"):
        find_checkpoint(run, choice)


def test_a_run_without_a_validation_loss_has_no_best(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no checkpoint yet. Train it first"):
        find_checkpoint(tmp_path, "best")
    save(tmp_path, 5, *make(0))
    message = "has no checkpoint with a validation loss; only .*. Choose one of step_00000005"
    with pytest.raises(FileNotFoundError, match=message):
        find_checkpoint(tmp_path, "best")
