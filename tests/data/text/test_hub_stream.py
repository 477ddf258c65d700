"""A dataset that is read as it arrives: real streams of `datasets`, from local files."""

import json
from types import SimpleNamespace

import datasets
import pytest

from data.text.documents import split_of
from data.text.hub_stream import HubStream
from data.text.prepare import prepare
from data.text.shards import TokenStream
from data.text.sources import open_source
from scripts import prepare_text

N = 120


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Mock of the hub: one dataset, the requests for it, and a commit."""
    for part in range(3):
        lines = [
            json.dumps({"text": f"document {n} of many. " * 5, "other": n})
            for n in range(part * 40, part * 40 + 40)
        ]
        (tmp_path / f"part_{part}.jsonl").write_text("\n".join(lines) + "\n")
    hub = SimpleNamespace(asked=[], commit="c0ffee")
    load = datasets.load_dataset

    def load_dataset(name, config=None, *, split, streaming, revision):
        hub.asked.append((name, config, split, streaming, revision))
        files = [str(tmp_path / f"part_{part}.jsonl") for part in range(3)]
        return load("json", data_files=files, split="train", streaming=True)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    api = SimpleNamespace(dataset_info=lambda name: SimpleNamespace(sha=hub.commit))
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: api)
    monkeypatch.setattr("data.hub.why_offline", lambda: None)
    return hub


def test_documents_come_in_order_from_any_of_them_on(hub) -> None:
    source = open_source(["owner/corpus"], stream=True, val_ratio=0.1)
    documents = list(source.documents())
    assert hub.asked == [("owner/corpus", None, "train", True, "c0ffee")]
    assert [d.text for d in documents] == [f"document {n} of many. " * 5 for n in range(N)]
    assert [d.split for d in documents] == [split_of(n, 0.1) for n in range(N)]
    for start in (1, 39, 40, 100, N):
        assert list(source.documents(start)) == documents[start:]


def test_a_beginning_is_enough(hub) -> None:
    source = HubStream("owner/corpus", max_documents=50)
    documents = list(source.documents())
    assert len(documents) == 50 and documents[-1].done == 1.0
    assert list(source.documents(45)) == documents[45:]
    assert list(source.documents(60)) == []


def test_a_dataset_that_changed_is_another_source(hub) -> None:
    before = HubStream("owner/corpus").describe()
    hub.commit = "decade"
    assert HubStream("owner/corpus").describe() != before
    assert before["commit"] == "c0ffee"


def test_preparing_resumes_where_it_was_stopped(hub, tmp_path, monkeypatch) -> None:
    def open_stream():
        return open_source(["owner/corpus"], stream=True, val_ratio=0.1)

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    prepare(open_stream(), whole, train_bpe=300, shard_tokens=400)
    read = HubStream._read

    def cut(self, start):
        for number, row in enumerate(read(self, start), start=start):
            if number == 77:
                raise ConnectionError("the line went dead")
            yield row

    with monkeypatch.context() as patch:
        patch.setattr(HubStream, "_read", cut)
        with pytest.raises(ConnectionError):
            prepare(open_stream(), parts, train_bpe=300, shard_tokens=400)
    prepare(open_stream(), parts, train_bpe=300, shard_tokens=400)
    for split in ("train", "val"):
        a, b = TokenStream(whole, split), TokenStream(parts, split)
        assert len(a) == len(b) > 0
        assert (a.read(0, len(a)) == b.read(0, len(b))).all()


def test_the_command(hub, tmp_path, capsys) -> None:
    command = ["owner/corpus", "--stream", "--max-documents", "80", "--val-ratio", "0.1"]
    prepare_text.main([*command, "--train-bpe", "300", "--out", str(tmp_path / "out")])
    said = capsys.readouterr().out
    assert "kind: hub stream" in said and "commit: c0ffee" in said
    assert len(TokenStream(tmp_path / "out", "train")) > 1000


def test_refusals(hub, monkeypatch) -> None:
    with pytest.raises(
        ValueError, match=r"owner/corpus has no column 'body', only \['text', 'other"
    ):
        list(HubStream("owner/corpus", text_field="body").documents())
    with pytest.raises(ValueError, match="stream has no effect on local files"):
        open_source([__file__], stream=True)
    with pytest.raises(ValueError, match="stream has no effect on the standard library"):
        open_source(["stdlib"], stream=True)
    with pytest.raises(ValueError, match="max_documents=5 must be at least 1, and needs stream"):
        open_source(["owner/corpus"], max_documents=5)
    with pytest.raises(ValueError, match="max_documents=0 must be at least 1"):
        open_source(["owner/corpus"], stream=True, max_documents=0)

    def dead(self):
        raise ConnectionError("connection reset by peer")
        yield

    monkeypatch.setattr(datasets.IterableDataset, "__iter__", dead, raising=True)
    with pytest.raises(ValueError, match="the next row of owner/corpus could not be downloaded"):
        list(HubStream("owner/corpus").documents())


@pytest.mark.parametrize("stream", [True, False])
def test_bad_rows_are_refused_or_left_out(monkeypatch, stream) -> None:
    monkeypatch.setattr("data.hub.why_offline", lambda: None)
    api = SimpleNamespace(dataset_info=lambda name: SimpleNamespace(sha="c0ffee"))
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: api)
    rows = datasets.Dataset.from_dict({"text": ["a", None, "", *["b"] * 20]})
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda *_, **__: rows.to_iterable_dataset() if stream else rows,
    )
    source = open_source(["owner/corpus"], stream=stream, val_ratio=0.1, skip_bad=True)
    documents = list(source.documents())
    assert [d.number for d in documents] == list(range(23))
    left_out = sorted(d.left_out for d in documents if d.left_out)
    assert left_out == ["empty text", "null instead of a string"]
    assert "".join(d.text for d in documents).replace("b", "") == "a"
    with pytest.raises(
        ValueError, match=r"owner/corpus: field 'text' of row \d.* --skip-bad leaves"
    ):
        list(open_source(["owner/corpus"], stream=stream, val_ratio=0.1).documents())
