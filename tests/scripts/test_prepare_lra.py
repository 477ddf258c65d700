import json
import lzma
import os
import shutil
import zipfile
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import data.lra.tasks
import data.pathfinder.generator
from data.lra import listops
from data.lra.request import Request
from data.lra.store import DisplayLists, Images, Sequences, open_split, verify_split
from data.pathfinder.generator import generate
from data.pathfinder.parameters import Pathfinder
from scripts.prepare_lra import main
from tests.data.lra.papers import make_papers, make_wheel


def run(tmp_path, *command):
    assert main([*command, "--out", str(tmp_path / "out"), "--workers", "2"]) == 0


@pytest.fixture
def few_formulas(monkeypatch):
    monkeypatch.setattr(listops, "SPLIT_SIZES", {"train": 200, "val": 30, "test": 20})


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.npy")}


def test_listops_with_its_baselines(tmp_path, capsys, few_formulas):
    run(tmp_path, "listops", "--tsv")
    folder = tmp_path / "out" / "listops"
    sizes = {split: len(open_split(folder, split)) for split in ("train", "val", "test")}
    assert sizes == {"train": 200, "val": 30, "test": 20}
    for split in sizes:
        verify_split(folder, split)
    test = open_split(folder, "test")
    assert isinstance(test, Sequences) and test.manifest.vocab_size == 16
    for i, label in enumerate(test.labels.tolist()):
        assert listops.evaluate(test.documents(i)[0].tolist()) == label
    printed = capsys.readouterr().out
    assert "Accuracy on test from the most common label" in printed
    assert (folder / "samples.png").stat().st_size > 10_000
    # the written files as a source give the same data
    main(["listops", "--source", str(folder), "--out", str(tmp_path / "again")])
    assert files_of(tmp_path / "again" / "listops") == files_of(folder)
    run(tmp_path, "listops")
    assert "is already finished; nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("task", "files"),
    [
        ("listops", ["basic_train.tsv", "basic_val.tsv", "basic_test.tsv"]),
        ("text", ["imdb_train.jsonl", "imdb_test.jsonl"]),
        ("image", ["cifar10-gray-train.npz.xz", "cifar10-gray-test.npz.xz"]),
        ("image", ["test_batch", *(f"data_batch_{n}" for n in range(1, 6))]),
        ("retrieval", [f"new_aan_pairs.{split}.tsv" for split in ("train", "eval", "test")]),
        ("aclsum", ["aclsum/dataset/paper_jsons/P18-1001.json"]),
        ("pathfinder32", ["pathfinder32/curv_contour_length_14/metadata/0.npy"]),
    ],
)
def test_a_pipe_in_the_source_is_refused(tmp_path, task, files):
    for name in files:
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(path)
    with pytest.raises(SystemExit, match="is not a regular file"):
        run(tmp_path, task, "--source", str(tmp_path / "source"))


def test_more_training_formulas_do_not_change_the_other_splits(tmp_path, few_formulas):
    run(tmp_path, "listops")
    main(["listops", "--examples", "250,30,10", "--out", str(tmp_path / "more")])
    before, after = files_of(tmp_path / "out/listops"), files_of(tmp_path / "more/listops")
    assert after["val.tokens.npy"] == before["val.tokens.npy"]
    train = open_split(tmp_path / "more/listops", "train")
    first = open_split(tmp_path / "out/listops", "train")
    n = len(first.tokens)
    assert (train.tokens.read(0, n) == first.all_tokens()).all()
    test = open_split(tmp_path / "out/listops", "test")
    all_train = {train.documents(i)[0].tobytes() for i in range(250)}
    assert all_train.isdisjoint(test.documents(i)[0].tobytes() for i in range(20))


def test_shorter_formulas_make_a_separate_data_set(tmp_path, capsys):
    run(tmp_path, "listops", "--shortest", "4", "--longest", "32", "--examples", "50,10,10")
    folder = tmp_path / "out" / "listops-tokens4to32"
    train = open_split(folder, "train")
    assert isinstance(train, Sequences) and len(train.labels) == 50
    lengths = np.diff(train.offsets)
    assert lengths.min() >= 4 and lengths.max() <= 32
    source = json.loads((folder / "manifest.json").read_text())["source"]
    assert (source["shortest"], source["longest"]) == (4, 32)
    assert "from the root operator: " in capsys.readouterr().out
    assert (folder / "samples.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "text", "longest": 99}, r"longest=99 are for generated ListOps"),
        ({"source": Path("x"), "shortest": 9}, r"shortest=9 .* are for generated"),
        ({"shortest": 3}, r"shortest=3 must be at least 4"),
        ({"shortest": 40, "longest": 32}, r"shortest=40 must be .* at most longest=32"),
        ({"shortest": 4, "longest": 7}, r"longest=7, which must be in 8..1999"),
        ({"longest": 2000}, r"longest=2000, which must be in 8..1999"),
    ],
)
def test_impossible_lengths_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Request(**({"task": "listops"} | changes))


def test_text_and_pairs(tmp_path):
    imdb = tmp_path / "imdb"
    imdb.mkdir()
    for split, n in (("train", 60), ("test", 20)):
        texts = [" ".join(f"{split}{i}-{w}" for w in range(60)) for i in range(n)]
        rows = [json.dumps({"text": text, "label": i % 2}) for i, text in enumerate(texts)]
        (imdb / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    run(tmp_path, "text", "--source", str(imdb), "--examples", "50,10,20")
    text = open_split(tmp_path / "out" / "text", "val")
    assert isinstance(text, Sequences) and len(text) == 10 and text.manifest.vocab_size == 257
    assert bytes((text.documents(0)[0] - 1).astype(np.uint8)).startswith(b"train")
    run(tmp_path, "pairs", "--source", str(imdb))
    pairs = open_split(tmp_path / "out" / "pairs", "train")
    assert isinstance(pairs, Sequences) and pairs.manifest.documents_per_example == 2
    assert len(pairs) == 54 and len(pairs.offsets) == 109
    for task, split in product(("text", "pairs"), ("train", "val", "test")):
        open_split(tmp_path / "out" / task, split)
        verify_split(tmp_path / "out" / task, split)


def test_retrieval(tmp_path, capsys):
    for name in ("train", "eval", "test"):
        rows = b"".join(b"%d.0\t1\t2\tfirst %d\tsecond\n" % (i % 2, i) for i in range(6))
        (tmp_path / f"new_aan_pairs.{name}.tsv").write_bytes(rows + b"1.0\t1\t2\t\tempty\n")
    run(tmp_path, "retrieval", "--source", str(tmp_path))
    split = open_split(tmp_path / "out" / "retrieval", "val")
    assert isinstance(split, Sequences) and split.labels.tolist() == [0, 1, 0, 1, 0, 1]
    assert bytes((split.documents(5)[0] - 1).astype(np.uint8)) == b"first 5"
    assert "val: 1 empty and left out: new_aan_pairs.eval.tsv, line 7" in capsys.readouterr().out


def test_shared_citations_from_a_wheel_and_from_folders(tmp_path):
    wheel = make_wheel(tmp_path / "aclsum-0.1.2-py3-none-any.whl", make_papers(60))
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path / "unpacked")
    sources = wheel, tmp_path / "unpacked", tmp_path / "unpacked/aclsum/dataset/paper_jsons"
    made = []
    for i, source in enumerate(sources):
        main(["aclsum", "--source", str(source), "--out", str(tmp_path / f"{i}")])
        made.append(files_of(tmp_path / f"{i}" / "aclsum"))
    assert made[0] == made[1] == made[2]
    for split in ("train", "val", "test"):
        verify_split(tmp_path / "0/aclsum", split)
        pairs = open_split(tmp_path / "0/aclsum", split)
        assert isinstance(pairs, Sequences) and pairs.manifest.documents_per_example == 2
        assert len(pairs) > 0 and pairs.labels.mean() == 0.5
    source = json.loads((tmp_path / "0/aclsum/manifest.json").read_text())["source"]
    assert source["papers"] == {"train": 30, "val": 12, "test": 18}
    assert "not AAN" in source["question"]
    with pytest.raises(SystemExit, match=r"examples: val=9,999 must be at most"):
        run(tmp_path, "aclsum", "--source", str(wheel), "--examples", "8,9999,8")


def test_image(tmp_path):
    for split, n in (("train", 50), ("test", 10)):
        images = np.arange(n, dtype=np.uint8)[:, None, None] * np.ones((32, 32), np.uint8)
        with lzma.open(tmp_path / f"cifar10-gray-{split}.npz.xz", "wb", preset=0) as file:
            np.savez(file, images=images, labels=np.arange(n) % 10)
    run(tmp_path, "image", "--source", str(tmp_path), "--examples", "45,5,10")
    split = open_split(tmp_path / "out" / "image", "val")
    assert isinstance(split, Images) and split.images[:, 0, 0].tolist() == [45, 46, 47, 48, 49]


def test_generated_pathfinder_resumes_with_the_same_bytes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(data.lra.tasks, "CHUNK", 16)
    command = ["pathfinder32", "--contour-length", "3", "--distractors-of", "14"]
    command += ["--examples", "50,8,8", "--seed", "5"]
    run(tmp_path, *command)
    folder = tmp_path / "out" / "pathfinder32-length3-distractors14"
    split = open_split(folder, "train")
    parameters = Pathfinder(32, 3, distractors_of=14)
    assert isinstance(split, DisplayLists)
    assert Pathfinder(**split.manifest.source["parameters"]) == parameters
    assert (split.display_lists == generate(parameters, 5, range(50))).all()
    val = open_split(folder, "val")
    assert isinstance(val, DisplayLists)
    assert (val.display_lists == generate(parameters, 5, range(160_000, 160_008))).all()
    whole = files_of(folder)
    shutil.rmtree(folder)
    capsys.readouterr()

    calls = []

    def interrupted(*args, **options):
        calls.append(args[2])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return generate(*args, **options)

    monkeypatch.setattr(data.pathfinder.generator, "generate", interrupted)
    with pytest.raises(SystemExit) as ended:
        main([*command, "--out", str(tmp_path / "out")])
    assert ended.value.code == 130
    assert "the same command resumes" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match="finish its preparation"):
        open_split(folder, "train")
    with pytest.raises(SystemExit, match="source.seed is 5 there and 6 here"):
        main([*command[:-1], "6", "--out", str(tmp_path / "out")])
    run(tmp_path, *command)
    assert calls[3:] == [range(32, 48), range(48, 50), range(160_000, 160_008), *calls[6:]]
    assert files_of(folder) == whole


def test_released_pathfinder(tmp_path, capsys):
    folder = tmp_path / "pathfinder32" / "curv_contour_length_14"
    images = folder / "imgs" / "0"
    for new in (folder / "metadata", images):
        new.mkdir(parents=True)
    for i in range(20):
        Image.fromarray(np.full((32, 32), i, np.uint8)).save(images / f"sample_{i}.png")
    (images / "sample_17.png").write_bytes(b"")
    lines = [f"imgs/0 sample_{i}.png {i} {i % 2} 1.0 14 4 2 0.5 1 1\n" for i in range(20)]
    (folder / "metadata" / "0.npy").write_text("".join(lines))
    run(tmp_path, "pathfinder32", "--source", str(tmp_path))
    splits = [open_split(tmp_path / "out" / "pathfinder32", s) for s in ("train", "val", "test")]
    assert [len(split) for split in splits] == [16, 1, 2]
    assert isinstance(splits[1], Images) and splits[1].images[:, 0, 0].tolist() == [16]
    assert "val: 1 empty and left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["retrieval"], "OpenNLPLab/lra"),
        (["listops", "--contour-length", "6"], "listops has no contours"),
        (["text", "--distractors-of", "6"], "text has no contours"),
        (["pathx", "--contour-length", "15"], "contour_length=15 must be"),
        (["pathx", "--examples", "1,2"], "must be three numbers"),
        (["pathx", "--examples", "1,0,2"], "at least 1"),
        (["pathx", "--seed", "-1"], "seed=-1"),
        (["pathx", "--workers", "0"], "n_threads=0"),
        (["pathx", "--source", "x", "--distractors-of", "6"], "was not released"),
        (["pathx", "--examples", "1,1,1", "--tsv"], "--tsv is for listops only, not for pathx"),
    ],
)
def test_errors_are_sentences(tmp_path, command, message):
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        main([*command, "--out", str(tmp_path)])
    assert not any(tmp_path.glob("*/manifest.json"))


def test_names_of_folders():
    assert Request(task="pathx").name == "pathx"
    assert Request(task="pathx", contour_length=6).name == "pathx-easy"
    assert Request(task="pathx", contour_length=3).name == "pathx-length3"
    assert Request(task="pathx", distractors_of=14).name == "pathx"
    assert Request(task="pathx", distractors_of=6).name == "pathx-distractors6"
    with pytest.raises(ValueError, match="task='path-x' must be one of listops"):
        Request(task="path-x")
