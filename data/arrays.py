"""NumPy files that may be somebody else's: what they declare is compared with their size first."""

import math
import zipfile
import zlib
from pathlib import Path
from tokenize import TokenError
from typing import IO

import numpy as np

from data.files import check_regular

_LARGEST = 1 << 32  # bytes that the arrays of an .npz file may have in memory
_MOST_ARRAYS = 10_000
_NOT_A_HEADER = (
    *(EOFError, KeyError, MemoryError, OverflowError, RecursionError, SyntaxError, TokenError),
    *(TypeError, ValueError),
)
_NOT_A_ZIP = (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, zlib.error)


def check_npy(path: Path) -> None:
    """Refuse an .npy file whose size is not that of the array which its header declares.

    Raises:
        ValueError: it is not, or it is not a file of plain numbers.
        FileNotFoundError: there is nothing.
    """
    check_regular(path)
    with path.open("rb") as file:
        _check_header(file, path.stat().st_size)


def load_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name.

    Raises:
        ValueError: it is damaged, or has or declares more than 4 GiB.
        FileNotFoundError: there is nothing.
    """
    check_regular(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            size = sum(member.file_size for member in members)
            if len(members) > _MOST_ARRAYS or size > _LARGEST:
                raise ValueError(
                    f"it declares {len(members)} arrays of {size} bytes, and may have "
                    f"{_MOST_ARRAYS} of {_LARGEST}"
                )
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
        raise ValueError(f"it is not a whole .npz file: {error}") from error


def _check_header(file: IO[bytes], size: int) -> None:
    try:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version}")
        read = {1: np.lib.format.read_array_header_1_0, 2: np.lib.format.read_array_header_2_0}
        shape, _, dtype = read[version[0]](file)
        whole = all(type(n) is int and n >= 0 for n in shape)
    except _NOT_A_HEADER as error:
        raise ValueError(f"its header cannot be read ({type(error).__name__})") from error
    if not whole or dtype.hasobject:
        raise ValueError(f"its header declares {shape} of {dtype}, which are not plain numbers")
    declared = file.tell() + math.prod(shape) * dtype.itemsize
    if declared != size:
        raise ValueError(f"its header declares {declared} bytes, and it has {size}")
