"""The command measures what is missing, and nothing twice."""

import json
import subprocess
from itertools import pairwise

import numpy as np
import pytest
import torch

from data.text.shards import TokenStream
from evaluation.results import read_result
from experiments.table4 import models
from experiments.table4.models import Budget, Model
from experiments.time_to_loss import __main__ as command
from experiments.time_to_loss import nanogpt
from experiments.time_to_loss.report import PAPILIO, seconds_to
from tests.experiments.table4.tiny_sweep import LONG, TINY, FinishedProcess, train
from training.metrics import read_metrics

BLOCK, BATCH = 64, 4


@pytest.fixture
def measure(monkeypatch, corpus, tmp_path):
    """A function that runs the command with tiny models.

    It returns the runs of the result, and the names of the runs that were trained.
    """
    start, started = subprocess.Popen, []

    def start_here(arguments, log, environment):
        if arguments[1] != "train.py":
            started.append("nanogpt")
            return start(arguments, stdout=log, stderr=subprocess.STDOUT, env=environment)
        started.append(next(a.split("/")[-2] for a in arguments if a.startswith("run.out_dir=")))
        train(arguments[2:])
        return FinishedProcess()

    monkeypatch.setattr("experiments.gpu_pool._start", start_here)
    monkeypatch.setattr(nanogpt, "SECONDS", 6)
    for name, value in (("block_size", BLOCK), ("batch_size", BATCH), ("device", "cpu")):
        monkeypatch.setitem(nanogpt.SETTINGS, name, value)
    budget = Budget(steps=1, batch_tokens=BLOCK * BATCH, seeds=3, overrides=TINY)
    monkeypatch.setitem(models.BUDGETS, "minutes", budget)
    monkeypatch.setitem(models.MODELS, "recipe", Model("4k", (*LONG, "model.n_embd=32")))
    monkeypatch.setattr(command, "draw", lambda *_: None)

    def run(*options, data=corpus):
        started.clear()
        out = tmp_path / "time_to_loss.json"
        files = ("--out", str(out), "--runs", str(tmp_path / "runs"))
        command.main(["--data", str(data), *files, *options])
        return read_result(out)["runs"], [*started]

    return run


def bigram_loss(corpus):
    """Loss of the stand-in's model on the whole validation text, in float64."""
    train_ids, ids = (
        stream.read(0, len(stream)) for stream in (TokenStream(corpus, s) for s in ("train", "val"))
    )
    counts = np.full((320, 320), 0.1)  # its 300 entries, up to a multiple of 64
    for pair in pairwise(train_ids):
        counts[pair] += 1
    shares = counts / counts.sum(1, keepdims=True)
    return -np.log(shares[ids[:-1], ids[1:]]).mean()


def test_runs_are_measured_once(measure, checkout, corpus, other_corpus, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"no run of nanoGPT.*target\. Pass --nanogpt FOLDER"):
        measure("--steps", "recipe=10")
    runs, started = measure("--nanogpt", str(checkout), "--steps", "recipe=10,120")
    assert started == ["nanogpt", "nanogpt", "steps_10", "steps_120"]
    goal, short, long = runs

    # 6 s of 51 ms, in six parts
    assert goal["steps"] == 6 * 19 and goal["tokens"] == 6 * 19 * BLOCK * BATCH
    assert goal["seconds"] == pytest.approx(6 * 19 * 0.051) and goal["compile_s"] == 1.35
    assert goal["val_loss"] == pytest.approx(bigram_loss(corpus), abs=1e-5)
    estimates = [(19 * n, round(6 - n / 6, 4)) for n in range(1, 6)]
    curve = [(point["steps"], point["val_loss"]) for point in goal["curve"]]
    assert curve == [*estimates, (114, goal["val_loss"])]
    assert goal["curve"][0]["seconds"] == pytest.approx(19 * 0.051)
    saved = torch.load(tmp_path / "runs/nanogpt/steps_114/ckpt.pt")["settings"]
    assert (saved["max_iters"], saved["eval_interval"], saved["dropout"]) == ("114", "19", "0.0")

    for run, steps in ((short, 10), (long, 120)):
        folder = tmp_path / f"runs/steps_{steps}/recipe_seed1"
        last = read_metrics(folder)[-1]
        assert run["steps"] == last["step"] == steps and run["tokens"] == last["tokens"]
        assert run["seconds"] == 3600 * last["gpu_hours"] and run["val_loss"] == last["val_loss"]
        assert run["curve"][-1]["val_loss"] == run["val_loss"]
        config = (folder / "config.yaml").read_text()
        assert f"max_steps: {steps}\n" in config and "seed: 1\n" in config
    assert short["val_loss"] > goal["val_loss"] > long["val_loss"]
    answer = seconds_to(goal["val_loss"], runs[1:])
    assert answer.bound == "" and short["seconds"] < answer.seconds < long["seconds"]

    # nothing twice, also where only the result was lost
    more, started = measure("--steps", "recipe=10,20", "recipe=120,20")
    assert started == ["steps_20"] and more[:3] == runs and len(more) == 4
    assert measure() == (more, [])
    out = tmp_path / "time_to_loss.json"
    out.unlink()
    again, started = measure("--nanogpt", str(checkout), "--steps", "recipe=10,120,20")
    assert started == [] and again == more

    with pytest.raises(ValueError, match="--out=.* has runs on another text: .*'name': 'shards'"):
        measure(data=other_corpus)
    result = json.loads(out.read_text())
    monkeypatch.setattr(command, "machine", lambda: {"device": "another GPU"})
    with pytest.raises(ValueError, match="run of nanogpt on .*, but this machine has another GPU"):
        measure()
    out.unlink()  # runs that were trained on another device are not taken
    with pytest.raises(ValueError, match=r"runs has a run of nanogpt on .* --out and --runs"):
        measure("--nanogpt", str(checkout))
    assert result["text"]["val_tokens"] == len(TokenStream(corpus, "val"))


def test_contenders_have_names_and_models():
    assert [*PAPILIO] == [*command.MODELS]
    assert {*PAPILIO} <= {*models.MODELS}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("recipe", "must be MODEL=STEPS,STEPS"),
        ("16k=100", "with a model of 4k, 4k_learned, recipe"),
        ("4k=100,x", "such as recipe=1200,1800"),
        ("4k=9", "has 9 steps, which must be at least 10"),
    ],
)
def test_steps_are_of_a_model(value, problem, capsys):
    with pytest.raises(SystemExit):
        command.main(["--data", "unused", "--steps", value])
    assert problem in capsys.readouterr().err
