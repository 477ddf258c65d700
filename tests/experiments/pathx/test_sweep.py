"""The stages of Path-X, with tiny images and models."""

import json
from pathlib import Path

import pytest

import train
from configs.reader import read_config, to_yaml
from data.lra.request import Request
from experiments import example_sets, reports
from experiments.pathx import __main__ as reproduce_pathx
from experiments.pathx import report
from experiments.pathx.__main__ import make_runs
from experiments.pathx.report import STAGES
from tests.experiments.table4.tiny_sweep import FinishedProcess
from training.classification.config import ClassifyConfig
from training.classification.scoring import read_best
from training.metrics import read_metrics

EXAMPLES = {"train": 24, "val": 8, "test": 10}
SETS = {
    "path64": Request(task="pathfinder32", contour_length=2, distractors_of=0, examples=EXAMPLES),
    "pathx": Request(task="pathfinder32", contour_length=3, distractors_of=0, examples=EXAMPLES),
}


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two stages on images of 32 x 32 pixels."""
    for stage, request in SETS.items():
        data = tmp_path / "data" / request.name
        (tmp_path / f"{stage}.yaml").write_text(
            f"""
task: classification
model: {{vocab_size: 256, n_classes: 2, context_length: 256, grid_width: 32, n_layer: 1,
        n_embd: 16, n_inner: 16, tokens: intensities, embedding: row_column, rotary: axial,
        pooling: mean_max}}
data: {{path: {data}, zeros: padding}}
optim: {{max_steps: 3, batch_size: 8, lr: 1.0e-3}}
run: {{out_dir: nowhere, eval_every: 2, save_every: 2, log_every: 1, device: cpu, compile: false,
      dtype: float32}}
"""
        )

    def train_here(command, *_):
        """Instead of a child, which would take seconds to start."""
        assert command[1] == "train.py"
        train.main(command[2:])
        return FinishedProcess()

    monkeypatch.setattr("experiments.gpu_pool._start", train_here)
    monkeypatch.setattr(reproduce_pathx, "CONFIGS", tmp_path)
    monkeypatch.setattr(example_sets, "REQUESTS", tuple(SETS.values()))
    return tmp_path


def test_stages_follow_one_another_and_are_reported(tiny: Path, capsys, monkeypatch):
    arguments = ["--stages", "pathx", "path64", "--out", str(tiny / "out")]
    arguments += ["--results", str(tiny / "results")]
    (tiny / "results").mkdir()
    baselines = {"accuracies": {"128": {"distance": 0.53}}}
    (tiny / "results" / "pathfinder_baselines.json").write_text(json.dumps(baselines))
    reproduce_pathx.main(arguments)
    first, second = (tiny / "out" / f"{stage}_seed1111" for stage in ("path64", "pathx"))
    config = read_config(ClassifyConfig, [str(second / "config.yaml")])
    assert config.run.init_from == str(first)
    assert read_best(second).keys() == read_best(first).keys()

    result = json.loads((tiny / "results" / "pathx.json").read_text())
    assert [run["stage"] for run in result["runs"]] == ["path64", "pathx"]
    for run, folder in zip(result["runs"], (first, second), strict=True):
        last = read_metrics(folder)[-1]
        assert run["test_accuracy"] == pytest.approx(100 * last["test_accuracy"])
        low, high = run["test_interval"]
        assert low < run["test_accuracy"] < high
        assert (run["examples"], run["examples_in_sets"], run["test_examples"]) == (24, 24, 10)
    text = (tiny / "results" / "pathx.md").read_text()
    assert "| distance | 53.0 |" in text
    assert (tiny / "results" / "pathx.png").stat().st_size > 10_000

    monkeypatch.setattr(reports, "save", lambda *_: None)  # drawn once is enough
    # again: nothing is trained, the report is the same
    capsys.readouterr()
    reproduce_pathx.main(arguments)
    assert "started" not in capsys.readouterr().out
    assert json.loads((tiny / "results" / "pathx.json").read_text())["runs"] == result["runs"]
    report.redraw(tiny / "results" / "pathx.json")
    assert (tiny / "results" / "pathx.md").read_text() == text

    # a stage whose folder is gone, from the report
    first.rename(tiny / "elsewhere")
    arguments += ["--report-only", "--add", str(tiny / "results" / "pathx.json")]
    reproduce_pathx.main(arguments)
    assert json.loads((tiny / "results" / "pathx.json").read_text())["runs"] == result["runs"]


def test_a_stage_needs_the_one_before(tiny: Path):
    with pytest.raises(ValueError, match=r"pathx starts from .* path64, .*Add path64 to --stages"):
        make_runs(["pathx"], [1], tiny / "out")


@pytest.mark.parametrize("key", ["run.seed", "run.out_dir", "run.init_from"])
def test_settings_that_follow_from_arguments_cannot_be_set(tiny: Path, key: str):
    with pytest.raises(ValueError, match=rf"{key} for each run. Use --"):
        make_runs(["path64"], [1], tiny / "out", [f"{key}=3"])


def test_a_folder_of_other_settings_is_refused(tiny: Path):
    (run,) = make_runs(["path64"], [1111], tiny / "out")
    run.folder.mkdir(parents=True)
    (run.folder / "config.yaml").write_text(to_yaml(run.config))
    with pytest.raises(ValueError, match=r"optim.lr is 0.001 there and 0.01 here"):
        make_runs(["path64"], [1111], tiny / "out", ["optim.lr=0.01"])


def test_nothing_to_report(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no finished stage"):
        report.write_report(tmp_path, tmp_path)


def test_the_stages_fit_together():
    """The configurations that come along: each continues the model before it."""
    runs = {run.folder.name: run for run in make_runs(list(STAGES), [1], Path("out/none"))}
    grows = {"context_length", "grid_width", "mask"}
    for stage, (_, before, _) in STAGES.items():
        if before is None:
            continue
        here, there = (vars(runs[f"{s}_seed1"].config.model) for s in (stage, before))
        assert {name for name in here if here[name] != there[name]} <= grows


def test_eight_gpus_share_every_batch():
    """As docs/lra.md says of --gpus-per-run 8."""
    for run in make_runs(list(STAGES), [1], Path("out/none")):
        config = run.config
        phases = [(phase.batch_size, len(phase.paths)) for phase in config.data.phases]
        for batch_size, n_sets in [*phases, (None, 1)]:
            assert (batch_size or config.optim.batch_size) % (8 * n_sets) == 0, run.folder
