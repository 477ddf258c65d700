"""Which sets there are to make: those that the configurations read."""

from pathlib import Path

import pytest

from configs.reader import read_config
from data.lra.request import Request
from data.lra.store import MANIFEST
from experiments import example_sets
from experiments.example_sets import REQUESTS, prepare_sets
from experiments.lra.tasks import CONFIGS as LRA
from experiments.pathx.__main__ import CONFIGS as PATHX
from training.classification.config import ClassifyConfig


def test_the_sets_are_those_that_configurations_read():
    files = [*LRA.glob("pathfinder*.yaml"), *LRA.glob("listops*.yaml"), *PATHX.glob("*.yaml")]
    configs = [read_config(ClassifyConfig, [str(file)]) for file in files]
    read = {Path(path).name for config in configs for path in config.data.training_paths}
    assert read == {request.name for request in REQUESTS}
    assert len({request.name for request in REQUESTS}) == len(REQUESTS)


def test_only_what_is_missing_is_made(tmp_path, monkeypatch, capsys):
    examples = {"train": 4, "val": 2, "test": 2}
    request = Request(task="pathfinder32", contour_length=2, distractors_of=0, examples=examples)
    monkeypatch.setattr(example_sets, "REQUESTS", (request,))
    folder = tmp_path / "data" / request.name
    prepare_sets([str(folder), str(folder)])
    assert capsys.readouterr().out == f"{folder}: created\n"
    assert (folder / "manifest.json").exists()
    prepare_sets([str(folder)])
    assert capsys.readouterr().out == ""


def test_an_unknown_set_is_named_unless_it_is_there(tmp_path, capsys):
    dots = tmp_path / "dots"
    with pytest.raises(ValueError, match=r"dots is not prepared, .* pathx, pathx-length2"):
        prepare_sets([str(dots)])
    dots.mkdir()
    (dots / MANIFEST).write_text("{}")
    prepare_sets([str(dots)])
    prepare_sets([])
    assert capsys.readouterr().out == ""
