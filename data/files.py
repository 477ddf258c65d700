"""Crash-safe files, and folders that only one process at a time may write to."""

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
_UNFINISHED_NAME = re.compile(rf".+\.[0-9]+\{_UNFINISHED}")
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
"""Size limit in bytes of each file that is read as a whole, by its name.

Papilio writes no larger ones. The limit protects readers of an untrusted folder from long reads and
full memory."""
_LARGEST = 256 * _MIB
"""Size limit in bytes of files with other names. A metrics.jsonl of this size has a million
records."""
_BLOCK = 64 * _MIB  # bytes that are hashed at a time
_MAX_DEPTH = 30  # nested objects and lists
_NO_LOCK = (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Errors of file systems that cannot lock a folder.

NFS only locks files that are open for writing (flock(2))."""


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file atomically: after a crash, either the old or the new content is there.

    Several processes may write the same file; the last one wins. A failure, such as a full disk,
    leaves nothing behind. A killed process may leave its unfinished file.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}{_UNFINISHED}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # Rename only now: a crash after the rename must not leave a name without its content.
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def remove_unfinished_files(folder: Path) -> None:
    """Delete the files that killed processes left; no other process may write to the folder."""
    for path in folder.glob(f"*{_UNFINISHED}"):
        if _UNFINISHED_NAME.fullmatch(path.name):
            path.unlink()


@contextmanager
def lock_folder(folder: Path, refusal: str = "") -> Iterator[None]:
    """Hold the lock of a folder; the system releases it when this process ends, however it ends.

    The folder itself is locked, so there is no lock file. If the file system has no locks (NFS, for
    example), a warning is issued and other processes are not kept out.

    Raises:
        ValueError: Another process, or this one, already holds the lock. The message is `refusal`.
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
                f"the file system of {folder} cannot lock it ({error.strerror}): make sure that no "
                "other process writes to it",
                stacklevel=1,
            )
        yield
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Flush new and renamed entries of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def damaged(path: Path, problem: str, remedy: str = "prepare the folder again") -> ValueError:
    """Build the error for a damaged file: what is wrong with it, and what to do."""
    return ValueError(f"{path} {problem}; {remedy}.")


def load_json(path: Path, remedy: str = "prepare the folder again") -> dict[str, Any]:
    """Read a JSON object; if it is damaged, raise a ValueError that ends with `remedy`."""
    try:
        values = parse_json(read_text(path))
        if not isinstance(values, dict):
            raise ValueError(f"it holds {type(values).__name__}, not an object")
    except ValueError as error:
        raise damaged(path, f"is damaged ({error})", remedy) from error
    return values


def read_text(path: Path) -> str:
    """Read a UTF-8 file within its size limit; raises ValueError if it is larger or not UTF-8."""
    check_size(path)
    return path.read_text(encoding="utf-8")


def check_size(path: Path) -> None:
    """Raise ValueError if a file is not regular, or exceeds the size limit for its name."""
    check_regular(path)
    largest = LARGEST.get(path.name, _LARGEST)
    if (size := path.stat().st_size) > largest:
        raise ValueError(f"{path} has {size} bytes, but at most {largest} are allowed")


def check_regular(path: Path) -> None:
    """Raise ValueError for a folder, a device, or a pipe, whose reader would block."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is not a regular file")


def sha256_of(path: Path) -> str:
    """SHA-256 of a regular file, in hexadecimal.

    The file is not memory-mapped: if a mapped file is truncated, SIGBUS ends the process.
    """
    check_regular(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        # Large blocks: other Python threads may have to wait briefly between two of them.
        block = memoryview(bytearray(min(_BLOCK, os.fstat(file.fileno()).st_size) or 1))
        while count := file.readinto(block):
            digest.update(block[:count])
    return digest.hexdigest()


def is_present(path: Path) -> bool:
    """Whether a path names a file or folder, following links.

    Raises:
        OSError: A link is broken (for example because a disk is not mounted), or access is denied.
            Neither proves that the file does not exist.
    """
    try:
        path.stat()
    except FileNotFoundError as error:
        if path.is_symlink():
            raise OSError(
                f"{path} links to {path.readlink()}, which does not exist: mount its disk or "
                "remove the link"
            ) from error
        return False
    except NotADirectoryError:  # one of its parents is a file
        return False
    return True


def list_folder(folder: Path) -> list[Path]:
    """Contents of a folder, sorted by name; empty if the folder does not exist.

    Unlike `Path.glob`, this does not return an empty list for a folder that cannot be read.

    Raises:
        OSError: The folder exists but cannot be listed.
    """
    if not is_present(folder):
        return []
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise OSError(
            f"{folder} cannot be listed ({error.strerror}): it must be a folder that this user can "
            "read"
        ) from error


def identity(path: Path) -> tuple[int, int] | None:
    """Device and inode number of a path, or None if it does not exist."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raises ValueError if the text is not JSON or is nested too deeply."""
    try:
        values = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    _check_depth(values)
    return values


def _check_depth(values: Any) -> None:
    """Raise ValueError for values that are nested too deeply for recursive functions."""
    level = [values]
    for _ in range(_MAX_DEPTH + 1):
        level = [each for each in level if isinstance(each, (dict, list))]
        if not level:
            return
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [item for items in inner for item in items]
    raise ValueError("it is nested too deeply")


def sealed(values: dict[str, Any]) -> dict[str, Any]:
    """Add a SHA-256 of the values, which `load_sealed` verifies."""
    return values | {_SEAL: _seal(values)}


def load_sealed(path: Path, remedy: str = "prepare the folder again") -> dict[str, Any]:
    """Read a JSON object, and verify and remove its SHA-256.

    Files of version 0.2 and older have no SHA-256. If the file is damaged or was edited by hand,
    raises a ValueError that ends with `remedy`.
    """
    values = load_json(path, remedy)
    seal = values.pop(_SEAL, None)
    if seal is not None and seal != _seal(values):
        problem = "is damaged (its sha256 does not match its content), or was edited by hand"
        raise damaged(path, problem, remedy)
    return values


def load_manifest(path: Path, version: int, make: Callable[[dict[str, Any]], T], remedy: str) -> T:
    """Read a sealed JSON object with this format_version, and pass it to `make`.

    Raises ValueError if it is damaged, has another version, or lacks a field that `make` needs.
    """
    values = load_sealed(path, remedy)
    if (actual := values.get("format_version")) != version:
        raise damaged(path, f"has format_version={actual}, but this code reads {version}", remedy)
    try:
        return make(values)
    except (KeyError, TypeError, AttributeError) as error:
        raise damaged(path, f"lacks a field of a manifest ({error})", remedy) from error


def _seal(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def to_json(values: dict[str, Any]) -> bytes:
    """Format JSON so that it is readable, and identical byte for byte for equal values."""
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def check_settings(
    folder: Path, saved: dict[str, Any], current: dict[str, Any], ignored: Collection[str] = ()
) -> None:
    """Raise ValueError if a folder was begun with other settings, and list the differences.

    Settings in `ignored` may differ; nested ones are named "group.name".
    """
    if changes := differing(saved, current, ignored):
        raise ValueError(
            f"{folder} was begun with other settings ({'; '.join(changes)}); repeat them, choose "
            "another --out folder, or delete this one."
        )


def differing(
    saved: dict[str, Any], current: dict[str, Any], ignored: Collection[str] = ()
) -> list[str]:
    """Describe each setting that differs, with both values; nested ones are named "group.name"."""
    there, here = dict(leaves(saved)), dict(leaves(current))
    return [
        f"{name} is {there.get(name)!r} there and {here.get(name)!r} here"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name) and name not in ignored
    ]


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested settings to (name, value) pairs; nested names are "group.name"."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
