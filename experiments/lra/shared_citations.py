"""Baselines of the task aclsum: what simple comparisons of two texts reveal.

They read the bytes that models read. A model that does not beat "years" may have learned no more
than how far apart two papers were published.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from data.lra.store import Sequences

_VIEWS = {"years": [0], "cosine": [1], "citations": [2], "comparisons": [0, 1, 2]}
"""Columns of `_compare` that each baseline sees."""

_YEAR = re.compile(r"(?<!\d)(?:19[5-9]|20[0-2])\d(?!\d)")
_CITATION = re.compile(
    r"([^\W\d_][\w'’-]+)(?: et al\.?| (?:and|&) [^\W\d_][\w'’-]+)?,? ?\(?((?:19|20)\d\d)(?!\d)"
)
"""First author and year: of "Och and Ney, 2003", for example, or "Och et al. (2003a)"."""


def baselines(train: Sequences, test: Sequences) -> dict[str, float]:
    """Accuracy in percent of logistic regressions on comparisons of two texts; fit on `train`.

    Returns:
        "majority": sees nothing. "years": sees the difference of the latest years in the texts.
        "cosine": sees the similarity of their words, weighted by TF-IDF. "citations": sees the
        number of inline citations that are in both. "comparisons": sees all three numbers.
    """
    # imported here, because it would slow down --help
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    splits = [[_texts(split, i) for i in range(len(split))] for split in (train, test)]
    words = TfidfVectorizer(sublinear_tf=True).fit(sorted({t for pair in splits[0] for t in pair}))
    x, x_test = (_compare(pairs, words.transform) for pairs in splits)
    shares = {"majority": (test.labels == np.bincount(train.labels).argmax()).mean()}
    for name, columns in _VIEWS.items():
        model = make_pipeline(StandardScaler(), LogisticRegression())
        model.fit(x[:, columns], train.labels)
        shares[name] = model.score(x_test[:, columns], test.labels)
    return {name: 100 * float(share) for name, share in shares.items()}


def _texts(split: Sequences, example: int) -> list[str]:
    """Both texts of an example, each without a last character that is cut in two."""
    documents = ((ids - 1).astype(np.uint8).tobytes() for ids in split.documents(example))
    return [document.decode(errors="ignore") for document in documents]


def _compare(pairs: list[list[str]], to_vectors: Callable[[list[str]], Any]) -> np.ndarray:
    """Difference of years, cosine and number of common citations of each pair, float64 (n, 3).

    `to_vectors` returns a sparse unit vector for each text. A text without a year differs by 0.
    """
    texts = sorted({text for pair in pairs for text in pair})
    vectors = dict(zip(texts, to_vectors(texts).toarray(), strict=True))
    years = {text: [int(year) for year in _YEAR.findall(text)] for text in texts}
    citations = {text: {*_CITATION.findall(text)} for text in texts}
    rows = []
    for a, b in pairs:
        gap = abs(max(years[a]) - max(years[b])) if years[a] and years[b] else 0
        rows.append((gap, vectors[a] @ vectors[b], len(citations[a] & citations[b])))
    return np.array(rows, np.float64)
