"""The picture of Path-X, of made-up runs."""

import numpy as np
import pytest
from matplotlib.patches import Rectangle

from experiments.pathx.report import CHANCE, PAPER, draw


def made_up_run(stage, seed, accuracy, attention="dense"):
    return {
        "stage": stage, "seed": seed, "attention": attention, "test_accuracy": accuracy,
        "size": 128, "test_interval": [accuracy - 1, accuracy + 2],
    }  # fmt: skip


def test_bars_are_next_to_those_of_the_paper():
    runs = [
        made_up_run("path64", 1, 70.0),  # a stage on the way, which the paper has no number of
        made_up_run("pathx", 1, 90.0),
        made_up_run("pathx", 2, 80.0),
        made_up_run("path256_butterfly", 1, 75.0, "butterfly"),
    ]
    (axes,) = draw({"paper": PAPER, "runs": runs}).axes
    bars = [bar for bar in axes.patches if isinstance(bar, Rectangle)]
    assert [CHANCE + bar.get_width() for bar in bars] == pytest.approx([90, 80, 75])
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "Path-X\npacked", "Path-256\nbutterfly"
    ]  # fmt: skip
    theirs = [np.ravel(line.get_xdata()) for line in axes.lines if line.get_linewidth() > 2]
    assert np.mean(theirs, axis=1).tolist() == [61.4, 63.1]


def test_the_best_guess_from_the_ends_is_dotted():
    baselines = {"accuracies": {"128": {"distance": 0.5, "both directions": 0.75}, "64": {"a": 1}}}
    (axes,) = draw({"paper": PAPER, "runs": [made_up_run("pathx", 1, 90.0)]}, baselines).axes
    dotted = [np.ravel(line.get_xdata()) for line in axes.lines if line.get_linestyle() == ":"]
    assert np.mean(dotted, axis=1).tolist() == [75]
