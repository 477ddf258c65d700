import json
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from experiments import long_documents
from experiments.long_documents import (
    COUNT,
    MODEL,
    WORDS,
    GPTClassifier,
    documents_table,
    fine_tune,
    folds_of,
    metrics,
    rows_of,
    score,
    summarize,
)
from model.config import ModelConfig
from model.gpt import GPT
from model.mask_config import MaskConfig

SHAPE = {"vocab_size": 60, "n_layer": 2, "n_head": 2, "n_embd": 32, "context_length": 16}


@pytest.fixture(params=["learned", "rotary"])
def source(request):
    torch.manual_seed(0)
    return GPT(ModelConfig(**SHAPE, positions=request.param, attention="reference")).eval()


@pytest.fixture(autouse=True)
def short_rows(monkeypatch):
    monkeypatch.setattr(long_documents, "ROW", 64)


def random_documents(*lengths):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(60, (n,), generator=generator) for n in lengths]


def test_documents_in_a_row_do_not_see_each_other(source):
    model = GPTClassifier(source, 32).eval()
    torch.nn.init.normal_(model.head.weight)
    documents = random_documents(7, 1, 32, 16)  # 56 tokens
    together = model(documents)
    alone = torch.cat([model([document]) for document in documents])
    assert together.shape == (4, 2)
    assert torch.allclose(together, alone, atol=1e-5)


def test_short_documents_keep_the_positions_of_pretraining(source):
    model = GPTClassifier(source, 16).eval()
    documents = random_documents(16)
    expected = model.head(source.hidden(documents[0][None])[:, -1])
    assert torch.allclose(model(documents), expected, atol=1e-5)


def test_positions_are_extended(source):
    model = GPTClassifier(source, 32)
    if source.config.positions == "learned":
        table, old = model.gpt.pos_emb.weight, source.pos_emb.weight
        assert table[:32:2].equal(old) and not table[32:].any()
        assert torch.allclose(table[1], (old[0] + old[1]) / 2)
    else:
        config = model.gpt.config
        assert (config.rope_scaling, config.rope_factor) == ("linear", 2.0)


@pytest.mark.gpu
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_compiled_models_have_the_gradients_of_eager_ones(positions, monkeypatch):
    monkeypatch.setattr(long_documents, "ROW", 256)
    source, graphs = GPT(ModelConfig(**SHAPE, positions=positions)), []
    compiled_hidden = long_documents.compiled_hidden
    for length, sizes in ((16, (16, 5)), (32, (32, 9, 17)), (128, (128, 3))):
        with torch.device("cuda"):
            model = GPTClassifier(source, length)
        torch.nn.init.normal_(model.head.weight)
        documents = [document.cuda() for document in random_documents(*sizes)]
        results = []
        for hidden in (compiled_hidden, GPT.hidden):
            monkeypatch.setattr(long_documents, "compiled_hidden", hidden)
            logits = model(documents)
            grads = torch.autograd.grad(logits[:, 0].sum(), [*model.parameters()])
            results.append(torch.cat([logits.flatten(), *(grad.flatten() for grad in grads)]))
        assert (results[0] - results[1]).norm() < 0.02 * results[1].norm()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert positions == "rotary" or graphs[0] == graphs[-1]


@pytest.mark.parametrize("scaling", ["none", "linear", "ntk", "yarn"])
def test_rotary_frequencies_are_those_of_the_run(scaling):
    torch.manual_seed(0)
    schedule = {"context_schedule": [[8, 0.5], [16, 0.5]], "window_grows": True, "window_size": 8}
    options = {"positions": "rotary", "rope_scaling": scaling, "attention": "reference"}
    factor = 1.0 if scaling == "none" else 4.0
    source = GPT(ModelConfig(**SHAPE, **options, rope_factor=factor, **schedule)).eval()
    document = random_documents(16)[0]
    expected = source.hidden(document[None])
    for length in (8, 16):
        assert torch.allclose(GPTClassifier(source, length).gpt.hidden(document[None]), expected)


def test_rows_hold_as_many_documents_as_fit():
    documents = random_documents(30, 30, 5, 64, 1)
    assert list(rows_of(documents, [0, 1, 2, 3, 4])) == [[0, 1], [2], [3], [4]]
    assert list(rows_of(documents, [4, 2, 1])) == [[4, 2, 1]]
    assert list(rows_of(documents, [])) == []


def test_fine_tuning_finds_a_token_far_from_the_end(source, monkeypatch):
    monkeypatch.setattr(long_documents, "LR", 1e-2)
    documents = [document % 10 for document in random_documents(*[8] * 64)]
    labels = torch.arange(64) % 2
    for document, label in zip(documents, labels, strict=True):
        document[2] = 58 + label
    torch.manual_seed(0)
    model = GPTClassifier(source, 32).train()
    assert len([*fine_tune(model, documents, labels, range(48), epochs=30, seed=1)]) == 30
    scores = torch.tensor(score(model, documents, range(48, 64)))
    assert ((scores > 0) == labels[48:].bool()).float().mean() > 0.75


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


def test_metrics_are_those_of_scikit_learn():
    from sklearn.metrics import f1_score, roc_auc_score

    generator = np.random.default_rng(0)
    labels = generator.random(50) > 0.4
    scores = generator.normal(size=(2, 50)).round(1) + 0.5 * labels  # some are equal
    weights = np.stack((np.ones(50, np.int64), generator.integers(3, size=50)))
    found = metrics(labels, np.zeros(50), scores, weights)
    for i, counts in enumerate(weights):
        for seed, row in enumerate(scores):
            micro = f1_score(labels, row > 0, average="micro", sample_weight=counts)
            area = roc_auc_score(labels, row, sample_weight=counts)
            assert found["micro_f1"][i, seed] == pytest.approx(micro)
            assert found["auc"][i, seed] == pytest.approx(area)


def test_documents_of_two_folds_are_not_compared():
    labels, folds = np.array([True, False] * 4), np.array([0] * 4 + [1] * 4)
    scores = np.array([[1.0, 0.0] * 2 + [-4.0, -5.0] * 2])  # the folds have different scales
    assert metrics(labels, folds, scores, np.ones((1, 8), np.int64))["auc"] == [[1.0]]


def test_summary_over_seeds_and_documents():
    labels = [True, False] * 50
    right = [1.0, -1.0] * 50
    guess = [1.0, 1.0] * 50
    rows = [
        {"name": MODEL, "length": 512, "seed": 1, "scores": guess},
        {"name": MODEL, "length": 1024, "seed": 1, "scores": right},
        {"name": MODEL, "length": 1024, "seed": 2, "scores": guess},
        {"name": WORDS, "length": 512, "seed": 0, "scores": right},
    ]
    result = {"labels": labels, "folds": [0] * 100, "rows": rows}
    words, short, long = summarize(result)
    assert [row["micro_f1"] for row in (words, short, long)] == [1.0, 0.5, 0.75]
    assert [row["auc"] for row in (words, short, long)] == [1.0, 0.5, 0.75]
    assert short["gain_interval"] == [0, 0] and long["seeds"] == 2
    assert long["gain_interval"] == [0, 0.5]  # one seed gains half of all pairs, one nothing
    lines = documents_table(result).splitlines()
    assert lines[2] == "| always affirmed | - | - | 50.0 | - | - |"
    assert lines[3].startswith("| bag of words | 512 | 1 | 100.0 (100.0 to 100.0) |")


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

    run.model = GPT(ModelConfig(**SHAPE, mask=MaskConfig(pattern="butterfly", block_size=16)))
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
