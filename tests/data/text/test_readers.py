"""Byte order marks, line ends, and documents that are not text."""

import codecs
import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.text import readers
from data.text.documents import FileSource
from data.text.readers import is_text
from data.text.sources import CutSource, open_source


def read(path, **options):
    return [d.text for d in FileSource([str(path)], val_ratio=0.5, **options).documents()]


def whole(path, **options):
    """Text of a file that is one document."""
    other = path.with_name("other.jsonl")
    other.write_text('{"text": "x"}\n')
    source = FileSource([str(path)], val=[str(other)], **options)
    return next(iter(source.documents())).text


@pytest.fixture(params=[1, 2, 3, 1 << 20])
def chunks(request, monkeypatch):
    monkeypatch.setattr(readers, "_CHUNK", request.param)


def test_line_ends_of_other_systems_in_plain_text(tmp_path, chunks):
    text = "a\r\nb\rc\n\r\n\r\rd\n\re\r"
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    assert whole(path) == "a\nb\nc\n\n\n\nd\n\ne\n" == "\n".join(text.splitlines()) + "\n"
    assert read(path, txt_separator="\n\n") == ["a\nb\nc", "d", "e\n"]
    assert read(path, txt_separator="\r\n\r\n") == read(path, txt_separator="\n\n")


def test_line_ends_and_separators_within_a_json_text_stay(tmp_path):
    path = tmp_path / "a.jsonl"
    texts = ["a\r\nb", "c\rd\u2028e\u2029f\x85g", "h"]
    path.write_bytes(
        "\r\n".join(json.dumps({"text": t}, ensure_ascii=False) for t in texts).encode()
    )
    assert read(path) == texts


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_utf_8_byte_order_mark_is_not_text(tmp_path, chunks, name):
    path = tmp_path / name
    data = "\ufeffone|\ufefftwo".encode()
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert whole(path) == "one|\ufefftwo"
    assert read(path, txt_separator="|") == ["one", "\ufefftwo"]


def test_the_mark_of_utf_8_before_any_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + b'{"text": "a"}\n' + codecs.BOM_UTF8 + b'{"text": "b"}\n')
    assert read(path) == ["a", "b"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("skip_bad", [False, True])
def test_other_marks_are_named_with_the_remedy(tmp_path, encoding, name, skip_bad):
    path = tmp_path / name
    path.write_text('{"text": "a"}\n', encoding=encoding)
    message = rf"{name} is {encoding.upper()}.*iconv -f {encoding.upper()} -t UTF-8 {name} > NEW"
    with pytest.raises(ValueError, match=message):
        read(path, txt_separator="|" if name == "a.txt" else None, skip_bad=skip_bad)


BAD = [
    (b'{"text": ""}', "empty text"),
    (b'{"text": null}', "null instead of a string"),
    (b'{"text": 5}', "int instead of a string"),
    (b'{"text": "x"', "not a JSON object"),
    (b"[" * 100_000, "not a JSON object"),
    (b'["x"]', "not a JSON object"),
    (b'{"body": "x"}', "no field 'text'"),
    (b'{"text": "\xff"}', "not UTF-8"),
    (b'{"text": "\\ud800"}', "half of a surrogate pair"),
]


@pytest.fixture
def bad_lines(tmp_path):
    path = tmp_path / "bad.jsonl"
    lines = [line for bad, _ in BAD for line in (b'{"text": "fine"}', bad)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_bad_lines_are_left_out_by_reason(bad_lines):
    source = FileSource([str(bad_lines)], val_ratio=0.5, skip_bad=True)
    documents = list(source.documents())
    assert [d.left_out for d in documents] == [r for _, reason in BAD for r in (None, reason)]
    assert [d.text for d in documents] == ["fine", ""] * len(BAD)
    # a document keeps its number, and so its split, whatever comes before it
    assert [d.number for d in documents] == list(range(2 * len(BAD)))
    for start in range(2 * len(BAD)):
        assert list(source.documents(start)) == documents[start:]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_bad_lines_are_refused_with_the_option(tmp_path, number):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + BAD[number][0] + b"\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2.*\. --skip-bad leaves such"):
        read(path)


def test_bad_rows_of_a_parquet_file(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", None, "", "b"]}), path)
    documents = FileSource([str(path)], val_ratio=0.5, skip_bad=True).documents()
    assert [d.left_out for d in documents] == [None, "null instead of a string", "empty text", None]
    with pytest.raises(ValueError, match="row 1 of row group 0.* but is null. --skip-bad"):
        read(path)


def test_a_parquet_file_that_memory_does_not_hold(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", "b"]}), path)

    def full(*_, **__):
        raise pa.ArrowMemoryError("malloc of size 64 failed")

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", full)
    with pytest.raises(ValueError, match=r"a\.parquet: document 0 takes more memory than there is"):
        read(path)


def test_bad_documents_of_plain_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one|\xff\xff|three")
    assert read(path, txt_separator="|", skip_bad=True) == ["one", "", "three"]
    with pytest.raises(ValueError, match=r"a\.txt, document 2 is not UTF-8.* --skip-bad"):
        read(path, txt_separator="|")
    assert whole(path, skip_bad=True) == ""
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8.* --skip-bad"):
        whole(path)


def test_few_documents_some_of_them_bad(bad_lines):
    bad_lines.write_bytes(b'{"text": null}\n{"text": "a long and longer text"}\n{}\n')
    source = open_source([str(bad_lines)], skip_bad=True)
    assert isinstance(source, CutSource)
    documents = list(source.documents())
    assert [(d.number, d.text) for d in documents] == [
        (0, ""), (2, "a long and longer "), (3, "text"), (4, ""),
    ]  # fmt: skip
    assert [d.left_out for d in documents] == [
        "null instead of a string", None, None, "no field 'text'",
    ]  # fmt: skip
    for start in range(6):
        again = [d[:3] for d in source.documents(start)]
        assert again == [d[:3] for d in documents if d.number >= start]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", True),
        ("naïve 東京".encode(), True),
        (b"x" * 65535 + "東".encode(), True),  # which the first 64 KiB end within
        (b"caf\xe9 au lait", False),
        ("text".encode("utf-16-le"), False),
        (b"\x89PNG\r\n\x1a\n", False),
    ],
)
def test_what_counts_as_text(tmp_path, data, expected):
    path = tmp_path / "a.md"
    path.write_bytes(data)
    assert is_text(path) is expected
    packed = tmp_path / "a.md.gz"
    packed.write_bytes(gzip.compress(data))
    assert is_text(packed) is expected
