"""Sources of documents: the Hugging Face hub, local files, or Python's standard library.

A source yields its documents in a fixed order and assigns each to training or validation. Preparing
a corpus is therefore one pass that can start anywhere: `documents(start)` yields the documents from
number `start` on. `describe()` returns the settings that determine documents and splits, as JSON
values.
"""

import hashlib
import math
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from data.hub import from_hub
from data.text.local_files import LocalFiles
from data.text.readers import (
    MAX_DOCUMENT_BYTES,
    SUPPORTED,
    UnusableTextError,
    check_column,
    checked_text,
    file_format,
    holds_one_document,
    read_file,
)

OPENWEBTEXT = "Skylion007/openwebtext"
SPLIT_SEED = 2357  # nanoGPT's seed for splitting OpenWebText, used for all sources
HUB_VAL_RATIO = 0.0005
LOCAL_VAL_RATIO = 0.01

_HUB_ROWS_PER_READ = 256
_END_BYTES = 1 << 16


class Document(NamedTuple):
    """One document of a source."""

    number: int
    """Index in the order of the source."""
    split: str
    text: str
    done: float
    """Fraction of the source read up to the end of this document."""
    left_out: str | None = None
    """Reason why the document is not used, or None; if set, `text` is empty."""


class DocumentSource(Protocol):
    """Source of documents."""

    def describe(self) -> dict[str, Any]:
        """Settings that determine the documents and their splits, as JSON values."""
        ...

    def documents(self, start: int = 0) -> Iterator[Document]:
        """Yield the documents from number `start` on, in order."""
        ...


def load_document(
    number: int, split: str, load: Callable[[], str], done: float, *, skip_bad: bool
) -> Document:
    """Load the text of a document, or mark the document as left out if it cannot be used.

    Raises:
        ValueError: The document cannot be used, and `skip_bad` is false.
    """
    try:
        return Document(number, split, load(), done)
    except UnusableTextError as error:
        if not skip_bad:
            raise ValueError(f"{error}. --skip-bad leaves such documents out.") from error
        return Document(number, split, "", done, error.reason)


def split_of(number: int, val_ratio: float) -> str:
    """Assign a document to "train" or "val" by a keyed hash of its number."""
    key = SPLIT_SEED.to_bytes(8, "little")
    digest = hashlib.blake2b(number.to_bytes(8, "little"), key=key, digest_size=8).digest()
    return "val" if int.from_bytes(digest, "little") < val_ratio * 2**64 else "train"


@dataclass(frozen=True)
class HubSource:
    """Dataset on the Hugging Face hub, split as nanoGPT splits OpenWebText.

    All training documents come first, then all validation documents.
    """

    name: str
    config: str | None = None
    text_field: str = "text"
    val_ratio: float = HUB_VAL_RATIO
    skip_bad: bool = False

    def describe(self) -> dict[str, Any]:
        # Names and sizes instead of the commit: editing the dataset's page changes no document.
        files = self._splits["train"].info.download_checksums or {}
        listing = [f"{url.rpartition('/')[2]} {file['num_bytes']}" for url, file in files.items()]
        return {
            "kind": "hub",
            **asdict(self),
            "skip_bad": self.skip_bad or None,
            "listing_sha256": _sha256_of_lines(sorted(listing)),
        }

    def documents(self, start: int = 0) -> Iterator[Document]:
        total = sum(len(rows) for rows in self._splits.values())
        base = 0
        for split, rows in self._splits.items():
            for first in range(max(0, start - base), len(rows), _HUB_ROWS_PER_READ):
                texts = rows[first : first + _HUB_ROWS_PER_READ][self.text_field]
                for row, text in enumerate(texts, start=first):
                    where = f"{self.name}: field {self.text_field!r} of row {row} of {split}"
                    number = base + row
                    yield load_document(
                        number,
                        split,
                        partial(checked_text, text, where),
                        (number + 1) / total,
                        skip_bad=self.skip_bad,
                    )
            base += len(rows)

    @cached_property
    def _splits(self) -> dict[str, Any]:
        remedy = (
            "check the name and the network, or download the dataset on another machine (hf "
            f"download --repo-type dataset {self.name}) and pass its files: {SUPPORTED}"
        )
        with from_hub(f"{self.name} is not a local file, and as a dataset", remedy):
            import datasets

            rows = datasets.load_dataset(self.name, self.config, split="train")
        check_column(self.name, self.text_field, rows.column_names)
        halves = rows.select_columns([self.text_field]).train_test_split(
            test_size=self.val_ratio, seed=SPLIT_SEED, shuffle=True
        )
        return {"train": halves["train"], "val": halves["test"]}


@dataclass
class FileSource:
    """Local files in the given order; folders and globs in sorted order.

    Validation is either the files of `val`, read last, or a random fraction of the documents.
    """

    names: Sequence[str]
    val: Sequence[str] = ()
    val_ratio: float = LOCAL_VAL_RATIO
    text_field: str = "text"
    txt_separator: str | None = None
    as_text: bool = False
    """Read files of other formats as plain text."""
    skip_bad: bool = False
    """Leave out and count documents that are not text, or empty."""

    def __post_init__(self) -> None:
        if self.txt_separator == "":
            raise ValueError(
                "txt_separator must not be empty; leave it out for one document per file."
            )
        local_files = LocalFiles(self.as_text)
        train_files, val_files = local_files.find(self.names), local_files.find(self.val)
        files = train_files + val_files
        self._left_out_files = local_files.summary()
        self._val_files = set(val_files)
        self._sizes = {path: path.stat().st_size for path in files}
        if self.txt_separator and all(file_format(path) in ("jsonl", "parquet") for path in files):
            raise ValueError(
                f"txt_separator={self.txt_separator!r} has no effect without a .txt file; "
                "leave it out."
            )
        whole_files = [path for path in files if holds_one_document(path, self.txt_separator)]
        for path in whole_files:
            if self._sizes[path] > MAX_DOCUMENT_BYTES:
                # fail now: read_file would raise the same error, but perhaps after hours
                raise ValueError(
                    f"{path} has {self._sizes[path]:,} bytes, but one document in memory may have "
                    f"at most {MAX_DOCUMENT_BYTES:,}; pass the separator of its documents with "
                    "--txt-separator."
                )
        if whole_files == files and not self.val and not self.are_few():
            splits = {split_of(number, self.val_ratio) for number in range(len(files))}
            if len(splits) < 2:
                raise ValueError(empty_split_message(len(files), splits.pop()))

    def are_few(self) -> bool:
        """Whether `val_ratio` of the documents is less than one document."""
        n_needed = math.ceil(1 / self.val_ratio)
        return sum(1 for _ in islice(self._records(), n_needed)) < n_needed

    def describe(self) -> dict[str, Any]:
        listing = [
            f"{path.name} {size} {_fingerprint(path, size)}" for path, size in self._sizes.items()
        ]
        return {
            "kind": "files",
            "names": list(self.names),
            "val": list(self.val) or None,
            "val_ratio": None if self.val else self.val_ratio,
            "files": len(self._sizes),
            "bytes": sum(self._sizes.values()),
            "listing_sha256": _sha256_of_lines(listing),
            "text_field": self.text_field,
            "txt_separator": self.txt_separator,
            "as_text": self.as_text or None,
            "skip_bad": self.skip_bad or None,
            "left_out_files": self._left_out_files,
        }

    def documents(self, start: int = 0) -> Iterator[Document]:
        for number, (path, load, done) in enumerate(self._records()):
            if number < start:
                continue
            if self.val:
                split = "val" if path in self._val_files else "train"
            else:
                split = split_of(number, self.val_ratio)
            try:
                yield load_document(number, split, load, done, skip_bad=self.skip_bad)
            except MemoryError as error:
                raise ValueError(
                    f"{path}: document {number} takes more memory than there is, or than ulimit -v "
                    "allows; split it (a .txt file with --txt-separator, for example)."
                ) from error

    def _records(self) -> Iterator[tuple[Path, Callable[[], str], float]]:
        """Yield each document's file, a function that loads its text, and the fraction read."""
        total = max(1, sum(self._sizes.values()))
        read = 0
        for path, size in self._sizes.items():
            for load, done in read_file(path, self.text_field, self.txt_separator):
                yield path, load, (read + done * size) / total
            read += size


class StdlibSource:
    """Python files of the running interpreter's standard library, which is always available.

    They are ordered by a hash of the relative path, because neighbours in a folder are similar.
    Files that are not UTF-8 (a few of Python's own tests) are left out and counted in `describe()`.
    """

    def __init__(self, val_ratio: float = LOCAL_VAL_RATIO) -> None:
        self._val_ratio = val_ratio
        root = Path(sysconfig.get_paths()["stdlib"])
        names = [path.relative_to(root).as_posix() for path in _python_files(root)]
        names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
        self._files = [root / name for name in names if _is_utf8(root / name)]
        self._skipped = len(names) - len(self._files)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "stdlib",
            "python": platform.python_version(),
            "files": len(self._files),
            "bytes": sum(path.stat().st_size for path in self._files),
            "skipped_not_utf8": self._skipped,
            "val_ratio": self._val_ratio,
        }

    def documents(self, start: int = 0) -> Iterator[Document]:
        for number, path in enumerate(self._files[start:], start):
            text = path.read_bytes().decode("utf-8")
            split = split_of(number, self._val_ratio)
            yield Document(number, split, text, (number + 1) / len(self._files))


def empty_split_message(n_documents: int, full_split: str) -> str:
    """Error message for a corpus whose documents all fell into one split."""
    empty = "val" if full_split == "train" else "train"
    return (
        f"All {n_documents:,} documents fell into {full_split} and none into {empty}; pass --val "
        "FILE, another --val-ratio (0.1, for example), or, for a text file that holds many "
        "documents, --txt-separator."
    )


def _fingerprint(path: Path, size: int) -> str:
    """Hash of both ends of a file: cheap, and, unlike the mtime, equal for a copy."""
    with path.open("rb") as file:
        ends = file.read(_END_BYTES)
        file.seek(max(0, size - _END_BYTES))
        ends += file.read(_END_BYTES)
    return hashlib.blake2b(ends, digest_size=16).hexdigest()


def _sha256_of_lines(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _python_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        # prune: installed packages can have far more files than the library itself
        foreign = {"site-packages", "dist-packages", "__pycache__"}
        subfolders[:] = [name for name in subfolders if name not in foreign]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
