"""Choose the source for the names on a command line, and cut documents if there are only a few."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.text.documents import (
    HUB_VAL_RATIO,
    LOCAL_VAL_RATIO,
    Document,
    DocumentSource,
    FileSource,
    HubSource,
    StdlibSource,
)
from data.text.hub_stream import HubStream
from data.text.readers import file_format

CUT_VAL_RATIO = 0.1  # of each document, if there are too few to use whole ones for validation


@dataclass(frozen=True)
class CutSource:
    """Local files with so few documents that the end of each is used for validation.

    The beginning of document n gets number 2 n, its end number 2 n + 1. A document that is too
    short to cut has no end.

    Raises:
        ValueError: No document can be cut.
    """

    files: FileSource
    val_ratio: float = CUT_VAL_RATIO
    """Fraction of each text for validation."""

    def __post_init__(self) -> None:
        longest = count = 0
        for document in self.files.documents():
            if cut_position(document.text, self.val_ratio) is not None:
                return
            if document.left_out is None:
                longest, count = max(longest, len(document.text)), count + 1
        if count:  # if there are none, `prepare` reports it
            raise ValueError(
                f"{', '.join(self.files.names)}: {count} document(s) are too few to use whole ones "
                f"for validation, and too short to cut (the longest has {longest} characters); "
                "pass --val FILE or, for a text file that holds many documents, --txt-separator."
            )

    def describe(self) -> dict[str, Any]:
        return self.files.describe() | {"val_ratio": None, "val_cut": self.val_ratio}

    def documents(self, start: int = 0) -> Iterator[Document]:
        before = 0.0
        for document in self.files.documents(start // 2):
            cut = cut_position(document.text, self.val_ratio)
            number = 2 * document.number
            if number >= start and document.left_out is not None:
                yield document._replace(number=number)
            elif number >= start:
                fraction = 1 if cut is None else cut / len(document.text)
                done = before + fraction * (document.done - before)
                yield Document(number, "train", document.text[:cut], done)
            if cut is not None:
                yield Document(number + 1, "val", document.text[cut:], document.done)
            before = document.done


def cut_position(text: str, val_ratio: float) -> int | None:
    """Position at which the last `val_ratio` of a text begins, or at most twice as much.

    It is the beginning of a line, or else of a word; None if there is neither in that range.
    """
    earliest, latest = (int(len(text) * max(0, 1 - n * val_ratio)) for n in (2, 1))
    borders = (text.rfind(mark, earliest, latest) + 1 for mark in ("\n", " "))
    return next((border for border in borders if border > 0), None)


def open_source(
    names: Sequence[str],
    *,
    val: Sequence[str] = (),
    val_ratio: float | None = None,
    text_field: str = "text",
    txt_separator: str | None = None,
    as_text: bool = False,
    skip_bad: bool = False,
    hub_config: str | None = None,
    stream: bool = False,
    max_documents: int | None = None,
) -> DocumentSource:
    """Choose the source for the names on a command line.

    Args:
        names: "stdlib", one dataset name on the Hugging Face hub, or local files, folders, globs.
        val: Local files, folders and globs for validation; without them, the source is split.
        val_ratio: Fraction of the documents for validation, by default 0.0005 for the hub and 0.01
            otherwise. If this is less than one document of local files, every document is cut, and
            the fraction (by default 0.1) applies to its text.
        text_field: JSON field or column that holds the text.
        txt_separator: Separator of the documents in .txt files; without it, a file is a document.
        as_text: Read formats other than .txt, .jsonl and .parquet as plain text.
        skip_bad: Leave out and count documents that are not text, or empty. By default they raise
            an error.
        hub_config: Configuration of the hub dataset, if it has several.
        stream: Stream a hub dataset without storing it on disk.
        max_documents: Number of documents to read from a stream; None reads all.

    Raises:
        ValueError: An option does not fit the source, or the validation split would be empty.
        FileNotFoundError: A local name matches nothing.
    """
    if val_ratio is not None and not 0 < val_ratio < 1:
        raise ValueError(f"val_ratio={val_ratio} must lie between 0 and 1.")
    if val and val_ratio is not None:
        raise ValueError("val and val_ratio exclude each other: pass one of them.")
    if max_documents is not None and (not stream or max_documents < 1):
        raise ValueError(
            f"max_documents={max_documents} must be at least 1, and needs stream: without it, the "
            "whole dataset is downloaded."
        )
    local_only = {"val": val, "txt_separator": txt_separator, "as_text": as_text}
    if list(names) == ["stdlib"]:
        other_field = text_field if text_field != "text" else None
        unsupported = {"hub_config": hub_config, "text_field": other_field, "stream": stream}
        unsupported["skip_bad"] = skip_bad
        _refuse("the standard library", local_only | unsupported)
        return StdlibSource(val_ratio or LOCAL_VAL_RATIO)
    if len(names) == 1 and not _looks_local(names[0]):
        _refuse(f"the hub dataset {names[0]!r}", local_only)
        ratio = val_ratio or HUB_VAL_RATIO
        if stream:
            return HubStream(names[0], hub_config, text_field, ratio, max_documents, skip_bad)
        return HubSource(names[0], hub_config, text_field, ratio, skip_bad)
    _refuse("local files", {"hub_config": hub_config, "stream": stream})
    ratio = val_ratio or LOCAL_VAL_RATIO
    files = FileSource(names, val, ratio, text_field, txt_separator, as_text, skip_bad)
    return CutSource(files, val_ratio or CUT_VAL_RATIO) if not val and files.are_few() else files


def _looks_local(name: str) -> bool:
    return (
        any(mark in name for mark in "*?[")
        or name.startswith((".", "/", "~"))
        or name.count("/") > 1
        or file_format(Path(name)) is not None
        or Path(name).exists()
    )


def _refuse(source: str, options: dict[str, Any]) -> None:
    names = [name for name, value in options.items() if value]
    if names:
        raise ValueError(f"{', '.join(names)} has no effect on {source}; leave it out.")
