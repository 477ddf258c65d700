"""Only folders with an exact checkpoint name are treated as checkpoints, or deleted."""

import os

import pytest

from tests.training.checkpoint.small import make, save
from training.checkpoint.folders import (
    checkpoints,
    clear_unfinished,
    last_saved,
    latest_checkpoint,
)

THEIRS = [
    "step_00000015_best",
    "step_00000015.bak",
    "step_00000015 (copy)",
    "step_00000015.tar.gz",
    "step_15",
    "step_000000015",
    "step_٠٠٠٠٠٠١٥",
    ".unfinished_notes",
    ".unfinished_step_00000015_best",
]


@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize("name", THEIRS)
def test_folders_with_other_names_are_not_counted_or_deleted(tmp_path, name, as_file):
    model, optimizer = make(0)
    save(tmp_path, 5, model, optimizer)
    theirs = tmp_path / "checkpoints" / name
    if as_file:
        theirs.write_text("mine")
    else:
        theirs.mkdir()
        (theirs / "model.safetensors").write_text("mine")
    for step in (10, 15, 20):
        save(tmp_path, step, model, optimizer)
    clear_unfinished(tmp_path)
    assert [folder.name for folder in checkpoints(tmp_path)] == ["step_00000015", "step_00000020"]
    assert (theirs if as_file else theirs / "model.safetensors").read_text() == "mine"


def test_a_linked_checkpoint_counts_and_is_not_deleted(tmp_path):
    model, optimizer = make(0)
    elsewhere = save(tmp_path / "other", 3, model, optimizer)
    link = tmp_path / "checkpoints" / elsewhere.name
    link.parent.mkdir()
    link.symlink_to(elsewhere)
    assert latest_checkpoint(tmp_path) == link
    for step in (5, 10, 15):
        save(tmp_path, step, model, optimizer)
    assert link.exists() and elsewhere.exists()


def test_the_target_of_a_linked_last_saved_file_is_not_printed(tmp_path):
    (tmp_path / "private").write_text("s3cr3t")
    (tmp_path / "last_saved").symlink_to(tmp_path / "private")
    with pytest.raises(ValueError, match="must contain the name of a checkpoint. Delete it$"):
        last_saved(tmp_path)
    (tmp_path / "last_saved").unlink()
    os.mkfifo(tmp_path / "last_saved")
    with pytest.raises(ValueError, match="last_saved is not a regular file"):
        last_saved(tmp_path)


def test_the_newest_checkpoint_has_the_highest_step(tmp_path):
    for name in ("step_99999999", "step_100000000", "step_00000001"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert latest_checkpoint(tmp_path).name == "step_100000000"
    assert latest_checkpoint(tmp_path / "nothing") is None


def test_a_checkpoint_on_an_unmounted_disk_is_an_error(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step_00000005").symlink_to("/not/mounted")
    with pytest.raises(OSError, match="step_00000005 links to /not/mounted, which does not exist"):
        latest_checkpoint(tmp_path)
