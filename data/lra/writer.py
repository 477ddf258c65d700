"""Writing a prepared task: one process a folder, whole files only, the manifest last."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from data.files import (
    check_settings,
    load_json,
    lock_folder,
    remove_unfinished_files,
    sync_folder,
    to_json,
    write_atomically,
)
from data.lra.store import MANIFEST, Manifest, SplitInfo, array_info, array_path
from data.text.shards import PROGRESS

CHUNKS = "chunks"
"""Folder for finished pieces of a generated task, deleted with the end of the preparation."""


@contextmanager
def preparing(folder: Path, manifest: Manifest) -> Iterator["TaskWriter"]:
    """Hold a task's folder while its files are written.

    A folder that a killed preparation of the same settings left is gone on with.

    Args:
        folder: Where to; created if it is missing.
        manifest: What is prepared, without its splits.

    Raises:
        ValueError: The folder is another process's, or holds something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    busy = f"{folder} is being prepared by another process; wait for it or end it."
    with lock_folder(folder, busy):
        yield TaskWriter(folder, manifest)


class TaskWriter:
    """The splits of one task as they are written; made by `preparing`."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.finished = (folder / MANIFEST).exists()
        """Whether it was prepared before, with the same settings: there is nothing to do."""
        settings = manifest.settings()
        if self.finished:
            self.manifest = Manifest.load(folder)
            check_settings(folder, self.manifest.settings(), settings)
        elif (folder / PROGRESS).exists():
            check_settings(folder, load_json(folder / PROGRESS), settings)
        else:
            _refuse_foreign_files(folder)
            write_atomically(folder / PROGRESS, to_json(settings))
        remove_unfinished_files(folder)

    @property
    def chunks(self) -> Path:
        """A folder for finished pieces, which stays until the preparation is finished."""
        path = self.folder / CHUNKS
        path.mkdir(exist_ok=True)
        remove_unfinished_files(path)
        return path

    def write_sequences(
        self,
        split: str,
        examples: Iterable[tuple[int, Sequence[np.ndarray]]],
        skipped: Sequence[str] = (),
    ) -> None:
        """Write a split of kind "sequences".

        Args:
            split: "train", "val" or "test".
            examples: Label and documents of each example; documents are token ids from 1.
            skipped: Read after the examples: what had to be left out, for the manifest.

        Raises:
            ValueError: An example has another number of documents than the manifest says, or a
                document is empty or too long.
        """
        labels, lengths = [], []
        with self._new(split, "tokens", np.uint16) as tokens:
            for label, documents in examples:
                self._check_documents(split, len(labels), documents)
                for document in documents:
                    tokens.append(document)
                    lengths.append(len(document))
                labels.append(label)
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        with self._new(split, "offsets", np.int64) as writer:
            writer.append(offsets)
        self._write_labels(split, labels)
        self._add(split, len(labels), ("tokens", "offsets", "labels"), skipped)

    def write_images(
        self,
        split: str,
        blocks: Iterable[tuple[np.ndarray, npt.ArrayLike]],
        skipped: Sequence[str] = (),
    ) -> None:
        """Write a split of kind "images" from blocks of images uint8 (n, height, width) and labels.

        Raises:
            ValueError: Images have another size than the manifest's.
        """
        labels: list[int] = []
        with ExitStack() as stack:
            writer = None
            for images, block_labels in blocks:
                if writer is None:
                    shape = images.shape[1:]
                    writer = stack.enter_context(self._new(split, "images", np.uint8, shape))
                writer.append(images)
                labels += np.asarray(block_labels).tolist()
        if not labels:
            raise ValueError(f"{self.folder}: split {split} has no image; look at its source.")
        self._write_labels(split, labels)
        self._add(split, len(labels), ("images", "labels"), skipped)

    def write_display_lists(self, split: str, blocks: Iterable[np.ndarray]) -> None:
        """Write a split of kind "display_lists" from blocks of one structured dtype."""
        n_examples = 0
        with ExitStack() as stack:
            writer = None
            for block in blocks:
                if writer is None:
                    writer = stack.enter_context(self._new(split, "display_lists", block.dtype))
                writer.append(block)
                n_examples += len(block)
        if not n_examples:
            raise ValueError(f"{self.folder}: split {split} has no display list; ask for some.")
        self._add(split, n_examples, ("display_lists",), ())

    def finish(self) -> Manifest:
        """Write the manifest, which makes the folder readable, and delete what led to it."""
        self.manifest.save(self.folder)
        (self.folder / PROGRESS).unlink()
        shutil.rmtree(self.folder / CHUNKS, ignore_errors=True)
        self.finished = True
        return self.manifest

    def _new(
        self, split: str, name: str, dtype: npt.DTypeLike, shape: tuple[int, ...] = ()
    ) -> "NpyWriter":
        return NpyWriter(array_path(self.folder, split, name), np.dtype(dtype), shape)

    def _write_labels(self, split: str, labels: Sequence[int]) -> None:
        array = np.asarray(labels, dtype=np.int64)
        n_classes = self.manifest.n_classes
        if array.size and (array.min() < 0 or array.max() >= n_classes):
            raise ValueError(
                f"{self.folder}: labels of {split} run from {array.min()} to {array.max()}, but "
                f"must lie in [0, n_classes={n_classes})."
            )
        with self._new(split, "labels", np.uint8) as writer:
            writer.append(array.astype(np.uint8))

    def _check_documents(self, split: str, number: int, documents: Sequence[np.ndarray]) -> None:
        n, longest = self.manifest.documents_per_example, self.manifest.max_length
        lengths = [len(document) for document in documents]
        if len(lengths) != n or not all(1 <= length <= longest for length in lengths):
            raise ValueError(
                f"{self.folder}: example {number} of {split} has documents of {lengths} tokens, "
                f"but must have {n} of 1 to {longest}."
            )

    def _add(self, split: str, examples: int, names: Sequence[str], skipped: Sequence[str]) -> None:
        arrays = {name: array_info(array_path(self.folder, split, name)) for name in names}
        info = SplitInfo(examples=examples, arrays=arrays, skipped=tuple(skipped))
        self.manifest = replace(self.manifest, splits={**self.manifest.splits, split: info})


class NpyWriter:
    """A .npy file that grows along its first axis, and appears under its name when it is whole."""

    def __init__(self, path: Path, dtype: np.dtype, shape: tuple[int, ...] = ()) -> None:
        """Begin a file of rows of `shape`.

        Args:
            path: The file's name once it is finished.
            dtype: Of the array.
            shape: Of one entry along the first axis.
        """
        self._path = path
        self._temporary = path.with_name(f"{path.name}.unfinished")
        self._dtype = dtype
        self._shape = shape
        self._n = 0
        self._file = self._temporary.open("wb")
        self._header_bytes = self._write_header()

    def append(self, rows: np.ndarray) -> None:
        """Write (n, *shape) of values that the dtype holds exactly.

        Raises:
            ValueError: The rows have another shape or a dtype that could lose something.
        """
        if rows.shape[1:] != self._shape or not np.can_cast(rows.dtype, self._dtype):
            raise ValueError(
                f"{self._path} takes rows of shape {self._shape} and {self._dtype}, but got "
                f"{rows.shape[1:]} and {rows.dtype}."
            )
        self._file.write(np.ascontiguousarray(rows, dtype=self._dtype).data)
        self._n += len(rows)

    def __enter__(self) -> "NpyWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._file:
            if kind is None:
                self._file.seek(0)
                # NumPy leaves room in a header for its first axis to grow
                assert self._write_header() == self._header_bytes
                self._file.flush()
        if kind is None:
            self._temporary.replace(self._path)
            sync_folder(self._path.parent)
        else:
            self._temporary.unlink()

    def _write_header(self) -> int:
        header = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._n, *self._shape),
        }
        np.lib.format.write_array_header_1_0(self._file, header)
        return self._file.tell()


def _refuse_foreign_files(folder: Path) -> None:
    found = sorted(path.name for path in folder.iterdir())
    if found:
        raise ValueError(
            f"{folder} holds files of something else ({', '.join(found[:5])}); choose another "
            "--out folder or delete this one."
        )
