"""Text task of Long Range Arena: sentiment of IMDB reviews, read as bytes (Maas et al. 2011).

The benchmark validates on the test set. Here, validation uses a tenth of the training set instead.
The model is therefore not selected on the test set, and trains on a tenth less data.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.files import check_regular, list_folder
from data.hub import from_hub
from data.text.readers import file_format, read_json_lines

HUB_NAME = "stanfordnlp/imdb"
VOCAB_SIZE = 257  # a byte b has token id b + 1
N_CLASSES = 2
MAX_LENGTH = 4096  # bytes of a review that are kept; 3 % of the reviews are longer
SPLIT_SIZES = {"train": 22_500, "val": 2_500, "test": 25_000}

_CLASSES = ("neg", "pos")


class Review(NamedTuple):
    """One labelled document."""

    label: int
    """0: bad, 1: good."""
    text: bytes
    """Text in UTF-8."""


def read_imdb(source: Path | None = None) -> dict[str, list[Review]]:
    """Read the published "train" and "test" reviews.

    Args:
        source: A folder, either as in aclImdb_v1.tar.gz ({train,test}/{neg,pos}/*.txt) or with one
            *train*.jsonl and one *test*.jsonl (also .jsonl.xz and .jsonl.gz) of objects with
            `text` and `label`. None for stanfordnlp/imdb from the Hugging Face hub.

    Raises:
        ValueError: The folder holds neither, or a record is malformed; the message names file and
            line.
    """
    if source is None:
        remedy = "check the network, or pass --source FOLDER with its published files"
        with from_hub(HUB_NAME, remedy):
            from datasets import load_dataset

            splits: Any = load_dataset(HUB_NAME)
        return {
            split: [_review(row, f"{HUB_NAME}, {split} row {i}") for i, row in enumerate(rows)]
            for split, rows in splits.items()
            if split in ("train", "test")
        }
    for folder in (source, source / "aclImdb"):
        if (folder / "train" / "neg").is_dir():
            return {split: list(_read_folder(folder / split)) for split in ("train", "test")}
    return {split: list(_read_jsonl(_only_file(source, split))) for split in ("train", "test")}


def split_reviews(
    imdb: Mapping[str, Sequence[Review]], sizes: Mapping[str, int], seed: int = 0
) -> dict[str, list[Review]]:
    """Hold out the validation split and shuffle all splits.

    Order and split follow a hash of the text, keyed by the seed. They therefore do not depend on
    the source of the reviews, and equal training texts are never in both train and val.

    Raises:
        ValueError: A split has fewer reviews than requested.
    """
    train, test = (
        sorted(imdb[split], key=lambda review: keyed_hash(seed, review.text))
        for split in ("train", "test")
    )
    held_out = sizes["val"]
    for split, available in (("train", len(train) - held_out), ("test", len(test))):
        if sizes[split] > available:
            raise ValueError(
                f"examples: {split}={sizes[split]:,} must be at most {max(available, 0):,}"
                + (f", as val takes {held_out:,}." if split == "train" else ".")
            )
    return {
        "train": train[held_out : held_out + sizes["train"]],
        "val": train[:held_out],
        "test": test[: sizes["test"]],
    }


def examples(reviews: Sequence[Review]) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Yield label and token ids of each review, truncated to MAX_LENGTH."""
    for review in reviews:
        yield review.label, [to_ids(review.text, MAX_LENGTH)]


def to_ids(text: bytes, max_length: int) -> np.ndarray:
    """Token ids of the first bytes, uint16 (length,), length at most max_length."""
    return np.frombuffer(text[:max_length], np.uint8).astype(np.uint16) + np.uint16(1)


def keyed_hash(seed: int, text: bytes) -> int:
    """Pseudorandom number in [0, 2^64), a pure function of seed and text."""
    digest = hashlib.blake2b(text, key=seed.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _read_folder(folder: Path) -> Iterator[Review]:
    for label, name in enumerate(_CLASSES):
        paths = [path for path in list_folder(folder / name) if path.suffix == ".txt"]
        if not paths:
            raise ValueError(f"{folder / name} has no .txt file; unpack aclImdb_v1.tar.gz again.")
        for path in paths:
            check_regular(path)
            yield _checked(label, path.read_bytes(), str(path))


def _only_file(source: Path, split: str) -> Path:
    paths = [path for path in list_folder(source) if file_format(path) == "jsonl"]
    matches = [path for path in paths if path.match(f"*{split}*.jsonl*")]
    if len(matches) != 1:
        names = ", ".join(sorted(path.name for path in matches)) or "none"
        raise ValueError(
            f"source={source} must hold one *{split}*.jsonl (or .jsonl.xz, .jsonl.gz) of IMDB, or "
            f"{split}/neg and {split}/pos, but has {names}; leave it out to download {HUB_NAME} "
            "from the Hugging Face hub."
        )
    return matches[0]


def _read_jsonl(path: Path) -> Iterator[Review]:
    return (_review(row, where) for where, row in read_json_lines(path))


def _review(row: Any, where: str) -> Review:
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise ValueError(f"{where} must be an object whose `text` is a string.")
    return _checked(row.get("label"), row["text"].encode(), where)


def _checked(label: Any, text: bytes, where: str) -> Review:
    if label not in (0, 1):
        raise ValueError(f"{where} has label {label!r}, which must be 0 or 1.")
    if not text:
        raise ValueError(f"{where} has an empty text; remove it.")
    return Review(int(label), text)
