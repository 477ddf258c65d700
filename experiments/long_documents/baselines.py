"""Baselines on long documents: a bag of words, and the number of tokens alone.

    python -m experiments.long_documents.baselines --text TEXT... --tokenizer gpt2

They are logistic regressions on the documents and folds of experiments.long_documents; pass the
tokenizer of its model to have its tokens. Their strength of regularization is chosen within the
training documents.
"""

from argparse import Namespace

from experiments.harness import Command, measure_rows
from experiments.long_documents.options import add_options, check

command = Command(__name__)
add_options(command)
command.add("--tokenizer", default="gpt2", help="name or file, as of scripts.prepare_text")
command.read(out="docs/results/long_documents_baselines.json", resume=True, check=check)

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from data.text.tokenizer import load_tokenizer
from evaluation.results import Row
from experiments.long_documents.documents import Documents, load
from experiments.long_documents.regression import score_by_regression
from experiments.long_documents.report import COUNT, WORDS, documents_table


def words_and_pairs(ids: list[int]) -> list[str]:
    """Terms of the bag of words: tokens, and pairs of tokens in a row."""
    return [*map(str, ids), *(f"{a} {b}" for a, b in pairwise(ids))]


def measure(documents: Documents, length: int) -> Iterator[list[Row]]:
    """Yield rows with the score of each document by the two logistic regressions."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.preprocessing import FunctionTransformer

    ids = [document[:length].tolist() for document in documents.tokens]
    terms: Any = words_and_pairs
    words = TfidfVectorizer(analyzer=terms, min_df=4, sublinear_tf=True)
    n_tokens = FunctionTransformer(lambda rows: np.log([[len(x)] for x in rows]))
    for name, features in ((WORDS, words), (COUNT, n_tokens)):
        scores = score_by_regression(documents, ids, features, [0.01, 0.1, 1.0, 10.0, 100.0])
        yield [{"name": name, "length": length, "seed": 0, "scores": scores.tolist()}]


@command.main
def main(args: Namespace) -> None:
    """Measure both baselines at each length."""
    documents = load(args.text, load_tokenizer(args.tokenizer), args.folds)
    stages = [partial(measure, documents, length) for length in args.lengths]
    measure_rows(args, stages, documents_table, **documents.about())
