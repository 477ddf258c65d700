"""Image task of Long Range Arena: grey CIFAR-10 pixel by pixel, ten classes (Krizhevsky 2009)."""

import io
import lzma
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from data.files import check_regular
from data.hub import from_hub

HUB_NAME = "uoft-cs/cifar10"
VOCAB_SIZE = 256
N_CLASSES = 10
SIDE = 32
MAX_LENGTH = SIDE**2
SPLIT_SIZES = {"train": 45_000, "val": 5_000, "test": 10_000}
CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)

LabelledImages = tuple[np.ndarray, np.ndarray]  # images uint8 (n, 32, 32) and labels int64 (n)

_BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
_ARCHIVE = "cifar10-gray-{split}.npz.xz"


def read_cifar10(source: Path | None = None) -> dict[str, LabelledImages]:
    """Read CIFAR-10 as grey images, "train" and "test", in the published order.

    Args:
        source: A folder with cifar10-gray-{train,test}.npz.xz (arrays `images` and `labels`), or
            the original cifar-10-batches-py. None for uoft-cs/cifar10 from the Hugging Face hub.

    Raises:
        ValueError: The folder holds neither, or a file is damaged or has another format.
    """
    if source is None:
        return _read_hub()
    if (source / _ARCHIVE.format(split="train")).exists():
        return {s: _read_archive(source / _ARCHIVE.format(split=s)) for s in _BATCHES}
    for folder in (source, source / "cifar-10-batches-py"):
        if (folder / "test_batch").exists():
            return {split: _read_batches(folder, split) for split in _BATCHES}
    raise ValueError(
        f"source={source} must hold {_ARCHIVE.format(split='{train,test}')} or the files of "
        f"cifar-10-batches-py; leave it out to download {HUB_NAME} from the Hugging Face hub."
    )


def split_images(
    cifar10: dict[str, LabelledImages], sizes: dict[str, int]
) -> dict[str, LabelledImages]:
    """Split as the benchmark does: 45,000 training images, the other 5,000 for val, and the test.

    If the `sizes` of "train", "val" and "test" are smaller, each split takes its first images.

    Raises:
        ValueError: A split has fewer images than requested.
    """
    images, labels = cifar10["train"]
    border = len(images) - len(images) // 10
    parts = {
        "train": (images[:border], labels[:border]),
        "val": (images[border:], labels[border:]),
        "test": cifar10["test"],
    }
    for split, (available, _) in parts.items():
        if sizes[split] > len(available):
            raise ValueError(
                f"examples: {split}={sizes[split]:,} must be at most {len(available):,}."
            )
    return {split: (x[: sizes[split]], y[: sizes[split]]) for split, (x, y) in parts.items()}


def to_grey(rgb: np.ndarray) -> np.ndarray:
    """Convert RGB uint8 (..., 3) to grey (...), weighted .2989, .587 and .114, rounded down."""
    weights = np.array([2989, 5870, 1140], dtype=np.int32)
    return (rgb.astype(np.int32) @ weights // 10_000).astype(np.uint8)


def _read_hub() -> dict[str, LabelledImages]:
    remedy = "check the network, or pass --source FOLDER with its published files"
    with from_hub(HUB_NAME, remedy):
        from datasets import load_dataset

        splits: Any = load_dataset(HUB_NAME)
    read = {}
    for split in _BATCHES:
        rows = splits[split]
        images = np.stack([to_grey(np.asarray(image.convert("RGB"))) for image in rows["img"]])
        read[split] = _checked(images, rows["label"], f"{HUB_NAME}, {split}")
    return read


def _read_archive(path: Path) -> LabelledImages:
    check_regular(path)
    try:
        with lzma.open(path) as file, np.load(io.BytesIO(file.read())) as arrays:
            return _checked(arrays["images"], arrays["labels"], str(path))
    except (EOFError, lzma.LZMAError, KeyError, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error}); download or write it again.") from error


def _read_batches(folder: Path, split: str) -> LabelledImages:
    images, labels = [], []
    for name in _BATCHES[split]:
        check_regular(folder / name)
        with (folder / name).open("rb") as file:
            try:
                batch = _ArraysOnly(file, encoding="bytes").load()
                planes = batch[b"data"].reshape(-1, 3, SIDE, SIDE)
                labels += batch[b"labels"]
            except (pickle.UnpicklingError, EOFError, KeyError) as error:
                raise ValueError(
                    f"{folder / name} cannot be read ({error}); download it again."
                ) from error
        images.append(to_grey(planes.transpose(0, 2, 3, 1)))
    return _checked(np.concatenate(images), labels, str(folder))


class _ArraysOnly(pickle.Unpickler):
    """Unpickler of containers and NumPy arrays only; other objects could run arbitrary code."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name.startswith("numpy") and global_name in ("_reconstruct", "ndarray", "dtype"):
            return super().find_class(module_name, global_name)
        raise pickle.UnpicklingError(f"it holds a {module_name}.{global_name}")


def _checked(images: np.ndarray, labels: Any, where: str) -> LabelledImages:
    labels = np.asarray(labels, dtype=np.int64)
    if images.dtype != np.uint8 or images.shape != (len(labels), SIDE, SIDE):
        raise ValueError(
            f"{where} has images of {images.dtype} {images.shape} for {len(labels)} labels, but "
            f"they must be uint8 ({len(labels)}, {SIDE}, {SIDE})."
        )
    return images, labels
