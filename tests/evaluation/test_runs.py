"""Labels and descriptions of runs. Settings are tested with the code that uses them."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.reader import to_yaml
from evaluation.runs import check_same_settings, describe, labels, mask_of, open_run
from model.config import ModelConfig
from model.mask_config import MaskConfig
from training.checkpoint.files import SUMS, write_sums
from training.config import RUN_CONFIG
from training.environment import ENVIRONMENTS, record_start
from training.language.config import load_config
from training.metrics import METRICS


def test_labels_group_seeds(opened, tmp_path):
    runs = [
        opened("small_seed1", "run.seed=1"),
        opened("small_seed22", "run.seed=22", "run.init_from=elsewhere"),
        opened("large_seeds", "model.n_layer=7"),
        opened("seed3", "model.n_layer=9"),
        opened("small_seed3", "run.seed=1", "run.init_from=elsewhere"),
        opened("small_1k", step=9),
    ]
    assert labels(runs) == ["small", "small", "large_seeds", "seed3", "small", "small_1k"]
    # seeds may differ in how they were trained, and in how their data is named
    data = tmp_path / "data"
    others = (f"data.path={os.path.relpath(data)}", "run.keep_last=5", "run.wandb=offline")
    runs = [opened("a_seed1", f"data.path={data}"), opened("a_seed2", "run.seed=2", *others)]
    assert labels(runs) == ["a", "a"]


@pytest.mark.parametrize(
    ("options", "step", "message"),
    [
        (
            ("run.seed=2", "optim.lr=1e-5"),
            3,
            "called a, .* run.seed: optim.lr is 1e-05 there and .*Rename",
        ),
        (("run.seed=2",), 4, r"a_seed2 is at step 4 and .*a_seed1 at step 3.*to the same step"),
        (("run.seed=1",), 3, r"a_seed2 and .*a_seed1 both have run.seed=1"),
    ],
)
def test_runs_that_are_not_seeds_of_one_model_are_refused(opened, options, step, message):
    runs = [opened("a_seed1", "run.seed=1"), opened("a_seed2", *options, step=step)]
    with pytest.raises(ValueError, match=message):
        labels([opened("b", "model.n_layer=9"), *runs])


def test_a_deleted_checkpoint_is_an_error(opened):
    run = opened("a")
    message = "step_00000003 was deleted while training continued .*=2"
    with pytest.raises(FileNotFoundError, match=message):
        _ = run.model


def test_model_settings_come_from_the_checkpoint(train, caplog):
    folder = train("run")
    weights = open_run(folder).model.state_dict()
    assert caplog.messages == []
    path = folder / RUN_CONFIG
    path.write_text(path.read_text().replace("n_layer: 2", "n_layer: 3"))
    run = open_run(folder)
    assert run.config.model.n_layer == 2
    assert run.model.state_dict().keys() == weights.keys()
    (said,) = caplog.messages
    assert said.startswith(f"{path} differs from the settings in {run.checkpoint}")
    assert said.endswith("model.n_layer is 3 there and 2 here")


def test_another_tokenizer_is_refused(train):
    folder = train("run")
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text())
    merges = spec["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]  # the same number of ids, with other meanings
    path.write_text(json.dumps(spec))
    with pytest.raises(ValueError, match=r"tokenizer.json is not the tokenizer .* checkpoint says"):
        open_run(folder)


@pytest.mark.parametrize("more", [[], [{"type": "ByteLevel"}]])
def test_a_decoder_that_changes_the_text_is_refused(train, more):
    folder = train("run")
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text())
    level = {"add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    replaces = {"type": "Replace", "pattern": {"String": "a"}, "content": "b"}
    decoders = [*(each | level for each in more), replaces]
    path.write_text(json.dumps(spec | {"decoder": {"type": "Sequence", "decoders": decoders}}))
    with pytest.raises(ValueError, match=r"tokenizer.json encodes text as bytes, but its decoder"):
        open_run(folder)


@pytest.mark.parametrize("change", ["has no tensor", "has an unexpected tensor"])
def test_extra_or_missing_weights_are_refused(train, change):
    folder = train("run")
    run = open_run(folder)
    path = run.checkpoint / "model.safetensors"
    weights = load_file(path)
    weights["more"] = weights.pop("tok_emb.weight") if change == "has no tensor" else torch.zeros(1)
    save_file(weights, path)
    (run.checkpoint / SUMS).unlink()
    write_sums(run.checkpoint)
    with pytest.raises(ValueError, match="is damaged.*model.safetensors has (no|an unexp)"):
        _ = open_run(folder).model


def test_seed_numbers(opened):
    assert opened("a_seed7", "run.seed=1007").seed_number == 7
    assert opened("a_seeds", "run.seed=3").seed_number == 3
    runs = [opened("a", "run.seed=2"), opened("a_seed2", "run.seed=1002")]
    with pytest.raises(ValueError, match=r"a_seed2 and .*a would both be seed 2 of a: rename the"):
        labels(runs)


def test_paths_may_differ_but_no_other_settings(tmp_path):
    def config(*overrides):
        return load_config(["configs/quickstart.yaml", *overrides])

    moved = [f"run.{name}=where/it/was/trained" for name in ("out_dir", "init_from")]
    (tmp_path / RUN_CONFIG).write_text(to_yaml(config("data.path=out/data/x", *moved)))
    data = f"data.path={Path('out/data/x').resolve()}"  # the same folder as an absolute path
    check_same_settings(tmp_path, config(data, "run.out_dir=here", "run.init_from=also/here"))
    check_same_settings(tmp_path, config(data))
    for setting, value in (
        ("data.document_mask", "True"), ("model.dropout", "0.1"), ("data.path", "'.*/y'")
    ):  # fmt: skip
        override = f"{setting}={'out/data/y' if 'path' in setting else value.lower()}"
        with pytest.raises(ValueError, match=rf"{setting} is .* there and {value} here"):
            check_same_settings(tmp_path, config(data, override))


def test_a_description_includes_the_cost_of_the_earlier_run(opened, tmp_path):
    def evaluated(folder, *records):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / METRICS).write_text("".join(json.dumps(record) + "\n" for record in records))

    last = {"step": 9, "tokens": 90, "gpu_hours": 0.5, "val_loss": 4.0}
    evaluated(tmp_path / "a", last | {"step": 5, "other": 1}, last | {"other": 2}, {"step": 9})
    evaluated(tmp_path / "far" / "away", last | {"tokens": 7})
    first = describe(opened("a", step=9))
    assert first["before"] is None
    assert first["evaluations"] == [last | {"step": 5}, last]
    assert describe(opened("a", step=8))["evaluations"] == [last | {"step": 5}]
    for origin in (tmp_path / "a", "where/it/was/trained/a"):  # both runs were moved
        assert describe(opened("b", f"run.init_from={origin}"))["before"] == last
    evaluated(tmp_path / "away", last | {"tokens": 8})  # next to the run, but not at its old path
    far = describe(opened("b", f"run.init_from={tmp_path / 'far' / 'away'}"))
    assert far["before"] == last | {"tokens": 7}
    for origin in ("nowhere", "gone/a"):  # the second has the name of the run itself
        assert describe(opened("a", f"run.init_from={origin}"))["before"] is None
    noted = opened("b", "run.init_from=nowhere")
    noted.folder.mkdir()
    record_start(noted.folder, 0, origin=tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    assert describe(noted)["before"] == last
    begun = json.loads((noted.folder / ENVIRONMENTS).read_text())
    begun[0]["before"] = None  # unknown, and not replaced by the cost of the run that is there now
    (noted.folder / ENVIRONMENTS).write_text(json.dumps(begun))
    evaluated(tmp_path / "nowhere", last)
    assert describe(noted)["before"] is None
    assert json.loads(json.dumps(first)) == first


@pytest.mark.parametrize(
    ("settings", "label"),
    [
        ({}, "dense"),
        ({"mask": MaskConfig(pattern="butterfly")}, "butterfly"),
        ({"window_size": 1024, "full_every": 4}, "window 1,024, 1 of 4 layers dense"),
    ],
    ids=["dense", "butterfly", "window"],
)
def test_mask_label(settings, label):
    assert mask_of(ModelConfig(vocab_size=256, **settings)) == label
