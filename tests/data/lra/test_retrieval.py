import numpy as np
import pytest

from data.lra.retrieval import (
    MAX_LENGTH,
    exclude,
    find_aan,
    make_pairs,
    pair_examples,
    read_aan,
)
from data.lra.text import Review


def test_rows_of_any_bytes(tmp_path):
    path = tmp_path / "new_aan_pairs.train.tsv"
    long = b"x" * (MAX_LENGTH + 5)
    path.write_bytes(
        b'1.0\t7\t8\tsays "no quotes\tcaf\xc3\xa9 \xff\n'
        b"0.0\t7\t9\t" + long + b"\tb\r\n"
        b"0\t1\t2\t\tno first text\n"
        b"1\t1\t2\t\x85c\xe2\x80\xa8d\tlast, without an end of line"
    )
    skipped = []
    read = list(read_aan(path, skipped))
    assert [label for label, _ in read] == [1, 0, 1]
    texts = [[bytes((d - 1).astype(np.uint8)) for d in documents] for _, documents in read]
    assert texts == [
        [b'says "no quotes', b"caf\xc3\xa9 \xff"],
        [b"x" * 4000, b"b"],
        [b"\x85c\xe2\x80\xa8d", b"last, without an end of line"],
    ]
    assert skipped == ["new_aan_pairs.train.tsv, line 3"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b"1.0\t1\t2\ta", "line 2 has 4 fields between tabs, but must have 5"),
        (b"1.0\t1\t2\ta\tb\tc", "line 2 has 6 fields"),
        (b"0.5\t1\t2\ta\tb", "line 2 has label b'0.5'"),
        (b"nan\t1\t2\ta\tb", "line 2 has label b'nan'"),
        (b"label\t1\t2\ta\tb", "line 2 has label b'label'"),
    ],
)
def test_malformed_rows_are_named(tmp_path, row, message):
    path = tmp_path / "new_aan_pairs.test.tsv"
    path.write_bytes(b"1.0\t1\t2\ta\tb\n" + row + b"\n")
    with pytest.raises(ValueError, match=f"test.tsv, {message}"):
        list(read_aan(path, []))


def test_missing_files_say_where_to_get_them(tmp_path):
    for source in (None, tmp_path):
        with pytest.raises(ValueError, match=r"OpenNLPLab/lra .*\(8.5, 1.1 and 1.0 GB\)"):
            find_aan(source)
    (tmp_path / "tsv_data").mkdir()
    for name in ("train", "eval", "test"):
        (tmp_path / "tsv_data" / f"new_aan_pairs.{name}.tsv").write_text("")
    assert find_aan(tmp_path)["val"].name == "new_aan_pairs.eval.tsv"


@pytest.fixture(scope="module")
def reviews():
    rng = np.random.default_rng(0)
    texts = []
    for i, length in enumerate(rng.integers(40, 400, 4000).tolist()):
        # every word names its document, so that pairs can be checked
        texts.append(" ".join([f"d{i}w{w}" for w in range(length)]).encode())
    return [Review(0, text) for text in texts]


def document_of(text):
    documents = {word.split(b"w")[0] for word in text.split()}
    assert len(documents) == 1
    return documents.pop()


def test_pairs_are_of_one_document_or_of_two(reviews):
    pairs = make_pairs(reviews, seed=0)
    assert len(pairs) == len(reviews)
    for label, start, end in pairs:
        assert label == (document_of(start) == document_of(end))
        assert b"w0" in start.split()[0] and start == start.strip() and end == end.strip()
    assert np.mean([label for label, _, _ in pairs]) == 0.5
    for part in (1, 2):  # every start and every end is used once
        assert len({document_of(pair[part]) for pair in pairs}) == len(reviews)
    assert {bytes(start + b" ... " + end) for _, start, end in pairs}.isdisjoint(
        review.text for review in reviews
    )


def test_lengths_do_not_tell_the_label(reviews):
    """Means and spreads of lengths, and of what would give independent cuts away, agree."""
    pairs = make_pairs(reviews, seed=0)
    labels = np.array([label for label, _, _ in pairs], bool)
    lengths = np.array([[len(start), len(end)] for _, start, end in pairs], float)
    total = lengths.sum(1)
    for feature in (lengths[:, 0], lengths[:, 1], total, (lengths[:, 0] - lengths[:, 1]) / total):
        one, two = feature[labels], feature[~labels]
        error = (one.var() / len(one) + two.var() / len(two)) ** 0.5
        assert abs(one.mean() - two.mean()) < 4 * error
        # both pairs of a couple are alike, so that errors are those of half as many
        spread_error = 4 * (2 / len(one)) ** 0.5
        assert np.log(one.std() / two.std()) == pytest.approx(0, abs=spread_error)


def test_pairs_do_not_depend_on_order_or_copies(reviews):
    some = reviews[:41]
    pairs = make_pairs(some, seed=5)
    assert len(pairs) == 40
    assert make_pairs([*some[::-1], *some[:7]], seed=5) == pairs
    assert make_pairs(some, seed=6) != pairs


def test_documents_too_short_to_cut_are_not_used():
    short = [Review(0, b"good film"), Review(1, b"x" * 500)]
    assert make_pairs(short, seed=0) == []
    assert make_pairs([], seed=0) == []


def test_without_and_ids():
    assert exclude([Review(0, b"a"), Review(1, b"b")], [Review(1, b"a")]) == [Review(1, b"b")]
    [(label, documents)] = pair_examples([(1, b"a" * 5000, b"\x00")])
    assert label == 1 and [len(d) for d in documents] == [4000, 1]
    assert documents[1].tolist() == [1]
