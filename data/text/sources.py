"""Which source the names on a command line mean, and what is done where documents are few."""

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

CUT_VAL_RATIO = 0.1  # of each document, where there are too few to give whole ones to validation


@dataclass(frozen=True)
class CutSource:
    """Local files of so few documents that each is cut: the end of its text is for validation.

    A document begins as number 2 n and ends as number 2 n + 1; one that is too short for a cut has
    no end.

    Raises:
        ValueError: No document can be cut.
    """

    files: FileSource
    val_ratio: float = CUT_VAL_RATIO
    """Share of each text for validation."""

    def __post_init__(self) -> None:
        longest = count = 0
        for document in self.files.documents():
            if cut_position(document.text, self.val_ratio) is not None:
                return
            if document.left_out is None:
                longest, count = max(longest, len(document.text)), count + 1
        if count:  # of none at all, preparing them tells
            raise ValueError(
                f"{', '.join(self.files.names)}: {count} document(s), too few to give whole ones "
                f"to validation and too short to cut (the longest has {longest} characters); pass "
                "--val FILE or, for a text file that holds many documents, --txt-separator."
            )

    def describe(self) -> dict[str, Any]:
        return self.files.describe() | {"val_ratio": None, "val_cut": self.val_ratio}

    def documents(self, start: int = 0) -> Iterator[Document]:
        before = 0.0
        for whole in self.files.documents(start // 2):
            cut = cut_position(whole.text, self.val_ratio)
            number = 2 * whole.number
            if number >= start and whole.left_out is not None:
                yield whole._replace(number=number)
            elif number >= start:
                share = 1 if cut is None else cut / len(whole.text)
                done = before + share * (whole.done - before)
                yield Document(number, "train", whole.text[:cut], done)
            if cut is not None:
                yield Document(number + 1, "val", whole.text[cut:], whole.done)
            before = whole.done


def cut_position(text: str, val_ratio: float) -> int | None:
    """Where the last `val_ratio` of a text begin, or at most twice as much: with a line.

    Where no line begins there, with a word; None if there is none either.
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
    """Choose the source that the names on a command line mean.

    Args:
        names: "stdlib", one dataset name on the Hugging Face hub, or local files, folders, globs.
        val: Local files, folders and globs for validation; without them the source is split.
        val_ratio: Share of the documents for validation; the default is 0.0005 for the hub and
            0.01 for the rest. Where that is less than one of the documents of local files, each is
            cut, and it is the share of its text; the default is then 0.1.
        text_field: JSON field or column that holds the text.
        txt_separator: String between the documents of .txt files; without it a file is a document.
        as_text: Read files of other formats than .txt, .jsonl and .parquet as plain text.
        skip_bad: Leave out, and count, the documents that are no text or empty, which are refused
            otherwise.
        hub_config: Configuration of the hub dataset, where it has several.
        stream: Read a hub dataset as it arrives, and keep none of it on the disk.
        max_documents: Of a stream, how many to read; None reads all.

    Raises:
        ValueError: An option does not fit the source, or the validation split would be empty.
        FileNotFoundError: A local name matches nothing.
    """
    if val_ratio is not None and not 0 < val_ratio < 1:
        raise ValueError(f"val_ratio={val_ratio} must lie between 0 and 1.")
    if val and val_ratio is not None:
        raise ValueError("val and val_ratio exclude each other: give one of them.")
    if max_documents is not None and (not stream or max_documents < 1):
        raise ValueError(
            f"max_documents={max_documents} must be at least 1, and needs stream: a dataset that "
            "is not streamed is read whole."
        )
    local_only = {"val": val, "txt_separator": txt_separator, "as_text": as_text}
    if list(names) == ["stdlib"]:
        other_field = text_field if text_field != "text" else None
        useless = {"hub_config": hub_config, "text_field": other_field, "stream": stream}
        useless["skip_bad"] = skip_bad
        _refuse("the standard library", local_only | useless)
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
    given = [name for name, value in options.items() if value]
    if given:
        raise ValueError(f"{', '.join(given)} has no meaning for {source}; leave it out.")
