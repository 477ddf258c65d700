"""Tasks of Long Range Arena that are prepared in no time and learned in seconds."""

from pathlib import Path

import numpy as np

from data.lra import listops, text
from data.lra.store import Manifest
from data.lra.writer import preparing

SIDE = 8
CONTEXT = SIDE * SIDE
SPLITS = {"train": 48, "val": 20, "test": 25}

TINY = (
    *(f"model.context_length={CONTEXT}", f"model.grid_width={SIDE}"),
    *("model.n_layer=1", "model.n_head=1", "model.n_embd=16", "model.n_inner=16"),
    *(
        "data.phases=[]",
        "optim.max_steps=6",
        "optim.warmup_steps=2",
        "optim.batch_size=8",
        "optim.lr=1e-2",
    ),
    *("optim.eval_batch_size=10", "run.eval_every=2", "run.save_every=2", "run.log_every=1"),
    *("run.device=cpu", "run.dtype=float32", "run.compile=false"),
)
"""Overrides that fit all tasks here, and a CPU."""


def make_tasks(folder: Path, *names: str) -> Path:
    """Prepare listops, image, pathfinder32 and pairs, or those of `names`."""
    makers = {
        "listops": _listops,
        "image": _images,
        "pathfinder32": _images,
        "pairs": _pairs,
        "retrieval": _pairs,
        "aclsum": _pairs,
    }
    for name in names or ("listops", "image", "pathfinder32", "pairs"):
        makers[name](folder / name)
    return folder


def _listops(folder: Path) -> None:
    """Formulas of one operator and some digits."""
    generator = np.random.default_rng(0)
    manifest = Manifest(
        task="listops", kind="sequences", vocab_size=listops.VOCAB_SIZE,
        n_classes=listops.N_CLASSES, max_length=listops.MAX_LENGTH, source={},
    )  # fmt: skip

    def formula() -> tuple[int, list[np.ndarray]]:
        operator = listops.FIRST_OPERATOR_ID + generator.integers(len(listops.OPERATORS))
        digits = generator.integers(10, size=generator.integers(2, 9)) + 1
        tokens = np.array([operator, *digits, listops.CLOSE_ID], np.uint16)
        return listops.evaluate(tokens.tolist()), [tokens]

    with preparing(folder, manifest) as writer:
        for split, n in SPLITS.items():
            writer.write_sequences(split, [formula() for _ in range(n)])
        writer.finish()


def _images(folder: Path) -> None:
    """Dark and bright images, of the first two classes of their task."""
    generator = np.random.default_rng(1)
    manifest = Manifest(
        task=folder.name, kind="images", vocab_size=256,
        n_classes=10 if folder.name == "image" else 2, max_length=CONTEXT, source={},
    )  # fmt: skip
    with preparing(folder, manifest) as writer:
        for split, n in SPLITS.items():
            labels = generator.integers(2, size=n)
            images = generator.integers(128, size=(n, SIDE, SIDE)) + 128 * labels[:, None, None]
            writer.write_images(split, [(images.astype(np.uint8), labels)])
        writer.finish()


def _pairs(folder: Path) -> None:
    """Two documents of few different bytes, of which the label is whether they share them."""
    generator = np.random.default_rng(2)
    manifest = Manifest(
        task=folder.name, kind="sequences", vocab_size=text.VOCAB_SIZE, n_classes=2,
        max_length=CONTEXT, documents_per_example=2, source={},
    )  # fmt: skip

    def pair() -> tuple[int, list[np.ndarray]]:
        label, first = generator.integers(2), generator.integers(1, 50)
        second = first if label else first + 100
        documents = [np.full(CONTEXT // 2, byte, np.uint16) for byte in (first, second)]
        return int(label), documents

    with preparing(folder, manifest) as writer:
        for split, n in SPLITS.items():
            writer.write_sequences(split, [pair() for _ in range(n)])
        writer.finish()
