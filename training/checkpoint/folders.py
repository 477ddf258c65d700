"""Find, name and delete the checkpoint folders of a run.

Only folders with an exact checkpoint name count. Any others, such as a user's copy of a checkpoint,
are never used and never deleted.
"""

import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from data.files import is_present, list_folder, read_text, write_atomically

CHECKPOINTS = "checkpoints"
UNFINISHED = ".unfinished_"
"""Prefix of a checkpoint's name while it is being written or deleted."""
LAST_SAVED = "last_saved"
"""File in the folder of a run that names its last saved checkpoint.

It distinguishes a run that never saved from one whose checkpoints were removed.
"""
_NAME = re.compile(r"step_([0-9]{8,})")


def checkpoint_folder(run: Path, step: int) -> Path:
    """Path of the checkpoint of a step."""
    return run / CHECKPOINTS / f"step_{step:08d}"


def step_of(checkpoint: Path) -> int | None:
    """Step of a checkpoint, from its name; None if the folder is not a checkpoint."""
    match = _NAME.fullmatch(checkpoint.name)
    if match is None or checkpoint.name != f"step_{int(match[1]):08d}":
        return None
    return int(match[1])


def checkpoints(run: Path) -> list[Path]:
    """Finished checkpoints of a run, oldest first; empty if there is no folder of checkpoints.

    Raises:
        OSError: The folder of checkpoints, or a link in it, cannot be read.
    """
    return sorted(_named(run, ""), key=lambda folder: step_of(folder) or 0)


def latest_checkpoint(run: Path) -> Path | None:
    """Newest finished checkpoint of a run, or None."""
    return next(reversed(checkpoints(run)), None)


def record_last_saved(checkpoint: Path) -> None:
    """Record a checkpoint as the last saved one of its run."""
    run = checkpoint.parent.parent
    write_atomically(run / LAST_SAVED, f"{checkpoint.name}\n".encode())


def last_saved(run: Path) -> str | None:
    """Name of the last checkpoint that a run saved, even if it was removed; None if it never saved.

    Raises:
        ValueError: The file does not contain such a name.
    """
    path = run / LAST_SAVED
    if not is_present(path):
        return None
    name = read_text(path).strip()
    if step_of(Path(name)) is None:  # not quoted: the file may be a link to something private
        raise ValueError(f"{path} must contain the name of a checkpoint. Delete it")
    return name


def clear_last_saved(run: Path) -> None:
    """Delete the record of the last checkpoint saved in this folder."""
    (run / LAST_SAVED).unlink(missing_ok=True)


def delete_except(run: Path, kept: Collection[Path]) -> None:
    """Delete all checkpoints of a run except those `kept`; links stay, as the user made them."""
    for old in checkpoints(run):
        if old not in kept and not old.is_symlink():
            # Rename first, so that an interrupted deletion does not leave half a checkpoint.
            shutil.rmtree(old.rename(old.with_name(UNFINISHED + old.name)))


def clear_unfinished(run: Path) -> None:
    """Delete unfinished checkpoints of killed processes; call only if no other process saves."""
    for unfinished in _named(run, UNFINISHED):
        shutil.rmtree(unfinished)


def _named(run: Path, prefix: str) -> Iterator[Path]:
    for path in list_folder(run / CHECKPOINTS):
        finished = path.with_name(path.name.removeprefix(prefix))
        is_named = path.name.startswith(prefix) and step_of(finished) is not None
        if is_named and is_present(path) and path.is_dir():
            yield path
