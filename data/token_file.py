"""One file of token ids, read so that no change of it during a run goes unnoticed."""

import hashlib
import os
import weakref
from pathlib import Path

import numpy as np

from data.files import check_regular, damaged


class TokenFile:
    """Token ids of a shard, or of an .npy file.

    They are read from the open file instead of a memory map: a file that is cut while it is mapped
    ends the process by SIGBUS, without a message. A file of this name that comes later is not read.
    """

    def __init__(
        self, path: Path, *, tokens: int, dtype: np.dtype, sha256: str, offset: int = 0
    ) -> None:
        """Open the file, whose ids begin at byte `offset`; `sha256` is that of all of it.

        Raises:
            FileNotFoundError: It is missing.
            ValueError: Its size is not that of `tokens` ids.
        """
        self.path, self._tokens, self._sha256 = path, tokens, sha256
        self._dtype, self._offset = dtype, offset
        try:
            check_regular(path)  # to open a pipe is to wait for its writer
            self._file = os.open(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{path} is missing; prepare the folder again.") from error
        weakref.finalize(self, os.close, self._file).atexit = False  # threads may still read
        self._state = self._check_size()

    def __len__(self) -> int:
        """Tokens in the file."""
        return self._tokens

    def read(self, first: int, n: int) -> np.ndarray:
        """Token ids [first, first + n) as they are stored: (n,).

        Raises:
            ValueError: The file was changed since it was opened, and its sha256 is another now.
        """
        ids = self._read(first, n)
        # A write changes the time before the content: what was read is what was there at the start.
        # The time alone may change, for example by `touch`.
        if self._read_state() != self._state:
            self._state = self._check_size()
            self.check_sha256()
            ids = self._read(first, n)
        return ids

    def check_sha256(self) -> np.ndarray:
        """All token ids, once their sha256 is found to be right.

        Raises:
            ValueError: It is another one.
        """
        ids = self._read(0, self._tokens)
        digest = hashlib.sha256(os.pread(self._file, self._offset, 0))
        digest.update(ids.data)
        if (found := digest.hexdigest()) != self._sha256:
            expected = f"but the manifest says {self._sha256}; the file is damaged"
            raise damaged(self.path, f"has sha256={found}, {expected}")
        return ids

    def _read(self, first: int, n: int) -> np.ndarray:
        ids, offset = np.empty(n, self._dtype), self._offset + first * self._dtype.itemsize
        filled = os.preadv(self._file, [ids.data], offset)
        while filled < ids.nbytes:  # one call reads 2 GiB at most
            count = os.preadv(self._file, [ids.view(np.uint8).data[filled:]], offset + filled)
            if count == 0:
                self._check_size()
                raise damaged(self.path, "was changed while it was read", "copy it again")
            filled += count
        return ids

    def _check_size(self) -> tuple[int, int]:
        state = self._read_state()
        size, expected = state[0], self._offset + self._tokens * self._dtype.itemsize
        if size != expected:
            must = f"{self._tokens} tokens of {self._dtype.itemsize} bytes, {expected} in all"
            problem = f"is torn: it has {size} bytes, but the manifest says {must}"
            raise damaged(self.path, problem, "copy or prepare it again")
        return state

    def _read_state(self) -> tuple[int, int]:
        found = os.fstat(self._file)
        return found.st_size, found.st_mtime_ns
