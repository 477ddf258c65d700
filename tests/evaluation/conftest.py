"""Shared fixtures of the evaluation tests: known losses, untrained runs and tiny trained runs."""

from functools import partial

import numpy as np
import pytest

from data.text.shards import TokenStream
from evaluation import key_tokens
from evaluation.runs import Run
from scripts import evaluate
from tests.data.conftest import make_shards  # noqa: F401
from tests.evaluation import known_losses
from tests.evaluation.key_tokens_by_hand import GAIN, LOSS
from tests.experiments.table4 import tiny_sweep
from training.checkpoint.contents import Progress
from training.language.config import load_config


@pytest.fixture(scope="module")
def stream(corpus):
    return TokenStream(corpus, "val")


@pytest.fixture(scope="module")
def base(stream):
    """Random losses of a model, one per token."""
    return np.random.default_rng(0).gamma(2.0, 1.5, len(stream))


@pytest.fixture
def scored(stream, tmp_path):
    """Factory of runs with known losses."""
    return partial(known_losses.made_up_run, stream, tmp_path)


@pytest.fixture
def small_gains(monkeypatch):
    """Lower the thresholds, so that some tokens are key tokens of hardly trained models."""
    monkeypatch.setattr(key_tokens, "MIN_GAIN", GAIN)
    monkeypatch.setattr(key_tokens, "MAX_LOSS", LOSS)


@pytest.fixture
def opened(tmp_path):
    """Factory of untrained runs, for tests that need no weights."""

    def make(name, *overrides, step=3, gpu_hours=0.5):
        folder = tmp_path / name
        return Run(
            folder=folder,
            config=load_config(
                ["configs/quickstart.yaml", f"run.out_dir={folder}", *map(str, overrides)]
            ),
            tokenizer=None,
            checkpoint=folder / "checkpoints" / f"step_{step:08d}",
            progress=Progress(step=step, gpu_hours=gpu_hours),
        )

    return make


@pytest.fixture
def train(run, tmp_path):
    """Train for a few steps into a folder of this name, and return the folder."""

    def train(name, *overrides, steps=2):
        folder = tmp_path / name
        steps = (f"optim.max_steps={steps}", "optim.warmup_steps=0")
        tiny_sweep.train([str(run.config), f"run.out_dir={folder}", *steps, *overrides])
        return folder

    return train


@pytest.fixture
def results_of(monkeypatch):
    """Evaluate and return (output folder, result) of each report that the command would write."""

    def main(*arguments):
        reports = []
        monkeypatch.setattr(
            evaluate, "write_report", lambda result, out: reports.append((out, result))
        )
        evaluate.main([*map(str, arguments), "--device", "cpu"])
        return reports

    return main


@pytest.fixture
def result_of(results_of):
    """Evaluate on one corpus and return the result that the command would report."""

    def main(*arguments):
        ((_, result),) = results_of(*arguments)
        return result

    return main
