import json
from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from experiments.long_documents import __main__ as long_documents
from experiments.long_documents import baselines
from experiments.long_documents.documents import SOURCE, Documents, folds_of
from experiments.long_documents.report import COUNT, WORDS, documents_table
from model.gpt import GPT
from model.mask_config import MaskConfig

X = {"name": "x", "pooling": "mean"}


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
    documents = Documents([torch.zeros(4, dtype=torch.int64)] * 32, labels, folds_of(labels, 2))
    (((row,),),) = [[*long_documents.measure(None, documents, 4, seed=1, epochs=3, **X)]]
    assert row["scores"] == [2.0] * 24 + [-2.0] * 8
    epochs = iter([float("nan")] * 3)
    with pytest.raises(ValueError, match="4 tokens, seed 1: no epoch has a finite loss"):
        next(long_documents.measure(None, documents, 4, seed=1, epochs=3, **X))


def test_command(source, tmp_path, monkeypatch, capsys):
    reasons = "The jury found for Acme on all counts after a long trial. " * 30
    results = {"affirmed": "The judgment is affirmed.", "reversed": "We reverse the judgment."}
    names = ["affirmed", "reversed"] * 12
    texts = [f"Roe is the {i}th to sue. {reasons}{results[x]}" for i, x in enumerate(names)]
    texts.append(texts[0])  # counts once
    documents = [{"source": SOURCE, "text": text} for text in texts]
    documents += [{"source": "novels", "text": "Call me"}, {"text": "It is"}]
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps(document) + "\n" for document in documents))
    others = tmp_path / "others.jsonl"
    long_documents.main(["--text", str(file), "--without-opinions", str(others)])
    kept = [json.loads(line)["text"] for line in others.read_text().splitlines()]
    assert kept == ["Call me", "It is"]

    tokenizer = SimpleNamespace(encode=lambda text: [ord(c) % 60 for c in text])
    run = SimpleNamespace(model=source, tokenizer=tokenizer)
    monkeypatch.setattr(long_documents, "open_run", lambda folder: run)
    monkeypatch.setattr(baselines, "load_tokenizer", lambda name: tokenizer)
    out, baselines_out = tmp_path / "result.json", tmp_path / "baselines.json"
    shared = ["--text", str(file), "--lengths", "16", "32", "--folds", "2"]
    options = [*shared, "--init", "run", "--name", "tiny", "--out", str(out)]
    options += ["--seeds", "1", "--epochs", "1"]
    long_documents.main(options)
    frozen_out = tmp_path / "frozen.json"
    long_documents.main([*options, "--frozen", "--out", str(frozen_out)])
    baselines.main([*shared, "--out", str(baselines_out)])
    outs = (out, frozen_out, baselines_out)
    result, frozen, of_baselines = (json.loads(path.read_text()) for path in outs)
    assert (result["init"], result["name"], result["pooling"]) == ("run", "tiny", "mean")
    assert sum(result["labels"]) == 12 and len(result["labels"]) == 24
    expected = (["fine-tuned tiny"], ["frozen tiny"], [WORDS, COUNT])
    for of, names in zip((result, frozen, of_baselines), expected, strict=True):
        found = {(row["name"], row["length"]) for row in of["rows"]}
        assert found == {(name, length) for name in names for length in (16, 32)}
        assert all(len(row["scores"]) == 24 for row in of["rows"])
    assert sorted(result["folds"]) == [0] * 12 + [1] * 12
    assert out.with_suffix(".png").stat().st_size > 1000
    assert "| fine-tuned tiny | 32 | 1 |" in capsys.readouterr().out
    assert documents_table(result, frozen, of_baselines).count("| 32 |") == 4

    run.model = GPT(replace(source.config, mask=MaskConfig(pattern="butterfly", block_size=16)))
    with pytest.raises(
        ValueError, match=r"--init=run has model\.mask\.pattern=butterfly, but must"
    ):
        long_documents.main(options)


SIZES = {"lengths": [512], "seeds": [1], "folds": 2, "epochs": 1}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "pass either --init RUN or --without-opinions FILE"),
        ({"init": "run", "without_opinions": "file"}, "pass either --init RUN"),
        ({"init": "run", "lengths": [512, 0]}, r"--lengths=\[512, 0\] must be at least 1"),
        ({"init": "run", "seeds": [1, -1]}, r"--seeds=\[1, -1\] must be at least 0"),
        ({"init": "run", "seeds": [1, 2, 1]}, r"--seeds=\[1, 2, 1\] must not repeat a number"),
        ({"init": "run", "folds": 1}, "--folds=1 must be at least 2"),
    ],
)
def test_invalid_options(options, problem):
    args = Namespace(**{"init": None, "without_opinions": None, **SIZES, **options})
    with pytest.raises(ValueError, match=problem):
        long_documents.check(args)
