import lzma
import pickle

import datasets
import numpy as np
import pytest
from PIL import Image

from data.lra.image import read_cifar10, split_images, to_grey

N_TRAIN, N_TEST = 20, 4


@pytest.fixture
def rgb():
    rng = np.random.default_rng(0)
    return {
        "train": rng.integers(0, 256, (N_TRAIN, 32, 32, 3), np.uint8),
        "test": rng.integers(0, 256, (N_TEST, 32, 32, 3), np.uint8),
    }


def labels_of(split):
    return [i % 10 for i in range(N_TRAIN if split == "train" else N_TEST)]


def write_batches(folder, rgb):
    folder.mkdir()
    planes = {split: x.transpose(0, 3, 1, 2).reshape(len(x), -1) for split, x in rgb.items()}
    for i in range(5):
        part = slice(4 * i, 4 * i + 4)
        batch = {b"data": planes["train"][part], b"labels": labels_of("train")[part]}
        (folder / f"data_batch_{i + 1}").write_bytes(pickle.dumps(batch))
    batch = {b"data": planes["test"], b"labels": labels_of("test")}
    (folder / "test_batch").write_bytes(pickle.dumps(batch))


def write_archives(folder, rgb):
    for split, images in rgb.items():
        with lzma.open(folder / f"cifar10-gray-{split}.npz.xz", "wb") as file:
            np.savez(file, images=to_grey(images), labels=labels_of(split))


def test_grey_drops_the_fraction():
    colours = [[255, 255, 255], [255, 0, 0], [0, 255, 0], [0, 0, 255], [10, 20, 30], [0, 0, 0]]
    # .2989 + .587 + .114 is .9999: white comes out as 254
    assert to_grey(np.array(colours, np.uint8)).tolist() == [254, 76, 149, 29, 18, 0]


def test_all_sources_give_the_same(tmp_path, rgb, monkeypatch):
    write_batches(tmp_path / "cifar-10-batches-py", rgb)
    (tmp_path / "archives").mkdir()
    write_archives(tmp_path / "archives", rgb)
    features = datasets.Features(
        {"img": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)}
    )
    hub = {
        split: datasets.Dataset.from_dict(
            {"img": [Image.fromarray(x) for x in images], "label": labels_of(split)},
            features=features,
        )
        for split, images in rgb.items()
    }
    monkeypatch.setattr(datasets, "load_dataset", lambda name: hub)
    for source in (
        tmp_path,
        tmp_path / "cifar-10-batches-py",
        tmp_path / "archives",
        None,
    ):
        for split, (images, labels) in read_cifar10(source).items():
            assert images.dtype == np.uint8 and labels.tolist() == labels_of(split)
            assert (images == to_grey(rgb[split])).all()


def test_validation_is_the_last_tenth_of_training(tmp_path, rgb):
    write_archives(tmp_path, rgb)
    grey = to_grey(rgb["train"])
    splits = split_images(read_cifar10(tmp_path), {"train": 18, "val": 2, "test": 4})
    assert (splits["train"][0] == grey[:18]).all() and (splits["val"][0] == grey[18:]).all()
    assert splits["val"][1].tolist() == [8, 9]
    fewer = split_images(read_cifar10(tmp_path), {"train": 5, "val": 1, "test": 2})
    assert (fewer["train"][0] == grey[:5]).all() and (fewer["val"][0] == grey[18:19]).all()
    with pytest.raises(ValueError, match=r"val=3 must be at most 2"):
        split_images(read_cifar10(tmp_path), {"train": 18, "val": 3, "test": 4})


def test_files_that_are_not_cifar10_are_refused(tmp_path, rgb):
    with pytest.raises(ValueError, match=r"must hold cifar10-gray-\{train,test\}.npz.xz"):
        read_cifar10(tmp_path)
    write_archives(tmp_path, rgb)
    path = tmp_path / "cifar10-gray-train.npz.xz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="gray-train.npz.xz cannot be read"):
        read_cifar10(tmp_path)
    with lzma.open(path, "wb") as file:
        np.savez(file, images=np.zeros((3, 32, 32)), labels=[0, 1, 2])
    with pytest.raises(ValueError, match=r"images of float64 \(3, 32, 32\) for 3 labels"):
        read_cifar10(tmp_path)


def test_a_pickle_that_holds_code_is_not_run(tmp_path, rgb):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "run"), "w"))

    folder = tmp_path / "cifar-10-batches-py"
    write_batches(folder, rgb)
    (folder / "data_batch_3").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match=r"data_batch_3 cannot be read \(it holds a .*open"):
        read_cifar10(folder)
    assert not (tmp_path / "run").exists()
