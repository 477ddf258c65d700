"""Files that a crash leaves whole."""

import os
from pathlib import Path

_UNFINISHED = ".unfinished"


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a crash leaves the old one or the new one, never a part.

    Also where several processes write the same file: one of them is the last. Where that fails, as
    on a full disk, nothing is left behind; a process that is killed may leave its unfinished one.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}{_UNFINISHED}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def remove_unfinished_files(folder: Path) -> None:
    """Delete what killed processes left; only for a folder that no other process writes to."""
    for path in folder.glob(f"*{_UNFINISHED}"):
        path.unlink()


def sync_folder(folder: Path) -> None:
    """Wait until new and renamed entries of a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
