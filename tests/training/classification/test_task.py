"""Whole runs of the classifier's trainer on tiny tasks."""

import json
import math
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import train
from configs.reader import read_config
from data.lra.store import Manifest
from data.lra.writer import preparing
from experiments.reliability.dots import CPU, SPLITS, make_config, make_dots
from model.classifier import Classifier
from tests.training.classification.tiny_classifier import zeros_come_in
from tests.training_runs import losses, stop_after
from training.checkpoint.folders import latest_checkpoint
from training.classification.config import ClassifyConfig
from training.classification.scoring import TEST_LOGITS, read_best, save_best
from training.classification.start import load_initial_weights
from training.metrics import read_metrics

from train import main  # isort: skip

GPU = ["run.device=cuda"]
each_device = pytest.mark.parametrize(
    "options", [CPU, pytest.param(GPU, marks=pytest.mark.gpu)], ids=["cpu", "gpu"]
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return make_config(tmp_path)


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Configuration of a task on pairs of documents, each of one repeated byte out of 16."""
    generator = np.random.default_rng(0)
    manifest = Manifest(
        task="pairs", kind="sequences", vocab_size=257, n_classes=2, max_length=24,
        documents_per_example=2, source={},
    )  # fmt: skip

    def pair() -> tuple[int, list[np.ndarray]]:
        one, other = generator.choice(16, 2, replace=False) + 97
        label = int(generator.integers(2))
        bytes_ = (one, one if label else other)
        return label, [np.full(generator.integers(1, 25), byte, np.uint16) for byte in bytes_]

    with preparing(tmp_path / "pairs", manifest) as writer:
        for split, n in SPLITS:
            writer.write_sequences(split, [pair() for _ in range(n)])
        writer.finish()
    path = tmp_path / "pairs.yaml"
    path.write_text(
        f"""
task: classification
model: {{vocab_size: 257, n_classes: 2, context_length: 20, documents: 2, n_layer: 1, n_head: 1,
        n_embd: 32, n_inner: 32}}
data: {{path: {tmp_path / "pairs"}}}
optim: {{max_steps: 60, batch_size: 16, lr: 1.0e-2, warmup_steps: 2}}
run: {{out_dir: {tmp_path / "run"}, eval_every: 20, save_every: 20, log_every: 1}}
"""
    )
    return path


def without_time(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if name != "wall_s"}


@each_device
def test_learns_and_tests_the_best_weights(config: Path, tmp_path: Path, options: list[str]):
    result = main([str(config), *options, "optim.max_steps=64"])
    run = tmp_path / "run"
    assert result["test_accuracy"] > 0.8 and np.load(run / TEST_LOGITS).shape == (25, 2)
    records = [r for r in read_metrics(run) if "val_accuracy" in r]
    assert [r["step"] for r in records] == list(range(8, 65, 8))
    best = max(r["val_accuracy"] for r in records)
    last = records[-1]
    assert last["best_val_accuracy"] == best
    assert last["best_step"] == next(r["step"] for r in records if r["val_accuracy"] == best)
    assert (last["test_accuracy"], last["test_examples"]) == (result["test_accuracy"], 25)
    assert all("test_accuracy" not in r for r in records[:-1])
    assert last["examples"] == 5 * 8 + 59 * 16


@each_device
@pytest.mark.parametrize(
    "variant", ["labels", "masked", pytest.param("zeros that come in", marks=pytest.mark.slow)]
)
def test_resuming_changes_no_loss(config: Path, tmp_path: Path, options: list[str], variant: str):
    with_phases = variant == "zeros that come in"
    options = [*options, *(zeros_come_in(tmp_path) if with_phases else [f"objective={variant}"])]
    whole = main([str(config), *options, f"run.out_dir={tmp_path / 'whole'}"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.Trainer.record", stop_after(10))
        with pytest.raises(KeyboardInterrupt):
            main([str(config), *options])
    checkpoint = latest_checkpoint(tmp_path / "run")
    assert checkpoint is not None and checkpoint.name == "step_00000008"
    parts = main([str(config), *options])
    assert without_time(parts) == without_time(whole)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    # run again: nothing to train, the same answer
    assert without_time(main([str(config), *options])) == without_time(whole)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@each_device
@pytest.mark.parametrize("objective", ["masked", "causal"])
def test_learns_tokens_and_then_labels(
    pairs: Path, tmp_path: Path, options: list[str], objective: str
):
    """All bytes of a document are equal, so one of them predicts the others."""
    options = [str(pairs), *options, "run.compile=false"]
    first, second = tmp_path / "run", tmp_path / "second"
    result = main([*options, f"objective={objective}"])
    assert losses(first)[1] > 0.9 * math.log(257)
    records = [r for r in read_metrics(first) if "val_accuracy" in r]
    assert [r["step"] for r in records] == [20, 40, 60]
    assert max(r["val_accuracy"] for r in records) > 0.9
    assert result["test_loss"] < 1 and result["test_accuracy"] > 0.9
    assert records[-1]["test_accuracy"] == result["test_accuracy"]
    assert records[-1]["test_examples"] == 25
    assert not (first / TEST_LOGITS).exists()
    # a run on labels starts from its weights
    labels = [*options, f"run.init_from={first}", f"run.out_dir={second}"]
    main([*labels, "optim.lr=1e-12", "optim.max_steps=3", "optim.weight_decay=0"])
    learned, start = read_best(first), read_best(second)
    for name, weight in start.items():
        if not name.startswith("head_"):
            torch.testing.assert_close(weight, learned[f"classifier.{name}"], atol=1e-8, rtol=0)
    shutil.rmtree(second)
    tuned = main([*labels, "optim.max_steps=150"])
    assert np.load(second / TEST_LOGITS).shape == (25, 2)
    assert tuned["test_accuracy"] > 0.8


def test_pixels_are_predicted_at_their_positions(config: Path, tmp_path: Path):
    """Curriculum of joined sets without zero pixels: only grey levels have to be predicted."""
    for seed in range(2):
        folder = make_dots(tmp_path / f"one_grey_{seed}", seed=seed, grey=77)
    phases = f"data.phases=[{{paths: ['{folder}', '{folder.parent / 'one_grey_0'}'], steps: 5}}]"
    result = main([str(config), *CPU, "objective=masked", f"data.path={folder}", phases,
                  "optim.lr=3e-2", "optim.max_steps=40"])  # fmt: skip
    assert result["test_loss"] < 1 and result["test_accuracy"] == 1


@pytest.mark.gpu
def test_a_captured_step_equals_the_plain_one(config: Path, tmp_path: Path, monkeypatch):
    options = [str(config), *GPU, "model.attention_dropout=0"]
    main([*options, f"run.out_dir={tmp_path / 'captured'}"])
    plain = train.GraphedStep

    def without(*args, **keywords):
        return plain(*args, **(keywords | {"capture": False}))

    monkeypatch.setattr("train.GraphedStep", without)
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
    with pytest.raises(ValueError, match=r"has another model: .*fc_in.weight.* differ"):
        main([str(config), *options, f"run.init_from={second}", f"run.out_dir={tmp_path / 'no'}",
              "model.n_inner=8"])  # fmt: skip


def test_resuming_with_other_settings_is_refused(config: Path, tmp_path: Path):
    arguments = [str(config), *CPU, "optim.max_steps=8"]
    main(arguments)
    for change in (
        "run.init_from=elsewhere", "data.val_examples=3", "run.seed=5", "objective=masked"
    ):  # fmt: skip
        with pytest.raises(ValueError, match=rf"{change.partition('=')[0]} is .* there and"):
            main([*arguments, change])
    shutil.rmtree(tmp_path / "others")
    make_dots(tmp_path / "others", seed=9)  # other images under the same name
    with pytest.raises(ValueError, match=r"sha256 of .*others\.\w+ is '"):
        main(arguments)


def test_best_weights_without_a_checkpoint_are_ignored(config: Path, tmp_path: Path):
    (tmp_path / "run").mkdir()
    stale = torch.nn.Linear(1, 1)
    save_best(tmp_path / "run", stale, 8, 1.0)  # better than any can be
    result = main([str(config), *CPU, "optim.max_steps=8"])
    assert result["test_examples"] == 25
    assert "tok_emb.weight" in read_best(tmp_path / "run")


def test_learned_positions_are_upsampled_to_a_larger_grid(config: Path, tmp_path: Path):
    options = [*CPU, "data.phases=[]", "model.embedding=learned", "optim.max_steps=3"]
    main([str(config), *options])
    small = read_best(tmp_path / "run")["pos_emb"]
    model = Classifier(
        read_config(ClassifyConfig, [str(config), *options, "model.grid_width=32"]).model
    )
    load_initial_weights(tmp_path / "run", model)
    grown = model.pos_emb.view(16, 2, 16, 2, -1)
    for row in range(2):
        for column in range(2):
            assert torch.equal(grown[:, row, :, column].flatten(0, 1), small)


@pytest.mark.slow
def test_a_curriculum_may_have_many_shapes(config: Path, tmp_path: Path, monkeypatch, request):
    """More shapes than the recompile limit of PyTorch, which a run raises."""
    torch._dynamo.reset()
    request.addfinalizer(torch._dynamo.reset)  # graphs compiled here would count in other tests
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    phases = ", ".join(
        f"{{paths: ['{tmp_path / 'dots'}'], steps: 1, batch_size: {n}}}" for n in (2, 4, 6, 8)
    )
    with torch._dynamo.config.patch(recompile_limit=3):
        main([str(config), *CPU, "run.compile=true", f"data.phases=[{phases}]", "optim.max_steps=5",
              "optim.eval_batch_size=10", "model.attention_dropout=0"])  # fmt: skip
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_process_may_train_many_models(config: Path, tmp_path: Path, monkeypatch):
    """Graphs compiled for earlier models do not count towards the limit of the last one."""
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    options = [*CPU, "run.compile=true", "model.attention_dropout=0", "data.phases=[]"]
    for n in (2, 4, 6, 8):
        # reset each time, because a run raises the limit if it needs more
        with torch._dynamo.config.patch(recompile_limit=3):
            main([str(config), *options, f"optim.batch_size={n}", "optim.max_steps=3",
                  f"run.out_dir={tmp_path / str(n)}"])  # fmt: skip
        assert sorted(losses(tmp_path / str(n))) == [1, 2, 3]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.context_length=19", r"more pixels that are tokens than context_length"),
        (
            "optim.max_steps=5",
            r"take 5 steps and must take fewer than optim.max_steps=5",
        ),
        ("model.grid_width=null", r"model.embedding=row_column needs rows and columns"),
        ("data.zeros=tokens", r"context_length=\d+ has no effect with data.zeros=tokens"),
        ("optim.batch_size=0", r"optim.batch_size=0 must be at least 1"),
        ("data.path=nowhere", r"data.path=nowhere is not prepared; make it with"),
        ("model.grid_width=64", r"model.grid_width=64 must be 16 for the data in .*dots"),
        ("model.n_classes=5", r"model.n_classes=5 must be 2 for the data in .*dots"),
        ("model.vocab_size=10", r"model.vocab_size=10 must be 256 for the data in .*dots"),
        ("model.documents=2", r"model.documents=2 must be 1 for the data in .*dots"),
        ("data.min_level=0", r"data.min_level=0 must be a grey level from 1 to 255"),
        ("data.val_examples=0", r"data.val_examples=0 must be at least 1"),
    ],
)
def test_invalid_settings_are_refused(config: Path, override: str, message: str):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        main([str(config), *CPU, override])


def test_all_pixels_need_a_matching_context_length(config: Path):
    with pytest.raises(ValueError, match=r"model.context_length=24 must be 256 .* 16 x 16 pixels"):
        main([str(config), *CPU, "data.phases=[]", "data.zeros=tokens"])


def test_evaluated_images_with_too_many_pixels_are_refused(config: Path, tmp_path: Path):
    """Training images are checked earlier; here all of them fit."""
    narrow = make_dots(tmp_path / "narrow", seed=2, most=20)
    wide = make_dots(tmp_path / "wide", seed=3, most=23)
    phases = f"data.phases=[{{paths: ['{narrow}'], steps: 7}}]"
    with pytest.raises(
        ValueError,
        match=r"=21 must be .* grey level 1 up in each evaluated image of .*wide",
    ):
        main([str(config), *CPU, f"data.path={wide}", phases, "model.context_length=21",
              "optim.max_steps=8", "run.eval_every=4"])  # fmt: skip


def test_metrics_contain_only_numbers(config: Path, tmp_path: Path):
    main([str(config), *CPU, "optim.max_steps=8"])
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        assert all(isinstance(value, int | float) for value in json.loads(line).values())


def test_best_weights_of_another_model_are_refused(config: Path, tmp_path: Path):
    main([str(config), *CPU])
    save_best(tmp_path / "run", torch.nn.Linear(3, 2), 24, 1.0)
    with pytest.raises(ValueError, match=r"best.safetensors has (no|an unexpected) tensor"):
        main([str(config), *CPU])


def test_ruined_weights_are_not_the_best(config: Path, tmp_path: Path):
    options = ["optim.lr=1e30", "optim.warmup_steps=0", "run.eval_every=1", "run.save_every=1"]
    with pytest.raises(FloatingPointError, match=r"val_loss=nan at step \d+ is not finite"):
        main([str(config), *CPU, *options])
    assert not (tmp_path / "run" / "best.safetensors").exists()
    assert latest_checkpoint(tmp_path / "run") is None
