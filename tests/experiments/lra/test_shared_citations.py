import numpy as np
import pytest

from data.lra import retrieval
from data.lra.store import Manifest, open_split
from data.lra.writer import preparing
from experiments.lra.shared_citations import baselines


def scores_of(folder, make):
    """Baselines on pairs of texts that `make` makes from a label and a generator."""
    manifest = Manifest(
        task="aclsum", kind="sequences", vocab_size=retrieval.VOCAB_SIZE, n_classes=2,
        max_length=retrieval.MAX_LENGTH, documents_per_example=2, source={},
    )  # fmt: skip
    generator = np.random.default_rng(0)
    with preparing(folder, manifest) as writer:
        for split, n in (("train", 200), ("test", 100)):
            pairs = [(i % 2, *(t.encode() for t in make(i % 2, generator))) for i in range(n)]
            writer.write_sequences(split, retrieval.pair_examples(pairs))
        writer.finish()
    return baselines(open_split(folder, "train"), open_split(folder, "test"))


def test_years(tmp_path):
    def make(label, generator):
        year = int(generator.integers(1980, 2000))
        return f"in {year} and in 1960, of 120033 words", f"in {year + 20 - 15 * label}"

    scores = scores_of(tmp_path, make)
    assert scores["years"] == scores["comparisons"] == 100
    assert scores["majority"] == 50 and scores["citations"] == 50


def test_words(tmp_path):
    def make(label, generator):
        first, other = generator.choice(50, 2, replace=False)
        return f"topic{first} of these", f"topic{first if label else other} of these"

    scores = scores_of(tmp_path, make)
    assert scores["cosine"] > 95 and scores["years"] == 50


@pytest.mark.parametrize(
    "citation", ["({} and Ney, 2003)", "{} et al. (2003a)", "{} & Ney 2003", "({}, 2003;"]
)
def test_citations(tmp_path, citation):
    def make(label, generator):
        first, other = generator.choice(20, 2, replace=False)
        name = "Author" + chr(97 + first)
        return f"as in {name} et al., 2003", citation.format(
            name if label else "Author" + chr(97 + other)
        )

    assert scores_of(tmp_path, make)["citations"] == 100
