"""Losses of a run, added up by document: all that tables and intervals need, in a small file.

FOLDER/CORPUS/RUN.npz keeps them, and can be copied. Means, differences and bootstraps over
documents are linear in the losses, so nothing is lost but the single tokens. Which of them count is
settled before: where windows slide, those that see nearly all of the history in every way of
scoring (LEAST_SEEN).
"""

import io
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from fractions import Fraction
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from configs.reader import from_yaml, to_yaml
from data.arrays import load_npz
from data.files import parse_json, write_atomically
from data.text.shards import TokenStream
from evaluation.windows import Scoring
from training.language.config import TrainConfig

LEAST_SEEN = Fraction(7, 8)
"""Share of its history that a token must see to count where windows slide: with less, tokens at the
start of short windows would flatter the longer context."""

LEAST_DOCUMENTS = 5
"""Fewer, of equal length, have no interval: the mean of a draw cannot be far enough out."""

N_PARTS = 20
"""Parts into which a text of fewer documents is cut."""

DAMAGED = (AttributeError, KeyError, TypeError, ValueError)
"""Errors of reading a NumPy file with a wrong byte, or a file of another kind."""


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Losses of one run by one scoring, added up by document and bin."""

    nats: np.ndarray  # (n_units, n_bins) float64; units are documents, or parts of a few
    tokens: np.ndarray  # (n_units, n_bins) int64: how many
    n_bytes: int  # UTF-8, that all of them stand for


@dataclass(frozen=True, kw_only=True)
class Text:
    """What was scored."""

    name: str
    sha256: str  # of the validation split
    counted: str  # hash of which tokens count where windows slide; only equal ones are comparable
    tokens: int
    text_bytes: int
    # (n_units,) tokens of the document that each unit belongs to, the end of text included
    document_lengths: np.ndarray
    n_documents: int | None = None  # where few are cut into parts; None: each is one unit


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A run and what it was scored."""

    label: str  # of the model; runs that differ in their seed share it
    number: int  # of the seed
    about: dict[str, Any]  # settings and cost, of `evaluation.runs.describe`
    config: TrainConfig
    sums: dict[Scoring, Sums]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A validation stream and what is known of each of its tokens; arrays are (n_tokens,)."""

    stream: TokenStream
    text: Text
    unit: np.ndarray  # number of its document, or of its part of one
    history: np.ndarray  # tokens before it in its document
    n_bytes: np.ndarray  # UTF-8 bytes that it stands for; 0 for the end of text
    well_seen: np.ndarray  # whether it counts where windows slide


def describe_corpus(
    stream: TokenStream, token_bytes: np.ndarray, scorings: Iterable[Scoring]
) -> Corpus:
    """The facts about every token of a validation split, for all scorings that are compared.

    `token_bytes` are (vocab_size,) lengths of the entries of the tokenizer.

    Raises:
        ValueError: no token is well seen in all of them.
    """
    text, counted = describe_text(stream, scorings)
    lengths = _document_lengths(stream)
    units, _ = units_of(lengths)
    return Corpus(
        stream=stream,
        text=text,
        unit=np.repeat(np.arange(len(units)), units),
        history=np.arange(len(stream)) - np.repeat(stream.document_starts, lengths),
        n_bytes=token_bytes[stream.read(0, len(stream))],
        well_seen=counted,
    )


def describe_text(stream: TokenStream, scorings: Iterable[Scoring]) -> tuple[Text, np.ndarray]:
    """The text of `describe_corpus`, and which of its tokens are `well_seen`."""
    scorings = list(dict.fromkeys(scorings))
    counted = well_seen(scorings, len(stream))
    if not counted.any():
        names = ", ".join(s.name for s in scorings if kind_of(s) == "sliding")
        raise ValueError(
            f"none of the {len(stream):,} tokens of {stream.path} sees {LEAST_SEEN} of the history "
            f"in each of {names}: take a single --stride, a smaller --first, or a longer text"
        )
    lengths = _document_lengths(stream)
    units, document = units_of(lengths)
    text = Text(
        name=stream.path.resolve().name,
        sha256=sha256_of(stream),
        counted=sha256(np.packbits(counted).tobytes()).hexdigest(),
        tokens=len(stream),
        text_bytes=stream.info.text_bytes,
        document_lengths=lengths[document],
        n_documents=len(lengths) if len(units) > len(lengths) else None,
    )
    return text, counted


def _document_lengths(stream: TokenStream) -> np.ndarray:
    """(n_documents,) tokens of each document, the end of text included."""
    return np.diff(np.append(stream.document_starts, len(stream)))


def units_of(document_lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cut a text of few documents into parts of about equal length, for intervals over them.

    Parts of one document resemble each other: such intervals hold for this text only.

    Args:
        document_lengths: (n_documents,) tokens of each.

    Returns:
        lengths: (n_units,) tokens of each document; of each part, if fewer than LEAST_DOCUMENTS
            count (as `effective_number` does) and the text has N_PARTS tokens.
        document: (n_units,) number of the document that each belongs to.
    """
    n_tokens = document_lengths.sum()
    n_parts = np.ones(len(document_lengths), dtype=np.int64)
    if round(float(effective_number(document_lengths))) < LEAST_DOCUMENTS and n_tokens >= N_PARTS:
        n_parts = np.maximum(1, np.rint(N_PARTS * document_lengths / n_tokens).astype(np.int64))
    document = np.repeat(np.arange(len(n_parts)), n_parts)
    ends = [
        np.arange(1, n + 1) * length // n
        for length, n in zip(document_lengths, n_parts, strict=True)
    ]
    return np.concatenate([np.diff(end, prepend=0) for end in ends]), document


def effective_number(lengths: np.ndarray) -> np.ndarray:
    """Number of equal documents whose mean varies as much as that of these (axis 0).

    (sum w)^2 / sum w^2 with w the tokens (Kish 1965, Survey Sampling); 0 where there are none.
    """
    lengths = np.asarray(lengths, dtype=np.float64)
    return lengths.sum(axis=0) ** 2 / np.maximum((lengths**2).sum(axis=0), 1)


def sha256_of(stream: TokenStream) -> str:
    """Hash of a split, from those of its shards."""
    return sha256("".join(shard.sha256 for shard in stream.info.shards).encode()).hexdigest()


def kind_of(scoring: Scoring) -> Literal["chunk", "sliding", "control"]:
    """Whether windows stand side by side, slide, or have a distant part that is changed."""
    if scoring.control != "none":
        return "control"
    return "sliding" if scoring.first else "chunk"


def well_seen(scorings: Iterable[Scoring], n_tokens: int) -> np.ndarray:
    """(n_tokens,) bool: the tokens that see LEAST_SEEN of the history wherever windows slide."""
    counted = np.ones(n_tokens, dtype=bool)
    for scoring in scorings:
        if kind_of(scoring) == "sliding":
            counted &= scoring.seen(n_tokens) >= math.ceil(LEAST_SEEN * scoring.history)
    return counted


def add_up(losses: np.ndarray, scoring: Scoring, corpus: Corpus) -> Sums:
    """Add up (n_tokens,) losses, of which NaN does not count.

    Bins are those of `log_bins`: of the position in the window where these do not overlap, of the
    position in the document where they slide. A control has a single one.
    """
    counted = ~np.isnan(losses)
    places, most = np.zeros(len(losses), dtype=np.int64), 0
    if (kind := kind_of(scoring)) == "chunk":
        places = (np.arange(len(losses)) - 1) % scoring.history  # of the token before the target
        most = scoring.history - 1
    elif kind == "sliding":
        counted &= corpus.well_seen
        places, most = corpus.history, int(corpus.history.max())
    shape = len(corpus.text.document_lengths), int(log_bins(most)) + 1
    nats, tokens = np.zeros(shape), np.zeros(shape, dtype=np.int64)
    cell = corpus.unit[counted], log_bins(places[counted])
    np.add.at(nats, cell, losses[counted].astype(np.float64))
    np.add.at(tokens, cell, 1)
    return Sums(nats=nats, tokens=tokens, n_bytes=int(corpus.n_bytes[counted].sum()))


def log_bins(lengths: ArrayLike) -> np.ndarray:
    """Bin b of 1 and more holds [2^(b-1), 2^b), bin 0 holds 0."""
    return np.ceil(np.log2(np.asarray(lengths) + 1.0)).astype(np.int64)


def bin_name(number: int) -> str:
    """The numbers in a bin of `log_bins`."""
    return str(number) if number <= 1 else f"{2 ** (number - 1):,} to {2**number - 1:,}"


def write_scored(scored: Scored, text: Text, folder: Path) -> Path:
    """Keep what a report needs of a run as FOLDER/CORPUS/RUN.npz, whole or not at all."""
    path = folder / text.name / f"{scored.about['folder']}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {
        "scored": {name: getattr(scored, name) for name in ("label", "number", "about")},
        "config": to_yaml(scored.config),
        "text": {name: value for name, value in vars(text).items() if name != "document_lengths"},
        "scorings": [asdict(scoring) for scoring in scored.sums],
        "n_bytes": [sums.n_bytes for sums in scored.sums.values()],
    }
    arrays = {"facts": np.array(json.dumps(facts)), "document_lengths": text.document_lengths}
    for number, sums in enumerate(scored.sums.values()):
        arrays |= {f"nats_{number}": sums.nats, f"tokens_{number}": sums.tokens}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    write_atomically(path, buffer.getvalue())
    return path


def read_scored(path: Path) -> tuple[Scored, Text]:
    """What `write_scored` kept.

    Raises:
        ValueError: the file is damaged, or of a newer version.
    """
    try:
        kept = load_npz(path)
        facts, sums = parse_json(str(kept["facts"])), {}
        scorings = zip(facts["scorings"], facts["n_bytes"], strict=True)
        for n, (scoring, n_bytes) in enumerate(scorings):
            nats, tokens = kept[f"nats_{n}"], kept[f"tokens_{n}"]
            sums[Scoring(**scoring)] = Sums(nats=nats, tokens=tokens, n_bytes=n_bytes)
        text = Text(document_lengths=kept["document_lengths"], **facts["text"])
        config = from_yaml(TrainConfig, facts["config"])
        return Scored(config=config, sums=sums, **facts["scored"]), text
    except DAMAGED as error:
        raise ValueError(
            f"{path} is damaged, or was written by another version ({error}): copy it again, or "
            "score the run again"
        ) from error
