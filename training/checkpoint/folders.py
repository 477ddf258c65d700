"""Which folders are checkpoints of a run: those named exactly as it names them, and no others.

What else lies beside them, as a copy that somebody made, is never counted and never deleted.
"""

import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

CHECKPOINTS = "checkpoints"
UNFINISHED = ".unfinished_"
"""What the name of a checkpoint begins with while it is written or deleted."""
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
    """The finished checkpoints of a run, oldest first."""
    return sorted(_named(run, ""), key=lambda folder: step_of(folder) or 0)


def latest_checkpoint(run: Path) -> Path | None:
    """The newest finished checkpoint of a run, or None."""
    return next(reversed(checkpoints(run)), None)


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
    for path in (run / CHECKPOINTS).glob(f"{prefix}step_*"):
        if step_of(path.with_name(path.name.removeprefix(prefix))) is not None and path.is_dir():
            yield path
