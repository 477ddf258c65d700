"""Options of scripts/evaluate.py, and the defaults that it takes from a run."""

import shutil

import numpy as np
import pytest
import torch

from data.text.shards import TokenStream
from evaluation import score
from evaluation.runs import open_run
from evaluation.windows import ScoringWindows
from scripts import evaluate
from training.distributed import Processes


def test_activations_use_the_dtype_of_training(train, result_of, corpus):
    folder = train("run", "run.dtype=bfloat16", steps=1)
    (row,) = result_of(folder, "--modes", "chunk")["chunk"]
    text = torch.from_numpy(TokenStream(corpus, "val").read(0, row["tokens"] + 1))
    tokens, targets = text[:-1].reshape(-1, 32), text[1:].reshape(-1, 32)
    model, means = open_run(folder).model, {}
    for rounded in (True, False):
        cast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=rounded)
        with torch.no_grad(), cast:
            means[rounded] = float(model(tokens, targets, reduction="none").double().mean())
    assert row["nats"] == pytest.approx(means[True], abs=abs(means[True] - means[False]) / 10)


def test_batch_sizes_come_from_training_or_the_option(train, result_of, monkeypatch):
    folder = train("run", "optim.micro_batch_size=4", steps=1)
    sizes = []

    class Spy(ScoringWindows):
        def __init__(self, stream, scoring, batch_size, **options):
            sizes.append((scoring.history, batch_size))
            super().__init__(stream, scoring, batch_size, **options)

    monkeypatch.setattr(score, "ScoringWindows", Spy)
    command = (folder, "--modes", "strided", "cross", "--histories", 8)
    losses = []
    for options in ((), ("--batch-tokens", 9)):
        rows = result_of(*command, *options)["strided"]
        losses.append([row["nats"] for row in rows])
        shutil.rmtree(folder / "scores")
    # a window longer than --batch-tokens makes a batch of its own
    assert sizes == [(8, 16), (32, 4), (8, 1), (32, 1)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    with pytest.raises(ValueError, match="--batch-tokens=0 must be at least 1"):
        evaluate.main([str(folder), "--batch-tokens", "0"])


def test_processes_agree_on_the_checkpoint(train, result_of, monkeypatch):
    folder = train("run", "run.log_every=1", "run.save_every=1", steps=2)
    first, newest = sorted((folder / "checkpoints").iterdir())

    def agree(self, value):
        """Imitate a process that sees a newer checkpoint than the main process."""
        return [first] if value == [newest] else value

    monkeypatch.setattr(Processes, "agree", agree)
    assert [run["step"] for run in result_of(folder, "--modes", "chunk")["runs"]] == [1]


def test_the_text_comes_from_the_first_run(train, result_of, other_corpus):
    first = train("first", f"data.path={other_corpus}", steps=1)
    second = train("second", steps=1)
    assert result_of(first, second, "--modes", "chunk")["data"]["name"] == other_corpus.name
    assert result_of(second, first, "--modes", "chunk")["data"]["name"] != other_corpus.name


@pytest.mark.parametrize("option", ["--out", "--sums"])
@pytest.mark.parametrize("name", ["file", "file/folder"])
def test_a_file_as_output_folder_is_refused(tmp_path, option, name):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"{option}=.*{name}: .*/file is a file, and must be a"):
        evaluate.main([str(tmp_path), option, str(tmp_path / name)])


def test_an_early_checkpoint_is_reported(train, tmp_path, capsys):
    """The first of two runs is at step 3 of 4, because its last checkpoint was removed."""
    early, whole = train("early", "run.save_every=3", steps=4), train("whole", steps=4)
    shutil.rmtree(max((early / "checkpoints").iterdir()))
    out = tmp_path / "out"
    arguments = [early, whole, "--modes", "chunk", "--out", out, "--device", "cpu"]
    evaluate.main([*map(str, arguments)])
    sentence = "Not trained to the end: early (step 3 of 4)."
    assert sentence in capsys.readouterr().out.splitlines()
    assert sentence in (out / "report.md").read_text().splitlines()
