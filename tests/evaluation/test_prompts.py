"""Opening the runs and the text of a measurement on prompts."""

import json

import pytest
import torch

from data.text.prepare import prepare
from data.text.sources import open_source
from evaluation import prompts
from evaluation.prompts import open_runs, precision_of


def test_seeds_of_a_model_have_different_labels(train, corpus, other_corpus) -> None:
    folders = [train("a_seed1", "run.seed=1"), train("a_seed7", "run.seed=7"), train("b")]
    runs, stream = open_runs(folders, None, None)
    assert [*runs] == ["a, seed 1", "a, seed 7", "b"]
    assert [run.folder for run in runs.values()] == folders
    assert (stream.path, stream.split) == (corpus, "val")
    one, other = open_runs(folders[:1], None, other_corpus)
    assert [*one] == ["a"] and other.path == other_corpus


def test_a_text_of_another_tokenizer_is_refused(train, tmp_path) -> None:
    for name in ("train", "val"):
        (tmp_path / f"{name}.jsonl").write_text(
            json.dumps({"text": f"a {name} fish. " * 99}) + "\n"
        )
    source = open_source([str(tmp_path / "train.jsonl")], val=[str(tmp_path / "val.jsonl")])
    prepare(source, tmp_path / "fish", train_bpe=270)
    with pytest.raises(ValueError, match="fish was prepared with a tokenizer of sha256="):
        open_runs([train("a")], None, tmp_path / "fish")


def test_autocast_is_for_gpus_only(opened, monkeypatch) -> None:
    run = opened("a", "run.dtype=bfloat16")
    entered = []
    monkeypatch.setattr(prompts, "autocast", lambda dtype, device: entered.append((dtype, device)))
    for kind in ("cpu", "cuda"):
        precision_of(run, torch.device(kind))()
    assert entered == [("float32", torch.device("cpu")), ("bfloat16", torch.device("cuda"))]
