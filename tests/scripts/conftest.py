"""What the tests of scripts/benchmark_attention.py, of evaluations and of their parts share."""

import copy
from functools import partial

import numpy as np
import pytest
import torch

from configs import load_config
from data.shards import TokenStream
from scripts import attention_io, benchmark_attention, evaluate
from scripts.attention_check import RESULTS
from scripts.evaluation_plan import Plan
from scripts.runs import Run
from tests.scripts import known_losses, made_up_evaluation, tiny_sweep
from training.checkpoint import Progress


def made_up_rows(case, names):
    """Rows as measure_case makes them: a peer is wrong at 4,096 tokens, another out of memory."""
    rows = []
    for number, name in enumerate(names, start=2):
        row = {"name": name, **case.describe(), "errors": dict.fromkeys(RESULTS, 1e-3)}
        row["status"] = "ok"
        if name in ("SDPA math", "standard") and case.seq_len >= 16_384:
            row["status"] = "out of memory"
        elif name == "SDPA flash" and case.seq_len == 4096:
            row["status"] = "wrong: error 1.2e-01 of dk (allowed 1.3e-02)"
        else:
            for part, flops in (("forward", 1.0), ("backward", 2.5), ("both", 3.5)):
                ms = number * flops * case.forward_flops / 1e12
                row |= {f"{part}_ms": ms, f"{part}_tflops": 1000 / number}
            row["peak_mib"] = 100.0
            row["both_eager_ms"] = row["both_ms"] + 1.0
        rows.append(row)
    return rows


@pytest.fixture
def made_up(monkeypatch):
    """A GPU that answers at once."""
    monkeypatch.setattr(benchmark_attention, "measure_case", made_up_rows)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a made-up GPU")
    monkeypatch.setattr(attention_io, "with_bytes", partial(attention_io.with_bytes, device="cpu"))


@pytest.fixture(scope="module")
def full(corpus, tmp_path_factory):
    """All scorings with two strides, documents packed and masked, three seeds."""
    plan = Plan(strides=(8, 4), document_masks=(False, True))
    return made_up_evaluation.evaluate(corpus, tmp_path_factory, plan, seeds=3)


@pytest.fixture
def result(full):
    return copy.deepcopy(full)


@pytest.fixture(scope="module")
def stream(corpus):
    return TokenStream(corpus, "val")


@pytest.fixture(scope="module")
def base(stream):
    """Losses of a model: some of each token's own."""
    return np.random.default_rng(0).gamma(2.0, 1.5, len(stream))


@pytest.fixture
def scored(stream, tmp_path):
    """Make a run of known losses."""
    return partial(known_losses.made_up_run, stream, tmp_path)


@pytest.fixture
def opened(tmp_path):
    """A run that was never trained, for what needs no weights."""

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
    """Train for some steps into a folder of this name, which is returned."""

    def train(name, *overrides, steps=2):
        folder = tmp_path / name
        run(f"run.out_dir={folder}", f"optim.max_steps={steps}", "optim.warmup_steps=0", *overrides)
        return folder

    return train


@pytest.fixture
def results_of(monkeypatch):
    """Evaluate; returns each folder that the command would write, with what it would report."""

    def main(*arguments):
        seen = []
        monkeypatch.setattr(
            evaluate, "write_report", lambda result, out: seen.append((out, result))
        )
        evaluate.main([*map(str, arguments), "--device", "cpu"])
        return seen

    return main


@pytest.fixture
def result_of(results_of):
    """Evaluate on one corpus; returns what the command would report."""

    def main(*arguments):
        ((_, result),) = results_of(*arguments)
        return result

    return main


@pytest.fixture
def tiny(monkeypatch, corpus, tmp_path):
    """Sweeps of Table 4 over models of 32 and 64 tokens."""
    return tiny_sweep.sweep(monkeypatch, corpus, tmp_path)
