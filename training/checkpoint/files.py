"""Files of a checkpoint: tensors as safetensors, which hold no code, verified by sha256 sums."""

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
    """A checkpoint file is missing or damaged; the message names it."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write CPU tensors that share no memory, and wait until they are on disk.

    Raises:
        OSError: They cannot be written.
    """
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    path.chmod(
        path.parent.stat().st_mode & 0o666
    )  # safetensors makes it readable by its owner only
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a file, on the CPU.

    Raises:
        DamageError: It is not a safetensors file.
    """
    try:
        return load_file(path)
    except SafetensorError as error:
        raise DamageError(f"{path.name}: {error}") from error


def check_declared(path: Path, like: Mapping[str, Tensor]) -> None:
    """Compare names and shapes in the header of a file with the tensors that it must have.

    This rejects a wrong file before hashing it, whatever its size. dtypes are not compared.

    Raises:
        DamageError: It is not a safetensors file, or names or shapes differ.
    """
    with _as_damage(path.name):
        shapes = declared_shapes(path)
    for name in sorted(shapes.keys() | like.keys()):
        if name not in shapes or name not in like:
            problem = "has no tensor" if name in like else "has an unexpected tensor"
            raise DamageError(f"{path.name} {problem} {name}")
        if shapes[name] != (expected := tuple(like[name].shape)):
            raise DamageError(f"{name} in {path.name} is {shapes[name]} and must be {expected}")


def write_sums(folder: Path) -> None:
    """Write the sha256 of every file of a folder into its SHA256SUMS."""
    names = sorted(path.name for path in folder.iterdir())
    lines = [f"{sha256_of(folder / name)}  {name}\n" for name in names]
    write_atomically(folder / SUMS, "".join(lines).encode())


def read_checked(path: Path, sums: Mapping[str, str]) -> bytes:
    """Read a small file and verify its sha256.

    Raises:
        DamageError: The file was changed, or is missing or too large.
    """
    expected = _sum_of(path.name, sums)
    with _as_damage(path.name):
        check_size(path)
        content = path.read_bytes()
    _compare(path.name, hashlib.sha256(content).hexdigest(), expected)
    return content


def check_sums(folder: Path, sums: Mapping[str, str], names: Iterable[str]) -> None:
    """Verify tensor files against the sums from `read_sums`.

    Raises:
        DamageError: A file was changed or is missing.
    """
    for name in names:
        expected = _sum_of(name, sums)
        with _as_damage(name):
            declared_shapes(folder / name)  # rejects a wrong file before hashing, whatever its size
            actual = sha256_of(folder / name)
        _compare(name, actual, expected)


def _sum_of(name: str, sums: Mapping[str, str]) -> str:
    if name not in sums:
        raise DamageError(f"{SUMS} has no line for {name}")
    return sums[name]


def _compare(name: str, actual: str, expected: str) -> None:
    if actual != expected:
        raise DamageError(f"the sha256 of {name} does not match {SUMS}")


@contextmanager
def _as_damage(name: str) -> Iterator[None]:
    """Convert errors about a missing or invalid file to DamageError."""
    try:
        yield
    except FileNotFoundError as error:
        raise DamageError(f"{name} is missing") from error
    except ValueError as error:
        raise DamageError(f"{name}: {error}") from error


def read_sums(folder: Path) -> dict[str, str]:
    """Read the sums written by `write_sums`, by file name.

    Raises:
        DamageError: The file is missing, or has an invalid line.
    """
    with _as_damage(SUMS):
        *lines, rest = read_text(folder / SUMS).split("\n")
    sums = {}
    rows = [*lines, rest] if rest else lines
    for number, line in enumerate(rows, start=1):
        match = _LINE.fullmatch(line)
        if match is None:  # the line is not quoted: the file may be a link to something private
            raise DamageError(f"line {number} of {SUMS} is not a sha256 and a name")
        sums[match[2]] = match[1]
    return sums
