"""Two documents an example: Retrieval of Long Range Arena, and pairs of halves made from reviews.

Retrieval asks whether one paper cites the other (ACL Anthology Network, Radev et al. 2013).
`make_pairs` is a task of its own for those who cannot fetch that: do the two texts come from one
document? It has its own name, "pairs", and its numbers do not compare with Retrieval's.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from data.files import check_regular
from data.lra.text import VOCAB_SIZE as VOCAB_SIZE
from data.lra.text import Review, keyed_number, to_ids

N_CLASSES = 2
MAX_LENGTH = 4000  # bytes that are kept of each document
SPLIT_SIZES = {"train": 147_086, "val": 18_090, "test": 17_437}  # of the published files

_FILES = {
    "train": "new_aan_pairs.train.tsv",
    "val": "new_aan_pairs.eval.tsv",
    "test": "new_aan_pairs.test.tsv",
}
_FIELDS = 5
_CUT_BETWEEN = (0.4, 0.6)
_GAP = 64  # bytes

Example = tuple[int, list[np.ndarray]]  # label, and the token ids of two documents, uint16 (length)


def find_aan(source: Path | None) -> dict[str, Path]:
    """The files of the three splits in a folder, or in its tsv_data; raises ValueError that says
    where to get them."""
    for folder in () if source is None else (source, source / "tsv_data"):
        paths = {split: folder / name for split, name in _FILES.items()}
        if all(path.exists() for path in paths.values()):
            return paths
    raise ValueError(
        f"source={source} must be a folder with {', '.join(_FILES.values())}. They are in "
        "lra_release.gz, and in data/aan of the dataset OpenNLPLab/lra on the Hugging Face hub "
        "(8.5, 1.1 and 1.0 GB): download them, for example with `hf download --repo-type dataset "
        "OpenNLPLab/lra --include 'data/aan/new_aan_pairs.*' --local-dir FOLDER`, and give "
        "FOLDER/data/aan. Or prepare `pairs`, a task of two documents that needs no such file."
    )


def read_aan(path: Path, skipped: list[str]) -> Iterator[Example]:
    """Read one tsv file: label, two numbers, two texts; no header, no quotes, any bytes.

    `skipped` gets the name of each line that is left out, because a text of it is empty.

    Raises:
        ValueError: A line is malformed; names file and line.
    """
    check_regular(path)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            fields = line.rstrip(b"\r\n").split(b"\t")
            where = f"{path}, line {number}"
            if len(fields) != _FIELDS:
                raise ValueError(
                    f"{where} has {len(fields)} fields between tabs, but must have {_FIELDS} "
                    "(label, two numbers, two texts); fetch the file again."
                )
            documents = [to_ids(text, MAX_LENGTH) for text in fields[3:]]
            if all(len(document) for document in documents):
                yield _label(fields[0], where), documents
            else:
                skipped.append(f"{path.name}, line {number}")


def make_pairs(reviews: Sequence[Review], seed: int) -> list[tuple[int, bytes, bytes]]:
    """Make pairs of texts, half of them (label 1) from one document, half (label 0) from two.

    Every document is cut in two near its middle, where some words are left out, and used once. A
    pair of label 0 has halves of two documents that are neighbours by length, so that lengths tell
    nothing about labels. Equal documents count once; the odd one out and those too short to cut
    are not used. The seed, non-negative, decides cuts and labels, together with the texts.

    Returns:
        Label, start of one document, end of that one or another.
    """
    texts = sorted({review.text for review in reviews}, key=lambda text: (len(text), text))
    neighbours = list(zip(texts[0::2], texts[1::2], strict=False))
    neighbours.sort(key=lambda pair: keyed_number(seed, pair[0] + pair[1]))
    low, high = _CUT_BETWEEN
    pairs = []
    for i, (a, b) in enumerate(neighbours):
        # both at the same share: else lengths that do not add up would tell two documents apart
        share = low + (high - low) * keyed_number(seed, b + a) / 2**64
        (start_a, end_a), (start_b, end_b) = _cut(a, share), _cut(b, share)
        if not (start_a and end_a and start_b and end_b):
            continue
        if i % 2:
            pairs += [(1, start_a, end_a), (1, start_b, end_b)]
        else:
            pairs += [(0, start_a, end_b), (0, start_b, end_a)]
    return sorted(pairs, key=lambda pair: keyed_number(seed, pair[1] + pair[2]))


def without(reviews: Sequence[Review], others: Sequence[Review]) -> list[Review]:
    """The reviews whose text none of the others has."""
    texts = {review.text for review in others}
    return [review for review in reviews if review.text not in texts]


def pair_examples(pairs: Sequence[tuple[int, bytes, bytes]]) -> Iterator[Example]:
    """Yield label and token ids of each pair, cut to MAX_LENGTH."""
    for label, *texts in pairs:
        yield label, [to_ids(text, MAX_LENGTH) for text in texts]


def _cut(text: bytes, share: float) -> tuple[bytes, bytes]:
    """Cut between two words near a share of the text, and leave out some words there.

    Else the last letters before the cut and the first behind it would tell whether they belong
    together. A part is empty where there is no such place.
    """
    first = text.find(b" ", int(share * len(text)))
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
