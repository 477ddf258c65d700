"""The pictures of training steps, of made-up results."""

import numpy as np

from experiments.style import OURS, PEERS
from experiments.train_steps.tables import draw_losses, draw_speed, parts_table


def made_up_row(context_length, name, tokens_per_s):
    return {
        "size": "small",
        "context_length": context_length,
        "name": name,
        "tokens_per_s": tokens_per_s,
    }


def test_speeds_are_reported_next_to_nanogpts():
    rows = [made_up_row(n, "ours", 300_000) for n in (1024, 4096)]
    rows.append(made_up_row(4096, "nanoGPT, cuDNN", 240_000))
    alone, compared = draw_speed({"rows": rows}).axes
    assert [text.get_text() for text in alone.texts] == ["300"]
    assert [text.get_text() for text in compared.texts] == ["300, 1.25x", "240, 1.00x"]
    colours = [patch.get_facecolor() for patch in compared.patches]
    assert colours[0] != colours[1]


def test_parts_are_of_the_model_that_nanogpt_has_where_it_was_measured():
    names = ["ours", "ours, no biases", "nanoGPT, flash", "nanoGPT, cuDNN"]
    parts = {"attention": {"ms": 7.0, "launches": 36}}
    rows = [made_up_row(1024, name, 1) | {"step_s": 0.1, "parts": parts} for name in names]
    for left, ours in ((rows, "Papilio, no biases"), ([rows[0], rows[3]], "Papilio")):
        header, *_ = parts_table({"rows": left}).splitlines()
        assert header == f"| part (ms, kernel launches) | {ours}, 1,024 | nanoGPT, cuDNN, 1,024 |"


def test_distances_are_from_the_mean_of_pytorchs_runs():
    losses = {"ours 1": (5, 3), "sdpa 1": (4, 2), "sdpa 2": (6, 2)}
    runs = {name: {"curve": [[100, a], [200, b]]} for name, (a, b) in losses.items()}
    _, distances = draw_losses({"runs": runs}, "tiny").axes
    drawn = [(line.get_color(), np.ravel(line.get_ydata()).tolist()) for line in distances.lines]
    flash = PEERS["SDPA flash"]
    assert drawn[:3] == [(OURS, [0, 1]), (flash, [-1, 0]), (flash, [1, 0])]
    legend = distances.get_legend()
    assert legend and [text.get_text() for text in legend.get_texts()] == [
        "Papilio",
        "PyTorch SDPA",
    ]
