"""Token shards: format of a prepared corpus on disk, and its reader as one stream of tokens.

    manifest.json             written last: a folder without it is not finished
    progress.json             present instead until then
    tokenizer.json            the tokenizer of the ids
    train_00000.bin ...       token ids, little endian uint16 (uint32 from 65,536 entries)
    train_00000.offsets.npy   int64, start of each document in that shard
    val_00000.bin ...

Every document ends with the end-of-text id, and shards hold whole documents.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from data.arrays import check_npy
from data.files import damaged, load_manifest, sealed, to_json, write_atomically
from data.token_file import TokenFile
from data.verified import Verified

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
PROGRESS = "progress.json"
TOKENIZER = "tokenizer.json"
SPLITS = ("train", "val")


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """One finished shard."""

    name: str
    """File name of the token ids, such as train_00000.bin."""
    tokens: int
    """Number of token ids in the file, including ends of text."""
    documents: int
    """Number of documents in the file, all complete."""
    sha256: str
    """SHA-256 of the whole file."""


@dataclass(kw_only=True)
class SplitInfo:
    """One split, "train" or "val"."""

    tokens: int = 0
    """Number of token ids, including one end of text per document."""
    documents: int = 0
    """Number of documents, including empty ones."""
    text_bytes: int = 0
    """UTF-8 bytes of the documents' text, the denominator of bits per byte."""
    shards: list[ShardInfo] = field(default_factory=list)
    """Finished shards, in stream order."""


def splits_from_json(values: dict[str, Any]) -> dict[str, SplitInfo]:
    """Convert the output of `dataclasses.asdict` back to splits by name."""
    return {
        split: SplitInfo(**info | {"shards": [ShardInfo(**shard) for shard in info["shards"]]})
        for split, info in values.items()
    }


def total(splits: dict[str, SplitInfo]) -> SplitInfo:
    """Sum the counts of all splits."""
    infos = splits.values()
    return SplitInfo(
        tokens=sum(info.tokens for info in infos),
        documents=sum(info.documents for info in infos),
        text_bytes=sum(info.text_bytes for info in infos),
        shards=[shard for info in infos for shard in info.shards],
    )


@dataclass(frozen=True, kw_only=True)
class TokenizerInfo:
    """Metadata of the tokenizer of the shards."""

    name: str
    """Name that the user passed."""
    sha256: str
    """Hash of its behaviour, see data/text/tokenizer.py."""
    vocab_size: int
    """Exclusive upper bound of all ids."""
    eot_id: int
    """Id that ends each document and occurs nowhere else."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of manifest.json."""

    format_version: int = FORMAT_VERSION
    """Version of the folder's layout."""
    settings: dict[str, Any]
    """Source, tokenizer and shard size as requested."""
    tokenizer: TokenizerInfo
    """Tokenizer of all ids."""
    dtype: str
    """"uint16" or "uint32", little endian."""
    splits: dict[str, SplitInfo]
    """Splits by name: "train" and "val"."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Number of documents that prepare_text --skip-bad left out, by reason."""

    def save(self, folder: Path) -> None:
        """Write manifest.json atomically."""
        write_atomically(folder / MANIFEST, to_json(sealed(asdict(self))))

    @staticmethod
    def load(folder: Path) -> "Manifest":
        """Read manifest.json.

        Raises:
            FileNotFoundError: The folder is missing, or its preparation is not finished.
            ValueError: The file is damaged or has another version.
        """
        if not (folder / MANIFEST).exists():
            if not folder.is_dir():
                problem = "does not exist; create it from text files, or folders of them, with"
            elif (folder / PROGRESS).exists():
                problem = "is not finished; run the prepare command again to resume"
            else:
                problem = (
                    f"holds no {MANIFEST}, so it is not a folder of token shards; create one with"
                )
            raise FileNotFoundError(
                f"{folder} {problem}: python -m scripts.prepare_text TEXT... --out {folder}"
            )

        def read(values: dict[str, Any]) -> Manifest:
            values["tokenizer"] = TokenizerInfo(**values["tokenizer"])
            values["splits"] = splits_from_json(values["splits"])
            manifest = Manifest(**values)
            for problem in _contradictions(manifest):
                raise damaged(folder / MANIFEST, f"contradicts itself: {problem}")
            return manifest

        return load_manifest(folder / MANIFEST, FORMAT_VERSION, read, "prepare the folder again")


def _contradictions(manifest: Manifest) -> Iterator[str]:
    """Yield the inconsistencies of a manifest, which no preparation writes."""
    shards = [shard for info in manifest.splits.values() for shard in info.shards]
    texts = [manifest.tokenizer.name, manifest.tokenizer.sha256, *(s.sha256 for s in shards)]
    if not all(isinstance(text, str) for text in texts) or not isinstance(manifest.settings, dict):
        yield "a name or sha256 is not text, or settings is not an object"
    vocab_size, eot_id = manifest.tokenizer.vocab_size, manifest.tokenizer.eot_id
    if not (type(vocab_size) is type(eot_id) is int and 0 <= eot_id < vocab_size < 2**32):
        yield f"vocab_size={vocab_size!r} and eot_id={eot_id!r}"
    if manifest.dtype != (expected := token_dtype(vocab_size)):
        yield f"dtype={manifest.dtype!r}, but ids below vocab_size={vocab_size} are {expected}"
    for split, info in manifest.splits.items():
        if split not in SPLITS:
            yield f"split {split!r} must be one of {', '.join(SPLITS)}"
        for number, shard in enumerate(info.shards):
            if shard.name != (name := shard_name(split, number)):
                yield f"shard {number} of {split} is {shard.name!r}, but must be {name}"
        for unit in ("tokens", "documents"):
            counts = [getattr(shard, unit) for shard in info.shards]
            split_count = getattr(info, unit)
            if not all(type(n) is int and n > 0 for n in counts) or sum(counts) != split_count:
                yield f"{split} has {split_count} {unit}, but its shards have {counts[:9]}"
        if type(info.text_bytes) is not int or info.text_bytes < 0:
            yield f"text_bytes={info.text_bytes!r} of {split}"
    if not all(type(count) is int and count > 0 for count in manifest.left_out.values()):
        yield f"left_out={manifest.left_out!r} must be counts"


class TokenStream:
    """One split as a single stream of token ids over all its shards, read from disk."""

    def __init__(self, path: str | Path, split: str) -> None:
        """Open a folder of shards; reads the manifest and the sizes of the files.

        Raises:
            FileNotFoundError: The folder, its manifest or a shard is missing.
            ValueError: The split is unknown, or the size of a shard does not match the manifest.
        """
        self.path = Path(path)
        self.split = split
        self.manifest = Manifest.load(self.path)
        if split not in self.manifest.splits:
            raise ValueError(
                f"split={split!r} must be one of {sorted(self.manifest.splits)} of {self.path}."
            )
        self.info = self.manifest.splits[split]
        dtype = self.manifest.dtype
        self._shards = [_open_shard(self.path, shard, dtype) for shard in self.info.shards]
        self._ends = np.cumsum([shard.tokens for shard in self.info.shards])

    def verify(self) -> None:
        """Verify every shard of the split that was not verified before.

        If a file is damaged or was replaced, raises a ValueError that names it.
        """
        verified = Verified(self.path)
        for shard in self.info.shards:
            files = [self.path / shard.name, self.path / offsets_name(shard.name)]
            check = partial(_verify_shard, self.path, self.manifest, shard)
            verified.check_once(files, shard.sha256, check)

    def __len__(self) -> int:
        """Number of tokens in the split."""
        return self.info.tokens

    def read(self, start: int, length: int) -> np.ndarray:
        """Read token ids [start, start + length) of the stream, across shard borders.

        Returns:
            int64 array (length,).

        Raises:
            IndexError: The range is not inside the stream.
            ValueError: An id is outside the tokenizer's vocabulary, or a shard was changed.
        """
        if start < 0 or length < 0 or start + length > len(self):
            raise IndexError(
                f"start={start}, length={length} must stay within the {len(self)} tokens of "
                f"{self.split} in {self.path}."
            )
        vocab_size = self.manifest.tokenizer.vocab_size
        ids = np.empty(length, dtype=np.int64)
        filled = 0
        index = int(np.searchsorted(self._ends, start, side="right"))
        while filled < length:
            shard = self._shards[index]
            first = start + filled - (int(self._ends[index]) - len(shard))
            part = shard.read(first, min(length - filled, len(shard) - first))
            if (largest := int(part.max())) >= vocab_size:
                raise damaged(
                    self.path / self.info.shards[index].name,
                    f"is damaged from token {first} on: token id {largest} must be below the "
                    f"tokenizer's vocab_size={vocab_size}",
                )
            ids[filled : filled + len(part)] = part
            filled += len(part)
            index += 1
        return ids

    @cached_property
    def document_starts(self) -> np.ndarray:
        """Stream position of the start of each document: int64 (documents,), ascending from 0."""
        shards = zip(self.info.shards, self._ends, strict=True)
        return np.concatenate(
            [end - shard.tokens + load_offsets(self.path, shard) for shard, end in shards]
        )


def token_dtype(vocab_size: int) -> str:
    """Storage dtype of ids below `vocab_size`: "uint16", or "uint32" from 65,536 entries."""
    return "uint16" if vocab_size < 1 << 16 else "uint32"


def shard_name(split: str, number: int) -> str:
    """File name of a shard's token ids; shards are numbered from 0."""
    return f"{split}_{number:05d}.bin"


def offsets_name(shard_name: str) -> str:
    """File name of a shard's document starts."""
    return shard_name.removesuffix(".bin") + ".offsets.npy"


def load_offsets(folder: Path, shard: ShardInfo) -> np.ndarray:
    """Load the start of each document in a shard: int64 (documents,), ascending from 0."""
    path = folder / offsets_name(shard.name)
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; prepare the folder again.")
    try:
        check_npy(path)
        offsets = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise damaged(path, f"is not a NumPy file ({error})") from error
    shape, actual = (shard.documents,), f"{offsets.dtype} {offsets.shape}"
    if offsets.shape != shape or offsets.dtype != np.int64:
        raise damaged(path, f"holds {actual}, but must hold int64 {shape}")
    if offsets[0] != 0 or not (np.diff(offsets, append=shard.tokens) > 0).all():
        end = f"the {shard.tokens} tokens of {shard.name}"
        raise damaged(path, f"must ascend from 0 and stay below {end}")
    return offsets


def verify(folder: Path, manifest: Manifest) -> None:
    """Verify every shard of a folder.

    Raises:
        ValueError: A checksum differs, an id is outside the vocabulary, or the document starts do
            not match; the message names the file.
    """
    for shard in total(manifest.splits).shards:
        _verify_shard(folder, manifest, shard)


def _verify_shard(folder: Path, manifest: Manifest, shard: ShardInfo) -> None:
    ids = _open_shard(folder, shard, manifest.dtype).check_sha256()
    vocab_size, eot_id = manifest.tokenizer.vocab_size, manifest.tokenizer.eot_id
    if (largest := int(ids.max())) >= vocab_size:
        limit = f"must be below the tokenizer's vocab_size={vocab_size}"
        raise damaged(folder / shard.name, f"holds token id {largest}, which {limit}")
    # this id ends each document and occurs nowhere else, so it determines where they start
    starts = np.concatenate([[0], np.flatnonzero(ids == eot_id) + 1])
    if starts[-1] != len(ids) or not np.array_equal(starts[:-1], load_offsets(folder, shard)):
        problem = f"is damaged: it does not match where the documents of {shard.name} start"
        raise damaged(folder / offsets_name(shard.name), problem)


def _open_shard(folder: Path, shard: ShardInfo, dtype: str) -> TokenFile:
    return TokenFile(
        folder / shard.name,
        tokens=shard.tokens,
        dtype=np.dtype(dtype).newbyteorder("<"),
        sha256=shard.sha256,
    )
