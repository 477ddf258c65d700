"""Attention weights against the model's own output, and the picture of an untrained run."""

from pathlib import Path

import numpy as np
import pytest
import torch

from configs.reader import read_config
from data.lra.store import DisplayLists, open_split
from data.pathfinder.parameters import Pathfinder
from data.pathfinder.render import Renderer
from experiments.contours import plot_attention
from experiments.contours.plot_attention import paint
from experiments.contours.rollout import trace
from model.classifier import Classifier
from scripts import prepare_lra
from train import main as train_main
from training.classification.config import ClassifyConfig
from training.classification.scoring import TEST_LOGITS, read_best

NUMBER = 5
SIZE = 32


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data")
    prepare_lra.main(["pathfinder32", "--out", str(out), "--examples", "16,8,8", "--workers", "1"])
    return out / "pathfinder32"


@pytest.fixture(scope="module")
def train(data: Path, tmp_path_factory: pytest.TempPathFactory):
    def train(*overrides: str) -> Path:
        run = tmp_path_factory.mktemp("run")
        config = run / "given.yaml"
        config.write_text(
            f"""
task: classification
model: {{vocab_size: 256, n_classes: 2, context_length: 640, grid_width: {SIZE}, n_layer: 2,
        n_embd: 16, n_inner: 16, tokens: intensities, embedding: row_column, rotary: axial,
        pooling: mean_max}}
data: {{path: {data}, zeros: padding}}
optim: {{max_steps: 1, batch_size: 4, lr: 3.0e-2, warmup_steps: 0, weight_decay: 0.0}}
run: {{out_dir: {run}, device: cpu, compile: false, dtype: float32, eval_every: 1, save_every: 1,
      log_every: 1}}
"""
        )
        train_main([str(config), *overrides])
        return run

    return train


@pytest.fixture(scope="module")
def packed(train) -> Path:
    return train()


ALL_PIXELS = ("data.zeros=tokens", "model.context_length=1024")
BUTTERFLY = (
    "model.mask.pattern=butterfly",
    "model.mask.block_size=128",
    "model.attention=reference",
)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (*ALL_PIXELS, "data.order=tiles"),
        (*ALL_PIXELS, *BUTTERFLY),
    ],
    ids=["packed", "tiles", "butterfly"],
)
def test_weights_give_what_the_model_computes(train, overrides: tuple[str, ...]):
    run = train(*overrides)
    found = trace(run, NUMBER)
    # the trainer's own logits of the same image, padding and all
    np.testing.assert_allclose(
        found.logits.numpy(), np.load(run / TEST_LOGITS)[NUMBER], atol=1e-5, rtol=1e-4
    )
    model = Classifier(read_config(ClassifyConfig, [str(run / "config.yaml")]).model)
    model.load_state_dict(read_best(run))
    everything = torch.arange(len(found.positions))
    assert len(found.layers) == 2
    for layer, block in zip(found.layers, model.blocks, strict=True):
        weights = layer.weights(everything)
        assert weights.shape == (2, len(everything), len(everything))
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, len(everything)))
        mixed = torch.einsum("hrt,thd->rhd", weights, layer.v).flatten(1)
        torch.testing.assert_close(block.attn.out_proj(mixed), layer.out, atol=1e-5, rtol=1e-4)  # pyright: ignore
        few = torch.tensor([7, 3])
        torch.testing.assert_close(layer.weights(few), weights[:, few])


def test_rollout_is_the_product_of_the_layers(packed: Path):
    found = trace(packed, NUMBER)
    n = len(found.positions)
    product = torch.eye(n, dtype=torch.float64)
    for layer in found.layers:
        mean = layer.weights(torch.arange(n)).mean(0).double()
        product = (torch.eye(n, dtype=torch.float64) + mean) / 2 @ product
    rollout = found.rollout()
    for marker, tokens in enumerate(found.under_markers):
        expected = product[tokens].mean(0).float()
        torch.testing.assert_close(rollout[marker], expected, atol=1e-7, rtol=1e-4)
    torch.testing.assert_close(rollout.sum(1), torch.ones(2))
    paid = found.paid()
    assert paid.shape == (2, 2, n)
    one = found.layers[1].weights(found.under_markers[0]).mean(0).mean(0)
    torch.testing.assert_close(paid[1, 0], one)


def test_tokens_under_markers_are_the_pixels_there(packed: Path, data: Path):
    number = 3
    found = trace(packed, number)
    split = open_split(data, "test")
    assert isinstance(split, DisplayLists)
    image = Renderer(Pathfinder(SIZE))(split.display_lists[number : number + 1])[0]
    assert torch.equal(found.image, image)
    assert torch.equal(found.positions, image.flatten().nonzero()[:, 0])
    assert found.label == split.labels[number]
    markers = split.display_lists["markers"][number]
    for marker, tokens in zip(markers, found.under_markers, strict=True):
        pixels = np.stack(divmod(found.positions[tokens].numpy(), SIZE), axis=1)
        off = np.abs(pixels - marker.astype(int))
        assert off.max() == 1 and len(pixels) == 9  # a disk of radius 1.5


def test_the_picture(packed: Path, tmp_path: Path, capsys):
    out = tmp_path / "pictures" / "attention.png"
    plot_attention.main([str(packed), "--image", str(NUMBER), "--out", str(out)])
    assert capsys.readouterr().out == f"drew {out}\n"
    assert out.stat().st_size > 10_000


def test_results_without_a_picture_are_refused(train, packed: Path):
    for number in (-1, 8):
        with pytest.raises(ValueError, match=r"must be between 0 and 7"):
            trace(packed, number)
    with pytest.raises(ValueError, match=r"model.pooling=cls, a token that is not a pixel"):
        trace(train("model.pooling=cls"), 0)
    with pytest.raises(
        ValueError, match=r"pattern=butterfly on 640 tokens with data.zeros=padding"
    ):
        trace(train(*BUTTERFLY), 0)


def test_painting_puts_attention_where_pixels_are():
    picture = paint(torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0, 3, 2]), 2)
    np.testing.assert_array_equal(picture, [[1.5, np.nan], [0.75, 0.75]])
