import gzip
import json
import lzma
import os
import random
import tracemalloc

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.text import readers
from data.text.documents import FileSource, HubSource, StdlibSource, split_of
from data.text.sources import open_source

TEXTS = ["first", " ", "line\u2028sep\r\nand\ttab", "naïve 東京 🦋", "<|endoftext|>"] * 5


def read(source, start=0):
    return [document.text for document in source.documents(start)]


def zstd(data: bytes) -> bytes:
    return pa.compress(data, codec="zstd", asbytes=True)


@pytest.fixture
def lines():
    return "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in TEXTS).encode()


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress), (".zst", zstd)],
)
def test_jsonl_plain_and_compressed(tmp_path, lines, suffix, compress):
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(compress(lines + b"\n"))
    source = FileSource([str(path)], val_ratio=0.5)
    assert read(source) == TEXTS
    for start in range(len(TEXTS) + 1):
        assert read(source, start) == TEXTS[start:]
    documents = list(source.documents())
    assert [d.number for d in documents] == list(range(len(TEXTS)))
    assert [d.split for d in documents] == [split_of(n, 0.5) for n in range(len(TEXTS))]
    assert {d.split for d in documents} == {"train", "val"}
    assert documents[-1].done <= 1


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress), (".zst", zstd)]
)
def test_truncated_compression_names_the_file(tmp_path, suffix, compress):
    data = compress(b'{"text": "x"}\n' + os.urandom(1000).hex().encode() + b"\n")
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"a\.jsonl\.\w+(, line| cannot be read to its end)"):
        read(FileSource([str(path)]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "x"', "line 3 is not a JSON object"),
        (b'{"body": "x"}', r"line 3 has no field 'text', only \['body'\].*--text-field"),
        (b'{"text": 5}', "line 3: field 'text' must be a string, but is int"),
        (b'["x"]', "line 3 is list"),
        (b'{"text": "\xff"}', "line 3 is not UTF-8"),
        (b'{"text": "\\ud800"}', "line 3: field 'text' holds half of a surrogate pair"),
    ],
)
def test_broken_line_names_file_and_line(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "x"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"bad\.jsonl, {message}"):
        read(FileSource([str(path)]))


def test_parquet_by_row_groups(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": TEXTS, "n": range(25)}), path, row_group_size=4)
    source = FileSource([str(path)], text_field="body")
    assert read(source) == TEXTS
    groups = []
    whole = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_group",
        lambda self, i, **options: groups.append(i) or whole(self, i, **options),
    )
    assert read(source, 18) == TEXTS[18:]
    assert groups == [4, 5, 6]
    with pytest.raises(ValueError, match=r"no column 'text', only \['body', 'n'\]"):
        read(FileSource([str(path)]))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"a\.parquet is not a complete Parquet file"):
        read(source)


def test_a_line_that_no_memory_holds(tmp_path, monkeypatch):
    monkeypatch.setattr("data.text.readers.MAX_DOCUMENT_BYTES", 1000)
    for suffix, compress in (("", bytes), (".xz", lzma.compress), (".gz", gzip.compress)):
        path = tmp_path / f"long.jsonl{suffix}"
        path.write_bytes(compress(b'{"text": "a"}\n{"text": "' + b"a" * 2000 + b'"}\n'))
        with pytest.raises(ValueError, match=rf"{path.name}, line 2 has more than 1,000 bytes"):
            read(FileSource([str(path)]))


@pytest.mark.parametrize("name", ["pipe.txt", "pipe.jsonl", "pipe.jsonl.xz", "pipe.parquet"])
def test_a_pipe_is_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    (tmp_path / "a.txt").write_text("a")
    for options in ({}, {"val": [str(tmp_path / "a.txt")]}):
        with pytest.raises(ValueError, match=f"{name} is not a regular file"):
            open_source([str(tmp_path / name)], **options)
    with pytest.raises(ValueError, match=f"{name} is not a regular file"):
        open_source([str(tmp_path / "a.txt")], val=[str(tmp_path / name)])


def test_flipped_bits_of_a_parquet_file_are_named_or_change_nothing(tmp_path):
    path = tmp_path / "texts.parquet"
    values = [f"text {n} " * 20 for n in range(200)]
    pq.write_table(pa.table({"text": values}), path, write_page_checksum=True, compression="zstd")
    content, generator, n_refused = path.read_bytes(), random.Random(0), 0
    for _ in range(60):
        flipped = bytearray(content)
        flipped[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        path.write_bytes(flipped)
        try:
            assert read(FileSource([str(path)])) == values
        except ValueError as error:
            assert "texts.parquet" in str(error)
            n_refused += 1
    assert n_refused > 30


def test_parquet_null(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", None]}), path)
    with pytest.raises(ValueError, match="row 1 of row group 0: field 'text' must be a string"):
        read(FileSource([str(path)]))


def test_text_file_is_one_document(tmp_path):
    text = "a\n\tb\u2028c\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress(b"val"))
    source = FileSource([str(tmp_path / "a.txt")], val=[str(tmp_path / "b.txt.xz")])
    assert [(d.split, d.text) for d in source.documents()] == [("train", text), ("val", "val")]


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 1 << 20])
def test_separator_and_multibyte_text_across_chunks(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr("data.text.readers._CHUNK", chunk_bytes)
    path = tmp_path / "a.txt"
    path.write_text("東京<|e|>🦋\n<|e|><|e|>end", encoding="utf-8")
    source = FileSource([str(path)], txt_separator="<|e|>")
    assert read(source) == ["東京", "🦋\n", "end"]
    assert read(source, 2) == ["end"]


@pytest.mark.parametrize("separator", ["a", "aa", "aba", "\n\n"])
def test_separators_are_found_as_by_split(tmp_path, monkeypatch, separator):
    rng = random.Random(0)
    path = tmp_path / "a.txt"
    for chunk_bytes in (1, 2, 3, 7, 1000):
        monkeypatch.setattr("data.text.readers._CHUNK", chunk_bytes)
        text = "".join(rng.choices("ab\n", k=300))
        path.write_text(text)
        documents = read(FileSource([str(path)], txt_separator=separator))
        assert documents == [part for part in text.split(separator) if part]


def test_rare_separators_cost_no_second_look(tmp_path, monkeypatch):
    """Text is searched once, not again with every later chunk."""
    monkeypatch.setattr("data.text.readers._CHUNK", 1 << 10)
    path = tmp_path / "a.txt"
    path.write_text("x" * (1 << 20) + "|" + "y" * 100)
    searched = 0

    class Counted(bytes):
        def __radd__(self, tail):
            nonlocal searched
            searched += len(tail) + len(self)
            return bytes(tail) + bytes(self)

    chunks = readers._plain_chunks
    monkeypatch.setattr(readers, "_plain_chunks", lambda *file: map(Counted, chunks(*file)))
    texts = read(FileSource([str(path)], txt_separator="|"))
    assert [len(text) for text in texts] == [1 << 20, 100]
    assert (1 << 20) < searched < 2 << 20


def test_documents_too_long_for_memory(tmp_path, monkeypatch):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"0123456789" * 20))
    with monkeypatch.context() as patched:
        patched.setattr("data.text.readers.MAX_DOCUMENT_BYTES", 199)
        with pytest.raises(ValueError, match=r"holds more than 199 bytes.*--txt-separator"):
            read(_pair(path))
        patched.setattr("data.text.readers._CHUNK", 50)
        with pytest.raises(ValueError, match=r"200 bytes in a row without .*'\|'"):
            read(FileSource([str(path)], txt_separator="|"))
        assert len(read(FileSource([str(path)], txt_separator="9"))) == 20
    monkeypatch.setattr("data.text.documents.MAX_DOCUMENT_BYTES", 20)
    with pytest.raises(ValueError, match=r"a\.txt\.gz has \d+ bytes.*--txt-separator"):
        _pair(path)


def test_a_document_takes_no_more_memory_than_its_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("text " * 1000)
    source = _pair(path)
    tracemalloc.start()
    read(source)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_a_document_that_memory_does_not_hold(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("text")

    def full(data, where):
        raise MemoryError

    monkeypatch.setattr("data.text.readers._decode", full)
    with pytest.raises(ValueError, match=r"a\.txt: document 0 takes more memory .*--txt-separator"):
        read(_pair(path))


def test_edited_files_are_another_source(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n' * 100)
    before = FileSource([str(path)]).describe()
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "a.jsonl").write_bytes(path.read_bytes())
    assert FileSource([str(copy)]).describe()["listing_sha256"] == before["listing_sha256"]
    path.write_text('{"text": "two"}\n' * 100)
    after = FileSource([str(path)]).describe()
    assert [key for key in before if before[key] != after[key]] == ["listing_sha256"]


def test_text_that_ends_within_a_character(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("one|東".encode()[:-1])
    with pytest.raises(ValueError, match=r"a\.txt, document \d is not UTF-8"):
        read(FileSource([str(path)], txt_separator="|"))


def test_text_that_is_not_utf8(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9 au lait")
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8"):
        read(_pair(path))
    with pytest.raises(ValueError, match=r"a\.txt, document \d is not UTF-8"):
        read(FileSource([str(path)], txt_separator="|"))


def _pair(path):
    other = path.with_name("other.txt")
    other.write_text("x")
    return FileSource([str(path)], val=[str(other)])


def test_folders_and_globs_are_read_in_sorted_order(tmp_path):
    for name in ("b/2.txt", "b/1.txt", "a.txt", "notes.md", "c.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"text": name}) if name == "c.jsonl" else name)
    assert read(FileSource([str(tmp_path)])) == ["a.txt", "b/1.txt", "b/2.txt", "c.jsonl"]
    val = [str(tmp_path / "a.txt")]
    assert read(FileSource([f"{tmp_path}/b/*"], val=val)) == ["b/1.txt", "b/2.txt", "a.txt"]


def test_files_that_cannot_be_used_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "empty").mkdir()
    a = str(tmp_path / "a.txt")
    with pytest.raises(ValueError, match="given twice"):
        FileSource([a], val=[a])
    with pytest.raises(FileNotFoundError, match=r"must have a known format.*\.parquet"):
        FileSource([str(tmp_path / "a.csv")])
    with pytest.raises(FileNotFoundError, match="no file of a known format"):
        FileSource([str(tmp_path / "empty")])
    with pytest.raises(FileNotFoundError, match="matches no file"):
        FileSource([f"{tmp_path}/*.jsonl"])
    with pytest.raises(ValueError, match=r"1 document.*too short to cut.*--txt-separator"):
        open_source([a])


def test_split_is_near_its_ratio_and_fixed():
    splits = [split_of(number, 0.1) for number in range(20_000)]
    assert 0.09 < splits.count("val") / len(splits) < 0.11
    assert [n for n in range(3000) if split_of(n, 0.002) == "val"] == PINNED_VAL


PINNED_VAL = [372, 700, 798, 1166, 1619, 1928, 2411, 2633]


@pytest.fixture
def hub(monkeypatch):
    rows = datasets.Dataset.from_dict({"text": [f"document {i}" for i in range(700)]})
    calls = []

    def load_dataset(name, config=None, *, split):
        calls.append((name, config, split))
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return rows, calls


def test_hub_is_split_as_by_nanogpt(hub):
    rows, calls = hub
    source = open_source(["owner/corpus"], val_ratio=0.01)
    expected = rows.train_test_split(test_size=0.01, seed=2357, shuffle=True)
    documents = list(source.documents())
    assert calls == [("owner/corpus", None, "train")]
    by_split = {s: [d.text for d in documents if d.split == s] for s in ("train", "val")}
    assert by_split == {"train": expected["train"]["text"][:], "val": expected["test"]["text"][:]}
    assert len(by_split["val"]) == 7
    for start in (0, 1, 255, 256, 692, 693, 694, 700):
        assert list(source.documents(start)) == documents[start:]


def test_hub_files_that_changed_are_another_source(hub):
    rows, _ = hub
    before = open_source(["owner/corpus"]).describe()
    url = "hf://datasets/owner/corpus@{}/a.parquet"
    listings = []
    for commit, num_bytes in (("0123", 5), ("4567", 5), ("4567", 6)):
        rows.info.download_checksums = {url.format(commit): {"num_bytes": num_bytes}}
        listings.append(open_source(["owner/corpus"]).describe()["listing_sha256"])
    assert listings[0] == listings[1] != listings[2]
    assert before["listing_sha256"] not in listings


def test_hub_without_the_field_or_the_network(hub, monkeypatch):
    with pytest.raises(ValueError, match=r"no column 'body', only \['text'\]"):
        read(HubSource("owner/corpus", None, "body", 0.01))

    def offline(*args, **options):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(ValueError, match=r"owner/corpus is not a local file.*hf download"):
        read(open_source(["owner/corpus"]))


def test_stdlib_is_shuffled_and_skips_what_is_not_utf8(tmp_path, monkeypatch):
    for i in range(300):
        path = tmp_path / f"p{i % 3}" / f"m{i:03}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"x = {i}\n")
    for foreign in ("site-packages", "__pycache__"):
        (tmp_path / foreign).mkdir()
        (tmp_path / foreign / "other.py").write_text("no")
    (tmp_path / "bad.py").write_bytes(b"# \xe9")
    monkeypatch.setattr(
        "data.text.documents.sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)}
    )
    source = StdlibSource(val_ratio=0.1)
    texts = read(source)
    assert sorted(texts) == sorted(f"x = {i}\n" for i in range(300))
    assert texts != sorted(texts)
    assert texts == read(StdlibSource(val_ratio=0.1))
    assert read(source, 250) == texts[250:]
    assert source.describe()["skipped_not_utf8"] == 1
