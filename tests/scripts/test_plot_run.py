"""Curves of runs: labels and points, also with few or unusual records."""

import json
import math

import pytest

from configs.reader import to_yaml
from scripts import plot_run
from scripts.plot_run import draw_runs
from training.config import RUN_CONFIG
from training.language.config import load_config
from training.metrics import METRICS


@pytest.fixture
def write_run(tmp_path):
    """Create a run folder from (step, kind, loss, GPU-hours), with a million tokens per step."""

    def write(name, *rows):
        folder = tmp_path / name
        folder.mkdir()
        records = [
            {"step": step, "tokens": step * 10**6, kind: loss, "gpu_hours": hours}
            for step, kind, loss, hours in rows
        ]
        lines = [json.dumps({k: v for k, v in r.items() if v is not None}) for r in records]
        (folder / METRICS).write_text("".join(line + "\n" for line in lines))
        return folder

    return write


def curves(axes):
    """Points of each curve by label, with perplexity converted back to loss."""
    return {
        line.get_label(): [
            (x, round(math.log(y), 9)) for x, y in zip(*line.get_data(), strict=True)
        ]
        for line in axes.lines
    }


def test_both_losses_over_tokens_and_over_hours(write_run):
    one = write_run(
        "one",
        (1, "loss", 9.0, 0.1),
        (2, "loss", 4.0, 0.2),
        (2, "val_loss", 4.5, 0.2),
        (5, "loss", 3.0, 0.5),
        (5, "val_loss", 3.5, 0.5),
    )
    two = write_run("two", (7, "val_loss", 3.0, 0.25))
    tokens, hours = draw_runs([one, two]).axes[:2]
    assert curves(tokens) == {
        "one, training": [(1, 9.0), (2, 4.0), (5, 3.0)],
        "one, validation": [(2, 4.5), (5, 3.5)],
        "two, validation": [(7, 3.0)],
    }
    assert curves(hours) == {
        "one, training": [(0.1, 9.0), (0.2, 4.0), (0.5, 3.0)],
        "one, validation": [(0.2, 4.5), (0.5, 3.5)],
        "two, validation": [(0.25, 3.0)],
    }


def test_writes_the_picture(write_run, tmp_path):
    run = write_run("run", (1, "loss", 3.0, 0.1))
    plot_run.main([str(run)])
    plot_run.main([str(run), "--out", str(tmp_path / "other.png")])
    for picture in (run / "perplexity.png", tmp_path / "other.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_accuracies_of_a_classifier(tmp_path, write_run):
    run = tmp_path / "classifier"
    run.mkdir()
    records = [
        {"step": 5, "examples": 500, "loss": 2.0, "accuracy": 0.25, "gpu_hours": 0.5},
        {"step": 5, "examples": 500, "val_loss": 2.0, "val_accuracy": 0.5, "gpu_hours": 0.5},
    ]
    (run / METRICS).write_text("".join(json.dumps(record) + "\n" for record in records))
    left, right = draw_runs([run]).axes
    for axes, x in ((left, 0.5), (right, 0.5)):
        assert [line.get_xydata().tolist() for line in axes.lines] == [[[x, 25]], [[x, 50]]]
    assert left.get_ylabel() == "accuracy, %" and left.get_yscale() == "linear"
    plot_run.main([str(run)])
    assert (run / "accuracy.png").exists()
    with pytest.raises(ValueError, match=r"classifier: run\(s\) of classifiers, and others"):
        draw_runs([write_run("gpt", (1, "loss", 3.0, 0.1)), run])


def test_a_folder_without_records_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no records in metrics.jsonl"):
        draw_runs([tmp_path])


def test_a_continued_run_begins_where_the_first_ends(write_run, tmp_path):
    first = write_run("first", (1, "val_loss", 4.0, 0.1), (3, "val_loss", 3.5, 0.25))
    then = write_run("then", (1, "loss", 3.25, 0.5), (2, "val_loss", 3.0, 0.75))
    imported = write_run("imported", (1, "val_loss", 3.75, 0.125))
    for folder, origin in ((then, first), (imported, tmp_path / "weights_of_somebody")):
        config = load_config(["configs/quickstart.yaml", f"run.init_from={origin}"])
        (folder / RUN_CONFIG).write_text(to_yaml(config))
    tokens, hours = draw_runs([first, then, imported]).axes[:2]
    assert curves(tokens) == {
        "first, validation": [(1, 4.0), (3, 3.5)],
        "then, training": [(4, 3.25)],
        "then, validation": [(3, 3.5), (5, 3.0)],
        "imported (without the cost of its initial weights), validation": [(1, 3.75)],
    }
    assert curves(hours)["then, training"] == [(0.75, 3.25)]
    assert curves(hours)["then, validation"] == [(0.25, 3.5), (1.0, 3.0)]
