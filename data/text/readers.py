"""The file formats of local corpora, read one document at a time whatever the size of the file.

Every reader yields `(load, done)` pairs. `load()` parses and returns the document's text, so that
the documents a resumed run skips cost no parsing; `done` is the share of the file read so far.
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
"""A document is held in memory, several times over while it is tokenized."""

_CHUNK = 1 << 20
_HEAD = 1 << 16
_OTHER_MARKS = {  # that of UTF-16 begins like that of UTF-32
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}
_MARK_BYTES = 4


class UnusableTextError(ValueError):
    """A document that is no text, or an empty one."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason
        """Name under which such documents are counted."""


def file_format(path: Path) -> str | None:
    """ "text", "jsonl" or "parquet", by the name of the file; None if it is another."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return "parquet"
    if suffix in COMPRESSIONS:
        suffix = Path(path.stem).suffix.lower()
    return {".txt": "text", ".jsonl": "jsonl"}.get(suffix)


def is_text(path: Path) -> bool:
    """Whether the first 64 KiB of a file, decompressed, are UTF-8 without a NUL."""
    with opened(path) as (stream, _):
        head = stream.read(_HEAD)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # which may end within a character
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def holds_one_document(path: Path, txt_separator: str | None) -> bool:
    """Whether the file is a single document, known without opening it."""
    return txt_separator is None and file_format(path) in ("text", None)


def read_file(path: Path, text_field: str, txt_separator: str | None) -> Iterator[Record]:
    """Yield the documents of one file in file order.

    `text_field` is the JSON field or Parquet column that holds the text; its text stays as it is.
    Any other file is plain text: a byte order mark is removed, and the line ends "\\r\\n" and
    "\\r" become "\\n". `txt_separator` stands between its documents, several in a row count as
    one, and without it the file is one document.

    Raises:
        ValueError: The file is damaged, or lacks `text_field`; names file and line.
        UnusableTextError: By `load()`: the document is no text, or an empty one.
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
def opened(path: Path) -> Iterator[tuple[Any, Callable[[], float]]]:
    """Open a file, decompressing by its name, and give a function that tells the share read."""
    check_regular(path)
    with path.open("rb") as raw:
        size = max(1, os.fstat(raw.fileno()).st_size)
        decompress = COMPRESSIONS.get(path.suffix.lower())
        try:
            yield decompress(raw) if decompress else raw, lambda: raw.tell() / size
        except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
            raise ValueError(
                f"{path} cannot be read to its end ({error}); fetch or write it again."
            ) from error


def _zstd(raw: BinaryIO) -> BufferedReader:
    import pyarrow

    # of the zstd readers at hand, Arrow's is the one that notices a truncated file
    stream: Any = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")
    return BufferedReader(stream, _CHUNK)


COMPRESSIONS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".zst": _zstd,
}
"""Functions that open a compressed file, by its suffix."""


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
    """Refuse a file whose first bytes are a byte order mark of another encoding than UTF-8."""
    for encoding, marks in _OTHER_MARKS.items():
        if head.startswith(marks):
            raise UnusableTextError(
                f"{path} is {encoding}, as its byte order mark says, and must be UTF-8; convert "
                f"it: iconv -f {encoding} -t UTF-8 {path.name} > NEW",
                "not UTF-8",
            )


def _with_newlines(data: bytes) -> bytes:
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _plain_chunks(stream: BinaryIO, path: Path) -> Iterator[bytes]:
    """A plain text file in chunks, without a byte order mark and with "\\n" for all line ends."""
    head = stream.read(_MARK_BYTES)
    _refuse_other_marks(head, path)
    head, after_return = head.removeprefix(codecs.BOM_UTF8), False
    # by chunks, as read(limit) takes memory for the whole limit at once
    for chunk in chain([head], iter(partial(stream.read, _CHUNK), b"")):
        rest = chunk.removeprefix(b"\n") if after_return else chunk
        after_return = chunk.endswith(b"\r")
        yield _with_newlines(rest)


def _read_text(path: Path) -> str:
    data = bytearray()
    with opened(path) as (stream, _):
        for chunk in _plain_chunks(stream, path):
            data += chunk
            if len(data) > MAX_DOCUMENT_BYTES:
                raise ValueError(
                    f"{path} holds more than {MAX_DOCUMENT_BYTES:,} bytes, too many for one "
                    "document in memory; name what stands between its documents with "
                    "--txt-separator."
                )
    return checked_text(_decode(data, str(path)), str(path))


def _read_separated(path: Path, separator: bytes) -> Iterator[Record]:
    begun: list[bytes] = []  # what is known of the document that has not ended yet
    tail = b""  # the last bytes read, which may begin a separator
    number = 0
    with opened(path) as (stream, share_read):
        for chunk in _plain_chunks(stream, path):
            *ended, rest = (tail + chunk).split(separator)
            done = share_read()
            for end in ended:
                if document := b"".join([*begun, end]):
                    number += 1
                    yield partial(_decode, document, f"{path}, document {number}"), done
                begun = []
            border = max(0, len(rest) - len(separator) + 1)
            begun.append(rest[:border])
            tail = rest[border:]
            if (size := sum(map(len, begun))) > MAX_DOCUMENT_BYTES:
                raise ValueError(
                    f"{path} has {size:,} bytes in a row without the separator "
                    f"{separator.decode()!r}; choose a --txt-separator that it holds more often."
                )
    if document := b"".join([*begun, tail]):
        yield partial(_decode, document, f"{path}, document {number + 1}"), 1.0


def _read_jsonl(path: Path, text_field: str) -> Iterator[Record]:
    # lines end in b"\n" only: U+2028 and its kin are legal inside a JSON string
    with opened(path) as (stream, share_read):
        for line_number in count(1):
            line = stream.readline(MAX_DOCUMENT_BYTES + 1)
            if not line:
                break
            where = f"{path}, line {line_number}"
            # of every line, as files with such marks are joined by cat
            if line_number == 1:
                _refuse_other_marks(line, path)
            line = line.removeprefix(codecs.BOM_UTF8)
            if len(line) > MAX_DOCUMENT_BYTES:
                raise ValueError(
                    f"{where} has more than {MAX_DOCUMENT_BYTES:,} bytes, too many for one "
                    "document in memory; remove or split it."
                )
            if line.strip():
                yield partial(_json_text, line, where, text_field), share_read()


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
            f"{where} has no field {text_field!r}, only {sorted(record)}; name the text's field "
            "with --text-field",
            f"no field {text_field!r}",
        )
    text = checked_text(record[text_field], f"{where}: field {text_field!r}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UnusableTextError(
            f"{where}: field {text_field!r} holds half of a surrogate pair at character "
            f"{error.start}, which no UTF-8 text can; repair or remove the line",
            "half of a surrogate pair",
        ) from error
    return text


def checked_text(value: Any, where: str) -> str:
    """The value of a field, or a whole file, which must be a string that is not empty."""
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise UnusableTextError(
            f"{where} must be a string, but is {kind}", f"{kind} instead of a string"
        )
    if not value:
        raise UnusableTextError(f"{where} is empty", "empty text")
    return value


def check_column(dataset: str, text_field: str, columns: Sequence[str]) -> None:
    """Refuse a dataset without the column that is to hold the text."""
    if text_field not in columns:
        raise ValueError(
            f"{dataset} has no column {text_field!r}, only {columns}; name one with --text-field."
        )


def _read_parquet(path: Path, text_field: str) -> Iterator[Record]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    check_regular(path)
    try:
        parquet = ParquetFile(path, page_checksum_verification=True)
    except (ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a whole Parquet file ({error}).") from error
    with closing(parquet):
        check_column(str(path), text_field, parquet.schema_arrow.names)
        n_groups = parquet.metadata.num_row_groups
        for group in range(n_groups):
            # read when its first document is wanted, so that a resumed run skips whole groups
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
    except MemoryError:  # Arrow's, which is an ArrowException too: the file is not at fault
        raise
    except (ArrowException, OSError) as error:
        raise ValueError(f"{where} cannot be read ({error}); fetch the file again.") from error
    return checked_text(text, where)
