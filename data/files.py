"""Files that a crash leaves whole, in folders that one process at a time may write to."""

import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_UNFINISHED = ".unfinished"
_OURS = re.compile(rf".+\.[0-9]+\{_UNFINISHED}")
_SEAL = "sha256_of_the_rest"
_MIB = 1 << 20
LARGEST = {
    "SHA256SUMS": _MIB,
    "config.json": _MIB,
    "last_saved": _MIB,
    "state.json": _MIB,
    "wandb_id": _MIB,
    "environments.json": 16 * _MIB,
    ".verified.json": 64 * _MIB,
    "manifest.json": 64 * _MIB,
    "model.safetensors.index.json": 64 * _MIB,
    "tokenizer.json": 128 * _MIB,
}
"""Bytes of a file that is read as a whole, by its name. What is larger is not ours: whoever opens
somebody else's folder need not wait for it, nor hold it in memory."""
_LARGEST = 256 * _MIB
"""Bytes of files of other names, and of metrics.jsonl, which holds a million records in them."""
_BLOCK = 64 * _MIB  # bytes that are hashed at a time
_DEEPEST = 30  # objects and lists in each other
_NO_LOCK = (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Of file systems that cannot lock a folder; NFS locks only what is open for writing (flock(2))."""


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a crash leaves the old one or the new one, never a part.

    Several processes may write the same file: one of them is the last. A failure, as on a full
    disk, leaves nothing behind; a process that is killed may leave its unfinished file.
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
        if _OURS.fullmatch(path.name):
            path.unlink()


@contextmanager
def lock_folder(folder: Path, refusal: str = "") -> Iterator[None]:
    """Hold the lock of a folder, which the system frees when this process ends in any way.

    The folder itself is locked, so no lock file lies in it. Where the file system has no locks, as
    NFS, a warning says so, and nobody is kept out.

    Raises:
        ValueError: another process holds the lock, or this one does already; it says `refusal`.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                refusal or f"{folder} is being prepared by another process; wait for it or end it."
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCK:
                raise
            warnings.warn(
                f"the file system of {folder} cannot lock it ({error.strerror}): see to it that no "
                "second process writes there",
                stacklevel=1,
            )
        yield
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Wait until new and renamed entries of a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def damaged(path: Path, problem: str, remedy: str = "prepare the folder again") -> ValueError:
    """The error for a file that is not as it was written: what is wrong, and what to do."""
    return ValueError(f"{path} {problem}; {remedy}.")


def load_json(path: Path, remedy: str = "prepare the folder again") -> dict[str, Any]:
    """Read a JSON object; raises ValueError, which ends with the remedy, where it is damaged."""
    try:
        values = parse_json(read_text(path))
        if not isinstance(values, dict):
            raise ValueError(f"it holds {type(values).__name__}, not an object")
    except ValueError as error:
        raise damaged(path, f"is damaged ({error})", remedy) from error
    return values


def read_text(path: Path) -> str:
    """Text of a file that `check_size` lets pass; raises ValueError where it is not UTF-8."""
    check_size(path)
    return path.read_text(encoding="utf-8")


def check_size(path: Path) -> None:
    """Refuse a file that is not regular, or larger than one of its name may be (ValueError)."""
    check_regular(path)
    largest = LARGEST.get(path.name, _LARGEST)
    if (size := path.stat().st_size) > largest:
        raise ValueError(f"{path} has {size} bytes, and may have {largest}")


def check_regular(path: Path) -> None:
    """Refuse a pipe, which would be waited for, a device and a folder (ValueError)."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is no regular file")


def sha256_of(path: Path) -> str:
    """The sha256 of a regular file, in hexadecimal.

    It is not mapped: a file that is cut while it is mapped ends the process by SIGBUS.
    """
    check_regular(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        # Large blocks, as other threads of Python may wait for a moment between two of them.
        block = memoryview(bytearray(min(_BLOCK, os.fstat(file.fileno()).st_size) or 1))
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def is_present(path: Path) -> bool:
    """Whether there is a file or folder, which may be reached by a link.

    Raises:
        OSError: A link leads nowhere, as to a disk that is not mounted, or the path may not be
            looked at. Neither means that there is nothing.
    """
    try:
        path.stat()
    except FileNotFoundError as error:
        if path.is_symlink():
            raise OSError(
                f"{path} links to {path.readlink()}, which does not exist: mount its disk, or "
                "remove the link"
            ) from error
        return False
    except NotADirectoryError:  # a file has the name of one of its folders
        return False
    return True


def list_folder(folder: Path) -> list[Path]:
    """Contents of a folder in the order of their names; nothing where there is no folder.

    `Path.glob` also gives nothing where the folder cannot be read.

    Raises:
        OSError: It exists and cannot be listed.
    """
    if not is_present(folder):
        return []
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise OSError(
            f"{folder} cannot be listed ({error.strerror}): it must be a folder that this user may "
            "read"
        ) from error


def identity(path: Path) -> tuple[int, int] | None:
    """Device and number of what has this name at present; None where nothing has it."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def parse_json(text: str | bytes) -> Any:
    """Values of a JSON text; raises ValueError where it is not JSON or nested too deeply."""
    try:
        values = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    _check_depth(values)
    return values


def _check_depth(values: Any) -> None:
    """Refuse what those who walk through it could not: they recurse."""
    level = [values]
    for _ in range(_DEEPEST + 1):
        level = [each for each in level if isinstance(each, (dict, list))]
        if not level:
            return
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [item for items in inner for item in items]
    raise ValueError("it is nested too deeply")


def sealed(values: dict[str, Any]) -> dict[str, Any]:
    """The values and a sha256 of them, which `load_sealed` compares."""
    return values | {_SEAL: _seal(values)}


def load_sealed(path: Path, remedy: str = "prepare the folder again") -> dict[str, Any]:
    """Read a JSON object without its seal, which one of version 0.2 or older does not have.

    Raises ValueError, which ends with the remedy, where it is damaged or was changed by hand.
    """
    values = load_json(path, remedy)
    seal = values.pop(_SEAL, None)
    if seal is not None and seal != _seal(values):
        problem = "is damaged (its sha256 is not that of its content), or was changed by hand"
        raise damaged(path, problem, remedy)
    return values


def load_manifest(path: Path, version: int, make: Callable[[dict[str, Any]], T], remedy: str) -> T:
    """Read a sealed JSON object of this format_version as what `make` makes of it.

    Raises ValueError also where it is of another version, or lacks what `make` looks up.
    """
    values = load_sealed(path, remedy)
    if (found := values.get("format_version")) != version:
        raise damaged(path, f"has format_version={found}, but this code reads {version}", remedy)
    try:
        return make(values)
    except (KeyError, TypeError, AttributeError) as error:
        raise damaged(path, f"lacks what a manifest must have ({error})", remedy) from error


def _seal(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def to_json(values: dict[str, Any]) -> bytes:
    """JSON for people and for byte-identical files."""
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def check_settings(
    folder: Path, before: dict[str, Any], now: dict[str, Any], but: Collection[str] = ()
) -> None:
    """Refuse to continue in a folder that was begun with other settings, naming the differences.

    `but` are the names of those that may differ, "group.name" where they are nested.
    """
    if changes := differing(before, now, but):
        raise ValueError(
            f"{folder} holds work of other settings ({'; '.join(changes)}); repeat those settings, "
            "choose another --out folder, or delete this one."
        )


def differing(there: dict[str, Any], here: dict[str, Any], but: Collection[str] = ()) -> list[str]:
    """Settings, "group.name" where they are nested, that are not equal, each with both values."""
    old, new = dict(leaves(there)), dict(leaves(here))
    return [
        f"{name} is {old.get(name)!r} there and {new.get(name)!r} here"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and name not in but
    ]


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of settings, "group.name" where they are nested."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
