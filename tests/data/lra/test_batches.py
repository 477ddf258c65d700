"""Batches of prepared tasks: each example as it is stored, whatever else is in the batch."""

from pathlib import Path

import numpy as np
import pytest
import torch

from data.lra.batches import load_examples
from data.lra.config import ExamplesConfig
from data.lra.pixels import tile_order
from data.lra.request import Request
from data.lra.store import Manifest, Sequences, open_split
from data.lra.tasks import prepare
from data.lra.writer import preparing
from data.pathfinder.generator import generate
from data.pathfinder.parameters import Pathfinder
from data.pathfinder.render import Renderer

CPU = torch.device("cpu")
EXAMPLES = {"train": 12, "val": 5, "test": 5}


def as_they_are(examples, *numbers):
    index = torch.tensor(numbers)
    return examples.batch(index, torch.zeros_like(index))


@pytest.fixture(scope="module")
def contours(tmp_path_factory) -> Path:
    request = Request(
        task="pathfinder32", contour_length=3, distractors_of=0, examples=EXAMPLES, seed=5
    )
    return prepare(request, tmp_path_factory.mktemp("data")).folder


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    manifest = Manifest(
        task="texts", kind="sequences", vocab_size=300, n_classes=3, max_length=9,
        documents_per_example=2, source={"made": "up"},
    )  # fmt: skip
    generator = np.random.default_rng(0)
    with preparing(tmp_path / "texts", manifest) as writer:
        for split, n in EXAMPLES.items():
            documents = [
                [
                    generator.integers(1, 300, generator.integers(1, 10), dtype=np.uint16)
                    for _ in range(2)
                ]
                for _ in range(n)
            ]
            writer.write_sequences(split, [(i % 3, pair) for i, pair in enumerate(documents)])
        writer.finish()
    return tmp_path / "texts"


@pytest.mark.parametrize("context_length", [4, 9, 16])
def test_texts_are_cut_and_padded(texts: Path, context_length: int) -> None:
    config = ExamplesConfig(path=str(texts))
    examples = load_examples(texts, "train", context_length, config, CPU)
    stored = open_split(texts, "train")
    assert isinstance(stored, Sequences)
    numbers = (11, 0, 3, 11)
    batch = as_they_are(examples, *numbers)
    assert batch.tokens.shape == (8, context_length) and batch.positions is None
    assert batch.lengths is not None and batch.lengths.dtype == torch.int32
    assert batch.labels.tolist() == [number % 3 for number in numbers]
    for i, number in enumerate(numbers):
        for j, document in enumerate(stored.documents(number)):
            kept = document[:context_length].tolist()
            row = batch.tokens[2 * i + j].tolist()
            assert row == kept + [0] * (context_length - len(kept))
            assert batch.lengths[2 * i + j] == len(kept)


def test_display_lists_become_the_images_they_tell_of(contours: Path) -> None:
    config = ExamplesConfig(path=str(contours))
    examples = load_examples(contours, "val", 1024, config, CPU)
    parameters = Pathfinder(32, 3, distractors_of=0)
    lists = generate(parameters, 5, range(160_000, 160_005))  # val follows the benchmark's train
    expected = Renderer(parameters)(lists)
    batch = as_they_are(examples, 4, 0)
    assert torch.equal(batch.tokens.view(2, 32, 32), expected[[4, 0]])
    assert batch.labels.tolist() == lists["label"][[4, 0]].tolist()
    assert batch.lengths is None and batch.positions is None


def test_patches_are_the_image_in_another_order(contours: Path) -> None:
    raster, tiles = (
        load_examples(contours, "train", 1024, ExamplesConfig(path="", order=order), CPU)
        for order in ("raster", "tiles")
    )
    image, read = as_they_are(raster, 3).tokens, as_they_are(tiles, 3)
    assert read.positions is not None
    assert torch.equal(read.positions, tile_order(32))
    assert torch.equal(torch.zeros_like(image).scatter(1, read.positions[None], read.tokens), image)


def test_padding_leaves_zeros_out(contours: Path) -> None:
    config = ExamplesConfig(path="", zeros="padding")
    packed = load_examples(contours, "train", 400, config, CPU)
    image = as_they_are(load_examples(contours, "train", 1024, ExamplesConfig(path=""), CPU), 7)
    batch = as_they_are(packed, 7)
    assert batch.lengths is not None and batch.positions is not None
    n = int(batch.lengths)
    assert n == (image.tokens > 0).sum()
    drawn = torch.zeros(1024, dtype=torch.uint8)
    drawn[batch.positions[0, :n]] = batch.tokens[0, :n]
    assert torch.equal(drawn, image.tokens[0])
    assert not packed.overflow
    narrow = load_examples(contours, "train", 20, config, CPU)
    as_they_are(narrow, 7)
    assert narrow.overflow


@pytest.mark.parametrize("level", [2, 100, 255])
def test_faint_pixels_are_left_out_with_the_black_ones(contours: Path, level: int) -> None:
    config = ExamplesConfig(path="", zeros="padding", min_level=level)
    batch = as_they_are(load_examples(contours, "train", 400, config, CPU), 7)
    image = as_they_are(load_examples(contours, "train", 1024, ExamplesConfig(path=""), CPU), 7)
    assert batch.lengths is not None and batch.positions is not None
    n = int(batch.lengths)
    bright = torch.where(image.tokens >= level, image.tokens, 0)
    drawn = torch.zeros_like(bright[0])
    drawn[batch.positions[0, :n]] = batch.tokens[0, :n]
    assert torch.equal(drawn, bright[0])
    assert n == bright.count_nonzero() < image.tokens.count_nonzero()


@pytest.mark.parametrize("share", [0.1, 0.7])
def test_a_share_of_zeros_comes_with_the_others(contours: Path, share: float) -> None:
    config = ExamplesConfig(path="")
    some = load_examples(contours, "train", 1024, config, CPU, zeros_share=share)
    numbers = torch.arange(12).repeat(2)
    changes = torch.arange(2).repeat_interleave(12)
    images = load_examples(contours, "train", 1024, config, CPU).batch(numbers, changes).tokens
    batch = some.batch(numbers, changes)
    assert batch.lengths is not None and batch.positions is not None
    kept = []
    for i, n in enumerate(batch.lengths.tolist()):
        positions = batch.positions[i, :n]
        assert torch.equal(batch.tokens[i, :n], images[i, positions])
        assert torch.equal(positions, positions.unique())
        visible = torch.zeros(1024, dtype=torch.bool)
        visible[positions] = True
        assert visible[images[i] > 0].all()
        kept.append(visible[images[i] == 0])
    drawn = torch.cat(kept).float()
    assert abs(drawn.mean() - share) < 5 * (share * (1 - share) / len(drawn)) ** 0.5
    # each image and each change of it has its own; both have the same wherever they stand
    assert len({str(x.tolist()) for x in kept}) == len(kept)
    again = some.batch(numbers[[17, 3]], changes[[17, 3]])
    assert again.positions is not None
    for i, j in enumerate((17, 3)):
        n = int(batch.lengths[j])
        assert torch.equal(again.positions[i, :n], batch.positions[j, :n])
    narrow = load_examples(contours, "train", 60, config, CPU, zeros_share=share)
    narrow.batch(numbers, changes)
    assert narrow.overflow and not some.overflow


def test_changes_turn_and_mirror(contours: Path) -> None:
    examples = load_examples(contours, "train", 1024, ExamplesConfig(path=""), CPU)
    image = as_they_are(examples, 2).tokens.view(32, 32)
    changed = examples.batch(torch.tensor([2, 2]), torch.tensor([2, 4])).tokens.view(2, 32, 32)
    assert torch.equal(changed[0], image.flip(1))
    assert torch.equal(changed[1], image.T)


def test_changes_move_what_was_turned(contours: Path) -> None:
    examples = load_examples(contours, "train", 1024, ExamplesConfig(path="", shift=1), CPU)
    image = as_they_are(examples, 2).tokens.view(32, 32)
    changed = examples.batch(torch.tensor([2]), torch.tensor([2 + 8 * 1])).tokens.view(32, 32)
    assert torch.equal(changed[:, :-1], image.flip(1)[:, 1:])


def test_images_are_not_moved_out_of_themselves(contours: Path) -> None:
    with pytest.raises(ValueError, match=r"data.shift=32 must be below the image size of 32 x 32"):
        load_examples(contours, "train", 1024, ExamplesConfig(path="", shift=32), CPU)
    with pytest.raises(ValueError, match=r"min_level=100 has no effect with data.zeros=tokens"):
        ExamplesConfig(path="", min_level=100)
    with pytest.raises(ValueError, match=r"data.shift=-1 must be at least 0 pixels"):
        ExamplesConfig(path="", shift=-1)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("zeros", "padding"), ("order", "tiles"), ("augment", "dihedral"), ("shift", 2)],
)
def test_texts_have_no_pixels(texts: Path, setting: str, value: str | int) -> None:
    config = ExamplesConfig(path="", **{setting: value})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=rf"data.{setting}={value} is for images"):
        load_examples(texts, "train", 9, config, CPU)
