"""The whole command on tiny tasks, trained on a CPU."""

import json
from pathlib import Path

import pytest
import torch

import train
from configs.reader import read_config
from data.lra.curriculum import Curriculum
from experiments import reports
from experiments.classifier_runs import is_finished
from experiments.lra import __main__ as reproduce_lra
from experiments.lra.speed import WARM_UP, Contender
from experiments.lra.tasks import arguments_of
from model.classifier import Classifier
from tests.experiments.table4.tiny_sweep import FinishedProcess
from tests.experiments.tiny_lra import SPLITS, TINY, make_tasks
from training.checkpoint.folders import latest_checkpoint
from training.checkpoint.reader import Checkpoint
from training.classification.config import ClassifyConfig
from training.metrics import read_metrics


@pytest.fixture
def reproduce(monkeypatch, tmp_path):
    """Run the command with children in this process; returns the folders that they trained.

    Nothing is drawn, which test_lra_report.py does.
    """
    data, out, results = (tmp_path / name for name in ("data", "out", "results"))
    make_tasks(data)
    ran: list[str] = []

    def run_here(command, *_):
        assert command[1] == "train.py"
        config = read_config(ClassifyConfig, command[2:])
        ran.append(Path(config.run.out_dir).name)
        if "image_dense_seed2" in ran[-1:] and reproduce.broken:
            return FinishedProcess(1)
        train.main(command[2:])
        return FinishedProcess()

    monkeypatch.setattr("experiments.gpu_pool._start", run_here)
    monkeypatch.setattr(reports, "save", lambda *_: None)

    def reproduce(*options, overrides=TINY):
        ran.clear()
        folders = ["--data", data, "--out", out, "--results", results]
        reproduce_lra.main([*map(str, folders), *options, "--set", *overrides])
        return list(ran)

    reproduce.broken = False
    return reproduce


def test_trains_reports_and_resumes(reproduce, tmp_path, capsys):
    tasks = ["--tasks", "image", "retrieval", "listops", "--seeds", "1", "2"]
    tasks += ["--jobs-per-gpu", "1", "--attentions", "standard", "dense"]
    reproduce.broken = True
    with pytest.raises(SystemExit, match="1"):
        reproduce(*tasks)
    printed = capsys.readouterr().out
    assert "skipping retrieval" in printed
    assert "these runs failed: image_dense_seed2" in printed

    reproduce.broken = False
    assert reproduce(*tasks) == ["image_dense_seed2"]
    printed = capsys.readouterr().out
    assert "already finished: image_standard_seed1" in printed
    result = json.loads((tmp_path / "results" / "lra.json").read_text())
    assert [(r["task"], r["attention"]) for r in result["rows"]] == [
        (task, attention) for task in ("listops", "image") for attention in ("standard", "dense")
    ]
    for row in result["rows"]:
        assert (row["seeds"], row["test_examples"]) == ([1, 2], SPLITS["test"])
        assert (row["steps"], row["examples"], row["jobs_per_gpu"]) == (6, 48, [1, 1])
    for run in result["runs"]:
        folder = tmp_path / "out" / f"{run['task']}_{run['attention']}_seed{run['seed']}"
        last = read_metrics(folder)[-1]
        assert run["test_accuracy"] == 100 * last["test_accuracy"]
        assert run["curve"]["examples"] == [16, 32, 48]
    assert set(result["baselines"]["listops"]) == {"majority", "root", "root_digits"}

    # of other tasks, into the same report
    assert reproduce("--tasks", "pairs", "--attentions", "dense", "--seeds", "1") == [
        "pairs_dense_seed1"
    ]
    assert len(json.loads((tmp_path / "results" / "lra.json").read_text())["rows"]) == 5
    assert reproduce("--report-only") == []

    # a run whose folder is gone, from the report
    report = tmp_path / "results" / "lra.json"
    (tmp_path / "out" / "pairs_dense_seed1").rename(tmp_path / "away")
    assert reproduce("--report-only", "--add", str(report)) == []
    assert len(json.loads(report.read_text())["rows"]) == 5


def test_a_stopped_run_resumes(reproduce, tmp_path, monkeypatch):
    options = ["--tasks", "image", "--attentions", "dense", "--seeds", "1"]
    save = train.CheckpointSaver.save

    def stop(*args, **keywords):
        save(*args, **keywords)
        raise OSError("the machine is gone")

    with monkeypatch.context() as patch:
        patch.setattr(train.CheckpointSaver, "save", stop)
        with pytest.raises(ValueError, match="no finished run"):
            reproduce(*options)
    folder = tmp_path / "out" / "image_dense_seed1"
    checkpoint = latest_checkpoint(folder)
    assert checkpoint is not None and checkpoint.name.endswith("2") and not is_finished(folder)
    assert reproduce(*options) == ["image_dense_seed1"]
    assert is_finished(folder)
    starts = json.loads((tmp_path / "results" / "lra.json").read_text())["runs"][0]["starts"]
    assert [start["from_step"] for start in starts] == [0, 2]


def test_pretraining_comes_first_and_counts(reproduce, tmp_path):
    options = ["--recipe", "pretrained", "--tasks", "image", "--attentions", "dense"]
    overrides = [*TINY, "model.rotary=none", "model.local_start=0", "model.dropout=0"]
    runs = ["image_masked_dense_seed1", "image_pretrained_dense_seed1"]
    assert reproduce(*options, "--seeds", "1", overrides=overrides) == runs
    (row,) = json.loads((tmp_path / "results" / "lra_pretrained.json").read_text())["rows"]
    assert (row["examples"], row["examples_in_all"]) == (48, 96)

    (tmp_path / "out" / runs[0]).rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"image_masked_dense_seed1, which has no finished run"):
        reproduce("--recipe", "pretrained", "--report-only")


def test_impossible_options_are_refused_before_training(reproduce):
    with pytest.raises(ValueError, match="--jobs-per-gpu=0 must be at least 1"):
        reproduce("--tasks", "image", "--jobs-per-gpu", "0")
    with pytest.raises(FileNotFoundError, match="prepare_lra text"):
        reproduce("--tasks", "image", "text")
    with pytest.raises(SystemExit):
        reproduce("--tasks", "cifar")


@pytest.mark.slow
def test_children_of_its_own(tmp_path):
    """Nothing is patched: two runs at a time, each a process."""
    make_tasks(tmp_path, "image")
    folders = ["--data", tmp_path, "--out", tmp_path / "out", "--results", tmp_path / "results"]
    options = ["--tasks", "image", "--attentions", "standard", "dense", "--seeds", "1"]
    reproduce_lra.main(
        [*map(str, folders), *options, "--jobs-per-gpu", "2", "--set", *TINY]
    )  # fmt: skip
    rows = json.loads((tmp_path / "results" / "lra.json").read_text())["rows"]
    assert [row["attention"] for row in rows] == ["standard", "dense"]
    assert rows[0]["jobs_per_gpu"] == [2]
    assert (tmp_path / "out" / "image_dense_seed1.log").stat().st_size > 100


@pytest.mark.parametrize("task", ["image", "listops"])
def test_the_timed_model_is_the_trained_one(task, tmp_path):
    """experiments.lra.speed's steps leave the weights that train.py's leave."""
    make_tasks(tmp_path, task)
    arguments = [
        *arguments_of(task, "dense", tmp_path, overrides=TINY),
        *(f"run.out_dir={tmp_path / 'run'}", f"optim.max_steps={WARM_UP + 2}"),
        *("model.dropout=0", "model.attention_dropout=0", "optim.grad_clip=0.1"),
    ]
    train.main(arguments)
    config = read_config(ClassifyConfig, arguments)
    trained = Classifier(config.model)
    checkpoint = latest_checkpoint(tmp_path / "run")
    assert checkpoint is not None
    trained.load_state_dict(Checkpoint.open(checkpoint).weights())

    device = torch.device("cpu")
    curriculum = Curriculum(
        config.data, config.model.context_length, config.optim.batch_size,
        seed=config.run.seed, rank=0, world_size=1, device=device,
    )  # fmt: skip
    timed = Contender(config, curriculum, device)
    timed.prepare(captured=False)
    for _ in range(2):
        timed.step()
    for name, weight in timed.model.state_dict().items():
        torch.testing.assert_close(weight, trained.state_dict()[name], rtol=0, atol=0)
