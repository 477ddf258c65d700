"""Logistic regressions that classify documents."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.long_documents.documents import Documents


def score_by_regression(
    documents: Documents, inputs: Sequence[Any] | np.ndarray, features: Any,
    strengths: Sequence[float],
) -> np.ndarray:  # fmt: skip
    """Log-odds of an affirmed judgment (n,), each by a regression on the documents of other folds.

    Args:
        documents: labels and folds of n documents.
        inputs: n inputs of `features`, a transformer of scikit-learn.
        features: the regression's input, fitted on its training documents.
        strengths: C of the regressions, of which cross-validation on the training documents chooses
            the one with the largest area under the ROC curve.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline

    scores = np.zeros(len(inputs))
    for train, test in documents.folds:
        regression = GridSearchCV(
            LogisticRegression(max_iter=1000), {"C": [*strengths]}, scoring="roc_auc", cv=3
        )
        model = make_pipeline(features, regression)
        model.fit([inputs[i] for i in train], [documents.labels[i] for i in train])
        scores[test] = model.decision_function([inputs[i] for i in test])
    return scores
