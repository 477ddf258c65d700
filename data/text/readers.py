"""The file formats of local corpora, read one document at a time whatever the size of the file.

Every reader yields `(load, done)` pairs. `load()` parses and returns the document's text, so that
the documents a resumed run skips cost no parsing; `done` is the share of the file read so far.
"""

import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache, partial
from io import BufferedReader, TextIOWrapper
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from data.files import check_regular, parse_json

Record = tuple[Callable[[], str], float]

SUPPORTED = ".txt, .jsonl (each also as .gz, .xz or .zst) and .parquet"

MAX_DOCUMENT_BYTES = 1 << 30
"""A document is held in memory, several times over while it is tokenized."""

_CHUNK = 1 << 20


def is_supported(path: Path) -> bool:
    """Whether the name ends in a format that `read_file` knows."""
    return _format(path) in (".txt", ".jsonl") or path.suffix.lower() == ".parquet"


def holds_one_document(path: Path, txt_separator: str | None) -> bool:
    """Whether the file is a single document, known without opening it."""
    return _format(path) == ".txt" and txt_separator is None


def read_file(path: Path, text_field: str, txt_separator: str | None) -> Iterator[Record]:
    """Yield the documents of one file in file order.

    `text_field` is the JSON field or Parquet column that holds the text. `txt_separator` stands
    between the documents of a .txt file, several in a row count as one, and without it the file is
    one document.

    Raises:
        ValueError: The file is damaged, not UTF-8, or lacks `text_field`; names file and line.
    """
    kind = _format(path)
    if kind == ".parquet":
        return _read_parquet(path, text_field)
    if kind == ".jsonl":
        return _read_jsonl(path, text_field)
    if txt_separator is None:
        return iter([(partial(_read_text, path), 1.0)])
    return _read_separated(path, txt_separator)


def _format(path: Path) -> str:
    compressed = path.suffix.lower() in _DECOMPRESS
    return (Path(path.stem) if compressed else path).suffix.lower()


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Callable[[], float]]]:
    """Open a file, decompressing by its name, and give a function that tells the share read."""
    check_regular(path)
    with path.open("rb") as raw:
        size = max(1, os.fstat(raw.fileno()).st_size)
        decompress = _DECOMPRESS.get(path.suffix.lower())
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


_DECOMPRESS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".zst": _zstd,
}


def _decode(data: bytes | bytearray, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(where, f"{error.reason} at byte {error.start}") from error


def _not_utf8(where: str, reason: str) -> ValueError:
    return ValueError(
        f"{where} is not UTF-8 ({reason}); convert it, for example with iconv, and start again."
    )


def _read_text(path: Path) -> str:
    data = bytearray()
    with _opened(path) as (stream, _):
        # by chunks, as read(limit) takes memory for the whole limit at once
        while chunk := stream.read(_CHUNK):
            data += chunk
            if len(data) > MAX_DOCUMENT_BYTES:
                raise ValueError(
                    f"{path} holds more than {MAX_DOCUMENT_BYTES:,} bytes, too many for one "
                    "document in memory; name what stands between its documents with "
                    "--txt-separator."
                )
    return _decode(data, str(path))


def _read_separated(path: Path, separator: str) -> Iterator[Record]:
    begun: list[str] = []  # what is known of the document that has not ended yet
    tail = ""  # the last characters read, which may begin a separator
    with _opened(path) as (stream, share_read):
        text = TextIOWrapper(stream, encoding="utf-8", newline="\n")
        try:
            while chunk := text.read(_CHUNK):
                *ended, rest = (tail + chunk).split(separator)
                done = share_read()
                for end in ended:
                    if document := "".join([*begun, end]):
                        yield partial(str, document), done
                    begun = []
                border = max(0, len(rest) - len(separator) + 1)
                begun.append(rest[:border])
                tail = rest[border:]
                if (chars := sum(map(len, begun))) > MAX_DOCUMENT_BYTES:
                    raise ValueError(
                        f"{path} has {chars:,} characters in a row without the separator "
                        f"{separator!r}; choose a --txt-separator that it holds more often."
                    )
        except UnicodeDecodeError as error:
            raise _not_utf8(str(path), error.reason) from error
    if document := "".join([*begun, tail]):
        yield partial(str, document), 1.0


def _read_jsonl(path: Path, text_field: str) -> Iterator[Record]:
    # lines end in b"\n" only: U+2028 and its kin are legal inside a JSON string
    with _opened(path) as (stream, share_read):
        for line_number in count(1):
            line = stream.readline(MAX_DOCUMENT_BYTES + 1)
            if not line:
                break
            where = f"{path}, line {line_number}"
            if len(line) > MAX_DOCUMENT_BYTES:
                raise ValueError(
                    f"{where} has more than {MAX_DOCUMENT_BYTES:,} bytes, too many for one "
                    "document in memory; remove or split it."
                )
            if line.strip():
                yield partial(_json_text, line, where, text_field), share_read()


def _json_text(line: bytes, where: str, text_field: str) -> str:
    text = _decode(line, where)
    try:
        record = parse_json(text)
    except ValueError as error:
        raise ValueError(
            f"{where} is not a JSON object ({error}); repair or remove the line."
        ) from error
    if not isinstance(record, dict):
        raise ValueError(f"{where} is {type(record).__name__}, but every line must be an object.")
    if text_field not in record:
        raise ValueError(
            f"{where} has no field {text_field!r}, only {sorted(record)}; "
            "name the text's field with --text-field."
        )
    text = checked_text(record[text_field], f"{where}: field {text_field!r}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: field {text_field!r} holds half of a surrogate pair at character "
            f"{error.start}, which no UTF-8 text can; repair or remove the line."
        ) from error
    return text


def checked_text(value: Any, where: str) -> str:
    """The value of a field, which must be a string."""
    if not isinstance(value, str):
        raise ValueError(f"{where} must be a string, but is {type(value).__name__}.")
    return value


def _read_parquet(path: Path, text_field: str) -> Iterator[Record]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    check_regular(path)
    try:
        parquet = ParquetFile(path, page_checksum_verification=True)
    except (ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a whole Parquet file ({error}).") from error
    with closing(parquet):
        columns = parquet.schema_arrow.names
        if text_field not in columns:
            raise ValueError(
                f"{path} has no column {text_field!r}, only {columns}; "
                "name the text's column with --text-field."
            )
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
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} cannot be read ({error}); fetch the file again.") from error
    return checked_text(text, where)
