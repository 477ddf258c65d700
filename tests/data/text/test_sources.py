"""Names choose a source; where documents are few, each is cut."""

import gzip
import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.text.documents import OPENWEBTEXT, FileSource, HubSource, StdlibSource, split_of
from data.text.sources import CutSource, cut_position, open_source


def read(source):
    return [document.text for document in source.documents()]


def whole_in(folder, kind, text):
    """A file that holds one document."""
    path = folder / f"one.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"text": [text]}), path)
    else:
        data = (text if kind == "txt.gz" else json.dumps({"text": text}) + "\n").encode()
        path.write_bytes(gzip.compress(data) if kind == "txt.gz" else data)
    return path


@pytest.mark.parametrize("kind", ["txt.gz", "jsonl", "parquet"])
def test_a_lone_document_is_cut_at_a_line(tmp_path, kind):
    text = "".join(f"line {i}\n" for i in range(1000))
    source = open_source([str(whole_in(tmp_path, kind, text))])
    train, val = source.documents()
    assert (train.number, train.split, val.number, val.split) == (0, "train", 1, "val")
    assert train.text + val.text == text and train.text.endswith("\n")
    assert len(text) // 10 <= len(val.text) < len(text) // 10 + 20
    assert train.done == pytest.approx(0.9, abs=0.01) and val.done == 1
    assert list(source.documents(1)) == [val] and list(source.documents(2)) == []
    source = open_source([str(whole_in(tmp_path, kind, text))], val_ratio=0.25)
    assert len(read(source)[1]) == pytest.approx(len(text) / 4, rel=0.01)
    assert source.describe()["val_cut"] == 0.25 and source.describe()["val_ratio"] is None


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("title\n" + "word " * 200, "word " * 21),  # not nearly all of it, for the only line's end
        ("a " * 9 + "\n" + "b", "\nb"),
        ("x" * 1000, None),
        ("", None),
        ("short", None),
    ],
)
def test_where_a_document_is_cut(text, end):
    cut = cut_position(text, 0.1)
    assert (cut if cut is None else text[cut:]) == end


def test_the_draw_holds_some_of_many_documents_out():
    for val_ratio in (n / 1000 for n in range(1, 500)):
        enough = math.ceil(1 / val_ratio)  # fewer are cut
        assert {split_of(number, val_ratio) for number in range(enough)} == {"train", "val"}


def test_few_documents_are_cut_each(tmp_path):
    text = "".join(f"line {i}\n" for i in range(100))
    path = tmp_path / "few.jsonl"

    def write(*texts):
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return str(path)

    source = open_source([write(text, "short", text.upper())])
    documents = list(source.documents())
    assert [d.number for d in documents] == [0, 1, 2, 4, 5]
    assert [d.split for d in documents] == ["train", "val", "train", "train", "val"]
    assert "".join(d.text for d in documents) == text + "short" + text.upper()
    for start in range(7):
        again = source.documents(start)
        assert [d[:3] for d in again] == [d[:3] for d in documents if d.number >= start]
    assert isinstance(open_source([write(*[text] * 99)]), CutSource)
    assert isinstance(open_source([write(*[text] * 100)]), FileSource)
    assert isinstance(open_source([str(path)], val_ratio=0.009), CutSource)
    assert isinstance(
        open_source([write(text)], val=[str(whole_in(tmp_path, "jsonl", text))]), FileSource
    )
    with pytest.raises(ValueError, match=r"few.jsonl: 2 document.*the longest has 2 characters"):
        open_source([write("a", "bb")])


def test_openwebtext_is_recognised():
    assert open_source(["Skylion007/openwebtext"]) == HubSource(OPENWEBTEXT)
    assert open_source(["Skylion007/openwebtext"], val_ratio=0.01) != HubSource(OPENWEBTEXT)


def test_names_choose_the_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stdlib").mkdir()
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.jsonl").write_text("")
    assert isinstance(open_source(["stdlib"]), StdlibSource)
    assert isinstance(open_source(["corpus"]), CutSource)
    assert isinstance(open_source(["corpus/*.jsonl"]), CutSource)
    assert isinstance(open_source(["wikitext"], hub_config="wikitext-2-raw-v1"), HubSource)
    for name in ("absent.txt", "./absent", "a/b/c"):
        with pytest.raises(FileNotFoundError, match="matches no file"):
            open_source([name])


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["stdlib"], {"val": ["a.txt"]}, "val has no effect on the standard library"),
        (["stdlib"], {"text_field": "body"}, "text_field has no effect"),
        (["stdlib"], {"as_text": True, "skip_bad": True}, "as_text, skip_bad has no effect"),
        (["owner/corpus"], {"as_text": True}, "as_text has no effect on the hub"),
        (["owner/corpus"], {"txt_separator": "|"}, "txt_separator has no effect on the hub"),
        (["a.txt"], {"hub_config": "x"}, "hub_config has no effect on local files"),
        (["a.jsonl"], {"txt_separator": "|"}, "no effect without a .txt file"),
        (["a.txt"], {"txt_separator": ""}, "must not be empty"),
        (["a.txt"], {"val_ratio": 1.0}, r"val_ratio=1.0 must lie between 0 and 1"),
        (["a.txt"], {"val_ratio": 0.1, "val": ["b.txt"]}, "exclude each other"),
    ],
)
def test_options_without_effect_are_refused(tmp_path, monkeypatch, names, options, message):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match=message):
        open_source(names, **options)
