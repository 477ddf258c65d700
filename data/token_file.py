"""Reader of one file of token ids that notices every change of the file during a run."""

import hashlib
import os
import weakref
from pathlib import Path

import numpy as np

from data.files import check_regular, damaged


class TokenFile:
    """Token ids of a shard or of an .npy file.

    The ids are read from the open file instead of a memory map: if a mapped file is truncated,
    SIGBUS ends the process without a message. If the path is replaced, the old file is still read.
    """

    def __init__(
        self, path: Path, *, tokens: int, dtype: np.dtype, sha256: str, offset: int = 0
    ) -> None:
        """Open the file.

        Args:
            sha256: Hash of the whole file.
            offset: Byte at which the ids begin.

        Raises:
            FileNotFoundError: The file is missing.
            ValueError: The size of the file does not match `tokens` ids.
        """
        self.path, self._tokens, self._sha256 = path, tokens, sha256
        self._dtype, self._offset = dtype, offset
        try:
            check_regular(path)  # opening a pipe would block until it has a writer
            self._file = os.open(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{path} is missing; prepare the folder again.") from error
        weakref.finalize(self, os.close, self._file).atexit = False  # threads may still read
        self._state = self._check_size()

    def __len__(self) -> int:
        """Number of tokens in the file."""
        return self._tokens

    def read(self, first: int, n: int) -> np.ndarray:
        """Read token ids [first, first + n) in their stored dtype: (n,).

        Raises:
            ValueError: The file has changed since it was opened, and its sha256 no longer matches.
        """
        ids = self._read(first, n)
        # A write updates the mtime before the content. If the mtime is unchanged now, the ids are
        # the original ones. The mtime alone may change, for example by `touch`.
        if self._read_state() != self._state:
            self._state = self._check_size()
            self.check_sha256()
            ids = self._read(first, n)
        return ids

    def check_sha256(self) -> np.ndarray:
        """Read all token ids and verify their sha256.

        Raises:
            ValueError: The sha256 does not match.
        """
        ids = self._read(0, self._tokens)
        digest = hashlib.sha256(os.pread(self._file, self._offset, 0))
        digest.update(ids.data)
        if (actual := digest.hexdigest()) != self._sha256:
            expected = f"but the manifest says {self._sha256}; the file is damaged"
            raise damaged(self.path, f"has sha256={actual}, {expected}")
        return ids

    def _read(self, first: int, n: int) -> np.ndarray:
        ids, offset = np.empty(n, self._dtype), self._offset + first * self._dtype.itemsize
        filled = os.preadv(self._file, [ids.data], offset)
        while filled < ids.nbytes:  # one call reads at most 2 GiB
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
            declared = f"{self._tokens} tokens of {self._dtype.itemsize} bytes, {expected} in all"
            problem = f"is torn: it has {size} bytes, but the manifest says {declared}"
            raise damaged(self.path, problem, "copy or prepare it again")
        return state

    def _read_state(self) -> tuple[int, int]:
        status = os.fstat(self._file)
        return status.st_size, status.st_mtime_ns
