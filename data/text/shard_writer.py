"""Append documents to token shards so that a killed run can resume.

Files only ever grow, and progress.json holds counts that are safe: `ShardWriter.sync` flushes the
documents to disk before `PrepareState.save` writes the counts. When a resumed run opens its writers
with the loaded counts, everything that was written later is cut off.
"""

import hashlib
import os
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data.files import write_atomically
from data.text.shards import (
    ShardInfo,
    SplitInfo,
    TokenizerInfo,
    offsets_name,
    shard_name,
    token_dtype,
)
from data.text.tokenizer import TextTokenizer


@dataclass(eq=False)
class ShardWriter:
    """Writer of one split.

    A shard ends with the document that brings it to `shard_tokens` or more. The borders therefore
    depend only on the documents, and every shard holds at least one whole document.

    Raises:
        ValueError: The file on disk is shorter than the counts say.
    """

    folder: Path
    split: str
    info: SplitInfo
    """Counts to resume from; the writer updates them."""
    tokenizer: TextTokenizer | TokenizerInfo
    shard_tokens: int

    def __post_init__(self) -> None:
        self._dtype = np.dtype(token_dtype(self.tokenizer.vocab_size)).newbyteorder("<")
        self._open_tokens = self.info.tokens - sum(shard.tokens for shard in self.info.shards)
        self._file = self._reopen() if self._open_tokens else None

    def append(self, ids: list[int]) -> None:
        """Add token ids to the current document.

        Raises:
            ValueError: An id is outside the vocabulary.
        """
        array = np.array(ids, dtype=np.int64)
        if (largest := int(array.max(initial=0))) >= self.tokenizer.vocab_size:
            raise ValueError(
                f"The tokenizer produced token id {largest}, which must be below its "
                f"vocab_size={self.tokenizer.vocab_size}; its tokenizer.json contradicts itself."
            )
        if self._file is None:
            self._file = self._path().open("wb")
        self._file.write(array.astype(self._dtype).tobytes())
        self._open_tokens += len(ids)
        self.info.tokens += len(ids)

    def end_document(self, text_bytes: int) -> None:
        """End the current document, and its shard if that is full."""
        self.append([self.tokenizer.eot_id])
        self.info.documents += 1
        self.info.text_bytes += text_bytes
        if self._open_tokens >= self.shard_tokens:
            self.close_shard()

    def sync(self) -> None:
        """Flush everything to disk; call between documents."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close_shard(self) -> None:
        """Finish the current shard, if there is one."""
        if self._file is None:
            return
        self.sync()
        self._file.close()
        self._file = None
        path = self._path()
        ids = np.fromfile(path, dtype=self._dtype)
        # Text never encodes to the end-of-text id, so this id marks the ends of documents.
        eot_id = self.tokenizer.eot_id
        ends = np.flatnonzero(ids == eot_id)
        documents = self.info.documents - sum(shard.documents for shard in self.info.shards)
        if len(ends) != documents:
            raise ValueError(
                f"{path} holds {len(ends)} ends of text (id {eot_id}) for {documents} documents: "
                "the tokenizer turns ordinary text into that id; choose another one."
            )
        offsets = BytesIO()
        np.save(offsets, np.concatenate([[0], ends[:-1] + 1]).astype(np.int64))
        write_atomically(self.folder / offsets_name(path.name), offsets.getvalue())
        sha256 = hashlib.sha256(ids.data).hexdigest()
        self.info.shards.append(
            ShardInfo(name=path.name, tokens=len(ids), documents=documents, sha256=sha256)
        )
        self._open_tokens = 0

    def release(self) -> None:
        """Close the file without finishing the shard."""
        if self._file is not None:
            self._file.close()

    def _path(self) -> Path:
        return self.folder / shard_name(self.split, len(self.info.shards))

    def _reopen(self) -> BinaryIO:
        path = self._path()
        committed = self._open_tokens * self._dtype.itemsize
        size = path.stat().st_size if path.exists() else 0
        if size < committed:
            raise ValueError(
                f"{path} has {size} bytes, but {committed} were written before the last run "
                f"stopped; delete {self.folder} and prepare it again."
            )
        file = path.open("r+b")
        file.truncate(committed)
        file.seek(committed)
        return file
