"""What is told of runs, found here or told of before."""

import json

import pytest

from experiments.lra.jobs import make_jobs
from experiments.lra.runs import (
    JOBS_PER_GPU,
    changes_of,
    finished_runs,
    note_sharing,
    padding_of,
    positions_of,
    with_others,
)
from tests.experiments.lra.made_up_lra import make_up


def test_seeds_must_be_of_one_model(tmp_path):
    make_up(tmp_path, "text", "dense", 1, 0.4)
    make_up(tmp_path, "text", "dense", 2, 0.4, overrides=["optim.lr=0.1"])
    with pytest.raises(ValueError, match=r"text_dense_seed2 .*optim.lr is 0.1 there and 0.0001"):
        finished_runs(tmp_path, "paper")


@pytest.fixture
def report(tmp_path):
    """Of another machine, which has runs that `tmp_path` has and others."""
    there = tmp_path / "there"
    for task, seed in (("listops", 2), ("image", 1), ("image", 2)):
        make_up(there, task, "dense", seed, 0.3)
    path = tmp_path / "lra.json"
    path.write_text(json.dumps({"recipe": "paper", "runs": finished_runs(there, "paper")}))
    return path


def test_runs_of_other_reports_are_added(tmp_path, report):
    for task, seed in (("image", 3), ("image", 2), ("pathfinder", 1)):
        make_up(tmp_path, task, "dense", seed, 0.5)
    here = finished_runs(tmp_path, "paper")
    assert with_others(here, [], "paper") == here
    every = with_others(here, [report], "paper")
    assert [(run["task"], run["seed"], run["test_accuracy"]) for run in every] == [
        ("listops", 2, 30), ("image", 1, 30), ("image", 2, 50), ("image", 3, 50),
        ("pathfinder", 1, 50),
    ]  # fmt: skip
    assert with_others([], [report], "paper") == json.loads(report.read_text())["runs"]


def test_refuses_reports_on_other_runs(tmp_path, report):
    make_up(tmp_path, "image", "dense", 3, 0.5, overrides=["optim.lr=0.1"])
    with pytest.raises(ValueError, match=r"image with dense .* seed 3 has lr=0.1, and seed 1 0.00"):
        with_others(finished_runs(tmp_path, "paper"), [report], "paper")
    with pytest.raises(ValueError, match=r"lra.json: it is of the recipe paper, .* of rotary"):
        with_others([], [report], "rotary")


def test_sharing_keeps_the_most(tmp_path):
    for n, kept in ((2, "2\n"), (3, "3\n"), (1, "3\n")):
        note_sharing(tmp_path / "run", n)
        assert (tmp_path / "run" / JOBS_PER_GPU).read_text() == kept


@pytest.mark.parametrize(
    ("task", "overrides", "positions", "padding"),
    [
        ("listops", [], "learned", "after the text, hidden"),
        ("image", [], "learned", "none, black pixels are tokens"),
        ("image", ["data.zeros=padding", "model.embedding=row_column", "model.rotary=axial"],
         "waves of row and column, rotary by row and column", "black pixels, left out"),
        ("text", ["model.embedding=none", "model.rotary=sequence"], "rotary",
         "after the text, hidden"),
        ("text", ["model.embedding=none", "model.rotary=sequence", "model.local_start=36"],
         "rotary, heads that begin at a neighbour, by 36", "after the text, hidden"),
        ("text", ["model.embedding=none"], "none", "after the text, hidden"),
    ],
)  # fmt: skip
def test_positions_and_padding_in_words(tmp_path, task, overrides, positions, padding):
    (job,) = make_jobs([task], ["dense"], [1], data=tmp_path, out=tmp_path, overrides=overrides)
    assert (positions_of(job.config), padding_of(job.config)) == (positions, padding)


@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        ([], "as they are"),
        (["data.augment=mirror", "data.shift=4"], "mirrored, moved by up to 4"),
        (["data.augment=dihedral",
          "data.phases=[{paths: [a], steps: 1200}, {paths: [b], steps: 300}]"],
         "turned and mirrored, after 1,500 steps on other sets"),
    ],
)  # fmt: skip
def test_changes_in_words(tmp_path, overrides, changes):
    overrides = ["data.augment=none", "data.shift=0", "data.phases=[]", *overrides]
    (job,) = make_jobs(["image"], ["dense"], [1], data=tmp_path, out=tmp_path, overrides=overrides)
    assert changes_of(job.config) == changes


def test_changes_name_the_steps_on_hidden_tokens(tmp_path):
    options = {"data": tmp_path, "out": tmp_path, "recipe": "pretrained"}
    hidden, labels = make_jobs(["text"], ["dense"], [1], **options)
    assert hidden.config.optim.lr != labels.config.optim.lr
    changes = changes_of(labels.config, hidden.config)
    assert changes == "after 8,000 steps on hidden tokens at a learning rate of 0.0005"
