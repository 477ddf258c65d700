import gzip
import json
import lzma

import datasets
import pytest

from data.lra.text import MAX_LENGTH, Review, examples, read_imdb, split_reviews, to_ids

TRAIN = [(i % 2, f"train review {i} – é") for i in range(20)]
TEST = [(i % 2, f"test review {i}") for i in range(10)]


def write_jsonl(folder, opener, suffix):
    for split, rows in (("train", TRAIN), ("test", TEST)):
        with opener(folder / f"imdb-{split}.jsonl{suffix}", "wt", encoding="utf-8") as file:
            for label, text in rows:
                file.write(json.dumps({"id": 1, "label": label, "text": text}) + "\n")


def write_folders(folder):
    for split, rows in (("train", TRAIN), ("test", TEST)):
        for i, (label, text) in enumerate(rows):
            path = folder / split / ("neg", "pos")[label] / f"{i}_7.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())


def as_set(reviews):
    return sorted((review.label, review.text.decode()) for review in reviews)


@pytest.mark.parametrize(("opener", "suffix"), [(open, ""), (lzma.open, ".xz"), (gzip.open, ".gz")])
def test_jsonl(tmp_path, opener, suffix):
    write_jsonl(tmp_path, opener, suffix)
    imdb = read_imdb(tmp_path)
    assert [(r.label, r.text.decode()) for r in imdb["train"]] == TRAIN
    assert [(r.label, r.text.decode()) for r in imdb["test"]] == TEST


def test_splits_do_not_depend_on_where_they_were_read_from(tmp_path, monkeypatch):
    (tmp_path / "lines").mkdir()
    write_jsonl(tmp_path / "lines", open, "")
    write_folders(tmp_path / "folders" / "aclImdb")
    hub = {
        split: datasets.Dataset.from_list([{"text": t, "label": y} for y, t in rows])
        for split, rows in (("train", TRAIN), ("test", TEST), ("unsupervised", [(-1, "none")]))
    }
    monkeypatch.setattr(datasets, "load_dataset", lambda name: hub)
    sizes = {"train": 15, "val": 4, "test": 10}
    lines, folders, inner, from_hub = (
        split_reviews(read_imdb(source), sizes, seed=3)
        for source in (
            tmp_path / "lines",
            tmp_path / "folders",
            tmp_path / "folders" / "aclImdb",
            None,
        )
    )
    assert lines == folders == inner == from_hub
    assert as_set(lines["test"]) == sorted(TEST)
    held_out = as_set(lines["val"])
    assert len(held_out) == 4 and not set(held_out) & set(as_set(lines["train"]))
    assert set(held_out) | set(as_set(lines["train"])) < set(TRAIN)
    other = split_reviews(read_imdb(tmp_path / "lines"), sizes, seed=4)
    assert as_set(other["val"]) != held_out


def test_equal_reviews_fall_on_one_side():
    twins = [Review(0, b"twice"), *(Review(1, bytes([65 + i])) for i in range(9))] * 2
    for held_out in range(0, 19, 2):
        sizes = {"train": 20 - held_out, "val": held_out, "test": 1}
        splits = split_reviews({"train": twins, "test": twins}, sizes)
        assert not {r.text for r in splits["train"]} & {r.text for r in splits["val"]}


def test_too_few_reviews_are_refused():
    imdb = {"train": [Review(0, b"a")] * 10, "test": [Review(0, b"b")] * 5}
    with pytest.raises(ValueError, match=r"train=9 must be at most 8, as val takes 2"):
        split_reviews(imdb, {"train": 9, "val": 2, "test": 5})
    with pytest.raises(ValueError, match=r"test=6 must be at most 5\."):
        split_reviews(imdb, {"train": 8, "val": 2, "test": 6})


def test_ids_are_bytes_plus_one_and_cut():
    assert to_ids(b"\x00a\xff", 10).tolist() == [1, 98, 256]
    assert to_ids("é".encode(), 1).tolist() == [0xC3 + 1]
    [(label, [tokens])] = examples([Review(1, b"x" * (MAX_LENGTH + 1))])
    assert label == 1 and len(tokens) == MAX_LENGTH == 4096


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"}', "line 2 has label None"),
        ('{"text": "a", "label": 2}', "line 2 has label 2, which must be 0 or 1"),
        ('{"text": "", "label": 1}', "line 2 has an empty text"),
        ('{"label": 1}', "line 2 must be an object whose `text`"),
        ("[]", "line 2 must be an object"),
        ("{", "line 2 is not JSON"),
    ],
)
def test_malformed_records_are_named(tmp_path, line, message):
    for split in ("train", "test"):
        path = tmp_path / f"{split}.jsonl"
        path.write_text(f'{{"text": "a", "label": 0}}\n{line}\n')
    with pytest.raises(ValueError, match=f"train.jsonl, {message}"):
        read_imdb(tmp_path)


def test_torn_and_missing_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"must hold one \*train\*.jsonl .* but has none"):
        read_imdb(tmp_path)
    write_jsonl(tmp_path, lzma.open, ".xz")
    path = tmp_path / "imdb-train.jsonl.xz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"imdb-train.jsonl.xz cannot be read to its end"):
        read_imdb(tmp_path)
    (tmp_path / "more-train.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"has imdb-train.jsonl.xz, more-train.jsonl"):
        read_imdb(tmp_path)
    (tmp_path / "acl" / "train" / "neg").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"train/neg has no .txt file"):
        read_imdb(tmp_path / "acl")
