"""Which folders are checkpoints of a run: those named exactly as it names them, and no others.

What else lies beside them, as a copy that somebody made, is never counted and never deleted.
"""

import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from data.files import is_present, list_folder, read_text, write_atomically

CHECKPOINTS = "checkpoints"
UNFINISHED = ".unfinished_"
"""What the name of a checkpoint begins with while it is written or deleted."""
LAST_SAVED = "last_saved"
"""File in the folder of a run that names the checkpoint that was saved last.

It tells a run that never saved from one whose checkpoints are gone.
"""
_NAME = re.compile(r"step_([0-9]{8,})")


def checkpoint_folder(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies in the folder of a run."""
    return run / CHECKPOINTS / f"step_{step:08d}"


def step_of(checkpoint: Path) -> int | None:
    """The step that the name of a checkpoint tells; None of a folder that is none."""
    named = _NAME.fullmatch(checkpoint.name)
    if named is None or checkpoint.name != f"step_{int(named[1]):08d}":
        return None
    return int(named[1])


def checkpoints(run: Path) -> list[Path]:
    """The finished checkpoints of a run, oldest first; none where it has no such folder.

    Raises:
        OSError: The folder of checkpoints, or a link in it, cannot be read.
    """
    return sorted(_named(run, ""), key=lambda folder: step_of(folder) or 0)


def latest_checkpoint(run: Path) -> Path | None:
    """The newest finished checkpoint of a run, or None."""
    return next(reversed(checkpoints(run)), None)


def note_saved(checkpoint: Path) -> None:
    """Record in the folder of its run that a checkpoint was saved."""
    run = checkpoint.parent.parent
    write_atomically(run / LAST_SAVED, f"{checkpoint.name}\n".encode())


def last_saved(run: Path) -> str | None:
    """Name of the checkpoint that a run saved last, which may be gone; None if it never saved.

    Raises:
        ValueError: The file does not hold such a name.
    """
    path = run / LAST_SAVED
    if not is_present(path):
        return None
    name = read_text(path).strip()
    if step_of(Path(name)) is None:  # and not printed: it may link to something private
        raise ValueError(f"{path} does not name a checkpoint: delete it")
    return name


def forget_saved(run: Path) -> None:
    """Forget what an earlier run saved in this folder."""
    (run / LAST_SAVED).unlink(missing_ok=True)


def keep_only(run: Path, kept: Collection[Path]) -> None:
    """Delete the checkpoints of a run but those `kept`; links are left, as somebody made them."""
    for old in checkpoints(run):
        if old not in kept and not old.is_symlink():
            # Out of the finished ones first: a deletion that is cut short must not leave half.
            shutil.rmtree(old.rename(old.with_name(UNFINISHED + old.name)))


def clear_unfinished(run: Path) -> None:
    """Delete what killed processes left; only where no other process saves."""
    for left in _named(run, UNFINISHED):
        shutil.rmtree(left)


def _named(run: Path, prefix: str) -> Iterator[Path]:
    for path in list_folder(run / CHECKPOINTS):
        finished = path.with_name(path.name.removeprefix(prefix))
        is_named = path.name.startswith(prefix) and step_of(finished) is not None
        if is_named and is_present(path) and path.is_dir():
            yield path
