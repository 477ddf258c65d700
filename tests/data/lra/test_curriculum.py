"""Training examples of each step, for any number of processes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from data.lra.config import ExamplesConfig, Phase
from data.lra.curriculum import Curriculum, ExampleSampler
from data.lra.store import Manifest
from data.lra.writer import preparing

SIZES = {"small": 7, "large": 20}
CPU = torch.device("cpu")


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    """Images of 4 x 4 pixels, each all of its own number, 100 more in the second set."""
    for offset, (name, n) in zip((1, 101), SIZES.items(), strict=True):
        manifest = Manifest(
            task=name, kind="images", vocab_size=256, n_classes=2, max_length=16, source={}
        )
        with preparing(tmp_path / name, manifest) as writer:
            for split in ("train", "val", "test"):
                images = np.repeat(np.arange(offset, offset + n, dtype=np.uint8), 16)
                writer.write_images(split, [(images.reshape(n, 4, 4), np.arange(n) % 2)])
            writer.finish()
    return {name: str(tmp_path / name) for name in SIZES}


def make(folders: dict[str, str], *, rank: int = 0, world_size: int = 1, seed: int = 3, **changes):
    config = {
        "path": folders["large"],
        "phases": [
            Phase(paths=[folders["small"]], steps=3, batch_size=2),
            Phase(paths=[folders["small"], folders["large"]], steps=5),
        ],
    }
    return Curriculum(
        ExamplesConfig(**(config | changes)), 16, 4, seed=seed, rank=rank, world_size=world_size,
        device=CPU,
    )  # fmt: skip


def seen(curriculum: Curriculum, step: int) -> list[int]:
    """The numbers of a step's images."""
    batch = curriculum.stages[curriculum.number(step)].batch(*curriculum.draw(step))
    assert (batch.labels == (batch.tokens[:, 0] - 1) % 2).all()
    return batch.tokens[:, 0].tolist()


def test_phases_take_turns_and_share_batches(folders) -> None:
    curriculum = make(folders)
    assert [curriculum.number(step) for step in range(10)] == [0] * 3 + [1] * 5 + [2] * 2
    assert [curriculum.examples_before(step) for step in (0, 3, 4, 8, 10)] == [0, 6, 10, 26, 34]
    for step in range(10):
        numbers = seen(curriculum, step)
        assert len(numbers) == (2 if step < 3 else 4)
        of_small = [number <= SIZES["small"] for number in numbers]
        assert (
            of_small == ([True] * 2, [True] * 2 + [False] * 2, [False] * 4)[curriculum.number(step)]
        )


def test_an_epoch_of_the_task_sees_all_of_it(folders) -> None:
    curriculum = make(folders)
    numbers = [number for step in range(8, 13) for number in seen(curriculum, step)]
    assert sorted(numbers) == list(range(101, 121))


def test_processes_divide_each_step(folders) -> None:
    alone = make(folders, phases=[])
    ranks = [make(folders, phases=[], rank=rank, world_size=2) for rank in range(2)]
    for step in range(6):
        assert [x for part in ranks for x in seen(part, step)] == seen(alone, step)


def test_seeds_and_steps_decide_the_order(folders) -> None:
    assert seen(make(folders), 9) == seen(make(folders), 9)
    orders = [[seen(make(folders, seed=seed), step) for step in range(8, 13)] for seed in (3, 4)]
    assert orders[0] != orders[1]


def test_changes_are_drawn_where_they_are_asked_for(folders) -> None:
    def changes(augment: str) -> set[int]:
        curriculum = make(folders, phases=[], augment=augment)
        return {int(x) for step in range(60) for x in curriculum.draw(step)[1].flatten()}

    assert changes("none") == {0}
    assert changes("mirror") == {0, 2}
    assert changes("dihedral") == set(range(8))


def test_moves_are_drawn_with_the_changes(folders) -> None:
    def changes(shift: int) -> list[int]:
        curriculum = make(folders, phases=[], augment="mirror", shift=shift)
        return [int(x) for step in range(60) for x in curriculum.draw(step)[1].flatten()]

    still, moved = changes(0), changes(1)
    assert [x % 8 for x in moved] == still
    assert {x // 8 for x in moved} == set(range(9))
    assert changes(1) == moved
    # of two processes, each draws the moves of its own examples
    curricula = [
        make(folders, phases=[], augment="mirror", shift=1, rank=rank, world_size=2)
        for rank in range(2)
    ]
    both = [int(x) for step in range(60) for c in curricula for x in c.draw(step)[1].flatten()]
    assert both == moved


def test_zeros_come_in_phase_by_phase(tmp_path: Path) -> None:
    """On images of which every second pixel is black."""
    manifest = Manifest(
        task="stripes", kind="images", vocab_size=256, n_classes=2, max_length=1024, source={}
    )
    images = np.tile(np.array([0, 9], dtype=np.uint8), (8, 32, 16))
    with preparing(tmp_path / "stripes", manifest) as writer:
        for split in ("train", "val", "test"):
            writer.write_images(split, [(images, np.arange(8) % 2)])
        writer.finish()
    path = str(tmp_path / "stripes")
    phases = [
        Phase(paths=[path], steps=1, context_length=1000, zeros_share=share) for share in (0.1, 0.5)
    ]
    config = ExamplesConfig(path=path, phases=phases)
    curriculum = Curriculum(config, 1024, 8, seed=0, rank=0, world_size=1, device=CPU)
    batches = [curriculum.stages[step].batch(*curriculum.draw(step)) for step in range(3)]
    for batch, share in zip(batches, (0.1, 0.5), strict=False):
        assert batch.lengths is not None and batch.tokens.shape == (8, 1000)
        zeros = batch.lengths - 512
        assert abs(zeros.sum() / (8 * 512) - share) < 0.04
    assert batches[2].lengths is None and batches[2].tokens.shape == (8, 1024)
    curriculum.check()


@pytest.mark.parametrize(("batch_size", "world_size"), [(3, 1), (4, 4)])
def test_batches_must_be_shared_equally(folders, batch_size: int, world_size: int) -> None:
    phases = [Phase(paths=[folders["small"], folders["large"]], steps=1, batch_size=batch_size)]
    with pytest.raises(ValueError, match=rf"batch_size={batch_size} .*2 folder.* {world_size} GPU"):
        make(folders, phases=phases, world_size=world_size)


def test_lost_pixels_are_reported(folders) -> None:
    curriculum = make(folders, phases=[Phase(paths=[folders["small"]], steps=1, context_length=9)],
                      zeros="padding")  # fmt: skip
    curriculum.check()
    seen(curriculum, 0)
    with pytest.raises(ValueError, match=r"more pixels that are tokens"):
        curriculum.check()


def test_an_epoch_visits_every_example_once() -> None:
    sampler = ExampleSampler(37, (5, 0))
    epochs = sampler.examples(np.arange(3 * 37)).reshape(3, 37)
    for epoch in epochs:
        assert sorted(epoch) == list(range(37))
    assert (epochs[0] != epochs[1]).any()


def test_single_samples_are_those_of_any_batch() -> None:
    sampler = ExampleSampler(10, (1,))
    numbers = np.arange(4090, 4110)
    together = sampler.examples(numbers), sampler.changes(numbers, "dihedral", 0)
    for i, number in enumerate(numbers):
        one = np.array([number])
        assert sampler.examples(one)[0] == together[0][i]
        assert sampler.changes(one, "dihedral", 0)[0] == together[1][i]


def test_keys_give_orders_of_their_own() -> None:
    numbers = np.arange(100)
    one, other = ExampleSampler(100, (1, 2)), ExampleSampler(100, (1, 3))
    assert (one.examples(numbers) != other.examples(numbers)).any()
    assert (one.changes(numbers, "dihedral", 0) != other.changes(numbers, "dihedral", 0)).any()


def test_changes_are_even() -> None:
    counts = np.bincount(
        ExampleSampler(10, (3,)).changes(np.arange(80_000), "dihedral", 0), minlength=8
    )
    assert len(counts) == 8
    assert np.abs(counts - 10_000).max() < 500  # five standard errors
