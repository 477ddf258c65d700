"""Reader of the Pathfinder images that Long Range Arena released (lra_release.gz).

    pathfinder{32,64,128,256}/
        curv_baseline/ curv_contour_length_9/ curv_contour_length_14/
            imgs/<batch>/sample_<i>.png     8-bit grey
            metadata/<batch>.npy            text in spite of its name, a line an image:
                imgs/<batch> sample_<i>.png <i> <label> <continuity> <contour length> ...

The format is that of google-research/long-range-arena, lra_benchmarks/data/pathfinder.py.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from data.files import check_regular, list_folder

BLOCK = 1000  # images that `read_images` gives at a time

_FOLDERS = {6: "curv_baseline", 9: "curv_contour_length_9", 14: "curv_contour_length_14"}
_LABEL_COLUMN = 3


class ReleasedImage(NamedTuple):
    """One line of the metadata."""

    path: Path
    label: int
    """1 if a contour joins the markers."""


def find_release(source: Path, size: int, contour_length: int) -> Path:
    """The folder of one size, in pixels, and difficulty.

    It is looked for in `source`, the folder of pathfinder32 and so on or what lra_release.gz was
    unpacked into.

    Raises:
        ValueError: There is no such folder.
    """
    if contour_length not in _FOLDERS:
        raise ValueError(
            f"contour_length={contour_length} must be one of {sorted(_FOLDERS)}, which were "
            "released; leave the source out to generate another."
        )
    inner = Path(f"pathfinder{size}", _FOLDERS[contour_length])
    for folder in (source, source / "lra_release", source / "lra_release" / "lra_release"):
        if (folder / inner / "metadata").is_dir():
            return folder / inner
    raise ValueError(
        f"source={source} must hold {inner}/metadata; give the folder that lra_release.gz was "
        "unpacked into, or leave the source out to generate images."
    )


def read_metadata(folder: Path) -> list[ReleasedImage]:
    """List all images of one size and difficulty, by number of batch and line.

    Raises:
        ValueError: There is no metadata, or a line of it is malformed; names file and line.
    """
    found = [path for path in list_folder(folder / "metadata") if path.suffix == ".npy"]
    files = sorted(found, key=_batch_number)
    images = []
    for file in files:
        check_regular(file)
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            columns = line.split()
            if len(columns) <= _LABEL_COLUMN or columns[_LABEL_COLUMN] not in ("0", "1"):
                raise ValueError(
                    f"{file}, line {number} must be a folder, a file, a number, a label of 0 or 1 "
                    f"and more, but is {line[:80]!r}; unpack lra_release.gz again."
                )
            path = folder / columns[0] / columns[1]
            images.append(ReleasedImage(path, int(columns[_LABEL_COLUMN])))
    if not images:
        raise ValueError(f"{folder / 'metadata'} lists no image; unpack lra_release.gz again.")
    return images


def split_images(images: Sequence[ReleasedImage]) -> dict[str, Sequence[ReleasedImage]]:
    """Divide into the first 80 %, "train", the next 10 %, "val", and the last 10 %, "test".

    The labels have no order, so this is as good as drawing lots. The benchmark divides in the same
    shares, in an order that depends on how its tool stored the images: single images may fall on
    another side here.
    """
    first, second = len(images) * 8 // 10, len(images) * 9 // 10
    return {"train": images[:first], "val": images[first:second], "test": images[second:]}


def read_images(
    images: Sequence[ReleasedImage], size: int, skipped: list[str], n_threads: int | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield blocks of images, uint8 (n, size, size), with their labels, uint8 (n), in order.

    `skipped` gets the path of each image that is left out because its file is empty, as
    pathfinder32/curv_baseline/imgs/0/sample_172.png is in the release.

    Raises:
        FileNotFoundError: An image is missing.
        ValueError: An image is damaged, or of another size.
    """
    with ThreadPoolExecutor(n_threads or os.cpu_count()) as pool:
        for first in range(0, len(images), BLOCK):
            block = images[first : first + BLOCK]
            pixels = list(pool.map(lambda image: _read_image(image.path, size), block))
            found = [(p, i.label) for p, i in zip(pixels, block, strict=True) if p is not None]
            skipped += [str(i.path) for p, i in zip(pixels, block, strict=True) if p is None]
            if found:
                read, labels = zip(*found, strict=True)
                yield np.stack(read), np.array(labels, np.uint8)


def _batch_number(path: Path) -> int:
    if not path.stem.isdecimal():
        raise ValueError(f"{path} must be named by the number of its batch; remove it.")
    return int(path.stem)


def _read_image(path: Path, size: int) -> np.ndarray | None:
    """The pixels, None where the file is empty."""
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
