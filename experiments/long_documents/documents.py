"""Opinions of courts with their labels, tokens and folds."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.text.opinions import Opinion, label_opinion
from data.text.readers import checked_text, read_json_lines
from data.text.tokenizer import TextTokenizer

SOURCE = "us-appellate-opinions"
LEAST = 10  # documents of each label: folds and validation need both


class Documents(NamedTuple):
    """Labelled documents in folds."""

    tokens: list[Tensor]
    """(T,) int64 each."""

    labels: list[bool]
    """True where the judgment was affirmed."""

    folds: list[tuple[list[int], list[int]]]
    """Indices of the training and test documents of each fold."""

    def about(self) -> dict[str, Any]:
        """Entries of a result: labels, number of tokens and the fold that tests each document."""
        folds = np.zeros(len(self.labels), np.int64)
        for number, (_, test) in enumerate(self.folds):
            folds[test] = number
        lengths = [len(document) for document in self.tokens]
        return {"labels": self.labels, "folds": folds.tolist(), "tokens": lengths}


def load(paths: Sequence[Path], tokenizer: TextTokenizer, n_folds: int) -> Documents:
    """Read, label and tokenize opinions.

    Raises:
        ValueError: see `read_documents` and `read_opinions`.
    """
    opinions = read_opinions(paths, n_folds)
    labels = [opinion.affirmed for opinion in opinions]
    tokens = [torch.tensor(tokenizer.encode(o.text), dtype=torch.int64) for o in opinions]
    return Documents(tokens, labels, folds_of(labels, n_folds))


def read_documents(paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield the objects of JSON lines.

    Raises:
        ValueError: a line is not JSON, or not an object with a text; the message names it.
    """
    for path in paths:
        for where, document in read_json_lines(path):
            if not isinstance(document, dict):
                kind = type(document).__name__
                raise ValueError(f"--text={where} must be an object with a text, but is {kind}")
            checked_text(document.get("text"), f"--text={where}: field 'text'")
            yield document


def read_opinions(paths: Sequence[Path], n_folds: int) -> list[Opinion]:
    """Read and label opinions, one of each text: no fold is tested on what it was trained on.

    Raises:
        ValueError: there are too few of a label for these folds.
    """
    documents = (d for d in read_documents(paths) if d.get("source") == SOURCE)
    labelled = filter(None, (label_opinion(document["text"]) for document in documents))
    opinions = [*{" ".join(opinion.text.split()): opinion for opinion in labelled}.values()]
    affirmed, least = sum(opinion.affirmed for opinion in opinions), max(LEAST, n_folds)
    others = len(opinions) - affirmed
    if min(affirmed, others) < least:
        raise ValueError(
            f"--text has {affirmed} opinions that affirm and {others} that do not, but must have "
            f"{least} of each: court opinions with source={SOURCE}"
        )
    return opinions


def folds_of(labels: Sequence[bool], n: int) -> list[tuple[list[int], list[int]]]:
    """Indices of training and test documents of each fold, with equal shares of both labels."""
    from sklearn.model_selection import StratifiedKFold

    folds = StratifiedKFold(n, shuffle=True, random_state=0).split(np.zeros(len(labels)), labels)
    return [(train.tolist(), test.tolist()) for train, test in folds]
