"""Appends the documents of one split to token shards so that a killed run can go on.

Files only ever grow. A commit syncs them and returns the counts that are safe; whoever stores those
counts can later reopen the writer with them, and it cuts off whatever was written after.
"""

import hashlib
import os
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data.files import write_atomically
from data.text.shards import ShardInfo, SplitInfo, offsets_name


class ShardWriter:
    """Writes one split. A shard ends with the document that brings it to `shard_tokens` or more,
    so the borders depend on the documents alone, and a shard holds at least one whole document."""

    def __init__(
        self,
        folder: Path,
        split: str,
        done: SplitInfo,
        *,
        dtype: str,
        eot_id: int,
        vocab_size: int,
        shard_tokens: int,
    ) -> None:
        """Open at the committed state `done`, which is `SplitInfo()` at the beginning.

        Raises:
            ValueError: The file on disk is shorter than the committed state says.
        """
        self._folder = folder
        self._split = split
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._eot_id = eot_id
        self._vocab_size = vocab_size
        self._shard_tokens = shard_tokens
        self.info = done
        """Counts so far, the current document included."""
        self._open_tokens = done.tokens - sum(shard.tokens for shard in done.shards)
        self._file: BinaryIO | None = None
        if self._open_tokens:
            self._file = self._reopen()

    def append(self, ids: list[int]) -> None:
        """Add token ids to the current document.

        Raises:
            ValueError: An id is outside the vocabulary.
        """
        if not ids:
            return
        array = np.array(ids, dtype=np.int64)
        if (largest := int(array.max())) >= self._vocab_size:
            raise ValueError(
                f"The tokenizer made token id {largest}, which must be below its "
                f"vocab_size={self._vocab_size}; its tokenizer.json contradicts itself."
            )
        if self._file is None:
            self._file = self._path().open("wb")
        self._file.write(array.astype(self._dtype).tobytes())
        self._open_tokens += len(ids)
        self.info = replace(self.info, tokens=self.info.tokens + len(ids))

    def end_document(self, text_bytes: int) -> None:
        """End the current document, and its shard where that is full."""
        self.append([self._eot_id])
        self.info = replace(
            self.info,
            documents=self.info.documents + 1,
            text_bytes=self.info.text_bytes + text_bytes,
        )
        if self._open_tokens >= self._shard_tokens:
            self.close_shard()

    def commit(self) -> SplitInfo:
        """Bring everything to the disk; call between documents. Returns the counts so far."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        return self.info

    def close_shard(self) -> None:
        """Finish the current shard, if there is one."""
        self.commit()
        if self._file is None:
            return
        self._file.close()
        self._file = None
        path = self._path()
        ids = np.fromfile(path, dtype=self._dtype)
        # text never encodes to the end-of-text id, so the ids themselves tell the documents apart
        ends = np.flatnonzero(ids == self._eot_id)
        documents = self.info.documents - sum(shard.documents for shard in self.info.shards)
        if len(ends) != documents:
            raise ValueError(
                f"{path} holds {len(ends)} ends of text (id {self._eot_id}) for {documents} "
                "documents: the tokenizer turns ordinary text into that id; choose another one."
            )
        offsets = BytesIO()
        np.save(offsets, np.concatenate([[0], ends[:-1] + 1]).astype(np.int64))
        write_atomically(self._folder / offsets_name(path.name), offsets.getvalue())
        shard = ShardInfo(
            name=path.name,
            tokens=len(ids),
            documents=documents,
            sha256=hashlib.sha256(ids.data).hexdigest(),
        )
        self.info = replace(self.info, shards=(*self.info.shards, shard))
        self._open_tokens = 0

    def release(self) -> None:
        """Close the file without finishing the shard."""
        if self._file is not None:
            self._file.close()

    def _path(self) -> Path:
        return self._folder / f"{self._split}_{len(self.info.shards):05d}.bin"

    def _reopen(self) -> BinaryIO:
        path = self._path()
        committed = self._open_tokens * self._dtype.itemsize
        size = path.stat().st_size if path.exists() else 0
        if size < committed:
            raise ValueError(
                f"{path} has {size} bytes, but {committed} were written before the last run "
                f"stopped; delete {self._folder} and prepare it again."
            )
        file = path.open("r+b")
        file.truncate(committed)
        file.seek(committed)
        return file
