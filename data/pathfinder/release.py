"""Reader of the Pathfinder images that Long Range Arena released (lra_release.gz).

    pathfinder{32,64,128,256}/
        curv_baseline/ curv_contour_length_9/ curv_contour_length_14/
            imgs/<batch>/sample_<i>.png     8-bit grey
            metadata/<batch>.npy            text despite its name, one line per image:
                imgs/<batch> sample_<i>.png <i> <label> <continuity> <contour length> ...

The format is defined by google-research/long-range-arena, lra_benchmarks/data/pathfinder.py.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from data.files import check_regular, list_folder

BLOCK = 1000  # images per block of `read_images`

_FOLDERS = {6: "curv_baseline", 9: "curv_contour_length_9", 14: "curv_contour_length_14"}
_LABEL_COLUMN = 3


class ReleasedImage(NamedTuple):
    """One line of the metadata."""

    path: Path
    label: int
    """1 if a contour joins the markers."""


def find_release(source: Path, size: int, contour_length: int) -> Path:
    """Find the folder of one size, in pixels, and one difficulty.

    Args:
        source: Folder that contains pathfinder32 etc., or into which lra_release.gz was unpacked.

    Raises:
        ValueError: There is no such folder.
    """
    if contour_length not in _FOLDERS:
        raise ValueError(
            f"contour_length={contour_length} must be one of {sorted(_FOLDERS)}, which were "
            "released; leave the source out to generate other images."
        )
    inner = Path(f"pathfinder{size}", _FOLDERS[contour_length])
    for folder in (source, source / "lra_release", source / "lra_release" / "lra_release"):
        if (folder / inner / "metadata").is_dir():
            return folder / inner
    raise ValueError(
        f"source={source} must hold {inner}/metadata; pass the folder into which lra_release.gz "
        "was unpacked, or leave the source out to generate images."
    )


def read_metadata(folder: Path) -> list[ReleasedImage]:
    """List all images of one size and difficulty, ordered by batch number and line.

    Raises:
        ValueError: There is no metadata, or a line is malformed; the message names file and line.
    """
    unsorted = [path for path in list_folder(folder / "metadata") if path.suffix == ".npy"]
    files = sorted(unsorted, key=_batch_number)
    images = []
    for file in files:
        check_regular(file)
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            columns = line.split()
            if len(columns) <= _LABEL_COLUMN or columns[_LABEL_COLUMN] not in ("0", "1"):
                raise ValueError(
                    f"{file}, line {number} must be a folder, a file, a number, a label of 0 or 1, "
                    f"and other columns, but is {line[:80]!r}; unpack lra_release.gz again."
                )
            path = folder / columns[0] / columns[1]
            images.append(ReleasedImage(path, int(columns[_LABEL_COLUMN])))
    if not images:
        raise ValueError(f"{folder / 'metadata'} lists no images; unpack lra_release.gz again.")
    return images


def split_images(images: Sequence[ReleasedImage]) -> dict[str, Sequence[ReleasedImage]]:
    """Split into the first 80 %, "train", the next 10 %, "val", and the last 10 %, "test".

    The labels are in random order, so this equals a random split. The benchmark uses the same
    fractions, but an order that depends on how its tool stored the images. Some images may
    therefore be in another split here.
    """
    first, second = len(images) * 8 // 10, len(images) * 9 // 10
    return {"train": images[:first], "val": images[first:second], "test": images[second:]}


def read_images(
    images: Sequence[ReleasedImage], size: int, skipped: list[str], n_threads: int | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield blocks of images, uint8 (n, size, size), with their labels, uint8 (n,), in order.

    An image whose file is empty is left out, and its path is appended to `skipped`. The release has
    such a file: pathfinder32/curv_baseline/imgs/0/sample_172.png.

    Raises:
        FileNotFoundError: An image is missing.
        ValueError: An image is damaged, or has another size.
    """
    with ThreadPoolExecutor(n_threads or os.cpu_count()) as pool:
        for first in range(0, len(images), BLOCK):
            block = images[first : first + BLOCK]
            pixels = list(pool.map(lambda image: _read_image(image.path, size), block))
            pairs = [(p, i.label) for p, i in zip(pixels, block, strict=True) if p is not None]
            skipped += [str(i.path) for p, i in zip(pixels, block, strict=True) if p is None]
            if pairs:
                arrays, labels = zip(*pairs, strict=True)
                yield np.stack(arrays), np.array(labels, np.uint8)


def _batch_number(path: Path) -> int:
    if not path.stem.isdecimal():
        raise ValueError(f"{path} must be named after its batch number; remove it.")
    return int(path.stem)


def _read_image(path: Path, size: int) -> np.ndarray | None:
    """Read the pixels of an image; None if the file is empty."""
    check_regular(path)
    if path.stat().st_size == 0:
        return None
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image)
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"{path} is damaged ({error}); unpack lra_release.gz again.") from error
    if pixels.shape != (size, size) or pixels.dtype != np.uint8:
        raise ValueError(
            f"{path} is {pixels.dtype} {pixels.shape}, but must be uint8 {(size, size)}."
        )
    return pixels
