import numpy as np
import torch
from sklearn.preprocessing import StandardScaler

from experiments.long_documents.documents import Documents, folds_of
from experiments.long_documents.regression import score_by_regression


def test_scores_are_by_regressions_on_other_folds():
    generator = np.random.default_rng(0)
    labels = [True, False] * 40
    states = generator.normal(size=(80, 3)) + 8 * np.array(labels)[:, None]
    documents = Documents([torch.zeros(1)] * 80, labels, folds_of(labels, 4))
    scores = score_by_regression(documents, states, StandardScaler(), [0.1, 1.0])
    assert ((scores > 0) == labels).all()
    # Labels of a fold do not change its own scores
    _, test = documents.folds[0]
    wrong = [not label if i in test else label for i, label in enumerate(labels)]
    again = score_by_regression(
        documents._replace(labels=wrong), states, StandardScaler(), [0.1, 1.0]
    )
    assert np.array_equal(again[test], scores[test])
