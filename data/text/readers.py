"""Readers of the file formats of local corpora, one document at a time for files of any size.

Every reader yields `(load, done)` pairs. `load()` parses and returns the document's text, so a
resumed run skips documents without parsing them. `done` is the fraction of the file read so far.
"""

import codecs
import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache, partial
from io import BufferedReader
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO

from data.files import check_regular, parse_json

Record = tuple[Callable[[], str], float]

SUPPORTED = ".txt, .jsonl (each also as .gz, .xz or .zst) and .parquet"

MAX_DOCUMENT_BYTES = 1 << 30
"""Limit, because a document is held in memory, with several copies while it is tokenized."""

_CHUNK = 1 << 20
_HEAD = 1 << 16
_OTHER_MARKS = {  # UTF-32 first: its byte order mark begins like that of UTF-16
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}
_MARK_BYTES = 4


class UnusableTextError(ValueError):
    """A document that is empty or is not text."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason
        """Reason under which such documents are counted."""


def file_format(path: Path) -> str | None:
    """Format of a file by its name: "text", "jsonl" or "parquet"; None if unknown."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return "parquet"
    if suffix in COMPRESSIONS:
        suffix = Path(path.stem).suffix.lower()
    return {".txt": "text", ".jsonl": "jsonl"}.get(suffix)


def is_text(path: Path) -> bool:
    """Whether the first 64 KiB of a file, decompressed, are UTF-8 without a NUL."""
    with open_file(path) as (stream, _):
        head = stream.read(_HEAD)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # may end inside a character
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def holds_one_document(path: Path, txt_separator: str | None) -> bool:
    """Whether a file is a single document, judged by its name and the separator."""
    return txt_separator is None and file_format(path) in ("text", None)


def read_file(path: Path, text_field: str, txt_separator: str | None) -> Iterator[Record]:
    """Yield the documents of one file in file order.

    Text in JSON Lines and Parquet stays unchanged. Any other file is plain text: a byte order mark
    is removed, and the line ends "\\r\\n" and "\\r" become "\\n".

    Args:
        text_field: JSON field or Parquet column that holds the text.
        txt_separator: Separator between the documents of plain text; several in a row count as one.
            None makes the file one document.

    Raises:
        ValueError: The file is damaged, or lacks `text_field`; the message names file and line.
        UnusableTextError: Raised by `load()` if the document is empty or is not text.
    """
    kind = file_format(path)
    if kind == "parquet":
        return _read_parquet(path, text_field)
    if kind == "jsonl":
        return _read_jsonl(path, text_field)
    if txt_separator is None:
        return iter([(partial(_read_text, path), 1.0)])
    return _read_separated(path, _with_newlines(txt_separator.encode()))


@contextmanager
def open_file(path: Path) -> Iterator[tuple[Any, Callable[[], float]]]:
    """Open a file, decompress it according to its name, and yield it with a progress function.

    The function returns the fraction of the file read so far.
    """
    check_regular(path)
    with path.open("rb") as raw:
        size = max(1, os.fstat(raw.fileno()).st_size)
        decompress = COMPRESSIONS.get(path.suffix.lower())
        try:
            yield decompress(raw) if decompress else raw, lambda: raw.tell() / size
        except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
            raise ValueError(
                f"{path} cannot be read to its end ({error}); download or write it again."
            ) from error


def read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the place, for messages, and the value of each line that is not blank.

    Raises:
        ValueError: a line is not JSON, or the file is torn; the message names it.
    """
    with open_file(path) as (file, _):
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                value = parse_json(line)
            except ValueError as error:
                raise ValueError(f"{where} is not JSON ({error}); repair it.") from error
            yield where, value


def _zstd(raw: BinaryIO) -> BufferedReader:
    import pyarrow

    # of the available zstd readers, only Arrow's notices a truncated file
    stream: Any = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")
    return BufferedReader(stream, _CHUNK)


COMPRESSIONS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".zst": _zstd,
}
"""Functions that open a compressed file, by suffix."""


def _decode(data: bytes | bytearray, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnusableTextError(
            f"{where} is not UTF-8 ({error.reason} at byte {error.start}); convert it, for example "
            "with iconv",
            "not UTF-8",
        ) from error


def _refuse_other_marks(head: bytes, path: Path) -> None:
    """Raise UnusableTextError for a byte order mark of an encoding other than UTF-8."""
    for encoding, marks in _OTHER_MARKS.items():
        if head.startswith(marks):
            raise UnusableTextError(
                f"{path} is {encoding} according to its byte order mark, but must be UTF-8; "
                f"convert it: iconv -f {encoding} -t UTF-8 {path.name} > NEW",
                "not UTF-8",
            )


def _with_newlines(data: bytes) -> bytes:
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _plain_chunks(stream: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yield a plain text file in chunks, without a byte order mark and with "\\n" line ends."""
    head = stream.read(_MARK_BYTES)
    _refuse_other_marks(head, path)
    head, after_return = head.removeprefix(codecs.BOM_UTF8), False
    # in chunks, because read(limit) allocates memory for the whole limit at once
    for chunk in chain([head], iter(partial(stream.read, _CHUNK), b"")):
        rest = chunk.removeprefix(b"\n") if after_return else chunk
        after_return = chunk.endswith(b"\r")
        yield _with_newlines(rest)


def _read_text(path: Path) -> str:
    data = bytearray()
    with open_file(path) as (stream, _):
        for chunk in _plain_chunks(stream, path):
            data += chunk
            if len(data) > MAX_DOCUMENT_BYTES:
                raise ValueError(
                    f"{path} holds more than {MAX_DOCUMENT_BYTES:,} bytes, the limit for one "
                    "document in memory; pass the separator of its documents with --txt-separator."
                )
    return checked_text(_decode(data, str(path)), str(path))


def _read_separated(path: Path, separator: bytes) -> Iterator[Record]:
    pending: list[bytes] = []  # parts of the document that has not ended yet
    tail = b""  # last bytes read, which may be the beginning of a separator
    number = 0
    with open_file(path) as (stream, fraction_read):
        for chunk in _plain_chunks(stream, path):
            *ends, rest = (tail + chunk).split(separator)
            done = fraction_read()
            for end in ends:
                if document := b"".join([*pending, end]):
                    number += 1
                    yield partial(_decode, document, f"{path}, document {number}"), done
                pending = []
            border = max(0, len(rest) - len(separator) + 1)
            pending.append(rest[:border])
            tail = rest[border:]
            if (size := sum(map(len, pending))) > MAX_DOCUMENT_BYTES:
                raise ValueError(
                    f"{path} has {size:,} bytes in a row without the separator "
                    f"{separator.decode()!r}; choose a --txt-separator that occurs more often."
                )
    if document := b"".join([*pending, tail]):
        yield partial(_decode, document, f"{path}, document {number + 1}"), 1.0


def _read_jsonl(path: Path, text_field: str) -> Iterator[Record]:
    # lines end in b"\n" only: U+2028 and similar characters are valid inside a JSON string
    with open_file(path) as (stream, fraction_read):
        for line_number in count(1):
            line = stream.readline(MAX_DOCUMENT_BYTES + 1)
            if not line:
                break
            where = f"{path}, line {line_number}"
            if line_number == 1:
                _refuse_other_marks(line, path)
            # any line can start with a byte order mark if files were concatenated with cat
            line = line.removeprefix(codecs.BOM_UTF8)
            if len(line) > MAX_DOCUMENT_BYTES:
                raise ValueError(
                    f"{where} has more than {MAX_DOCUMENT_BYTES:,} bytes, the limit for one "
                    "document in memory; remove or split it."
                )
            if line.strip():
                yield partial(_json_text, line, where, text_field), fraction_read()


def _json_text(line: bytes, where: str, text_field: str) -> str:
    decoded = _decode(line, where)
    try:
        record = parse_json(decoded)
    except ValueError as error:
        raise UnusableTextError(
            f"{where} is not a JSON object ({error}); repair or remove the line",
            "not a JSON object",
        ) from error
    if not isinstance(record, dict):
        raise UnusableTextError(
            f"{where} is {type(record).__name__}, but every line must be an object",
            "not a JSON object",
        )
    if text_field not in record:
        raise UnusableTextError(
            f"{where} has no field {text_field!r}, only {sorted(record)}; pass the field of the "
            "text with --text-field",
            f"no field {text_field!r}",
        )
    text = checked_text(record[text_field], f"{where}: field {text_field!r}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UnusableTextError(
            f"{where}: field {text_field!r} holds half of a surrogate pair at character "
            f"{error.start}, which UTF-8 text cannot; repair or remove the line",
            "half of a surrogate pair",
        ) from error
    return text


def checked_text(value: Any, where: str) -> str:
    """Check that the value of a field, or a whole file, is a nonempty string, and return it."""
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise UnusableTextError(
            f"{where} must be a string, but is {kind}", f"{kind} instead of a string"
        )
    if not value:
        raise UnusableTextError(f"{where} is empty", "empty text")
    return value


def check_column(dataset: str, text_field: str, columns: Sequence[str]) -> None:
    """Raise ValueError if a dataset lacks the column of the text."""
    if text_field not in columns:
        raise ValueError(
            f"{dataset} has no column {text_field!r}, only {columns}; pass one with --text-field."
        )


def _read_parquet(path: Path, text_field: str) -> Iterator[Record]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    check_regular(path)
    try:
        parquet = ParquetFile(path, page_checksum_verification=True)
    except (ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a complete Parquet file ({error}).") from error
    with closing(parquet):
        check_column(str(path), text_field, parquet.schema_arrow.names)
        n_groups = parquet.metadata.num_row_groups
        for group in range(n_groups):
            # read when its first document is loaded, so that a resumed run skips whole groups
            read = cache(partial(parquet.read_row_group, group, columns=[text_field]))
            n_rows = parquet.metadata.row_group(group).num_rows
            for row in range(n_rows):
                where = f"{path}, row {row} of row group {group}: field {text_field!r}"
                done = (group + (row + 1) / n_rows) / n_groups
                yield partial(_parquet_text, read, row, where), done


def _parquet_text(read: Callable[[], Any], row: int, where: str) -> str:
    from pyarrow import ArrowException

    try:
        text = read().column(0)[row].as_py()
    except UnicodeDecodeError as error:
        raise UnusableTextError(f"{where} is not UTF-8 ({error})", "not UTF-8") from error
    except MemoryError:  # Arrow's is also an ArrowException, but the file is not at fault
        raise
    except (ArrowException, OSError) as error:
        raise ValueError(f"{where} cannot be read ({error}); download the file again.") from error
    return checked_text(text, where)
