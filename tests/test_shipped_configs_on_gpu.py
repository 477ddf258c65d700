"""Shipped configurations train unchanged on a GPU: own shapes, compiled, with its kernels.

The data is synthetic, with the lengths and densities of the real data. 80 GiB are enough.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import train
from data.lra.store import Manifest
from data.lra.writer import preparing
from data.text.prepare import prepare
from data.text.sources import open_source
from tests.training_runs import losses

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

CONFIGS = Path("configs")
NAMES = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yaml"))
N_STEPS = 8  # the fifth is the first that is replayed as a CUDA graph
MAX_TOKENS = 2**20  # per step, where the configured batch would need two GPUs
LIT_SHARE = 0.08  # share of nonzero pixels in a Pathfinder image


@pytest.mark.parametrize("name", NAMES)
def test_trains(name, tmp_path):
    torch.compiler.reset()
    config = yaml.safe_load((CONFIGS / name).read_text())
    settings = [
        *(f"data.path={tmp_path / 'data'}", f"run.out_dir={tmp_path / 'run'}"),
        *(f"optim.max_steps={N_STEPS}", "optim.warmup_steps=2", "run.log_every=1"),
        *("run.device=cuda", "run.dtype=bfloat16", "run.compile=true", "run.init_from=null"),
    ]
    if config["task"] == "language":
        model = config["model"]
        context = model.get("context_length") or model["context_schedule"][-1][0]
        tokens = config["optim"]["micro_batch_size"] * context
        settings.append(f"optim.batch_tokens={2 * tokens}")
        make_text(tmp_path, "data")
        if "mix" in config["data"]:
            make_text(tmp_path, "mixed")
            settings.append(f"data.mix=[{{path: {tmp_path / 'mixed'}, weight: 1.0}}]")
    else:
        most = MAX_TOKENS // config["model"]["context_length"]
        settings.append(f"optim.batch_size={min(config['optim']['batch_size'], most)}")
        settings += ["data.phases=[]", "data.val_examples=null"]
        make_examples(tmp_path / "data", config["model"])
    train.main([str(CONFIGS / name), *settings])
    step_losses = losses(tmp_path / "run")
    assert list(step_losses) == list(range(1, N_STEPS + 1))
    assert all(math.isfinite(loss) for loss in step_losses.values())


def make_text(folder: Path, name: str) -> None:
    """Prepare documents with a vocabulary of nine words, enough for the longest context."""
    rng = np.random.default_rng(0)
    words = ["the", "cat", "sees", "one", "dog", "that", "hears", "a", "bird"]
    for split, n_documents in (("train", 100), ("val", 20)):
        documents = [" ".join(rng.choice(words, size=1200)) for _ in range(n_documents)]
        lines = (json.dumps({"text": text}) + "\n" for text in documents)
        (folder / f"{split}.jsonl").write_text("".join(lines))
    source = open_source([str(folder / "train.jsonl")], val=[str(folder / "val.jsonl")])
    prepare(source, folder / name, train_bpe=270)


def make_examples(folder: Path, model: dict) -> None:
    """Prepare images as wide as the model's grid, or documents as long as its context."""
    rng = np.random.default_rng(0)
    width, n_documents = model.get("grid_width"), model.get("documents", 1)
    manifest = Manifest(
        task=folder.name, kind="images" if width else "sequences", vocab_size=model["vocab_size"],
        n_classes=model["n_classes"], max_length=width**2 if width else model["context_length"],
        documents_per_example=n_documents, source={},
    )  # fmt: skip

    def document():
        return rng.integers(1, 15, size=rng.integers(5, model["context_length"])).astype(np.uint16)

    with preparing(folder, manifest) as writer:
        for split, n in (("train", 64), ("val", 20), ("test", 20)):
            labels = rng.integers(model["n_classes"], size=n)
            if width:
                images = rng.integers(1, 256, size=(n, width, width))
                images[rng.random(images.shape) > LIT_SHARE] = 0
                writer.write_images(split, [(images.astype(np.uint8), labels)])
            else:
                documents = [[document() for _ in range(n_documents)] for _ in range(n)]
                writer.write_sequences(split, zip(labels.tolist(), documents, strict=True))
        writer.finish()
