"""Whole runs of the classifier's trainer on tiny tasks."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import scripts.train_classifier
from configs import ClassifyConfig, read_config
from data.lra.store import Manifest
from data.lra.writer import preparing
from scripts.classifier_start import load_first_weights
from scripts.train_classifier import TEST_LOGITS, main
from training.checkpoint import latest_checkpoint
from training.classification import read_best, save_best
from training.metrics import RunLog, read_metrics

SIZE = 16
SPLITS = (("train", 256), ("val", 30), ("test", 25))
CPU = ["run.device=cpu", "run.compile=false", "run.dtype=float32"]
GPU = ["run.device=cuda"]
each_device = pytest.mark.parametrize(
    "options", [CPU, pytest.param(GPU, marks=pytest.mark.gpu)], ids=["cpu", "gpu"]
)


def make_dots(folder: Path, *, seed: int = 0, most: int = 20) -> Path:
    """Images of dots; the label is whether there are many."""
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
                places = generator.choice(SIZE * SIZE, most if label else 8, replace=False)
                image[places] = generator.integers(1, 256, len(places))
            writer.write_images(split, [(images.reshape(n, SIZE, SIZE), labels)])
        writer.finish()
    return folder


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration with a curriculum of two phases, on images without their zeros."""
    one, other = make_dots(tmp_path / "dots"), make_dots(tmp_path / "others", seed=1)
    path = tmp_path / "dots.yaml"
    path.write_text(
        f"""
model: {{vocab_size: 256, n_classes: 2, context_length: 24, grid_width: {SIZE}, n_embd: 32,
        n_inner: 32, tokens: intensities, embedding: row_column, rotary: axial,
        pooling: mean_max, attention_dropout: 0.1}}
data: {{path: {one}, zeros: padding, augment: dihedral,
       phases: [{{paths: ["{one}", "{other}"], steps: 5, batch_size: 8, context_length: 20}}]}}
optim: {{max_steps: 24, batch_size: 16, lr: 3.0e-3, warmup_steps: 2}}
run: {{out_dir: {tmp_path / "run"}, eval_every: 8, save_every: 4, log_every: 1}}
"""
    )
    return path


def losses(folder: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_metrics(folder) if "loss" in r}


@each_device
def test_learns_and_tests_the_best_weights(config: Path, tmp_path: Path, options: list[str]):
    found = main([str(config), *options, "optim.max_steps=64"])
    run = tmp_path / "run"
    assert found.accuracy > 0.8
    np.testing.assert_array_equal(np.load(run / TEST_LOGITS), found.logits.numpy())
    records = [r for r in read_metrics(run) if "val_accuracy" in r]
    assert [r["step"] for r in records] == list(range(8, 65, 8))
    best = max(r["val_accuracy"] for r in records)
    last = records[-1]
    assert last["best_val_accuracy"] == best
    assert last["best_step"] == next(r["step"] for r in records if r["val_accuracy"] == best)
    assert (last["test_accuracy"], last["test_examples"]) == (found.accuracy, 25)
    assert all("test_accuracy" not in r for r in records[:-1])
    assert last["examples"] == 5 * 8 + 59 * 16


@each_device
def test_stopping_and_going_on_changes_no_loss(config: Path, tmp_path: Path, options: list[str]):
    whole = main([str(config), *options, f"run.out_dir={tmp_path / 'whole'}"])

    class Stop(RunLog):
        def record(self, text, **values):
            if values["step"] > 10:
                raise KeyboardInterrupt
            super().record(text, **values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scripts.train_classifier, "RunLog", Stop)
        with pytest.raises(KeyboardInterrupt):
            main([str(config), *options])
    checkpoint = latest_checkpoint(tmp_path / "run")
    assert checkpoint is not None and checkpoint.name == "step_00000008"
    parts = main([str(config), *options])
    assert torch.equal(parts.logits, whole.logits)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    # once more: nothing to train, the same answer
    assert torch.equal(main([str(config), *options]).logits, whole.logits)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.gpu
def test_a_captured_step_is_the_step(config: Path, tmp_path: Path, monkeypatch):
    options = [str(config), *GPU, "model.attention_dropout=0"]
    main([*options, f"run.out_dir={tmp_path / 'captured'}"])
    plain = scripts.train_classifier.GraphedStep

    def without(*args, **keywords):
        return plain(*args, **(keywords | {"capture": False}))

    monkeypatch.setattr(scripts.train_classifier, "GraphedStep", without)
    main([*options, f"run.out_dir={tmp_path / 'plain'}"])
    assert losses(tmp_path / "captured") == losses(tmp_path / "plain")


def test_starts_with_the_best_weights_of_another_run(config: Path, tmp_path: Path):
    options = [*CPU, "model.attention_dropout=0", "data.phases=[]"]
    main([str(config), *options])
    best = read_best(tmp_path / "run")
    second = tmp_path / "second"
    main(
        [str(config), *options, f"run.init_from={tmp_path / 'run'}", f"run.out_dir={second}",
         "optim.lr=1e-12", "optim.max_steps=3", "optim.weight_decay=0"]
    )  # fmt: skip
    for name, weight in read_best(second).items():
        torch.testing.assert_close(weight, best[name], atol=1e-8, rtol=0)
    with pytest.raises(ValueError, match=r"run of another model: .*fc_in.weight.* differ"):
        main([str(config), *options, f"run.init_from={second}", f"run.out_dir={tmp_path / 'no'}",
              "model.n_inner=8"])  # fmt: skip


def test_only_the_same_run_goes_on(config: Path, tmp_path: Path):
    arguments = [str(config), *CPU, "optim.max_steps=8"]
    main(arguments)
    for change in ("run.init_from=elsewhere", "data.val_examples=3", "run.seed=5"):
        with pytest.raises(ValueError, match=rf"{change.partition('=')[0]} is .* there and"):
            main([*arguments, change])
    shutil.rmtree(tmp_path / "others")
    make_dots(tmp_path / "others", seed=9)  # other images under the same name
    with pytest.raises(ValueError, match=r"sha256 of .*others is"):
        main(arguments)


def test_weights_of_a_start_without_a_checkpoint_do_not_count(config: Path, tmp_path: Path):
    (tmp_path / "run").mkdir()
    stale = torch.nn.Linear(1, 1)
    save_best(tmp_path / "run", stale, 8, 1.0)  # better than any can be
    found = main([str(config), *CPU, "optim.max_steps=8"])
    assert len(found.logits) == 25
    assert "tok_emb.weight" in read_best(tmp_path / "run")


def test_learned_positions_grow_gridwise(config: Path, tmp_path: Path):
    options = [*CPU, "data.phases=[]", "model.embedding=learned", "optim.max_steps=3"]
    main([str(config), *options])
    small = read_best(tmp_path / "run")["pos_emb"]
    model = scripts.train_classifier.Classifier(
        read_config(ClassifyConfig, [str(config), *options, "model.grid_width=32"]).model
    )
    load_first_weights(tmp_path / "run", model)
    grown = model.pos_emb.view(16, 2, 16, 2, -1)
    for row in range(2):
        for column in range(2):
            assert torch.equal(grown[:, row, :, column].flatten(0, 1), small)


@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_take_the_same_steps(config: Path, tmp_path: Path):
    options = [*CPU, "model.attention_dropout=0", "optim.max_steps=8"]
    alone = main([str(config), *options])
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
        "-m", "scripts.train_classifier", str(config), *options, f"run.out_dir={tmp_path / 'two'}",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    one, two = losses(tmp_path / "run"), losses(tmp_path / "two")
    assert one.keys() == two.keys()
    np.testing.assert_allclose(list(one.values()), list(two.values()), rtol=1e-5)
    logits = np.load(tmp_path / "two" / TEST_LOGITS)
    np.testing.assert_allclose(logits, alone.logits.numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.context_length=19", r"more pixels above zero than model.context_length"),
        ("optim.max_steps=5", r"data.phases take 5 steps and optim.max_steps=5"),
        ("model.grid_width=null", r"model.embedding=row_column needs rows and columns"),
        ("data.zeros=tokens", r"context_length is room for pixels above zero"),
        ("optim.batch_size=0", r"optim.batch_size must be at least 1, got 0"),
        ("data.path=nowhere", r"nowhere.manifest.json does not exist; prepare the task"),
        ("model.grid_width=64", r"model.grid_width=64 and .*dots needs 16"),
        ("model.n_classes=5", r"model.n_classes=5 and .*dots needs 2"),
        ("model.vocab_size=10", r"model.vocab_size=10 and .*dots needs 256"),
        ("model.documents=2", r"model.documents=2 and .*dots needs 1"),
        ("data.val_examples=0", r"data.val_examples must be at least 1"),
    ],
)
def test_what_cannot_work_is_refused(config: Path, override: str, message: str):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        main([str(config), *CPU, override])


def test_all_pixels_need_their_number(config: Path):
    with pytest.raises(ValueError, match=r"16 x 16 pixels, and model.context_length=24: set it"):
        main([str(config), *CPU, "data.phases=[]", "data.zeros=tokens"])


def test_lost_pixels_of_scored_images_are_told(config: Path, tmp_path: Path):
    """Those of training images were told before; here all of them fit."""
    narrow = make_dots(tmp_path / "narrow", seed=2, most=20)
    wide = make_dots(tmp_path / "wide", seed=3, most=23)
    phases = f"data.phases=[{{paths: ['{narrow}'], steps: 7}}]"
    with pytest.raises(ValueError, match=r"wide that is scored has more pixels"):
        main([str(config), *CPU, f"data.path={wide}", phases, "model.context_length=21",
              "optim.max_steps=8", "run.eval_every=4"])  # fmt: skip


def test_metrics_are_json_of_numbers(config: Path, tmp_path: Path):
    main([str(config), *CPU, "optim.max_steps=8"])
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        assert all(isinstance(value, int | float) for value in json.loads(line).values())
