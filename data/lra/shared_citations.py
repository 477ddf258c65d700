"""Shared citations (aclsum): do two papers cite a common work? A task like Retrieval, but not AAN.

The papers are the 250 of the Python package aclsum 0.1.2 (Takeshita et al. 2024, MIT licence), each
with its text and its bibliography. Scores are not comparable with Retrieval's.
"""

import re
import unicodedata
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile, is_zipfile
from zipfile import Path as ZipPath

from data.files import parse_json
from data.lra.retrieval import MAX_LENGTH as MAX_LENGTH
from data.lra.retrieval import N_CLASSES as N_CLASSES
from data.lra.text import VOCAB_SIZE as VOCAB_SIZE
from data.lra.text import keyed_hash

PAPERS = "aclsum/dataset/paper_jsons"  # folder in the package
SPLIT_SHARES = {"train": 0.5, "val": 0.2, "test": 0.3}
"""Shares of the papers. Pairs grow with the square: a smaller val or test would have few."""


class Paper(NamedTuple):
    """One paper."""

    name: str
    """Its ID in the ACL Anthology, for example "P18-1001"."""
    text: bytes
    """Title, abstract and body in UTF-8, with inline citations, but without the bibliography."""
    works: frozenset[str]
    """Titles in its bibliography, as `normalize` returns them."""


Pair = tuple[int, Paper, Paper]
"""Label and two papers; the label is 1 if they cite a common work."""


def read_papers(source: Path | None) -> list[Paper]:
    """Read the papers of the package aclsum, sorted by name.

    Args:
        source: The wheel, a folder that contains aclsum/dataset/paper_jsons, or that folder itself.

    Raises:
        ValueError: The source has no papers, or one is malformed; the message names it.
    """
    papers = []
    if source is not None:
        root = ZipPath(source) if source.is_file() and is_zipfile(source) else source
        folder = root / PAPERS if (root / PAPERS).is_dir() else root
        paths = folder.iterdir() if folder.is_dir() else ()
        papers = [_read(path) for path in paths if path.suffix == ".json"]
    if not papers:
        raise ValueError(
            f"source={source} must be the wheel of the Python package aclsum 0.1.2, a folder with "
            f"{PAPERS}, or that folder itself. Download the wheel (5 MB) with `pip download "
            "--no-deps aclsum==0.1.2`, and pass aclsum-0.1.2-py3-none-any.whl."
        )
    return sorted(papers)


def split_papers(papers: Sequence[Paper], seed: int) -> dict[str, list[Paper]]:
    """Divide papers among "train", "val" and "test" by a hash of their names, keyed by the seed."""
    shuffled = sorted(papers, key=lambda paper: keyed_hash(seed, paper.name.encode()))
    splits, first, share = {}, 0, 0.0
    for split, more in SPLIT_SHARES.items():
        share += more
        end = round(share * len(shuffled))
        splits[split], first = shuffled[first:end], end
    return splits


def balanced_pairs(papers: Sequence[Paper], seed: int) -> list[Pair]:
    """Choose pairs of papers such that one paper alone does not reveal the label.

    Some papers share works with many others. If pairs with label 0 were drawn at random, such a
    paper would give label 1 away. Therefore two pairs with label 1, (a, b) and (c, d), are chosen
    together with two of label 0, (a, d) and (c, b). Each paper is then equally often first, and
    equally often second, in pairs of both labels. Half of all such fours are swapped, so that the
    order of names does not reveal the label. A pair with label 1 is left out if no other one
    matches it. Choice and order depend on the seed and the papers' names.

    Raises:
        ValueError: There are no such pairs.
    """

    def key(pair: tuple[Paper, Paper]) -> int:
        return keyed_hash(seed, f"{pair[0].name} {pair[1].name}".encode())

    waiting = sorted((p for p in combinations(sorted(papers), 2) if _share(*p)), key=key)
    chosen: list[Pair] = []
    used: set[frozenset[str]] = set()
    while waiting:
        a, b = waiting.pop(0)
        for pair, c, d in ((p, *q) for p in waiting for q in (p, p[::-1])):
            new = {frozenset((a.name, d.name)), frozenset((c.name, b.name))}
            distinct = len({a.name, b.name, c.name, d.name}) == 4
            if distinct and not (_share(a, d) or _share(c, b) or new & used):
                waiting.remove(pair)
                four: list[Pair] = [(1, a, b), (1, c, d), (0, a, d), (0, c, b)]
                if key((b, a)) % 2:
                    four = [(label, second, first) for label, first, second in four]
                chosen += four
                used |= new
                break
    if not chosen:
        raise ValueError(
            f"{len(papers)} papers are too few for pairs; use all 250 of aclsum 0.1.2."
        )
    return sorted(chosen, key=lambda pair: key(pair[1:]))


def normalize(title: str) -> str:
    """Reduce a title to its letters a to z and digits, without case, accents or spaces."""
    return re.sub(r"[^a-z0-9]", "", unicodedata.normalize("NFKD", title).casefold())


def _share(a: Paper, b: Paper) -> bool:
    return not a.works.isdisjoint(b.works)


def _read(path: Path | ZipPath) -> Paper:
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file")
    try:
        paper = parse_json(path.read_bytes())
        parsed = paper["pdf_parse"]
        paragraphs = [paper["title"], paper["abstract"], *(p["text"] for p in parsed["body_text"])]
        text = "\n".join(paragraphs).strip().encode(errors="replace")
        works = {normalize(entry["title"]) for entry in parsed["bib_entries"].values()} - {""}
        if not text:
            raise ValueError("it has no text")
    except (ValueError, KeyError, TypeError, AttributeError, BadZipFile) as error:
        raise ValueError(
            f"{path} must be a paper of aclsum 0.1.2, but is not ({error!r}); download it again."
        ) from error
    return Paper(path.stem, text, frozenset(works))
