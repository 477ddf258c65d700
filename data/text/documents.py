"""Where the documents of a corpus come from: the hub, local files, or Python's standard library.

A source yields its documents in one fixed order and says for each whether it is for training or for
validation, so that preparing a corpus is one pass that can start anywhere.
"""

import glob
import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from data.text.readers import (
    MAX_DOCUMENT_BYTES,
    SUPPORTED,
    Record,
    holds_one_document,
    is_supported,
    read_file,
)

SPLITS = ("train", "val")
OPENWEBTEXT = "Skylion007/openwebtext"
SPLIT_SEED = 2357
"""nanoGPT's seed for splitting OpenWebText; other sources split by it too."""
HUB_VAL_RATIO = 0.0005
LOCAL_VAL_RATIO = 0.01

_HUB_ROWS_PER_READ = 256
_END_BYTES = 1 << 16


class Document(NamedTuple):
    """One document, its place in the source's order, and the share of the source read by then."""

    number: int
    split: str
    text: str
    done: float


class DocumentSource(Protocol):
    """A corpus as a fixed sequence of documents."""

    def describe(self) -> dict[str, Any]:
        """What decides the documents and their split, as plain JSON values."""
        ...

    def documents(self, start: int = 0) -> Iterator[Document]:
        """Yield the documents from number `start` on."""
        ...


def split_of(number: int, val_ratio: float) -> str:
    """Assign a document to "train" or "val" by a keyed hash of its number alone."""
    key = SPLIT_SEED.to_bytes(8, "little")
    digest = hashlib.blake2b(number.to_bytes(8, "little"), key=key, digest_size=8).digest()
    return "val" if int.from_bytes(digest, "little") < val_ratio * 2**64 else "train"


class HubSource:
    """A dataset of the Hugging Face hub, split as nanoGPT splits OpenWebText.

    All training documents come first, then all of validation.
    """

    def __init__(self, name: str, config: str | None, text_field: str, val_ratio: float) -> None:
        self.name = name
        self._config = config
        self._text_field = text_field
        self._val_ratio = val_ratio

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "hub",
            "name": self.name,
            "config": self._config,
            "text_field": self._text_field,
            "val_ratio": self._val_ratio,
            "listing_sha256": self._listing_sha256(),
        }

    def _listing_sha256(self) -> str:
        """Of the names and sizes of the dataset's files: a commit that edits its page is no change.

        Empty where the library keeps no such list.
        """
        rows = next(iter(self._splits.values()))
        files = rows.info.download_checksums or {}
        return _sha256_of_lines(
            sorted(f"{url.rpartition('/')[2]} {file['num_bytes']}" for url, file in files.items())
        )

    @property
    def is_nanogpt_openwebtext(self) -> bool:
        """Whether this is exactly the corpus whose token counts nanoGPT publishes."""
        asked_for = (self.name, self._config, self._text_field, self._val_ratio)
        return asked_for == (OPENWEBTEXT, None, "text", HUB_VAL_RATIO)

    def documents(self, start: int = 0) -> Iterator[Document]:
        total = sum(len(rows) for rows in self._splits.values())
        base = 0
        for split, rows in self._splits.items():
            for first in range(max(0, start - base), len(rows), _HUB_ROWS_PER_READ):
                texts = rows[first : first + _HUB_ROWS_PER_READ][self._text_field]
                for number, text in enumerate(texts, start=base + first):
                    if not isinstance(text, str):
                        raise ValueError(
                            f"{self.name}: field {self._text_field!r} of row {number - base} of "
                            f"{split} must be a string, but is {type(text).__name__}."
                        )
                    yield Document(number, split, text, (number + 1) / total)
            base += len(rows)

    @cached_property
    def _splits(self) -> dict[str, Any]:
        import datasets

        try:
            rows = datasets.load_dataset(self.name, self._config, split="train")
        except OSError as error:
            raise ValueError(
                f"{self.name!r} is neither a local file nor a dataset that could be loaded from "
                f"the Hugging Face hub ({error}); check the name and the network, or pass local "
                f"files: {SUPPORTED}."
            ) from error
        if self._text_field not in rows.column_names:
            raise ValueError(
                f"{self.name} has no column {self._text_field!r}, only {rows.column_names}; "
                "name the text's column with --text-field."
            )
        halves = rows.select_columns([self._text_field]).train_test_split(
            test_size=self._val_ratio, seed=SPLIT_SEED, shuffle=True
        )
        return {"train": halves["train"], "val": halves["test"]}


class FileSource:
    """Local files in the given order, folders and globs in sorted order.

    Validation is either the files of `val`, read after the rest, or a share drawn by document.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        val: Sequence[str] = (),
        val_ratio: float = LOCAL_VAL_RATIO,
        text_field: str = "text",
        txt_separator: str | None = None,
    ) -> None:
        if txt_separator == "":
            raise ValueError(
                "txt_separator must not be empty; leave it out for one document a file."
            )
        self._names = list(names)
        self._val_names = list(val)
        self._val_ratio = val_ratio
        self._text_field = text_field
        self._txt_separator = txt_separator
        train_files, val_files = _expand(names), _expand(val)
        self._files = train_files + val_files
        self._first_val_file = len(train_files) if val else None
        self._sizes = [path.stat().st_size for path in self._files]
        self._check()

    def describe(self) -> dict[str, Any]:
        listing = [
            f"{path.name} {size} {_fingerprint(path, size)}"
            for path, size in zip(self._files, self._sizes, strict=True)
        ]
        return {
            "kind": "files",
            "names": self._names,
            "val": self._val_names or None,
            "val_ratio": None if self._val_names else self._val_ratio,
            "files": len(self._files),
            "bytes": sum(self._sizes),
            "listing_sha256": _sha256_of_lines(listing),
            "text_field": self._text_field,
            "txt_separator": self._txt_separator,
        }

    def documents(self, start: int = 0) -> Iterator[Document]:
        for number, (split, (load, done)) in enumerate(self._records()):
            if number >= start:
                split = split or split_of(number, self._val_ratio)
                yield Document(number, split, load(), done)

    def _records(self) -> Iterator[tuple[str | None, Record]]:
        total = max(1, sum(self._sizes))
        read = 0
        for index, (path, size) in enumerate(zip(self._files, self._sizes, strict=True)):
            split = None
            if self._first_val_file is not None:
                split = "val" if index >= self._first_val_file else "train"
            records = read_file(
                path, text_field=self._text_field, txt_separator=self._txt_separator
            )
            for load, done in records:
                yield split, (load, (read + done * size) / total)
            read += size

    def _check(self) -> None:
        """Refuse before any work what cannot end well."""
        if self._txt_separator and not any(".txt" in path.name for path in self._files):
            raise ValueError(
                f"txt_separator={self._txt_separator!r} has no meaning without a .txt file; "
                "leave it out."
            )
        seen: set[Path] = set()
        for path in self._files:
            if (resolved := path.resolve()) in seen:
                raise ValueError(
                    f"{path} is given twice (a file must be in the corpus once, and not in both "
                    "train and val); remove one."
                )
            seen.add(resolved)
        for path, size in zip(self._files, self._sizes, strict=True):
            if size > MAX_DOCUMENT_BYTES and holds_one_document(path, self._txt_separator):
                # read_file would say it as well, but perhaps after hours
                raise ValueError(
                    f"{path} has {size:,} bytes, too many for one document in memory; name what "
                    "stands between its documents with --txt-separator."
                )
        whole_files = all(holds_one_document(path, self._txt_separator) for path in self._files)
        n_files = len(self._files)
        if whole_files and not self._val_names:
            splits = {split_of(number, self._val_ratio) for number in range(n_files)}
            if len(splits) < 2:
                raise ValueError(empty_split_message(n_files, splits.pop()))


class StdlibSource:
    """The Python files of the running interpreter's standard library: a corpus always at hand.

    The order is by a hash of the relative path, since neighbours in a folder are alike. Files that
    are not UTF-8 (a few of Python's own tests) are left out and counted in `describe()`.
    """

    def __init__(self, val_ratio: float = LOCAL_VAL_RATIO) -> None:
        self._val_ratio = val_ratio
        root = Path(sysconfig.get_paths()["stdlib"])
        own = [path.relative_to(root).as_posix() for path in _python_files(root)]
        own.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
        self._files = [root / name for name in own if _is_utf8(root / name)]
        self._skipped = len(own) - len(self._files)

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
        n_files = len(self._files)
        for number in range(start, n_files):
            text = self._files[number].read_bytes().decode("utf-8")
            split = split_of(number, self._val_ratio)
            yield Document(number, split, text, (number + 1) / n_files)


def empty_split_message(n_documents: int, full_split: str) -> str:
    """The sentence for a corpus all of whose documents fell into one split."""
    empty = "val" if full_split == "train" else "train"
    return (
        f"All {n_documents:,} documents fell into {full_split} and none into {empty}; pass --val "
        "FILE, another --val-ratio, or, for a text file that holds many documents, --txt-separator."
    )


def _expand(names: Sequence[str]) -> list[Path]:
    files: list[Path] = []
    for name in names:
        path = Path(name).expanduser()
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file() and is_supported(p))
        elif path.exists():
            found = [path] if is_supported(path) else []
        else:
            found = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
            found = [match for match in found if is_supported(match)]
        if not found:
            reason = "holds no file of a known format" if path.exists() else "matches no file"
            raise FileNotFoundError(f"{name!r} {reason}; the formats are {SUPPORTED}.")
        files += found
    return files


def _fingerprint(path: Path, size: int) -> str:
    """A hash of both ends of a file: cheap, and the same for a copy, as the time it has is not."""
    with path.open("rb") as file:
        ends = file.read(_END_BYTES)
        file.seek(max(0, size - _END_BYTES))
        ends += file.read(_END_BYTES)
    return hashlib.blake2b(ends, digest_size=16).hexdigest()


def _sha256_of_lines(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _python_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        # pruned here, since installed packages can be far more files than the library itself
        foreign = {"site-packages", "dist-packages", "__pycache__"}
        subfolders[:] = [name for name in subfolders if name not in foreign]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
