"""Losses of a run, summed by document: a small file with all that tables and intervals need.

The file FOLDER/CORPUS/RUN.npz can be copied. Means, differences and bootstraps over documents are
linear in the losses, so sums by document are sufficient. Which tokens count is decided before: with
sliding windows, those that see nearly the full history in every scoring (MIN_HISTORY_SHARE).

If a run was scored on key tokens (`evaluation.key_tokens`), their sums are in the same file.
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

MIN_HISTORY_SHARE = Fraction(7, 8)
"""Share of the history that a token must see to count with sliding windows. A smaller share would
favour longer contexts, because tokens at the start of short windows have less history."""

MIN_DOCUMENTS = 5
"""Minimum number of documents, of equal length, for an interval: the resampled means of fewer do
not spread far enough."""

N_PARTS = 20
"""Number of parts into which a text of fewer documents is cut."""

DAMAGED = (AttributeError, KeyError, TypeError, ValueError)
"""Errors from reading a corrupt NumPy file, or a file of another kind."""


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Losses of one run and one scoring, summed by unit and bin."""

    nats: np.ndarray  # (n_units, n_bins) float64; a unit is a document, or a part of one
    tokens: np.ndarray  # (n_units, n_bins) int64: number of tokens
    n_bytes: int  # UTF-8 bytes that all tokens encode


@dataclass(frozen=True, kw_only=True)
class Text:
    """Text that was scored."""

    name: str
    sha256: str  # of the validation split
    counted: str  # hash of which tokens count with sliding windows; must be equal to compare
    tokens: int
    text_bytes: int
    # (n_units,) length in tokens of the document of each unit, including the end of text
    document_lengths: np.ndarray
    n_documents: int | None = None  # None means that each document is one unit


@dataclass(frozen=True, kw_only=True)
class KeySums:
    """Losses of one run on the key tokens that another run chose."""

    about: dict[str, Any]  # from `evaluation.key_tokens.KeyTokens.about`
    sums: dict[Scoring, Sums]  # of sliding windows


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Run with its summed losses."""

    label: str  # of the model, shared by its seeds
    number: int  # of the seed
    about: dict[str, Any]  # settings and cost from `evaluation.runs.describe`
    config: TrainConfig
    sums: dict[Scoring, Sums]
    key: KeySums | None = None


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Validation stream with properties of each token. Arrays are (n_tokens,)."""

    stream: TokenStream
    text: Text
    unit: np.ndarray  # index of the document, or of the part of one
    history: np.ndarray  # number of earlier tokens in the document
    n_bytes: np.ndarray  # UTF-8 bytes that the token encodes; 0 for the end of text
    well_seen: np.ndarray  # whether the token counts with sliding windows


def describe_corpus(
    stream: TokenStream, token_bytes: np.ndarray, scorings: Iterable[Scoring]
) -> Corpus:
    """Describe every token of a validation split, given all scorings that are compared.

    Args:
        stream: the validation split.
        token_bytes: (vocab_size,) length in bytes of each tokenizer entry.
        scorings: all scorings that are compared.

    Raises:
        ValueError: no token is well seen in all scorings.
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
    """Text of `describe_corpus`, and its (n_tokens,) mask of `well_seen` tokens."""
    scorings = list(dict.fromkeys(scorings))
    counted = well_seen(scorings, len(stream))
    if not counted.any():
        names = ", ".join(s.name for s in scorings if kind_of(s) == "sliding")
        raise ValueError(
            f"none of the {len(stream):,} tokens of {stream.path} sees {MIN_HISTORY_SHARE} of the "
            f"history in each of {names}. Try a single --stride, a smaller --first or a longer text"
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
    """(n_documents,) length of each document in tokens, including the end of text."""
    return np.diff(np.append(stream.document_starts, len(stream)))


def units_of(document_lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split a text into the units of its intervals: documents, or parts of them if there are few.

    Parts have about equal length. They are used if `effective_number` is below MIN_DOCUMENTS and
    the text has at least N_PARTS tokens. Parts of one document resemble each other, so intervals
    over parts hold for this text only.

    Args:
        document_lengths: (n_documents,) length of each document in tokens.

    Returns:
        lengths: (n_units,) length of each unit in tokens.
        document: (n_units,) index of the document of each unit.
    """
    n_tokens = document_lengths.sum()
    n_parts = np.ones(len(document_lengths), dtype=np.int64)
    if round(float(effective_number(document_lengths))) < MIN_DOCUMENTS and n_tokens >= N_PARTS:
        n_parts = np.maximum(1, np.rint(N_PARTS * document_lengths / n_tokens).astype(np.int64))
    document = np.repeat(np.arange(len(n_parts)), n_parts)
    ends = [
        np.arange(1, n + 1) * length // n
        for length, n in zip(document_lengths, n_parts, strict=True)
    ]
    return np.concatenate([np.diff(end, prepend=0) for end in ends]), document


def effective_number(lengths: np.ndarray) -> np.ndarray:
    """Number of documents of equal length whose mean has the same variance (axis 0).

    (sum w)^2 / sum w^2 with w the tokens of each document (Kish 1965, Survey Sampling), or 0 if
    there are no tokens.
    """
    lengths = np.asarray(lengths, dtype=np.float64)
    return lengths.sum(axis=0) ** 2 / np.maximum((lengths**2).sum(axis=0), 1)


def sha256_of(stream: TokenStream) -> str:
    """Hash of a split, computed from the hashes of its shards."""
    return sha256("".join(shard.sha256 for shard in stream.info.shards).encode()).hexdigest()


def kind_of(scoring: Scoring) -> Literal["chunk", "sliding", "control"]:
    """Kind of windows: chunks that do not overlap, sliding windows, or controls."""
    if scoring.control != "none":
        return "control"
    return "sliding" if scoring.first else "chunk"


def well_seen(scorings: Iterable[Scoring], n_tokens: int) -> np.ndarray:
    """(n_tokens,) bool: tokens that see MIN_HISTORY_SHARE of the history in all sliding windows."""
    counted = np.ones(n_tokens, dtype=bool)
    for scoring in scorings:
        if kind_of(scoring) == "sliding":
            counted &= scoring.seen(n_tokens) >= math.ceil(MIN_HISTORY_SHARE * scoring.history)
    return counted


def add_up(
    losses: np.ndarray, scoring: Scoring, corpus: Corpus, among: np.ndarray | None = None
) -> Sums:
    """Sum (n_tokens,) losses by unit and bin. NaN does not count.

    With `among`, an (n_tokens,) mask, only these tokens count.

    Bins are those of `log_bins`: of the position in the window for chunks, and of the position in
    the document for sliding windows. Controls have a single bin.
    """
    counted = ~np.isnan(losses)
    positions, last = np.zeros(len(losses), dtype=np.int64), 0
    if (kind := kind_of(scoring)) == "chunk":
        positions = (np.arange(len(losses)) - 1) % scoring.history  # of the token before the target
        last = scoring.history - 1
    elif kind == "sliding":
        counted &= corpus.well_seen
        positions, last = corpus.history, int(corpus.history.max())
    if among is not None:
        counted &= among
    shape = len(corpus.text.document_lengths), int(log_bins(last)) + 1
    nats, tokens = np.zeros(shape), np.zeros(shape, dtype=np.int64)
    cell = corpus.unit[counted], log_bins(positions[counted])
    np.add.at(nats, cell, losses[counted].astype(np.float64))
    np.add.at(tokens, cell, 1)
    return Sums(nats=nats, tokens=tokens, n_bytes=int(corpus.n_bytes[counted].sum()))


def log_bins(lengths: ArrayLike) -> np.ndarray:
    """Logarithmic bin of each length: bin 0 is 0, bin b >= 1 is [2^(b-1), 2^b)."""
    return np.ceil(np.log2(np.asarray(lengths) + 1.0)).astype(np.int64)


def bin_name(number: int) -> str:
    """Range of a bin of `log_bins`, such as "4 to 7"."""
    return str(number) if number <= 1 else f"{2 ** (number - 1):,} to {2**number - 1:,}"


def write_scored(scored: Scored, text: Text, folder: Path) -> Path:
    """Write the summed losses of a run to FOLDER/CORPUS/RUN.npz, atomically."""
    path = folder / text.name / f"{scored.about['folder']}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    scorings, arrays = _pack(scored.sums)
    facts = {
        "scored": {name: getattr(scored, name) for name in ("label", "number", "about")},
        "config": to_yaml(scored.config),
        "text": {name: value for name, value in vars(text).items() if name != "document_lengths"},
        **scorings,
    }
    if scored.key is not None:
        scorings, more = _pack(scored.key.sums, "key_")
        facts["key"] = {"about": scored.key.about, **scorings}
        arrays |= more
    arrays |= {"facts": np.array(json.dumps(facts)), "document_lengths": text.document_lengths}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    write_atomically(path, buffer.getvalue())
    return path


def read_scored(path: Path) -> tuple[Scored, Text]:
    """Read a file of `write_scored`.

    Raises:
        ValueError: the file is damaged, or was written by a newer version.
    """
    try:
        saved = load_npz(path)
        facts, key = parse_json(str(saved["facts"])), None
        if "key" in facts:
            sums = _unpack(saved, facts["key"], "key_")
            key = KeySums(about=facts["key"]["about"], sums=sums)
        text = Text(document_lengths=saved["document_lengths"], **facts["text"])
        config, sums = from_yaml(TrainConfig, facts["config"]), _unpack(saved, facts)
        return Scored(config=config, sums=sums, key=key, **facts["scored"]), text
    except DAMAGED as error:
        raise ValueError(
            f"{path} is damaged, or was written by another version ({error}): copy it again, or "
            "score the run again"
        ) from error


def _pack(sums: dict[Scoring, Sums], prefix: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    """Facts and arrays of a file that holds these sums."""
    facts = {
        "scorings": [asdict(scoring) for scoring in sums],
        "n_bytes": [of.n_bytes for of in sums.values()],
    }
    arrays = {}
    for n, of in enumerate(sums.values()):
        arrays |= {f"{prefix}nats_{n}": of.nats, f"{prefix}tokens_{n}": of.tokens}
    return facts, arrays


def _unpack(
    saved: dict[str, np.ndarray], facts: dict[str, Any], prefix: str = ""
) -> dict[Scoring, Sums]:
    """Sums from the facts and arrays of `_pack`."""
    sums = {}
    for n, (scoring, n_bytes) in enumerate(zip(facts["scorings"], facts["n_bytes"], strict=True)):
        nats, tokens = saved[f"{prefix}nats_{n}"], saved[f"{prefix}tokens_{n}"]
        sums[Scoring(**scoring)] = Sums(nats=nats, tokens=tokens, n_bytes=n_bytes)
    return sums
