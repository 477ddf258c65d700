import numpy as np
import pytest
from PIL import Image

from data.pathfinder import release
from data.pathfinder.release import find_release, read_images, read_metadata, split_images

REST = "1.8 6 2.0 5 1.5 2 1"


@pytest.fixture
def archive(tmp_path):
    """Two batches, 10 after 9, whose image k of all has the grey levels k and k + 1."""
    folder = tmp_path / "lra_release" / "pathfinder32" / "curv_baseline"
    (folder / "metadata").mkdir(parents=True)
    for batch, first in ((9, 0), (10, 10)):
        (folder / "imgs" / str(batch)).mkdir(parents=True)
        lines = []
        for i in range(10):
            pixels = np.full((32, 32), first + i, np.uint8)
            pixels[3, 5] += 1
            Image.fromarray(pixels).save(folder / "imgs" / str(batch) / f"sample_{i}.png")
            lines.append(f"imgs/{batch} sample_{i}.png {i} {(first + i) % 3 % 2} {REST}\n")
        (folder / "metadata" / f"{batch}.npy").write_text("".join(lines))
    return tmp_path


def test_images_come_in_order_with_their_labels(archive, monkeypatch):
    monkeypatch.setattr(release, "BLOCK", 7)
    images = read_metadata(find_release(archive, 32, 6))
    assert [image.label for image in images] == [k % 3 % 2 for k in range(20)]
    skipped = []
    blocks = list(read_images(images, 32, skipped, n_threads=3))
    pixels = np.concatenate([block for block, _ in blocks])
    assert [len(block) for block, _ in blocks] == [7, 7, 6] and skipped == []
    assert pixels.shape == (20, 32, 32) and pixels.dtype == np.uint8
    assert pixels[:, 0, 0].tolist() == list(range(20))
    assert pixels[:, 3, 5].tolist() == list(range(1, 21))
    assert np.concatenate([labels for _, labels in blocks]).tolist() == [
        k % 3 % 2 for k in range(20)
    ]


def test_the_archive_is_found_at_each_level(archive):
    folder = archive / "lra_release" / "pathfinder32" / "curv_baseline"
    assert find_release(archive, 32, 6) == find_release(archive / "lra_release", 32, 6) == folder
    with pytest.raises(ValueError, match="must hold pathfinder64/curv_contour_length_14/metadata"):
        find_release(archive, 64, 14)
    with pytest.raises(ValueError, match=r"contour_length=7 must be one of \[6, 9, 14\]"):
        find_release(archive, 32, 7)


def test_splits_are_80_10_10_in_order(archive):
    images = read_metadata(find_release(archive, 32, 6))
    splits = split_images(images)
    assert {split: len(part) for split, part in splits.items()} == {
        "train": 16,
        "val": 2,
        "test": 2,
    }
    assert [*splits["train"], *splits["val"], *splits["test"]] == images


def test_empty_images_are_left_out_and_named(archive):
    images = read_metadata(find_release(archive, 32, 6))
    images[4].path.write_bytes(b"")
    skipped = []
    [(pixels, labels)] = read_images(images, 32, skipped)
    assert len(pixels) == len(labels) == 19 and 4 not in pixels[:, 0, 0]
    assert skipped == [str(images[4].path)]
    only = []
    assert list(read_images(images[4:5], 32, only)) == [] and len(only) == 1


def test_damaged_images_are_refused(archive):
    images = read_metadata(find_release(archive, 32, 6))
    path = images[2].path
    with pytest.raises(ValueError, match=r"sample_0.png is uint8 \(32, 32\), but must be .*64"):
        list(read_images(images, 64, []))
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"no image"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"sample_2.png is damaged"):
            list(read_images(images, 32, []))
    Image.new("RGB", (32, 32)).save(path)
    with pytest.raises(ValueError, match=r"sample_2.png is uint8 \(32, 32, 3\)"):
        list(read_images(images, 32, []))
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"sample_2.png"):
        list(read_images(images, 32, []))


@pytest.mark.parametrize(
    "line", ["imgs/9 sample_0.png 0", f"imgs/9 sample_0.png 0 2 {REST}", "", "\x93NUMPY 1 2 3"]
)
def test_malformed_metadata_is_named(archive, line):
    folder = find_release(archive, 32, 6)
    (folder / "metadata" / "9.npy").write_text(f"imgs/9 sample_0.png 0 1 {REST}\n{line}\n")
    with pytest.raises(ValueError, match=r"9.npy, line 2 must be"):
        read_metadata(folder)


def test_metadata_that_is_not_there(archive):
    folder = find_release(archive, 32, 6)
    (folder / "metadata" / "first.npy").write_text("")
    with pytest.raises(ValueError, match=r"first.npy must be named after its batch"):
        read_metadata(folder)
    for path in (folder / "metadata").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match=r"metadata lists no images"):
        read_metadata(folder)
