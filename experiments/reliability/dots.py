"""Images with few or many dots, and a configuration of a classifier that trains in seconds."""

from pathlib import Path

import numpy as np

from data.lra.store import Manifest
from data.lra.writer import preparing

SIZE = 16
SPLITS = (("train", 256), ("val", 30), ("test", 25))
CPU = ["run.device=cpu", "run.compile=false", "run.dtype=float32"]


def make_dots(folder: Path, *, seed: int = 0, most: int = 20, grey: int | None = None) -> Path:
    """Create images of dots, in one grey level or all; the label is 1 for many dots."""
    generator = np.random.default_rng(seed)
    manifest = Manifest(
        task=folder.name, kind="images", vocab_size=256, n_classes=2, max_length=SIZE * SIZE,
        source={"seed": seed},
    )  # fmt: skip
    with preparing(folder, manifest) as writer:
        for split, n in SPLITS:
            labels = generator.integers(0, 2, n)
            images = np.zeros((n, SIZE * SIZE), np.uint8)
            for image, label in zip(images, labels, strict=True):
                pixels = generator.choice(SIZE * SIZE, most if label else 8, replace=False)
                image[pixels] = grey or generator.integers(1, 256, len(pixels))
            writer.write_images(split, [(images.reshape(n, SIZE, SIZE), labels)])
        writer.finish()
    return folder


def make_config(folder: Path) -> Path:
    """Write a configuration with a two-phase curriculum on images without their zeros.

    The task is folder/dots, and the run folder/run.
    """
    one, other = make_dots(folder / "dots"), make_dots(folder / "others", seed=1)
    path = folder / "dots.yaml"
    path.write_text(
        f"""
task: classification
model: {{vocab_size: 256, n_classes: 2, context_length: 24, grid_width: {SIZE}, n_embd: 32,
        n_inner: 32, tokens: intensities, embedding: row_column, rotary: axial,
        pooling: mean_max, attention_dropout: 0.1}}
data: {{path: {one}, zeros: padding, augment: dihedral,
       phases: [{{paths: ["{one}", "{other}"], steps: 5, batch_size: 8, context_length: 20}}]}}
optim: {{max_steps: 24, batch_size: 16, lr: 3.0e-3, warmup_steps: 2}}
run: {{out_dir: {folder / "run"}, eval_every: 8, save_every: 4, log_every: 1}}
"""
    )
    return path
