"""Setup shared by all tests: interpreted kernels, seed, import check and tiny models."""

import gc
import json
import os
import random
from pathlib import Path

import pytest
import torch

from tests.interpreter import speed_up_interpreter

# Triton decides when a kernel is defined whether it will be interpreted, so this comes before any
# of our imports. On a GPU the kernels are compiled: `make test-gpu`.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1":
    speed_up_interpreter()

ROOT = Path(__file__).resolve().parent.parent


def pytest_sessionstart(session):
    """Stop if another distribution's package (PyPI has a `kernels`) hides one of ours."""
    import configs
    import data
    import evaluation
    import experiments
    import kernels
    import model
    import scripts
    import training

    for package in (configs, data, evaluation, experiments, kernels, model, scripts, training):
        origin = Path(package.__file__).resolve()
        if ROOT not in origin.parents:
            raise pytest.UsageError(
                f"`import {package.__name__}` finds {origin}, not the one in {ROOT}: run pytest "
                "from the root of the checkout, and uninstall the other package"
            )


def pytest_collection_modifyitems(items):
    for item in items:
        marker = item.get_closest_marker("gpu")
        needed = 0 if marker is None else (marker.args or (1,))[0]
        if torch.cuda.device_count() < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs CUDA GPUs: {needed}"))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    # Imports and thousands of test items create few cycles: looking for them takes five seconds.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    # Each full garbage collection would traverse the million objects of the imported modules, which
    # takes a third of a second: whenever the compiler is reset, for example.
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # or extensions report leaks at the exit


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Sentences of a tiny grammar, so that there is something to learn."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    nouns, verbs = ["the cat", "a dog", "one bird"], ["sees", "hears", "follows"]

    def document(sentences):
        return " ".join(
            f"{rng.choice(nouns)} {rng.choice(verbs)} {rng.choice(nouns)}."
            for _ in range(sentences)
        )

    for name, count, sentences in (("train", 60, 40), ("val", 8, 20)):
        lines = [json.dumps({"text": document(sentences)}) for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    from data.text.prepare import prepare
    from data.text.sources import open_source

    source = open_source([str(folder / "train.jsonl")], val=[str(folder / "val.jsonl")])
    prepare(source, folder / "shards", train_bpe=300)
    return folder / "shards"


@pytest.fixture(scope="session")
def other_corpus(corpus, tmp_path_factory):
    """Different sentences and documents, tokenized with the tokenizer of `corpus`."""
    folder = tmp_path_factory.mktemp("other")
    for name, count in (("train", 1), ("val", 11)):
        lines = [
            json.dumps({"text": f"a dog follows {n} birds. " * (4 + n % 5)}) for n in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    from data.text.prepare import prepare
    from data.text.sources import open_source

    source = open_source([str(folder / "train.jsonl")], val=[str(folder / "val.jsonl")])
    prepare(source, folder / "birds", tokenizer=str(corpus / "tokenizer.json"))
    return folder / "birds"


@pytest.fixture(scope="session")
def make_run(corpus):
    """Write a small configuration into a folder; returns a function that trains with it."""

    def make(folder):
        config = folder / "config.yaml"
        config.write_text(
            f"""
            model: {{context_length: 32, n_layer: 2, n_head: 2, n_embd: 32, dropout: 0.1}}
            data: {{path: {corpus}}}
            optim: {{max_steps: 8, batch_tokens: 256, micro_batch_size: 2, lr: 1.0e-2,
                     warmup_steps: 2}}
            run: {{out_dir: {folder / "run"}, device: cpu, dtype: float32, compile: false,
                   log_every: 1, eval_every: 4, save_every: 4}}
            """
        )

        from train import main

        def train(*overrides):
            return main([str(config), *overrides])

        train.config, train.out_dir = config, folder / "run"
        return train

    return make


@pytest.fixture
def run(make_run, tmp_path):
    return make_run(tmp_path)


@pytest.fixture
def waits_for_saves(monkeypatch):
    """Make training wait until each checkpoint is written, so that a test knows what is on disk."""
    from training.checkpoint.saver import CheckpointSaver

    save = CheckpointSaver.save

    def save_and_wait(self, *args):
        save(self, *args)
        self.finish()

    monkeypatch.setattr(CheckpointSaver, "save", save_and_wait)


@pytest.fixture(scope="session")
def make_gpt2():
    """Make tiny GPT-2 models of transformers, with weights that exercise every nonlinearity."""
    from transformers import GPT2Config, GPT2LMHeadModel  # takes seconds

    def make(**options):
        options = {"n_positions": 40, "n_layer": 3, "n_head": 4, "n_embd": 32, **options}
        torch.manual_seed(0)
        config = GPT2Config(bos_token_id=0, eos_token_id=0, attn_implementation="eager", **options)
        model = GPT2LMHeadModel(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.3)
        return model

    return make


@pytest.fixture(scope="session")
def gpt2(make_gpt2, corpus):
    """A GPT-2 of transformers for the ids of `corpus`."""
    vocab_size = json.loads((corpus / "manifest.json").read_text())["tokenizer"]["vocab_size"]
    return make_gpt2(vocab_size=vocab_size, scale_attn_by_inverse_layer_idx=True, attn_pdrop=0.0)


@pytest.fixture(scope="session")
def gpt2_folder(gpt2, corpus, tmp_path_factory):
    """The folder that transformers writes for `gpt2`, with the tokenizer of `corpus`."""
    folder = tmp_path_factory.mktemp("gpt2") / "hf"
    gpt2.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((corpus / "tokenizer.json").read_bytes())
    return folder
