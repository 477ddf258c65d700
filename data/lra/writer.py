"""Writer of prepared tasks: one process per folder, complete files only, the manifest last."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data.files import (
    check_settings,
    load_json,
    lock_folder,
    remove_unfinished_files,
    sealed,
    sync_folder,
    to_json,
    write_atomically,
)
from data.lra.store import MANIFEST, Manifest, SplitInfo, array_info, array_names, array_path
from data.text.shards import PROGRESS

CHUNKS = "chunks"
"""Folder for finished chunks of a generated task, deleted at the end of the preparation."""

Append = Callable[[np.ndarray], None]
"""Function that appends (n, *shape) rows to a file; raises ValueError if the shape differs or the
dtype cannot be cast safely."""


@contextmanager
def preparing(folder: Path, manifest: Manifest) -> Iterator["TaskWriter"]:
    """Lock a task's folder, which is created if missing, while its files are written.

    A killed preparation with the same settings is resumed.

    Raises:
        ValueError: Another process holds the folder, or it holds something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder):
        yield TaskWriter(folder, manifest)


class TaskWriter:
    """Writer of the splits of one task; created by `preparing`."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.finished = (folder / MANIFEST).exists()
        """Whether the task was already prepared with equal settings."""
        settings = manifest.settings()
        if self.finished:
            self.manifest = Manifest.load(folder)
            check_settings(folder, self.manifest.settings(), settings)
        elif (folder / PROGRESS).exists():
            check_settings(folder, load_json(folder / PROGRESS), settings)
        elif names := sorted(path.name for path in folder.iterdir()):
            raise ValueError(
                f"{folder} holds files of something else ({', '.join(names[:5])}); choose another "
                "--out folder or delete this one."
            )
        else:
            write_atomically(folder / PROGRESS, to_json(settings))
        remove_unfinished_files(folder)

    @property
    def chunks(self) -> Path:
        """Folder for finished chunks; it exists until the preparation is finished."""
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
            examples: Label and documents of each; token ids start at 1.
            skipped: Names of the items left out, for the manifest; read after the examples.

        Raises:
            ValueError: The number of documents of an example differs from the manifest, or a
                document is empty or too long.
        """
        n, longest = self.manifest.documents_per_example, self.manifest.max_length
        labels, offsets = [], [0]
        with self._growing(split, "tokens", np.uint16) as append:
            for label, documents in examples:
                lengths = [len(document) for document in documents]
                if len(lengths) != n or not all(1 <= length <= longest for length in lengths):
                    raise ValueError(
                        f"{self.folder}: example {len(labels)} of {split} has documents of "
                        f"{lengths} tokens, but must have {n} of 1 to {longest}."
                    )
                for document in documents:
                    append(document)
                    offsets.append(offsets[-1] + len(document))
                labels.append(label)
        with self._growing(split, "offsets", np.int64) as append:
            append(np.array(offsets, np.int64))
        self._write_labels(split, labels)
        self._add(split, skipped)

    def write_images(
        self,
        split: str,
        blocks: Iterable[tuple[np.ndarray, npt.ArrayLike]],
        skipped: Sequence[str] = (),
    ) -> None:
        """Write a split of kind "images" from blocks of images uint8 (n, height, width) and labels.

        Raises:
            ValueError: There are no images, or they have different sizes.
        """
        labels: list[int] = []

        def images() -> Iterator[np.ndarray]:
            for pixels, block_labels in blocks:
                labels.extend(np.asarray(block_labels).tolist())
                yield pixels

        self._write_blocks(split, "images", images(), "image; check its source", np.uint8)
        self._write_labels(split, labels)
        self._add(split, skipped)

    def write_display_lists(self, split: str, blocks: Iterable[np.ndarray]) -> None:
        """Write a split of kind "display_lists" from blocks of one structured dtype.

        Raises:
            ValueError: There are no display lists.
        """
        self._write_blocks(split, "display_lists", blocks, "display list; request at least one")
        self._add(split)

    def finish(self) -> Manifest:
        """Write the manifest, which makes the folder readable, and delete the temporary files."""
        write_atomically(self.folder / MANIFEST, to_json(sealed(asdict(self.manifest))))
        (self.folder / PROGRESS).unlink()
        shutil.rmtree(self.folder / CHUNKS, ignore_errors=True)
        return self.manifest

    def _write_blocks(
        self,
        split: str,
        name: str,
        blocks: Iterable[np.ndarray],
        missing: str,
        dtype: npt.DTypeLike | None = None,
    ) -> None:
        """Write blocks end to end, by default in the dtype of the first one.

        If there is no block, raises a ValueError that names `missing`.
        """
        blocks = iter(blocks)
        if (first := next(blocks, None)) is None:
            raise ValueError(f"{self.folder}: split {split} has no {missing}.")
        with self._growing(split, name, dtype or first.dtype, first.shape[1:]) as append:
            for block in chain([first], blocks):
                append(block)

    def _write_labels(self, split: str, labels: Sequence[int]) -> None:
        array = np.asarray(labels, dtype=np.int64)
        n_classes = self.manifest.n_classes
        if array.size and (array.min() < 0 or array.max() >= n_classes):
            raise ValueError(
                f"{self.folder}: labels of {split} range from {array.min()} to {array.max()}, but "
                f"must be in [0, n_classes={n_classes})."
            )
        with self._growing(split, "labels", np.uint8) as append:
            append(array.astype(np.uint8))

    def _growing(
        self, split: str, name: str, dtype: npt.DTypeLike, shape: tuple[int, ...] = ()
    ) -> AbstractContextManager[Append]:
        return growing_array(array_path(self.folder, split, name), np.dtype(dtype), shape)

    def _add(self, split: str, skipped: Sequence[str] = ()) -> None:
        names = array_names(self.manifest.kind)
        arrays = {name: array_info(array_path(self.folder, split, name)) for name in names}
        n_examples = arrays[names[-1]].shape[0]  # the last array is the labels, or contains them
        info = SplitInfo(examples=n_examples, arrays=arrays, skipped=list(skipped))
        self.manifest = replace(self.manifest, splits={**self.manifest.splits, split: info})


@contextmanager
def growing_array(path: Path, dtype: np.dtype, shape: tuple[int, ...] = ()) -> Iterator[Append]:
    """Write a .npy file row by row; it appears under its name once it is complete."""
    temporary = path.with_name(f"{path.name}.unfinished")
    n = 0

    def write_header() -> int:
        descr = np.lib.format.dtype_to_descr(dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (n, *shape)}
        np.lib.format.write_array_header_1_0(file, header)
        return file.tell()

    def append(rows: np.ndarray) -> None:
        nonlocal n
        if rows.shape[1:] != shape or not np.can_cast(rows.dtype, dtype):
            raise ValueError(
                f"{path} takes rows of shape {shape} and {dtype}, but got {rows.shape[1:]} and "
                f"{rows.dtype}."
            )
        file.write(np.ascontiguousarray(rows, dtype=dtype).data)
        n += len(rows)

    try:
        with temporary.open("wb") as file:
            header_bytes = write_header()
            yield append
            file.seek(0)
            # NumPy pads the header so that the first axis can grow
            assert write_header() == header_bytes
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
