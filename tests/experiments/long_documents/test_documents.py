import pytest

from experiments.long_documents.documents import folds_of, read_documents, read_opinions


def test_each_document_is_tested_once_by_a_model_that_was_not_trained_on_it():
    labels = [True] * 30 + [False] * 10
    folds = folds_of(labels, 5)
    assert sorted(i for _, test in folds for i in test) == list(range(40))
    assert all(not set(train) & set(test) and len(train) == 32 for train, test in folds)
    assert all(sum(labels[i] for i in test) == 6 for _, test in folds)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", r"line 3 is not JSON \("),
        ("[1]", "line 3 must be an object with a text, but is list"),
        ('{"source": "novels"}', "line 3: field 'text' must be a string, but is null"),
    ],
)
def test_unreadable_documents(line, problem, tmp_path):
    file = tmp_path / "text.jsonl"
    file.write_text(f'{{"text": "Call me"}}\n\n{line}\n')  # an empty line counts
    with pytest.raises(ValueError, match=rf"{file}, {problem}"):
        list(read_documents([file]))


def test_too_few_opinions(tmp_path):
    file = tmp_path / "text.jsonl"
    file.write_text('{"text": "Call me", "source": "novels"}\n')
    with pytest.raises(ValueError, match="--text has 0 opinions that affirm and 0 .* 12 of each"):
        read_opinions([file], n_folds=12)
