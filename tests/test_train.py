"""Whole runs of the trainer on the CPU, on a corpus of a few thousand tokens."""

import json
import os
import random
import re
import subprocess
import sys

import pytest
import torch

from configs import ConfigError
from data.prepare import prepare
from data.sources import open_source
from training.checkpoint import latest_checkpoint
from training.metrics import read_metrics

from train import main  # isort: skip


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Sentences of a tiny grammar, so that there is something to learn."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    nouns, verbs = ["the cat", "a dog", "one bird"], ["sees", "hears", "follows"]

    def document():
        return " ".join(
            f"{rng.choice(nouns)} {rng.choice(verbs)} {rng.choice(nouns)}." for _ in range(40)
        )

    for name, count in (("train", 60), ("val", 4)):
        lines = [json.dumps({"text": document()}) for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    source = open_source([str(folder / "train.jsonl")], val=[str(folder / "val.jsonl")])
    prepare(source, folder / "shards", train_bpe=300)
    return folder / "shards"


@pytest.fixture
def run(corpus, tmp_path):
    """Write a small configuration; returns a function that trains with it."""
    config = tmp_path / "config.yaml"
    vocab_size = json.loads((corpus / "manifest.json").read_text())["tokenizer"]["vocab_size"]
    config.write_text(
        f"""
        model: {{vocab_size: {vocab_size}, context_length: 32, n_layer: 2, n_head: 2, n_embd: 32,
                 dropout: 0.1}}
        data: {{path: {corpus}}}
        optim: {{max_steps: 8, batch_tokens: 256, micro_batch_size: 2, lr: 1.0e-2,
                 warmup_steps: 2}}
        run: {{out_dir: {tmp_path / "run"}, device: cpu, dtype: float32, compile: false,
               log_every: 1, eval_every: 4, save_every: 4}}
        """
    )

    def train(*overrides):
        return main([str(config), *overrides])

    train.config, train.out_dir = config, tmp_path / "run"
    return train


def losses(folder):
    return {r["step"]: r["loss"] for r in read_metrics(folder) if "loss" in r}


def test_learns_and_evaluates_the_whole_validation_set(run, corpus):
    result = run("optim.max_steps=40", "run.eval_every=20")
    manifest = json.loads((corpus / "manifest.json").read_text())
    assert result.tokens == manifest["splits"]["val"]["tokens"] - 1
    assert result.loss < losses(run.out_dir)[1] - 1.5
    evaluations = [r for r in read_metrics(run.out_dir) if "val_loss" in r]
    assert [r["step"] for r in evaluations] == [20, 40]
    assert evaluations[-1]["val_loss"] == result.loss


def test_stopping_and_going_on_changes_no_loss(run, tmp_path):
    whole = run("optim.max_steps=8", f"run.out_dir={tmp_path / 'whole'}", "model.dropout=0.2")
    # the schedule is the whole run's: only the process ends early
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.record_step", stop_after(5))
        with pytest.raises(KeyboardInterrupt):
            run("optim.max_steps=8", "model.dropout=0.2")
    assert latest_checkpoint(run.out_dir).name == "step_00000004"
    parts = run("optim.max_steps=8", "model.dropout=0.2")
    assert parts == whole
    assert losses(run.out_dir) == losses(tmp_path / "whole")
    assert set(losses(run.out_dir)) == set(range(1, 9))


def stop_after(last_step):
    from train import record_step

    def record(log, config, processes, step, *rest):
        if step > last_step:
            raise KeyboardInterrupt
        record_step(log, config, processes, step, *rest)

    return record


def test_micro_batches_add_up_to_the_same_step(run, tmp_path):
    steps = []
    for micro in (1, 2, 8):
        out = tmp_path / f"micro_{micro}"
        run("model.dropout=0.0", f"optim.micro_batch_size={micro}", f"run.out_dir={out}")
        steps.append(losses(out))
    for step in steps[0]:
        torch.testing.assert_close(steps[1][step], steps[0][step], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(steps[2][step], steps[0][step], rtol=1e-4, atol=1e-5)


@pytest.mark.distributed
def test_two_processes_give_the_losses_of_one(run, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    result = run("model.dropout=0.0", f"run.out_dir={one}")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
        "train.py", str(run.config), "model.dropout=0.0", f"run.out_dir={two}",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    for step, loss in losses(one).items():
        torch.testing.assert_close(losses(two)[step], loss, rtol=1e-4, atol=1e-5)
    evaluation = [r for r in read_metrics(two) if "val_loss" in r][-1]
    torch.testing.assert_close(evaluation["val_loss"], result.loss, rtol=1e-4, atol=1e-5)
    assert evaluation["val_tokens"] == result.tokens


def test_trains_on_interpreted_triton_kernels(run, tmp_path):
    """The trainer on this project's own kernels gives the losses that it gives on PyTorch's."""
    options = ("optim.max_steps=3", "model.dropout=0.0", "optim.batch_tokens=64")
    run(*options, "model.attention=triton", f"run.out_dir={tmp_path / 'triton'}")
    run(*options, "model.attention=sdpa", f"run.out_dir={tmp_path / 'sdpa'}")
    for step, loss in losses(tmp_path / "sdpa").items():
        torch.testing.assert_close(losses(tmp_path / "triton")[step], loss, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["data.path=nowhere"], FileNotFoundError, "nowhere does not exist; prepare it with"),
        (
            ["model.vocab_size=500"],
            ValueError,
            "entries, and model.vocab_size=500: prepare the data with the model's tokenizer",
        ),
        (["run.device=cuda"], ValueError, "run.device=cuda, but PyTorch sees no GPU"),
        (
            ["model.context_length=100000", "optim.batch_tokens=200_000"],
            ValueError,
            "context_length",
        ),
        (["model.attention=triton"], ValueError, "needs a CUDA GPU"),
        (["optim.lr=1e30"], FloatingPointError, "the training loss is .* at step"),
        (["optim.batch_tokens=100"], ConfigError, "128 would do|64 would do"),
    ],
)
def test_errors(run, overrides, error, message, monkeypatch):
    if "run.device=cuda" in overrides:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    if "model.attention=triton" in overrides:
        monkeypatch.setattr("kernels.attention._INTERPRETED", False)
    with pytest.raises(error, match=message):
        run(*overrides)


def test_more_processes_than_gpus(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ValueError, match="which has 1 GPU.*use --nproc_per_node=1"):
        run("run.device=auto")


def test_checkpoint_of_another_model(run):
    run("optim.max_steps=4")
    with pytest.raises(ValueError, match=r"model.n_layer is 2 there and 3 here"):
        run("model.n_layer=3")
    with pytest.raises(ValueError, match="run.resume=never: choose another folder"):
        run("run.resume=never")


def test_command_line_error_is_one_sentence(run):
    done = subprocess.run(
        [sys.executable, "train.py", str(run.config), "optim.momentum=1"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert re.match(r"configuration: optim.momentum: .*\n", done.stderr), done.stderr
    assert "Traceback" not in done.stderr
