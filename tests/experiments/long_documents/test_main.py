import json
from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from experiments.long_documents import __main__ as long_documents
from experiments.long_documents.__main__ import folds_of, read_documents, read_opinions
from experiments.long_documents.report import COUNT, MODEL, WORDS
from model.gpt import GPT
from model.mask_config import MaskConfig


def test_scores_are_of_the_epoch_with_the_least_validation_loss(monkeypatch):
    labels = [True] * 24 + [False] * 8
    epochs = iter([0.1, 2.0, -1.0] * 2)  # log-odds of the true label
    seen = []

    def scores_of(model, documents, indices):
        if len(indices) == 2:  # validation
            seen.append(next(epochs))
        return [seen[-1] if labels[i] else -seen[-1] for i in indices]

    monkeypatch.setattr(long_documents, "GPTClassifier", lambda *args: torch.nn.Identity())
    monkeypatch.setattr(long_documents, "fine_tune", lambda *args, **options: range(3))
    monkeypatch.setattr(long_documents, "score", scores_of)
    args = Namespace(folds=2, epochs=3)
    documents = [torch.zeros(4, dtype=torch.int64)] * 32
    (((row,),),) = [[*long_documents.measure_model(None, documents, labels, 4, 1, args)]]
    assert row["scores"] == [2.0] * 24 + [-2.0] * 8
    epochs = iter([float("nan")] * 3)
    with pytest.raises(ValueError, match="4 tokens, seed 1: no epoch has a finite loss"):
        next(long_documents.measure_model(None, documents, labels, 4, 1, args))


def test_each_document_is_tested_once_by_a_model_that_was_not_trained_on_it():
    labels = [True] * 30 + [False] * 10
    folds = folds_of(labels, 5)
    assert sorted(i for _, test in folds for i in test) == list(range(40))
    assert all(not set(train) & set(test) and len(train) == 32 for train, test in folds)
    assert all(sum(labels[i] for i in test) == 6 for _, test in folds)


def test_command(source, tmp_path, monkeypatch, capsys):
    reasons = "The jury found for Acme on all counts after a long trial. " * 30
    results = {"affirmed": "The judgment is affirmed.", "reversed": "We reverse the judgment."}
    names = ["affirmed", "reversed"] * 12
    texts = [f"Roe is the {i}th to sue. {reasons}{results[x]}" for i, x in enumerate(names)]
    texts.append(texts[0])  # counts once
    documents = [{"source": long_documents.SOURCE, "text": text} for text in texts]
    documents += [{"source": "novels", "text": "Call me"}, {"text": "It is"}]
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps(document) + "\n" for document in documents))
    others = tmp_path / "others.jsonl"
    long_documents.main(["--text", str(file), "--without-opinions", str(others)])
    kept = [json.loads(line)["text"] for line in others.read_text().splitlines()]
    assert kept == ["Call me", "It is"]

    tokenizer = SimpleNamespace(encode=lambda text: [ord(c) % 60 for c in text])
    data = SimpleNamespace(path="out/data/text")
    run = SimpleNamespace(model=source, tokenizer=tokenizer, config=SimpleNamespace(data=data))
    monkeypatch.setattr(long_documents, "open_run", lambda folder: run)
    out = tmp_path / "result.json"
    options = ["--text", str(file), "--init", "run", "--out", str(out), "--lengths", "16", "32"]
    long_documents.main([*options, "--seeds", "1", "--folds", "2", "--epochs", "1"])
    result = json.loads(out.read_text())
    assert (result["init"], result["pretrained_on"]) == ("run", "out/data/text")
    assert sum(result["labels"]) == 12 and len(result["labels"]) == 24
    assert {(row["name"], row["length"]) for row in result["rows"]} == {
        (name, length) for name in (MODEL, WORDS, COUNT) for length in (16, 32)
    }
    assert all(len(row["scores"]) == 24 for row in result["rows"])
    assert sorted(result["folds"]) == [0] * 12 + [1] * 12
    assert out.with_suffix(".png").stat().st_size > 1000
    assert "| fine-tuned GPT | 32 | 1 |" in capsys.readouterr().out

    run.model = GPT(replace(source.config, mask=MaskConfig(pattern="butterfly", block_size=16)))
    with pytest.raises(
        ValueError, match=r"--init=run has model\.mask\.pattern=butterfly, but must"
    ):
        long_documents.main(options)


SIZES = {"lengths": [512], "seeds": 1, "folds": 2, "epochs": 1}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "pass either --init RUN or --without-opinions FILE"),
        ({"init": "run", "without_opinions": "file"}, "pass either --init RUN"),
        ({"init": "run", "lengths": [512, 0]}, r"--lengths=\[512, 0\] must be at least 1"),
        ({"init": "run", "folds": 1}, "--folds=1 must be at least 2"),
    ],
)
def test_invalid_options(options, problem):
    args = Namespace(**{"init": None, "without_opinions": None, **SIZES, **options})
    with pytest.raises(ValueError, match=problem):
        long_documents.check(args)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", r"line 2 must be JSON, but is not \("),
        ("[1]", "line 2 must be an object with a text, but is list"),
        ('{"source": "novels"}', "line 2: field 'text' must be a string, but is null"),
    ],
)
def test_unreadable_documents(line, problem, tmp_path):
    file = tmp_path / "text.jsonl"
    file.write_text(f'{{"text": "Call me"}}\n{line}\n')
    with pytest.raises(ValueError, match=rf"--text={file}, {problem}"):
        list(read_documents([file]))


def test_too_few_opinions(tmp_path):
    file = tmp_path / "text.jsonl"
    file.write_text('{"text": "Call me", "source": "novels"}\n')
    with pytest.raises(ValueError, match="--text has 0 opinions that affirm and 0 .* 12 of each"):
        read_opinions([file], folds=12)
