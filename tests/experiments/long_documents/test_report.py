import numpy as np
import pytest

from experiments.long_documents.report import WORDS, documents_table, draw, metrics, summarize

T_975 = 12.7062  # of Student's t with one degree of freedom


def described(labels, folds=None, tokens=None):
    zeros = np.zeros(len(labels), np.int64)
    return {
        "labels": labels.tolist(),
        "folds": (zeros if folds is None else folds).tolist(),
        "tokens": (zeros + 9 if tokens is None else tokens).tolist(),
    }


def test_metrics_are_those_of_scikit_learn():
    from sklearn.metrics import f1_score, roc_auc_score

    generator = np.random.default_rng(0)
    labels = generator.random(50) > 0.4
    scores = generator.normal(size=(2, 50)).round(1) + 0.5 * labels  # some are equal
    weights = np.stack((np.ones(50, np.int64), generator.integers(3, size=50)))
    found = metrics(described(labels), scores, weights)
    for i, counts in enumerate(weights):
        for seed, row in enumerate(scores):
            micro = f1_score(labels, row > 0, average="micro", sample_weight=counts)
            area = roc_auc_score(labels, row, sample_weight=counts)
            assert found["micro_f1"][i, seed] == pytest.approx(micro)
            assert found["auc"][i, seed] == pytest.approx(area)


def test_documents_of_two_folds_are_not_compared():
    labels, folds = np.array([True, False] * 4), np.array([0] * 4 + [1] * 4)
    scores = np.array([[1.0, 0.0] * 2 + [-4.0, -5.0] * 2])  # the folds have different scales
    assert metrics(described(labels, folds), scores, np.ones((1, 8), np.int64))["auc"] == [[1.0]]


def test_the_number_of_tokens_does_not_order_documents_of_similar_length():
    tokens = np.array([100, 110, 1000, 1100])
    labels = np.array([True, False, False, True])
    found = metrics(described(labels, tokens=tokens), tokens[None], np.ones((1, 4), np.int64))
    assert (found["auc"], found["similar"]) == ([[0.5]], [[0.5]])
    labels = np.array([False, True, True, True])
    found = metrics(described(labels, tokens=tokens), tokens[None] // 100, np.ones((1, 4), int))
    assert (found["auc"], found["similar"]) == ([[2.5 / 3]], [[0.5]])


def test_summary_over_seeds_and_documents():
    labels = [True, False] * 50
    right = [1.0, -1.0] * 50
    guess = [1.0, 1.0] * 50
    rows = [
        {"name": "fine-tuned GPT", "length": 512, "seed": 1, "scores": guess},
        {"name": "fine-tuned GPT", "length": 1024, "seed": 1, "scores": right},
        {"name": "fine-tuned GPT", "length": 1024, "seed": 2, "scores": guess},
        {"name": WORDS, "length": 512, "seed": 0, "scores": right},
    ]
    result = {"labels": labels, "folds": [0] * 100, "tokens": [9] * 100, "rows": rows}
    words, short, long = summarize(result)
    assert [row["micro_f1"] for row in (words, short, long)] == [1.0, 0.5, 0.75]
    assert [row["auc"] for row in (words, short, long)] == [1.0, 0.5, 0.75]
    assert short["auc_gain_interval"] == [0, 0] and long["seeds"] == 2
    assert long["auc_gain_interval"] == [0.5, 0.5]  # of the seed that both lengths have
    assert long["auc_interval"] == pytest.approx([0.75 - T_975 / 4, 0.75 + T_975 / 4])
    apart = {"rows": [rows[0], rows[2], rows[3]]}  # the two lengths of the GPT share no seed
    lines = documents_table(result | apart).splitlines()
    assert lines[5].startswith("| fine-tuned GPT | 1,024 | 1 |")
    assert lines[5].split(" | ")[5::2] == ["-", "- |"]
    assert lines[2] == "| always affirmed | - | - | 50.0 | - | - | - | - |"
    assert lines[3].startswith("| bag of words | 512 | 1 | 100.0 (100.0 to 100.0) |")


def test_models_with_other_tokenizers_are_compared():
    result = described(np.array([True, False] * 8)) | {
        "rows": [{"name": "fine-tuned GPT", "length": 512, "seed": 1, "scores": [1.0, -1.0] * 8}]
    }
    other = described(np.array([True, False] * 8), tokens=np.arange(16) + 5) | {
        "rows": [{"name": "fine-tuned other", "length": 512, "seed": 1, "scores": [-1.0, 1.0] * 8}]
    }
    lines = documents_table(result, other).splitlines()
    assert "| fine-tuned GPT | 512 | 1 | 100.0" in lines[3]
    assert "| fine-tuned other | 512 | 1 | 0.0" in lines[4]
    (axes, *_) = draw(result, other).axes
    _, names = axes.get_legend_handles_labels()
    assert names == ["always affirmed", "fine-tuned GPT", "fine-tuned other"]
    for change in ({"init": "another run"}, {"epochs": 1}):
        with pytest.raises(ValueError, match="2 results are of 'fine-tuned GPT': .* other --name"):
            documents_table(result, other, result | change)


def test_results_of_several_seeds_are_one_model():
    of_seeds = [
        described(np.array([True, False] * 8))
        | {"rows": [{"name": "fine-tuned GPT", "length": 512, "seed": seed, "scores": scores}]}
        for seed, scores in ((1, [1.0, -1.0] * 8), (2, [-1.0, 1.0] * 8))
    ]
    lines = documents_table(*of_seeds).splitlines()
    assert lines[3].startswith("| fine-tuned GPT | 512 | 2 | 50.0 (")
    assert [len(result["rows"]) for result in of_seeds] == [1, 1]
    with pytest.raises(
        ValueError, match=r"2 results are of \('fine-tuned GPT', 512, 1\): .* other --seeds"
    ):
        documents_table(*of_seeds, of_seeds[0])


def test_results_on_other_documents():
    results = [{"labels": [True, label], "folds": [0, 1], "tokens": [9, 9]} for label in (0, 1)]
    with pytest.raises(ValueError, match="results differ in labels: measure them on the same"):
        documents_table(*results)
