"""The files of one checkpoint: tensors that hold no code, and sums that tell of any damage."""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from data.files import check_size, read_text, sha256_of, write_atomically
from data.tensor_files import declared_shapes

SUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([\w.]+)")


class DamageError(ValueError):
    """What is wrong with a file of a checkpoint, which the text names."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors of the CPU that share no memory, and wait until they are on disk.

    Raises:
        OSError: The disk does not take them.
    """
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors lets the owner alone read it
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, on the CPU.

    Raises:
        DamageError: It is no file of safetensors.
    """
    try:
        return load_file(path)
    except SafetensorError as error:
        raise DamageError(f"{path.name}: {error}") from error


def check_declared(path: Path, like: Mapping[str, Tensor]) -> None:
    """Compare the tensors that a file declares with those that it must have, before it is read.

    So nobody waits for the sum of a file of any size. dtypes are not compared.

    Raises:
        DamageError: It is no file of safetensors, or of other names or shapes.
    """
    with _naming(path.name):
        shapes = declared_shapes(path)
    for name in sorted(shapes.keys() | like.keys()):
        if name not in shapes or name not in like:
            what = "lacks" if name in like else "has the unknown"
            raise DamageError(f"{path.name} {what} {name}")
        if shapes[name] != (wanted := tuple(like[name].shape)):
            raise DamageError(f"{name} of {path.name} is {shapes[name]}, and must be {wanted}")


def write_sums(folder: Path) -> None:
    """Keep the sha256 of every file of a folder in it."""
    names = sorted(path.name for path in folder.iterdir())
    lines = [f"{sha256_of(folder / name)}  {name}\n" for name in names]
    write_atomically(folder / SUMS, "".join(lines).encode())


def read_checked(path: Path, sums: Mapping[str, str]) -> bytes:
    """The content of a small file, which must be as it was written.

    Raises:
        DamageError: It is not, or it is gone or too large.
    """
    expected = _sum_of(path.name, sums)
    with _naming(path.name):
        check_size(path)
        content = path.read_bytes()
    _compare(path.name, hashlib.sha256(content).hexdigest(), expected)
    return content


def check_sums(folder: Path, sums: Mapping[str, str], names: Iterable[str]) -> None:
    """Compare files of tensors with the sums that `read_sums` gave.

    Raises:
        DamageError: A file is not as it was written, or gone.
    """
    for name in names:
        expected = _sum_of(name, sums)
        with _naming(name):
            declared_shapes(folder / name)  # nobody waits for the sum of a file of any size
            found = sha256_of(folder / name)
        _compare(name, found, expected)


def _sum_of(name: str, sums: Mapping[str, str]) -> str:
    if name not in sums:
        raise DamageError(f"{SUMS} has no line for {name}")
    return sums[name]


def _compare(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise DamageError(f"{name} has another sha256 than {SUMS} says")


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Report a file that is gone or cannot be what it should be as damage."""
    try:
        yield
    except FileNotFoundError as error:
        raise DamageError(f"{name} is gone") from error
    except ValueError as error:
        raise DamageError(f"{name}: {error}") from error


def read_sums(folder: Path) -> dict[str, str]:
    """The sha256 that `write_sums` kept, by name of file.

    Raises:
        DamageError: Their file is gone, or a line of it is something else.
    """
    with _naming(SUMS):
        *lines, rest = read_text(folder / SUMS).split("\n")
    sums = {}
    rows = [*lines, rest] if rest else lines
    for number, line in enumerate(rows, start=1):
        found = _LINE.fullmatch(line)
        if found is None:  # which is not quoted: the file may be a link to something private
            raise DamageError(f"line {number} of {SUMS} is not a sha256 and a name")
        sums[found[2]] = found[1]
    return sums
