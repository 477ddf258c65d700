import json
import os
import tracemalloc

import numpy as np
import pytest

from data.files import load_sealed, sealed
from data.lra.store import DisplayLists, Images, Manifest, Sequences, open_split, verify_split
from data.lra.writer import growing_array, preparing

DISPLAY_LIST = np.dtype([("strokes", [("y", "u1"), ("x", "u1")], (3,)), ("label", "u1")])


def sequences_manifest(**changes):
    values = {
        "task": "toy",
        "kind": "sequences",
        "vocab_size": 300,
        "n_classes": 2,
        "max_length": 6,
        "source": {"seed": 0},
    }
    return Manifest(**(values | changes))


def ids(*values):
    return np.array(values, np.uint16)


TOY = ((0, [ids(1, 2)]), (1, [ids(299)]), (1, [ids(3, 4, 5)]))


def write_toy(folder, examples=TOY):
    with preparing(folder, sequences_manifest()) as writer:
        writer.write_sequences("train", examples)
        return writer.finish()


def test_sequences_come_back(tmp_path):
    written = write_toy(tmp_path / "toy")
    split = open_split(tmp_path / "toy", "train")
    assert isinstance(split, Sequences)
    assert split.manifest == written == Manifest.load(tmp_path / "toy")
    assert len(split) == 3
    assert split.labels.tolist() == [0, 1, 1] and split.labels.dtype == np.uint8
    tokens = split.all_tokens()
    assert tokens.tolist() == [1, 2, 299, 3, 4, 5] and tokens.dtype == np.uint16
    assert split.offsets.tolist() == [0, 2, 3, 6] and split.offsets.dtype == np.int64
    assert split.lengths.tolist() == [2, 1, 3]
    assert [document.tolist() for document in split.documents(2)] == [[3, 4, 5]]
    assert not split.labels.flags.writeable
    assert sorted(path.name for path in (tmp_path / "toy").iterdir()) == [
        "manifest.json",
        "train.labels.npy",
        "train.offsets.npy",
        "train.tokens.npy",
    ]
    verify_split(tmp_path / "toy", "train")


def test_two_documents_an_example(tmp_path):
    with preparing(tmp_path, sequences_manifest(documents_per_example=2)) as writer:
        writer.write_sequences("val", [(1, [ids(1), ids(2, 3)]), (0, [ids(4, 5), ids(6)])])
        writer.finish()
    split = open_split(tmp_path, "val")
    assert len(split) == 2 and split.offsets.tolist() == [0, 1, 3, 5, 6]
    assert [document.tolist() for document in split.documents(1)] == [[4, 5], [6]]


def test_images_and_display_lists_come_back(tmp_path):
    images = np.arange(5 * 4 * 4, dtype=np.uint8).reshape(5, 4, 4)
    manifest = sequences_manifest(kind="images", max_length=16)
    with preparing(tmp_path / "images", manifest) as writer:
        blocks = [(images[:3], [0, 1, 1]), (images[3:], np.array([0, 1]))]
        writer.write_images("test", blocks, skipped=["imgs/0/sample_172.png"])
        writer.finish()
    split = open_split(tmp_path / "images", "test")
    assert isinstance(split, Images) and len(split) == 5
    assert (split.images == images).all() and split.labels.tolist() == [0, 1, 1, 0, 1]
    assert split.manifest.splits["test"].skipped == ["imgs/0/sample_172.png"]

    lists = np.zeros(7, DISPLAY_LIST)
    lists["label"] = np.arange(7) % 2
    lists["strokes"]["x"] = np.arange(21).reshape(7, 3)
    with preparing(tmp_path / "lists", sequences_manifest(kind="display_lists")) as writer:
        writer.write_display_lists("train", [lists[:4], lists[4:]])
        writer.finish()
    split = open_split(tmp_path / "lists", "train")
    assert isinstance(split, DisplayLists) and len(split) == 7
    assert split.display_lists.dtype == DISPLAY_LIST
    assert (split.display_lists == lists).all() and split.labels.tolist() == [0, 1, 0, 1, 0, 1, 0]


def test_growing_file_is_what_numpy_would_write(tmp_path):
    rows = np.arange(123 * 6, dtype=np.uint16).reshape(123, 2, 3)
    with growing_array(tmp_path / "grown.npy", np.dtype(np.uint16), (2, 3)) as append:
        for first in range(0, 123, 10):
            append(rows[first : first + 10])
    np.save(tmp_path / "saved.npy", rows)
    assert (tmp_path / "grown.npy").read_bytes() == (tmp_path / "saved.npy").read_bytes()


def test_growing_file_refuses_rows_that_do_not_fit(tmp_path):
    with (
        pytest.raises(ValueError, match=r"uint8, but got .* int64"),
        growing_array(tmp_path / "a.npy", np.dtype(np.uint8)) as append,
    ):
        append(np.array([300]))
    with (
        pytest.raises(ValueError, match=r"shape \(2,\)"),
        growing_array(tmp_path / "a.npy", np.dtype(np.uint8), (2,)) as append,
    ):
        append(np.zeros((4, 3), np.uint8))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([(0, [ids()])], r"example 0 of train has documents of \[0\] tokens"),
        ([(0, [ids(1)]), (0, [ids(*range(7))])], r"example 1 .* \[7\] tokens.* 1 to 6"),
        ([(0, [ids(1), ids(2)])], r"documents of \[1, 1\] tokens, but must have 1"),
        ([(2, [ids(1)])], r"labels of train range from 2 to 2"),
    ],
)
def test_bad_examples_are_refused(tmp_path, examples, message):
    with pytest.raises(ValueError, match=message):
        write_toy(tmp_path / "toy", examples)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        open_split(tmp_path / "toy", "train")


def test_unfinished_work_resumes_and_other_settings_are_refused(tmp_path):
    folder = tmp_path / "toy"
    with preparing(folder, sequences_manifest()) as writer:
        (writer.chunks / "0.npy").write_bytes(b"x")
        writer.write_sequences("train", [(0, [ids(1)])])
    with pytest.raises(FileNotFoundError, match="finish its preparation"):
        open_split(folder, "train")
    other = sequences_manifest(source={"seed": 1})
    with (
        pytest.raises(ValueError, match=r"source.seed is 0 there and 1 here"),
        preparing(folder, other),
    ):
        pass
    with preparing(folder, sequences_manifest()) as writer:
        assert not writer.finished and (writer.chunks / "0.npy").exists()
        writer.write_sequences("train", [(0, [ids(1)])])
        writer.finish()
    assert not (folder / "chunks").exists()
    with preparing(folder, sequences_manifest()) as writer:
        assert writer.finished and writer.manifest.splits["train"].examples == 1
    with (
        pytest.raises(ValueError, match=r"source.seed is 0 there and 1 here"),
        preparing(folder, other),
    ):
        pass


def test_folders_of_others_are_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("my only copy")
    with (
        pytest.raises(ValueError, match=r"something else \(thesis.tex\)"),
        preparing(tmp_path, sequences_manifest()),
    ):
        pass
    folder = tmp_path / "toy"
    with (
        preparing(folder, sequences_manifest()),
        pytest.raises(ValueError, match="another process"),
        preparing(folder, sequences_manifest()),
    ):
        pass


def test_unknown_split_and_kind(tmp_path):
    write_toy(tmp_path)
    with pytest.raises(ValueError, match=r"split='valid' must be one of \['train'\]"):
        open_split(tmp_path, "valid")
    with pytest.raises(ValueError, match="kind='sounds'"):
        sequences_manifest(kind="sounds")


def test_torn_and_foreign_arrays_are_refused(tmp_path):
    write_toy(tmp_path)
    path = tmp_path / "train.tokens.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"tokens.npy is torn.* 139 bytes"):
        open_split(tmp_path, "train")
    path.write_bytes(whole + b"x")
    with pytest.raises(ValueError, match=r"its header declares 140 bytes, but it has 141"):
        open_split(tmp_path, "train")
    np.save(path, np.zeros(7, np.uint16))
    with pytest.raises(ValueError, match=r"shape \(7,\) of <u2, but the manifest says \(6,\)"):
        open_split(tmp_path, "train")
    np.save(path, np.zeros(6, np.int16))
    with pytest.raises(ValueError, match=r"\(6,\) of <i2, but"):
        open_split(tmp_path, "train")
    path.unlink()
    with pytest.raises(FileNotFoundError, match="tokens.npy is missing"):
        open_split(tmp_path, "train")


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("labels", np.array([0, 1, 2], np.uint8), "label 2, which must be below n_classes=2"),
        ("offsets", np.array([0, 2, 3, 7]), "from 0 to 7, but must range from 0 to the 6"),
        ("offsets", np.array([0, 4, 3, 6]), "sequences of -1 to 4 tokens"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(tmp_path, name, array, message):
    write_toy(tmp_path)
    np.save(tmp_path / f"train.{name}.npy", array)
    with pytest.raises(ValueError, match=message):
        open_split(tmp_path, "train")


def test_tokens_stay_on_the_disk(tmp_path):
    """Every process of a machine opens the split, and Retrieval's has hundreds of megabytes."""
    long = [(0, [np.ones(1_000_000, np.uint16)])] * 4
    with preparing(tmp_path, sequences_manifest(max_length=1_000_000)) as writer:
        writer.write_sequences("train", long)
        writer.finish()
    tracemalloc.start()
    split = open_split(tmp_path, "train")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(split.tokens) == 4_000_000 and most < 2_000_000


@pytest.mark.parametrize("size", [0, 64, 128, 4096])
def test_tokens_that_are_cut_while_they_are_open(tmp_path, size):
    with preparing(tmp_path, sequences_manifest(max_length=10_000)) as writer:
        writer.write_sequences("train", [(0, [np.ones(10_000, np.uint16)])])
        writer.finish()
    split = open_split(tmp_path, "train")
    os.truncate(tmp_path / "train.tokens.npy", size)
    with pytest.raises(ValueError, match=rf"train\.tokens\.npy is torn: it has {size} bytes"):
        split.documents(0)


def test_tokens_that_are_overwritten_while_they_are_open(tmp_path):
    write_toy(tmp_path)
    split = open_split(tmp_path, "train")
    path = tmp_path / "train.tokens.npy"
    whole = path.read_bytes()
    with path.open("r+b") as file:
        file.write(whole)
    os.utime(path, ns=(0, 0))
    assert split.documents(2)[0].tolist() == [3, 4, 5]  # the same content, of another time
    with path.open("r+b") as file:
        file.write(whole[:-1] + b"x")
    with pytest.raises(ValueError, match=r"tokens\.npy has sha256=.*the file is damaged"):
        split.documents(2)


def test_verify_sees_a_changed_byte(tmp_path):
    write_toy(tmp_path)
    np.save(tmp_path / "train.tokens.npy", ids(1, 2, 299, 3, 4, 6))
    open_split(tmp_path, "train")
    with pytest.raises(ValueError, match=r"tokens.npy has sha256=.* but the manifest says"):
        verify_split(tmp_path, "train")


def test_damaged_manifests_are_named(tmp_path):
    write_toy(tmp_path)
    path = tmp_path / "manifest.json"
    values = load_sealed(path)
    path.write_text(json.dumps(sealed(values)).replace('"vocab_size": ', '"vocab_size": 1'))
    with pytest.raises(ValueError, match="manifest.json is damaged .*prepare the task again"):
        open_split(tmp_path, "train")
    away = {"train": values["splits"]["train"] | {"arrays": {"../train": {}}}}
    for changed, message in [
        (values | {"splits": away}, "manifest.json lacks"),
        (values | {"splits": {"../train": values["splits"]["train"]}}, "must be some of train, v"),
        (values | {"n_classes": "3"}, "n_classes='3' must be an integer of at least 1"),
        (values | {"format_version": 0}, "format_version=0, but this code reads 1"),
        ({k: v for k, v in values.items() if k != "vocab_size"}, "manifest.json lacks .*vocab_siz"),
        (values | {"splits": {"train": {"examples": 3}}}, "manifest.json lacks .*arrays"),
    ]:
        path.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=message):
            open_split(tmp_path, "train")
    path.write_text("{")
    with pytest.raises(ValueError, match="manifest.json is damaged"):
        open_split(tmp_path, "train")
