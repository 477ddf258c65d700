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

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from data.files import load_json, to_json, write_atomically

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
SPLITS = ("train", "val", "test")
KINDS = ("sequences", "images", "display_lists")

_PREPARE = "python -m scripts.prepare_lra TASK"
_HASH_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class ArrayInfo:
    """One .npy file."""

    shape: tuple[int, ...]
    dtype: Any
    """As numpy.lib.format.dtype_to_descr gives it, through JSON."""
    sha256: str
    """Of the whole file."""


@dataclass(frozen=True, kw_only=True)
class SplitInfo:
    """One split."""

    examples: int
    """Labelled examples; a pair of documents is one."""
    arrays: dict[str, ArrayInfo]
    """By name: "tokens" is the file {split}.tokens.npy."""
    skipped: tuple[str, ...] = ()
    """What of the source is broken and was left out, by name."""

    @staticmethod
    def from_json(values: dict[str, Any]) -> "SplitInfo":
        """Build from what `dataclasses.asdict` gave."""
        arrays = {
            name: ArrayInfo(**{**info, "shape": tuple(info["shape"])})
            for name, info in values["arrays"].items()
        }
        return SplitInfo(
            **{**values, "arrays": arrays, "skipped": tuple(values.get("skipped", ()))}
        )


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

    def settings(self) -> dict[str, Any]:
        """What decides the contents of the folder: all but the splits, as plain JSON values."""
        values = asdict(self)
        del values["splits"]
        return values

    def save(self, folder: Path) -> None:
        """Write manifest.json atomically."""
        write_atomically(folder / MANIFEST, to_json(asdict(self)))

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
                f"{_PREPARE} --out {folder.parent}"
            )
        values = load_json(path)
        if values.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"{path} has format_version={values.get('format_version')}, but this code reads "
                f"{FORMAT_VERSION}; prepare the task again."
            )
        try:
            values["splits"] = {k: SplitInfo.from_json(v) for k, v in values["splits"].items()}
            return Manifest(**values)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} lacks what a manifest must have ({error}); prepare the task again."
            ) from error


@dataclass(frozen=True)
class Sequences:
    """A split of token sequences, mapped from disk."""

    manifest: Manifest
    tokens: np.ndarray
    """uint16 (n_tokens), ids from 1, all sequences end to end."""
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

    def documents(self, example: int) -> list[np.ndarray]:
        """The token ids of one example's documents, views of uint16 (length)."""
        n = self.manifest.documents_per_example
        ends = self.offsets[example * n : (example + 1) * n + 1].tolist()
        return [self.tokens[a:b] for a, b in pairwise(ends)]


@dataclass(frozen=True)
class Images:
    """A split of grey images, mapped from disk."""

    manifest: Manifest
    images: np.ndarray
    """uint8 (n_examples, height, width)."""
    labels: np.ndarray
    """uint8 (n_examples)."""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class DisplayLists:
    """A split of Pathfinder images as what is drawn in them, mapped from disk.

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


def open_split(folder: str | Path, split: str) -> Sequences | Images | DisplayLists:
    """Open one split of a prepared task; arrays are memory-mapped, read-only.

    Args:
        folder: Of the task, such as out/data/lra/listops.
        split: "train", "val" or "test".

    Raises:
        FileNotFoundError: The folder, its manifest or an array is missing.
        ValueError: The split is unknown, or an array is not what the manifest says.
    """
    folder = Path(folder)
    manifest = Manifest.load(folder)
    if split not in manifest.splits:
        raise ValueError(f"split={split!r} must be one of {sorted(manifest.splits)} of {folder}.")
    info = manifest.splits[split]
    arrays = {n: _map_array(array_path(folder, split, n), a) for n, a in info.arrays.items()}
    build, names = _READERS[manifest.kind]
    if set(arrays) != set(names):
        raise ValueError(
            f"{folder / MANIFEST} lists {sorted(arrays)} for {split}, but kind={manifest.kind!r} "
            f"has {sorted(names)}; prepare the task again."
        )
    opened = build(manifest, **arrays)
    _check(opened, info.examples, folder, split)
    return opened


def verify(folder: str | Path, on_bytes: Callable[[int], None] = lambda n: None) -> None:
    """Read every file of a prepared task and compare its sha256 with the manifest's.

    Args:
        folder: Of the task.
        on_bytes: Told after each piece how many bytes it had.

    Raises:
        ValueError: A file is not what the manifest says.
    """
    folder = Path(folder)
    for split, info in Manifest.load(folder).splits.items():
        open_split(folder, split)
        for name, array in info.arrays.items():
            path = array_path(folder, split, name)
            found = file_sha256(path, on_bytes)
            if found != array.sha256:
                raise ValueError(
                    f"{path} has sha256={found}, but the manifest says {array.sha256}; the file is "
                    "damaged, prepare the task again."
                )


def array_path(folder: Path, split: str, name: str) -> Path:
    """Where an array of a split lies."""
    return folder / f"{split}.{name}.npy"


def array_info(path: Path) -> ArrayInfo:
    """Describe a .npy file for the manifest; reads all of it."""
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    return ArrayInfo(shape=array.shape, dtype=_descr(array.dtype), sha256=file_sha256(path))


def file_sha256(path: Path, on_bytes: Callable[[int], None] = lambda n: None) -> str:
    """Hash a file of any size."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_HASH_BYTES):
            found.update(piece)
            on_bytes(len(piece))
    return found.hexdigest()


_READERS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "sequences": (Sequences, ("tokens", "offsets", "labels")),
    "images": (Images, ("images", "labels")),
    "display_lists": (DisplayLists, ("display_lists",)),
}


def _map_array(path: Path, info: ArrayInfo) -> np.ndarray:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; prepare the task again.")
    try:
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"{path} is torn or no NumPy file ({error}): it has {path.stat().st_size} bytes, but "
            f"the manifest says shape {info.shape} of {info.dtype}; copy or prepare it again."
        ) from error
    size, expected = path.stat().st_size, mapped.offset + mapped.nbytes
    if size != expected:
        raise ValueError(
            f"{path} has {size} bytes, but its own header says {expected}; copy it again."
        )
    found = mapped.shape, _descr(mapped.dtype)
    if found != (info.shape, info.dtype):
        raise ValueError(
            f"{path} has shape {found[0]} of {found[1]}, but the manifest says {info.shape} of "
            f"{info.dtype}; it is of another preparation: copy or prepare it again."
        )
    # a plain array over the map: slices of np.memmap itself are several times slower
    return np.asarray(mapped)


def _check(
    opened: Sequences | Images | DisplayLists, examples: int, folder: Path, split: str
) -> None:
    """Raise where the arrays, each as the manifest says, do not fit together."""
    manifest = opened.manifest
    labels = array_path(folder, split, "labels")
    if len(opened) != examples:
        raise ValueError(
            f"{labels} has {len(opened)} labels, but the manifest says {examples} examples; "
            "prepare the task again."
        )
    if len(opened) and opened.labels.max() >= manifest.n_classes:
        raise ValueError(
            f"{labels} holds label {opened.labels.max()}, which must be below n_classes="
            f"{manifest.n_classes}; prepare the task again."
        )
    if isinstance(opened, Images) and len(opened.images) != examples:
        raise ValueError(
            f"{array_path(folder, split, 'images')} has {len(opened.images)} images for {examples} "
            "labels; prepare the task again."
        )
    if isinstance(opened, Sequences):
        _check_offsets(opened, array_path(folder, split, "offsets"))


def _check_offsets(opened: Sequences, path: Path) -> None:
    expected = len(opened) * opened.manifest.documents_per_example
    offsets, longest = opened.offsets, opened.manifest.max_length
    if len(offsets) != expected + 1:
        raise ValueError(
            f"{path} has {len(offsets)} offsets, but {expected} sequences need {expected + 1}; "
            "prepare the task again."
        )
    if offsets[0] != 0 or offsets[-1] != len(opened.tokens):
        raise ValueError(
            f"{path} runs from {offsets[0]} to {offsets[-1]}, but must run from 0 to the "
            f"{len(opened.tokens)} tokens; prepare the task again."
        )
    if expected and not (opened.lengths.min() >= 1 and opened.lengths.max() <= longest):
        raise ValueError(
            f"{path} has sequences of {opened.lengths.min()} to {opened.lengths.max()} tokens, but "
            f"they must have 1 to max_length={longest}; prepare the task again."
        )


def _descr(dtype: np.dtype) -> Any:
    """A dtype as it looks after a way through JSON, where tuples become lists."""
    return _lists(np.lib.format.dtype_to_descr(dtype))


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value
