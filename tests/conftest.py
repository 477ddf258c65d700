"""What all tests share: interpreted kernels, a seed, our own packages on the path, a tiny run."""

import json
import os
import random
from pathlib import Path

import pytest
import torch

# Triton decides when a kernel is defined whether it will be interpreted, so this comes before any
# of our imports. On a GPU the kernels are compiled: `make test-gpu`.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parent.parent


def pytest_sessionstart(session):
    """Stop if another distribution's package (PyPI has a `kernels`) hides one of ours."""
    import configs
    import data
    import kernels
    import model
    import scripts
    import training

    for package in (configs, data, kernels, model, scripts, training):
        origin = Path(package.__file__).resolve()
        if ROOT not in origin.parents:
            raise pytest.UsageError(
                f"`import {package.__name__}` finds {origin}, not the one in {ROOT}: run pytest "
                "from the root of the checkout, and uninstall the other package"
            )


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


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
    from data.prepare import prepare
    from data.sources import open_source

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

    from train import main

    def train(*overrides):
        return main([str(config), *overrides])

    train.config, train.out_dir = config, tmp_path / "run"
    return train
