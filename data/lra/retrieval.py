"""Tasks with two documents per example: Long Range Arena's Retrieval, and pairs of review halves.

Retrieval asks whether one paper cites the other (ACL Anthology Network, Radev et al. 2013).
`make_pairs` is a separate task for users who cannot download that data: do both texts come from one
document? It is called "pairs", and its scores are not comparable with Retrieval's.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from data.files import check_regular
from data.lra.text import VOCAB_SIZE as VOCAB_SIZE
from data.lra.text import Review, keyed_hash, to_ids

N_CLASSES = 2
MAX_LENGTH = 4000  # bytes of each document that are kept
SPLIT_SIZES = {"train": 147_086, "val": 18_090, "test": 17_437}  # of the published files

_FILES = {
    "train": "new_aan_pairs.train.tsv",
    "val": "new_aan_pairs.eval.tsv",
    "test": "new_aan_pairs.test.tsv",
}
_FIELDS = 5
_CUT_BETWEEN = (0.4, 0.6)
_GAP = 64  # bytes

Example = tuple[int, list[np.ndarray]]  # label and token ids of two documents, uint16 (length,)


def find_aan(source: Path | None) -> dict[str, Path]:
    """Find the files of the three splits in a folder, or in its tsv_data.

    Raises:
        ValueError: A file is missing; the message says where to download it.
    """
    for folder in () if source is None else (source, source / "tsv_data"):
        paths = {split: folder / name for split, name in _FILES.items()}
        if all(path.exists() for path in paths.values()):
            return paths
    raise ValueError(
        f"source={source} must be a folder with {', '.join(_FILES.values())}. They are in "
        "lra_release.gz, and in data/aan of the dataset OpenNLPLab/lra on the Hugging Face hub "
        "(8.5, 1.1 and 1.0 GB): download them, for example with `hf download --repo-type dataset "
        "OpenNLPLab/lra --include 'data/aan/new_aan_pairs.*' --local-dir FOLDER`, and pass "
        "FOLDER/data/aan. Or prepare `pairs`, a task with two documents that needs no such file."
    )


def read_aan(path: Path, skipped: list[str]) -> Iterator[Example]:
    """Read one tsv file: label, two numbers, two texts; no header, no quotes, any bytes.

    A line with an empty text is left out, and its name is appended to `skipped`.

    Raises:
        ValueError: A line is malformed; the message names file and line.
    """
    check_regular(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            fields = line.rstrip(b"\r\n").split(b"\t")
            where = f"{path}, line {number}"
            if len(fields) != _FIELDS:
                raise ValueError(
                    f"{where} has {len(fields)} fields between tabs, but must have {_FIELDS} "
                    "(label, two numbers, two texts); download the file again."
                )
            documents = [to_ids(text, MAX_LENGTH) for text in fields[3:]]
            if all(len(document) for document in documents):
                yield _label(fields[0], where), documents
            else:
                skipped.append(f"{path.name}, line {number}")


def make_pairs(reviews: Sequence[Review], seed: int) -> list[tuple[int, bytes, bytes]]:
    """Make pairs of texts, half of them (label 1) from one document, half (label 0) from two.

    Every document is cut in two near its middle, with some words dropped at the cut, and used once.
    A pair with label 0 joins halves of two documents that are neighbours by length, so that lengths
    carry no information about labels. Equal documents count once. Documents that are too short to
    cut, and the last of an odd number, are not used. Cuts and labels depend on the non-negative
    seed and the texts.

    Returns:
        For each pair: label, start of one document, end of that document or of another.
    """
    texts = sorted({review.text for review in reviews}, key=lambda text: (len(text), text))
    neighbours = list(zip(texts[0::2], texts[1::2], strict=False))
    neighbours.sort(key=lambda pair: keyed_hash(seed, pair[0] + pair[1]))
    low, high = _CUT_BETWEEN
    pairs = []
    for i, (a, b) in enumerate(neighbours):
        # Cut both at the same fraction: otherwise mismatched lengths would give label 0 away.
        fraction = low + (high - low) * keyed_hash(seed, b + a) / 2**64
        (start_a, end_a), (start_b, end_b) = _cut(a, fraction), _cut(b, fraction)
        if not (start_a and end_a and start_b and end_b):
            continue
        if i % 2:
            pairs += [(1, start_a, end_a), (1, start_b, end_b)]
        else:
            pairs += [(0, start_a, end_b), (0, start_b, end_a)]
    return sorted(pairs, key=lambda pair: keyed_hash(seed, pair[1] + pair[2]))


def exclude(reviews: Sequence[Review], others: Sequence[Review]) -> list[Review]:
    """Reviews whose text does not occur among the others."""
    texts = {review.text for review in others}
    return [review for review in reviews if review.text not in texts]


def pair_examples(pairs: Sequence[tuple[int, bytes, bytes]]) -> Iterator[Example]:
    """Yield label and token ids of each pair, truncated to MAX_LENGTH."""
    for label, *texts in pairs:
        yield label, [to_ids(text, MAX_LENGTH) for text in texts]


def _cut(text: bytes, fraction: float) -> tuple[bytes, bytes]:
    """Cut between two words near a fraction of the text, and drop some words at the cut.

    Otherwise the last letters before the cut and the first ones after it would reveal whether they
    belong together. If there is no such position, the second part is empty.
    """
    first = text.find(b" ", int(fraction * len(text)))
    second = text.find(b" ", first + _GAP) if first >= 0 else -1
    return (text[:first].strip(), text[second:].strip()) if second >= 0 else (text, b"")


def _label(field: bytes, where: str) -> int:
    try:
        label = float(field)
    except ValueError:
        label = -1.0
    if label not in (0.0, 1.0):
        raise ValueError(f"{where} has label {field[:20]!r}, which must be 0.0 or 1.0.")
    return int(label)
