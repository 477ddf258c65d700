"""Prepare a folder of token shards from documents; an interrupted run can resume anywhere.

    documents -> pieces -> batches -> token ids -> shard writers, one per split
                 read-ahead thread    encoder: all cores

Every few million tokens, the writers sync and progress.json records how many documents are safe.
The shards depend only on the documents, so a killed and resumed run gives the same bytes.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from data.files import (
    check_settings,
    leaves,
    load_json,
    lock_folder,
    remove_unfinished_files,
    to_json,
    write_atomically,
)
from data.text.documents import Document, DocumentSource, empty_split_message
from data.text.shard_writer import ShardWriter
from data.text.shards import (
    FORMAT_VERSION,
    MANIFEST,
    PROGRESS,
    TOKENIZER,
    Manifest,
    SplitInfo,
    TokenizerInfo,
    load_offsets,
    splits_from_json,
    token_dtype,
    total,
    verify,
)
from data.text.tokenizer import (
    END_OF_TEXT,
    TextTokenizer,
    check_bpe_vocab_size,
    load_tokenizer,
    train_tokenizer,
)

T = TypeVar("T")

SHARD_TOKENS = 100_000_000
BPE_SAMPLE_CHARS = 16_000_000
LONG_DOCUMENT_TOKENS = (1024, 4096, 16384)

OnProgress = Callable[[SplitInfo, float], None]
"""Callback with the counts of both splits, including earlier runs, and the fraction read."""

_WITHOUT_EFFECT = ("source.skip_bad", "source.left_out_files")
"""Settings that do not determine the content of the shards by themselves."""
_TEXT_RULES = 2
"""Version of the rules for reading and cutting texts; a resumed run must not mix versions.

Version 1 kept byte order marks and line ends, and did not cut long documents for every tokenizer.
"""
_COMMIT_TOKENS = 1 << 23
_PIECE_CHARS = 1 << 15
_BATCH_CHARS = 1 << 21


class Piece(NamedTuple):
    """Part of a document, small enough to spread the work of a long document over all cores."""

    document: Document
    text: str
    is_last: bool
    done: float
    """Fraction of the source read up to the end of this piece."""


@dataclass
class PrepareState:
    """Contents of progress.json, the state between runs."""

    settings: dict[str, Any]
    """Settings as they are stored in the manifest."""
    splits: dict[str, SplitInfo]
    """Counts of each split; tokens that are not in finished shards are in an open one."""
    documents_read: int = 0
    """Number of documents that the counts cover; a resumed run starts with this document."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Number of documents read but left out, by reason."""
    tokenizer_sha256: str | None = None
    """SHA-256 of the tokenizer.json next to the shards, once it is written."""
    text_rules: int = _TEXT_RULES
    """Version of the text rules of the work so far, see `_TEXT_RULES`."""
    format_version: int = FORMAT_VERSION

    def save(self, out: Path) -> None:
        """Write progress.json atomically; everything that it counts must be on disk already."""
        write_atomically(out / PROGRESS, to_json(asdict(self)))

    @staticmethod
    def load(out: Path, settings: dict[str, Any]) -> "PrepareState":
        """Read progress.json, or create it.

        Raises:
            ValueError: The work was begun with other settings or by an older version, or the file
                is damaged.
        """
        if not (out / PROGRESS).exists():
            state = PrepareState(settings, {"train": SplitInfo(), "val": SplitInfo()})
            state.save(out)
            return state
        values = load_json(out / PROGRESS)
        values.setdefault("text_rules", 1)
        try:
            values["splits"] = splits_from_json(values["splits"])
            state = PrepareState(**values)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{out / PROGRESS} lacks a field ({error}); delete {out} and prepare it again."
            ) from error
        if state.text_rules != _TEXT_RULES:
            raise ValueError(
                f"{out} was begun by another version, which read and cut texts by other rules. It "
                "cannot be finished: delete it, or choose another --out folder."
            )
        _check_same(out, state, settings)
        state.settings = settings
        return state


@dataclass(frozen=True, kw_only=True)
class PrepareReport:
    """Result of `prepare`."""

    manifest: Manifest
    seconds: float
    """Wall time of this run."""
    new_text_bytes: int
    """UTF-8 bytes of text that this run encoded; 0 if the folder was already finished."""
    long_document_shares: dict[str, tuple[float, ...]]
    """By split: fraction of tokens in documents longer than 1,024, 4,096 and 16,384 tokens."""


def prepare(
    source: DocumentSource,
    out: str | Path,
    *,
    tokenizer: str | None = None,
    train_bpe: int | None = None,
    end_of_text: str | None = None,
    shard_tokens: int = SHARD_TOKENS,
    on_progress: OnProgress = lambda counts, done: None,
) -> PrepareReport:
    """Tokenize a source into `out`; resumes an interrupted run with the same settings.

    Args:
        source: Source of documents, see `data.text.sources.open_source`.
        out: Folder for the shards, created if missing.
        tokenizer: "gpt2" (the default) or the path of a tokenizer.json.
        train_bpe: Instead of `tokenizer`: vocabulary size of a byte-level BPE to train on the first
            16M characters of the training documents.
        end_of_text: Special token that ends documents. The default is the token that the tokenizer
            was saved with, or else "<|endoftext|>".
        shard_tokens: A shard ends with the document that brings it to this many tokens.
        on_progress: Called after every batch.

    Raises:
        ValueError: The folder was begun with other settings, a split is empty, or a document is
            unreadable.
    """
    started = time.perf_counter()
    if train_bpe is not None:
        if tokenizer is not None:
            raise ValueError(
                f"tokenizer={tokenizer!r} and train_bpe={train_bpe} exclude each other: pass one."
            )
        check_bpe_vocab_size(train_bpe)
    if end_of_text == "":
        raise ValueError('end_of_text must not be empty; leave it out for "<|endoftext|>".')
    if shard_tokens < 1:
        raise ValueError(f"shard_tokens={shard_tokens} must be at least 1.")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    with lock_folder(out):
        remove_unfinished_files(out)
        given = None if train_bpe else load_tokenizer(tokenizer or "gpt2", end_of_text)
        end = given.end_of_text if given else end_of_text or END_OF_TEXT
        settings = {
            "source": source.describe(),
            "tokenizer": {
                **({"sha256": given.sha256} if given else {"train_bpe": train_bpe}),
                "end_of_text": None if end == END_OF_TEXT else end,
            },
            "shard_tokens": shard_tokens,
        }
        new_text_bytes = 0
        if (out / MANIFEST).exists():
            manifest = Manifest.load(out)
            _check_same(out, manifest, settings)
        else:
            state = PrepareState.load(out, settings)
            before = total(state.splits).text_bytes
            chosen = _choose_tokenizer(out, state, source, given)
            _encode_rest(out, state, source, chosen, on_progress)
            manifest = _finish(out, state, chosen)
            new_text_bytes = total(state.splits).text_bytes - before
        (out / PROGRESS).unlink(missing_ok=True)
    return PrepareReport(
        manifest=manifest,
        seconds=time.perf_counter() - started,
        new_text_bytes=new_text_bytes,
        long_document_shares={
            split: _long_document_shares(out, info) for split, info in manifest.splits.items()
        },
    )


def _check_same(out: Path, before: PrepareState | Manifest, settings: dict[str, Any]) -> None:
    """Raise ValueError if the work was begun with settings that give other shards.

    --skip-bad may be added later, because nothing was left out without it. It may be removed as
    long as no document was left out.
    """
    try:
        check_settings(out, before.settings, settings, _WITHOUT_EFFECT)
    except ValueError as error:
        if not _by_older_file_rules(before.settings, settings):
            raise
        raise ValueError(
            f"{error} The older version that prepared it also read empty and hidden files of a "
            "folder: train on it as it is, or prepare the files again without them."
        ) from error
    if before.left_out and not settings["source"].get("skip_bad"):
        raise ValueError(
            f"{out} was begun with --skip-bad, which left out {sum(before.left_out.values()):,} "
            "documents: repeat it, choose another --out folder, or delete this one."
        )


def _by_older_file_rules(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether version 0.2 or older resolved the same names to other files."""
    old, new = dict(leaves(before)), dict(leaves(now))
    return (
        "source.files" in old
        and "source.left_out_files" not in old
        and old.get("source.names") == new.get("source.names")
        and old.get("source.listing_sha256") != new.get("source.listing_sha256")
    )


def _choose_tokenizer(
    out: Path, state: PrepareState, source: DocumentSource, given: TextTokenizer | None
) -> TextTokenizer:
    """Return the given tokenizer, or the one trained for this folder; saved next to the shards."""
    train_bpe = state.settings["tokenizer"].get("train_bpe")
    end_of_text = state.settings["tokenizer"].get("end_of_text") or END_OF_TEXT
    if given is not None:
        tokenizer = given
    elif state.tokenizer_sha256 is None:
        tokenizer = train_tokenizer(_sample(source, BPE_SAMPLE_CHARS), train_bpe, end_of_text)
    else:
        tokenizer = load_tokenizer(str(out / TOKENIZER))
        tokenizer.name = f"bpe-{train_bpe}"
    if state.tokenizer_sha256 is None:
        write_atomically(out / TOKENIZER, tokenizer.to_json().encode())
        state.tokenizer_sha256 = tokenizer.sha256
        state.save(out)
    elif state.tokenizer_sha256 != tokenizer.sha256:
        raise ValueError(
            f"{out / TOKENIZER} has sha256={tokenizer.sha256}, but the work so far was done with "
            f"{state.tokenizer_sha256}; delete {out} and prepare it again."
        )
    return tokenizer


def _sample(source: DocumentSource, max_chars: int) -> Iterator[str]:
    """Yield the first characters of the training documents, about `max_chars` in all."""
    for document in source.documents():
        if document.split == "train":
            yield document.text[:max_chars]
            max_chars -= len(document.text)
            if max_chars <= 0:
                return


def _encode_rest(
    out: Path,
    state: PrepareState,
    source: DocumentSource,
    tokenizer: TextTokenizer,
    on_progress: OnProgress,
) -> None:
    """Encode the documents that `state` does not cover yet, and update it."""
    shard_tokens = state.settings["shard_tokens"]
    writers = {
        split: ShardWriter(out, split, info, tokenizer, shard_tokens)
        for split, info in state.splits.items()
    }
    safe_tokens = total(state.splits).tokens
    text_bytes = 0  # of the current document
    # two threads work ahead: one reads and cuts documents, the other encodes them on all cores
    batches = _prefetch(_batches(source.documents(state.documents_read), tokenizer))
    encoded = _prefetch(
        (batch, tokenizer.encode_batch([piece.text for piece in batch])) for batch in batches
    )
    try:
        for batch, encodings in encoded:
            for piece, encoding in zip(batch, encodings, strict=True):
                document = piece.document
                if document.left_out is not None:
                    state.left_out[document.left_out] = state.left_out.get(document.left_out, 0) + 1
                    state.documents_read = document.number + 1
                    continue
                writers[document.split].append(encoding.ids)
                text_bytes += len(piece.text.encode("utf-8"))
                if not piece.is_last:
                    continue
                writers[document.split].end_document(text_bytes)
                text_bytes = 0
                state.documents_read = document.number + 1
                tokens = sum(info.tokens for info in state.splits.values())
                if tokens - safe_tokens >= min(_COMMIT_TOKENS, shard_tokens):
                    for writer in writers.values():
                        writer.sync()
                    state.save(out)
                    safe_tokens = tokens
            on_progress(total(state.splits), batch[-1].done)
        on_progress(total(state.splits), 1.0)
        for writer in writers.values():
            writer.close_shard()
        state.save(out)
    finally:
        for writer in writers.values():
            writer.release()


def _finish(out: Path, state: PrepareState, tokenizer: TextTokenizer) -> Manifest:
    """Verify the shards on disk, then write the manifest that makes the folder valid."""
    nonempty = [split for split, info in state.splits.items() if info.documents]
    if not nonempty:
        raise ValueError("The source holds no documents; pass another one.")
    if len(nonempty) < len(state.splits):
        message = empty_split_message(state.splits[nonempty[0]].documents, nonempty[0])
        raise ValueError(f"{message} Delete {out} first.")
    manifest = Manifest(
        settings=state.settings,
        tokenizer=TokenizerInfo(
            name=tokenizer.name,
            sha256=tokenizer.sha256,
            vocab_size=tokenizer.vocab_size,
            eot_id=tokenizer.eot_id,
        ),
        dtype=token_dtype(tokenizer.vocab_size),
        splits=state.splits,
        left_out=state.left_out,
    )
    verify(out, manifest)
    manifest.save(out)
    return manifest


def _batches(documents: Iterator[Document], tokenizer: TextTokenizer) -> Iterator[list[Piece]]:
    """Cut documents into pieces, and group these into batches of at least `_BATCH_CHARS`."""
    batch, chars, before = [], 0, 0.0
    for document in documents:
        n_read, length = 0, len(document.text)
        # one by one, because all pieces would be a second copy of a long document
        for text in tokenizer.pieces(document.text, _PIECE_CHARS):
            n_read += len(text)
            done = before + n_read / max(1, length) * (document.done - before)
            batch.append(Piece(document, text, is_last=n_read == length, done=done))
            chars += len(text)
            if chars >= _BATCH_CHARS:
                yield batch
                batch, chars = [], 0
        before = document.done
    if batch:
        yield batch


def _prefetch(items: Iterator[T]) -> Iterator[T]:
    """Yield the items while a thread computes the next one."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        future = thread.submit(next, items, None)
        while (item := future.result()) is not None:
            future = thread.submit(next, items, None)
            yield item


def _long_document_shares(out: Path, info: SplitInfo) -> tuple[float, ...]:
    """Fraction of the split's text tokens in documents longer than each bound."""
    shards = [np.diff(load_offsets(out, shard), append=shard.tokens) for shard in info.shards]
    lengths = np.concatenate(shards) - 1  # not counting the end of text, as is common
    long_tokens = [int(lengths[lengths > bound].sum()) for bound in LONG_DOCUMENT_TOKENS]
    return tuple(tokens / max(1, info.tokens - info.documents) for tokens in long_tokens)
