"""Read untrusted NumPy files: the size that a header declares is checked before anything else."""

import math
import zipfile
import zlib
from pathlib import Path
from tokenize import TokenError
from typing import IO

import numpy as np

from data.files import check_regular

_MAX_BYTES = 1 << 32  # of all arrays of an .npz file, in memory
_MAX_ARRAYS = 10_000
_NOT_A_HEADER = (
    *(EOFError, KeyError, MemoryError, OverflowError, RecursionError, SyntaxError, TokenError),
    *(TypeError, ValueError),
)
_NOT_A_ZIP = (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, zlib.error)


def check_npy(path: Path) -> None:
    """Check that an .npy file has exactly the size that its header declares.

    Raises:
        ValueError: The size differs, or the file does not hold plain numbers.
        FileNotFoundError: The file does not exist.
    """
    check_regular(path)
    with path.open("rb") as file:
        _check_header(file, path.stat().st_size)


def load_npz(path: Path) -> dict[str, np.ndarray]:
    """Load the arrays of an .npz file, by name.

    Raises:
        ValueError: The file is damaged, or holds or declares more than 4 GiB.
        FileNotFoundError: The file does not exist.
    """
    check_regular(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            size = sum(member.file_size for member in members)
            if len(members) > _MAX_ARRAYS or size > _MAX_BYTES:
                raise ValueError(
                    f"it declares {len(members)} arrays of {size} bytes in all, but at most "
                    f"{_MAX_ARRAYS} arrays of {_MAX_BYTES} bytes are allowed"
                )
            if any(member.header_offset < 0 for member in members):
                raise ValueError("it declares an array that begins before the file")
            arrays = {}
            for member in members:
                with archive.open(member) as file:
                    _check_header(file, member.file_size)
                with archive.open(member) as file:
                    arrays[member.filename.removesuffix(".npy")] = np.lib.format.read_array(
                        file, allow_pickle=False
                    )
            return arrays
    except _NOT_A_ZIP as error:
        raise ValueError(f"it is not a complete .npz file: {error}") from error


def _check_header(file: IO[bytes], size: int) -> None:
    try:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version}")
        readers = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
        shape, _, dtype = readers[version[0]](file)
        valid_shape = all(type(n) is int and n >= 0 for n in shape)
    except _NOT_A_HEADER as error:
        raise ValueError(f"its header cannot be read ({type(error).__name__})") from error
    if not valid_shape or dtype.hasobject:
        raise ValueError(f"its header declares {shape} of {dtype}, not an array of plain numbers")
    declared = file.tell() + math.prod(shape) * dtype.itemsize
    if declared != size:
        raise ValueError(f"its header declares {declared} bytes, but it has {size}")
