"""Prepared tasks of Long Range Arena on disk: a folder with a manifest and NumPy files a split.

    manifest.json               written last: a folder without it is not finished
    train.tokens.npy            kind "sequences": uint16, all sequences end to end, no padding
    train.offsets.npy           int64 (n_sequences + 1), where each sequence starts and the end
    train.labels.npy            uint8 (n_examples)
    train.images.npy            kind "images": uint8 (n_examples, height, width), and labels
    train.display_lists.npy     kind "display_lists": structured, see data/pathfinder
    val...., test....

Token ids run from 1, 0 is left for padding. A task with two documents an example (Retrieval) holds
documents 2i and 2i + 1 of example i one after the other.
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
    """As numpy.lib.format.dtype_to_descr gives it, through JSON."""
    sha256: str
    """Of the whole file."""

    def __post_init__(self) -> None:
        sizes = self.shape if isinstance(self.shape, list) else [None]
        if not all(type(n) is int and n >= 0 for n in sizes) or not isinstance(self.sha256, str):
            raise TypeError("an array without a shape and a sha256")


@dataclass(frozen=True, kw_only=True)
class SplitInfo:
    """One split."""

    examples: int
    """Labelled examples; a pair of documents is one."""
    arrays: dict[str, ArrayInfo]
    """By name: "tokens" is the file {split}.tokens.npy."""
    skipped: list[str] = field(default_factory=list)
    """What of the source is broken and was left out, by name."""

    def __post_init__(self) -> None:
        if type(self.examples) is not int or self.examples < 0:
            raise TypeError("a split without its number of examples")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of manifest.json."""

    format_version: int = FORMAT_VERSION
    """Of the folder's layout."""
    task: str
    """Such as "listops"; the name of the folder."""
    kind: str
    """"sequences", "images" or "display_lists"."""
    vocab_size: int
    """Every token id, or grey level, is below this; of sequences 0 is padding."""
    n_classes: int
    """Every label is below this."""
    max_length: int
    """Tokens of the longest document there may be; height times width of images."""
    documents_per_example: int = 1
    """2 for Retrieval and pairs."""
    source: dict[str, Any]
    """Where the data come from; of generated data the generator's parameters and seed."""
    splits: dict[str, SplitInfo] = field(default_factory=dict)
    """By name: "train", "val" and "test"."""

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
        """What decides the contents of the folder: all but the splits, as plain JSON values."""
        values = asdict(self)
        del values["splits"]
        return values

    @staticmethod
    def load(folder: Path) -> "Manifest":
        """Read manifest.json.

        Raises:
            FileNotFoundError: The folder is missing or its preparation has not finished.
            ValueError: The file is damaged or of another version.
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
    """uint16 (n_tokens), ids from 1, all sequences end to end; they stay on the disk."""
    offsets: np.ndarray
    """int64 (n_sequences + 1): sequence i is tokens[offsets[i] : offsets[i + 1]]."""
    labels: np.ndarray
    """uint8 (n_examples)."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence, int64 (n_sequences)."""
        return np.diff(self.offsets)

    def all_tokens(self) -> np.ndarray:
        """Read the token ids of all sequences, uint16 (n_tokens)."""
        return self.tokens.read(0, len(self.tokens))

    def documents(self, example: int) -> list[np.ndarray]:
        """Read the token ids of one example's documents, uint16 (length) each."""
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
    """uint8 (n_examples)."""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class DisplayLists:
    """A split of Pathfinder images as what is drawn in them.

    data/pathfinder renders them; Pathfinder(**manifest.source["parameters"]) are its parameters.
    """

    manifest: Manifest
    display_lists: np.ndarray
    """Structured (n_examples), of data.pathfinder's display_list_dtype."""

    def __len__(self) -> int:
        return len(self.display_lists)

    @property
    def labels(self) -> np.ndarray:
        """uint8 (n_examples), a strided view."""
        return self.display_lists["label"]


KINDS = {"sequences": Sequences, "images": Images, "display_lists": DisplayLists}


def array_names(kind: str) -> list[str]:
    """The arrays that a split of this kind has."""
    return [field.name for field in fields(KINDS[kind]) if field.name != "manifest"]


def array_path(folder: Path, split: str, name: str) -> Path:
    """Where an array of a split lies."""
    return folder / f"{split}.{name}.npy"


def array_info(path: Path) -> ArrayInfo:
    """Describe a .npy file for the manifest; reads all of it."""
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    return ArrayInfo(shape=list(array.shape), dtype=_descr(array.dtype), sha256=sha256_of(path))


def open_split(folder: str | Path, split: str) -> Sequences | Images | DisplayLists:
    """Open one split of a prepared task.

    Tokens stay on the disk; other arrays are read into memory, and are read-only.

    Raises:
        FileNotFoundError: The folder, its manifest or an array is missing.
        ValueError: The split is unknown, or an array is not what the manifest says.
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
    opened = KINDS[manifest.kind](manifest, **arrays)
    for name, misfit in _misfits(opened, info.examples):
        raise damaged(array_path(folder, split, name), misfit, REMEDY)
    return opened


def verify_split(folder: Path, split: str) -> None:
    """Compare the sha256 of the files of a split, but for those known to be right (ValueError)."""
    known = Verified(folder)
    for name, array in Manifest.load(folder).splits[split].arrays.items():
        path = array_path(folder, split, name)
        known.once([path], array.sha256, partial(_verify_array, path, array))


def _verify_array(path: Path, array: ArrayInfo) -> None:
    found = sha256_of(path)
    if found != array.sha256:
        expected = f"but the manifest says {array.sha256}; the file is damaged"
        raise damaged(path, f"has sha256={found}, {expected}", REMEDY)


def _descr(dtype: np.dtype) -> Any:
    """A dtype as it looks after a way through JSON, where tuples become lists."""
    return json.loads(json.dumps(np.lib.format.dtype_to_descr(dtype)))


def _map_array(path: Path, info: ArrayInfo) -> np.memmap:
    """Map a .npy file, which must be what the manifest says; nothing of the array is read.

    The map tells where the array is. Its content is to be read from the file instead: a file that
    is cut while it is mapped ends the process by SIGBUS.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; {REMEDY}.")
    check_regular(path)
    size, shape = path.stat().st_size, tuple(info.shape)
    try:
        check_npy(path)
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        must = f"it has {size} bytes, but the manifest says shape {shape} of {info.dtype}"
        problem = f"is torn or no NumPy file ({error}): {must}"
        raise damaged(path, problem, "copy or prepare it again") from error
    dtype = _descr(mapped.dtype)
    if (mapped.shape, dtype) != (shape, info.dtype):
        must = f"but the manifest says {shape} of {info.dtype}; it is of another preparation"
        problem = f"has shape {mapped.shape} of {dtype}, {must}"
        raise damaged(path, problem, "copy or prepare it again")
    return mapped


def _open_tokens(path: Path, info: ArrayInfo) -> TokenFile:
    mapped = _map_array(path, info)
    if mapped.dtype != np.uint16:
        raise ValueError(f"{path} holds {mapped.dtype}, and must hold uint16; prepare it again.")
    return TokenFile(
        path, tokens=mapped.size, dtype=mapped.dtype, sha256=info.sha256, offset=mapped.offset
    )


def _read_array(path: Path, info: ArrayInfo) -> np.ndarray:
    mapped, shape = _map_array(path, info), tuple(info.shape)
    content = np.fromfile(path, mapped.dtype, count=mapped.size, offset=mapped.offset)
    if content.size != mapped.size:
        raise damaged(path, "was changed while it was read", "copy it again")
    content = content.reshape(shape, order="C" if mapped.flags.c_contiguous else "F")
    content.flags.writeable = False  # views of it are given away
    return content


def _misfits(opened: Sequences | Images | DisplayLists, examples: int) -> Iterator[tuple[str, str]]:
    """Where the arrays, each as the manifest says, do not fit together: names and complaints."""
    manifest = opened.manifest
    if len(opened) != examples:
        yield "labels", f"has {len(opened)} labels, but the manifest says {examples} examples"
    if len(opened) and opened.labels.max() >= manifest.n_classes:
        most = opened.labels.max()
        yield "labels", f"holds label {most}, which must be below n_classes={manifest.n_classes}"
    if isinstance(opened, Images) and len(opened.images) != examples:
        yield "images", f"has {len(opened.images)} images for {examples} labels"
    if isinstance(opened, Sequences):
        offsets, n_tokens, longest = opened.offsets, len(opened.tokens), manifest.max_length
        n = examples * manifest.documents_per_example
        if len(offsets) != n + 1:
            yield "offsets", f"has {len(offsets)} offsets, but {n} sequences need {n + 1}"
        if offsets[0] != 0 or offsets[-1] != n_tokens:
            ends = f"from {offsets[0]} to {offsets[-1]}"
            yield "offsets", f"runs {ends}, but must run from 0 to the {n_tokens} tokens"
        lengths = opened.lengths
        if n and not (lengths.min() >= 1 and lengths.max() <= longest):
            held = f"{lengths.min()} to {lengths.max()} tokens"
            yield "offsets", f"has sequences of {held}, but must have 1 to max_length={longest}"
