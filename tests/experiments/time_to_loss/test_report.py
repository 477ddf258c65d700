"""Seconds to a loss are interpolated between runs, or bounded by the runs there are."""

import numpy as np
import pytest
from matplotlib.colors import to_hex

from experiments.style import OURS, PEERS
from experiments.time_to_loss.report import (
    Answer,
    answers_table,
    draw,
    runs_table,
    seconds_to,
    target,
)


def run(contender, seconds, val_loss):
    steps = 10 * seconds
    points = [(seconds / 2, val_loss + 1), (seconds, val_loss)]
    return {
        "contender": contender,
        "steps": steps,
        "tokens": 32_768 * steps,
        "seconds": float(seconds),
        "val_loss": val_loss,
        "curve": [{"seconds": s, "val_loss": loss} for s, loss in points],
    }


NANOGPT = run("nanogpt", 600, 3.5)
RUNS = [run("recipe", 400, 3.0), run("recipe", 100, 4.0), run("recipe", 1600, 2.9)]
RESULT = {"runs": [*RUNS, run("4k", 300, 3.75), NANOGPT]}


@pytest.mark.parametrize(
    ("loss", "seconds"),
    [(3.5, 200.0), (3.75, 100 * 2**0.5), (3.0, 400.0), (2.95, 800.0), (3.999999, 100.0)],
)
def test_seconds_between_two_runs_are_those_of_a_line_over_log_seconds(loss, seconds):
    answer = seconds_to(loss, RUNS)
    assert answer.bound == ""
    assert answer.seconds == pytest.approx(seconds, rel=1e-5)


def test_runs_on_one_side_bound_the_seconds():
    assert seconds_to(4.0, RUNS) == Answer(100.0, "at most")
    assert seconds_to(4.5, RUNS) == Answer(100.0, "at most")
    assert seconds_to(2.8, RUNS) == Answer(1600.0, "more than")
    assert seconds_to(3.5, RUNS[:1]) == Answer(400.0, "at most")
    assert seconds_to(3.5, RUNS[1:2]) == Answer(100.0, "more than")


def test_a_longer_run_that_missed_the_loss_does_not_bracket_it():
    runs = [run("4k", 100, 4.0), run("4k", 200, 3.4), run("4k", 400, 3.6)]
    answer = seconds_to(3.7, runs)
    assert answer.bound == "" and answer.seconds == pytest.approx(100 * 2**0.5)


def test_bounds_of_seconds_are_bounds_of_the_speedup():
    texts = [
        (answer.text(), answer.speedup(600))
        for answer in (Answer(200, ""), Answer(200, "at most"), Answer(200, "more than"))
    ]
    assert texts == [
        ("200 s", "3.00x"),
        ("at most 200 s", "at least 3.00x"),
        ("more than 200 s", "less than 3.00x"),
    ]


def test_tables_have_each_recipe_in_order():
    assert answers_table(RESULT).splitlines() == [
        "| recipe | training to a validation loss of 3.500 | speedup | runs: seconds (loss) |",
        "| --- | --- | --- | --- |",
        "| nanoGPT, cuDNN attention | 600 s | 1.00x | 600 (3.500) |",
        "| Papilio, GPT-2's recipe | more than 300 s | less than 2.00x | 300 (3.750) |",
        "| Papilio, modern recipe | 200 s | 3.00x | 100 (4.000), 400 (3.000), 1600 (2.900) |",
    ]
    lines = runs_table(RESULT).splitlines()
    assert lines[2] == "| nanoGPT, cuDNN attention | 6,000 | 197M | 600 s | 100.0 | 3.5000 |"
    assert [line.split(" | ")[1] for line in lines[3:]] == ["3,000", "1,000", "4,000", "16,000"]


def test_a_target_must_be_measured():
    with pytest.raises(ValueError, match="no run of nanoGPT.*Pass --nanogpt FOLDER"):
        target({"runs": RUNS})


def test_every_run_is_drawn_and_every_recipe_named_once():
    (axes,) = draw(RESULT).axes
    drawn = [np.ravel(line.get_xydata()).tolist() for line in axes.lines]
    *curves, goal = (n for n, points in enumerate(drawn) if len(points) == 4)
    colours = [to_hex(axes.lines[n].get_color()).upper() for n in curves]
    assert colours[0] == PEERS["nanoGPT, cuDNN"]
    assert colours[2:] == [OURS] * 3
    recipe = [drawn[n] for n in curves[2:]]
    assert recipe == [[50, 5.0, 100, 4.0], [200, 4.0, 400, 3.0], [800, 3.9, 1600, 2.9]]
    assert drawn[goal][1::2] == [3.5, 3.5]
    legend = axes.get_legend()
    assert legend and [text.get_text() for text in legend.get_texts()] == [
        "nanoGPT, cuDNN attention",
        "Papilio, GPT-2's recipe",
        "Papilio, modern recipe",
    ]
