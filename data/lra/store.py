"""Prepared tasks of Long Range Arena on disk: a folder with a manifest, and NumPy files per split.

    manifest.json               written last: a folder without it is not finished
    train.tokens.npy            kind "sequences": uint16, all sequences end to end, no padding
    train.offsets.npy           int64 (n_sequences + 1,), start of each sequence, then the end
    train.labels.npy            uint8 (n_examples,)
    train.images.npy            kind "images": uint8 (n_examples, height, width), and labels
    train.display_lists.npy     kind "display_lists": structured, see data/pathfinder
    val...., test....

Token ids start at 1; 0 is reserved for padding. In a task with two documents per example
(Retrieval), example i consists of documents 2i and 2i + 1.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from data.arrays import check_npy
from data.files import check_regular, damaged, load_manifest, sha256_of
from data.token_file import TokenFile
from data.verified import Verified

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "val", "test")
REMEDY = "prepare the task again"


@dataclass(frozen=True, kw_only=True)
class ArrayInfo:
    """One .npy file."""

    shape: list[int]
    dtype: Any
    """Value of numpy.lib.format.dtype_to_descr after conversion to JSON and back."""
    sha256: str
    """SHA-256 of the whole file."""

    def __post_init__(self) -> None:
        sizes = self.shape if isinstance(self.shape, list) else [None]
        if not all(type(n) is int and n >= 0 for n in sizes) or not isinstance(self.sha256, str):
            raise TypeError("an array without a shape and a sha256")


@dataclass(frozen=True, kw_only=True)
class SplitInfo:
    """One split."""

    examples: int
    """Number of labelled examples; a pair of documents counts once."""
    arrays: dict[str, ArrayInfo]
    """Arrays by name: "tokens" is the file {split}.tokens.npy."""
    skipped: list[str] = field(default_factory=list)
    """Names of broken items of the source that were left out."""

    def __post_init__(self) -> None:
        if type(self.examples) is not int or self.examples < 0:
            raise TypeError("a split without its number of examples")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of manifest.json."""

    format_version: int = FORMAT_VERSION
    """Version of the folder's layout."""
    task: str
    """Name of the task and of the folder, for example "listops"."""
    kind: str
    """"sequences", "images" or "display_lists"."""
    vocab_size: int
    """Exclusive upper bound of token ids, or of grey levels. In sequences, 0 is padding."""
    n_classes: int
    """Exclusive upper bound of labels."""
    max_length: int
    """Maximum number of tokens of a document; height times width of images."""
    documents_per_example: int = 1
    """2 for Retrieval, pairs and aclsum."""
    source: dict[str, Any]
    """Origin of the data; for generated data, the generator's parameters and seed."""
    splits: dict[str, SplitInfo] = field(default_factory=dict)
    """Splits by name: "train", "val" and "test"."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} must be one of {', '.join(KINDS)}.")
        for name in ("vocab_size", "n_classes", "max_length", "documents_per_example"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} must be an integer of at least 1.")
        if not isinstance(self.task, str) or not isinstance(self.source, dict):
            raise ValueError("task must be text, and source an object.")
        if unknown := self.splits.keys() - {*SPLITS}:
            raise ValueError(f"splits {sorted(unknown)} must be some of {', '.join(SPLITS)}.")

    def settings(self) -> dict[str, Any]:
        """Settings that determine the folder's contents (all but the splits), as JSON values."""
        values = asdict(self)
        del values["splits"]
        return values

    @staticmethod
    def load(folder: Path) -> "Manifest":
        """Read manifest.json.

        Raises:
            FileNotFoundError: The folder is missing, or its preparation is not finished.
            ValueError: The file is damaged or has another version.
        """
        path = folder / MANIFEST
        if not path.exists():
            raise FileNotFoundError(
                f"{path} does not exist; prepare the task, or finish its preparation, with: "
                f"python -m scripts.prepare_lra TASK --out {folder.parent}"
            )

        def read(values: dict[str, Any]) -> Manifest:
            for split, info in values["splits"].items():
                info["arrays"] = {name: ArrayInfo(**a) for name, a in info["arrays"].items()}
                values["splits"][split] = SplitInfo(**info)
            return Manifest(**values)

        return load_manifest(path, FORMAT_VERSION, read, REMEDY)


@dataclass(frozen=True)
class Sequences:
    """A split of token sequences."""

    manifest: Manifest
    tokens: TokenFile
    """uint16 (n_tokens,), ids from 1, all sequences end to end; they stay on disk."""
    offsets: np.ndarray
    """int64 (n_sequences + 1,): sequence i is tokens[offsets[i] : offsets[i + 1]]."""
    labels: np.ndarray
    """uint8 (n_examples,)."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each sequence, int64 (n_sequences,)."""
        return np.diff(self.offsets)

    def all_tokens(self) -> np.ndarray:
        """Read the token ids of all sequences, uint16 (n_tokens,)."""
        return self.tokens.read(0, len(self.tokens))

    def documents(self, example: int) -> list[np.ndarray]:
        """Read the token ids of one example's documents, uint16 (length,) each."""
        n = self.manifest.documents_per_example
        ends = self.offsets[example * n : (example + 1) * n + 1].tolist()
        return [self.tokens.read(a, b - a) for a, b in pairwise(ends)]


@dataclass(frozen=True)
class Images:
    """A split of grey images."""

    manifest: Manifest
    images: np.ndarray
    """uint8 (n_examples, height, width)."""
    labels: np.ndarray
    """uint8 (n_examples,)."""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class DisplayLists:
    """A split of Pathfinder images, stored as lists of strokes.

    data/pathfinder renders them, with parameters Pathfinder(**manifest.source["parameters"]).
    """

    manifest: Manifest
    display_lists: np.ndarray
    """Structured (n_examples,), with data.pathfinder's display_list_dtype."""

    def __len__(self) -> int:
        return len(self.display_lists)

    @property
    def labels(self) -> np.ndarray:
        """Labels, uint8 (n_examples,), a strided view."""
        return self.display_lists["label"]


KINDS = {"sequences": Sequences, "images": Images, "display_lists": DisplayLists}


def array_names(kind: str) -> list[str]:
    """Names of the arrays that a split of this kind has."""
    return [field.name for field in fields(KINDS[kind]) if field.name != "manifest"]


def array_path(folder: Path, split: str, name: str) -> Path:
    """Path of the file of a split's array."""
    return folder / f"{split}.{name}.npy"


def array_info(path: Path) -> ArrayInfo:
    """Describe a .npy file for the manifest; reads the whole file."""
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    return ArrayInfo(shape=list(array.shape), dtype=_descr(array.dtype), sha256=sha256_of(path))


def open_split(folder: str | Path, split: str) -> Sequences | Images | DisplayLists:
    """Open one split of a prepared task.

    Tokens stay on disk. Other arrays are read into memory and are read-only.

    Raises:
        FileNotFoundError: The folder, its manifest or an array is missing.
        ValueError: The split is unknown, or an array does not match the manifest.
    """
    folder = Path(folder)
    manifest = Manifest.load(folder)
    if split not in manifest.splits:
        raise ValueError(f"split={split!r} must be one of {sorted(manifest.splits)} of {folder}.")
    info = manifest.splits[split]
    names = sorted(array_names(manifest.kind))
    if sorted(info.arrays) != names:
        problem = f"lists {sorted(info.arrays)} for {split}, but kind={manifest.kind!r} has {names}"
        raise damaged(folder / MANIFEST, problem, REMEDY)
    arrays = {
        name: (_open_tokens if name == "tokens" else _read_array)(
            array_path(folder, split, name), array
        )
        for name, array in info.arrays.items()
    }
    examples = KINDS[manifest.kind](manifest, **arrays)
    for name, problem in _inconsistencies(examples, info.examples):
        raise damaged(array_path(folder, split, name), problem, REMEDY)
    return examples


def verify_split(folder: Path, split: str) -> None:
    """Verify the sha256 of a split's files, except those already verified (ValueError)."""
    verified = Verified(folder)
    for name, array in Manifest.load(folder).splits[split].arrays.items():
        path = array_path(folder, split, name)
        verified.check_once([path], array.sha256, partial(_verify_array, path, array))


def _verify_array(path: Path, array: ArrayInfo) -> None:
    actual = sha256_of(path)
    if actual != array.sha256:
        expected = f"but the manifest says {array.sha256}; the file is damaged"
        raise damaged(path, f"has sha256={actual}, {expected}", REMEDY)


def _descr(dtype: np.dtype) -> Any:
    """Description of a dtype after conversion to JSON and back, which turns tuples into lists."""
    return json.loads(json.dumps(np.lib.format.dtype_to_descr(dtype)))


def _map_array(path: Path, info: ArrayInfo) -> np.memmap:
    """Memory-map a .npy file and check it against the manifest, without reading the array.

    Use the map only for the array's offset, shape and dtype. Read the content from the file: if a
    mapped file is truncated, SIGBUS ends the process.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; {REMEDY}.")
    check_regular(path)
    size, shape = path.stat().st_size, tuple(info.shape)
    try:
        check_npy(path)
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        expected = f"it has {size} bytes, but the manifest says shape {shape} of {info.dtype}"
        problem = f"is torn or not a NumPy file ({error}): {expected}"
        raise damaged(path, problem, "copy or prepare it again") from error
    dtype = _descr(mapped.dtype)
    if (mapped.shape, dtype) != (shape, info.dtype):
        expected = f"but the manifest says {shape} of {info.dtype}; it is from another preparation"
        problem = f"has shape {mapped.shape} of {dtype}, {expected}"
        raise damaged(path, problem, "copy or prepare it again")
    return mapped


def _open_tokens(path: Path, info: ArrayInfo) -> TokenFile:
    mapped = _map_array(path, info)
    if mapped.dtype != np.uint16:
        raise ValueError(f"{path} holds {mapped.dtype}, but must hold uint16; prepare it again.")
    return TokenFile(
        path, tokens=mapped.size, dtype=mapped.dtype, sha256=info.sha256, offset=mapped.offset
    )


def _read_array(path: Path, info: ArrayInfo) -> np.ndarray:
    mapped, shape = _map_array(path, info), tuple(info.shape)
    content = np.fromfile(path, mapped.dtype, count=mapped.size, offset=mapped.offset)
    if content.size != mapped.size:
        raise damaged(path, "was changed while it was read", "copy it again")
    content = content.reshape(shape, order="C" if mapped.flags.c_contiguous else "F")
    content.flags.writeable = False  # callers get views of it
    return content


def _inconsistencies(
    split: Sequences | Images | DisplayLists, n_examples: int
) -> Iterator[tuple[str, str]]:
    """Find arrays that contradict each other; yields the name of each and its problem."""
    manifest = split.manifest
    if len(split) != n_examples:
        yield "labels", f"has {len(split)} labels, but the manifest says {n_examples} examples"
    if len(split) and split.labels.max() >= manifest.n_classes:
        largest = split.labels.max()
        yield "labels", f"holds label {largest}, which must be below n_classes={manifest.n_classes}"
    if isinstance(split, Images) and len(split.images) != n_examples:
        yield "images", f"has {len(split.images)} images for {n_examples} labels"
    if isinstance(split, Sequences):
        offsets, n_tokens, longest = split.offsets, len(split.tokens), manifest.max_length
        n = n_examples * manifest.documents_per_example
        if len(offsets) != n + 1:
            yield "offsets", f"has {len(offsets)} offsets, but {n} sequences need {n + 1}"
        if offsets[0] != 0 or offsets[-1] != n_tokens:
            ends = f"from {offsets[0]} to {offsets[-1]}"
            yield "offsets", f"ranges {ends}, but must range from 0 to the {n_tokens} tokens"
        lengths = split.lengths
        if n and not (lengths.min() >= 1 and lengths.max() <= longest):
            actual = f"{lengths.min()} to {lengths.max()} tokens"
            yield "offsets", f"has sequences of {actual}, but must have 1 to max_length={longest}"
