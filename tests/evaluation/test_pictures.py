"""Plots of an evaluation: differences from the first model, a few models per panel."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from evaluation.pictures import MODELS_PER_PANEL, _styles, by_bin, by_history
from evaluation.style import COLOURS, name_ends, styles_of

LABELS = [f"model {number}" for number in range(MODELS_PER_PANEL + 2)]


def row(label, history, nats, difference):
    return {
        "label": label, "history": history, "stride": 8, "document_mask": False,
        "nats": nats, "nats_interval": [nats - 1, nats + 1],
        "difference": difference and {"nats": difference, "interval": [-1, 1]},
    }  # fmt: skip


def cell(label, number, tokens, difference):
    return {
        "label": label, "bin": number, "tokens": tokens, "nats": 3.0, "interval": [2.0, 4.0],
        "difference": difference, "difference_interval": [difference - 1, difference + 1],
    }  # fmt: skip


def names(axes):
    return {text.get_text() for text in axes.texts}


def points(axes):
    """Y values of the lines with markers, by colour."""
    return {
        line.get_color(): np.ravel(line.get_ydata()).tolist()
        for line in axes.lines
        if line.get_marker() in "os^Dv<>" and len(np.ravel(line.get_xdata())) > 1
    }


def test_each_panel_shows_a_few_models():
    rows = [cell(label, b, 100, n / 10) for n, label in enumerate(LABELS) for b in (3, 4)]
    first, second = by_bin(rows, _styles(LABELS), x_label="x").axes
    assert names(first) == {*LABELS[1 : 1 + MODELS_PER_PANEL]}  # not the reference
    assert names(second) == {LABELS[-1]}
    assert [*points(first).values()] == [[n / 10] * 2 for n in range(1, MODELS_PER_PANEL + 1)]


def test_a_single_model_shows_its_loss():
    (axes,) = by_bin([cell("a", b, 100, 0.0) for b in (3, 4)], _styles(["a"]), x_label="x").axes
    assert list(points(axes).values()) == [[3.0, 3.0]]
    (axes,) = by_history([row("a", 64, 3.5, None)], _styles(["a"])).axes
    assert names(axes) == {"a"}


def test_rare_bins_are_left_out():
    rows = [cell(label, b, 10 ** (b + 2), 0.5) for label in "ab" for b in range(5)]
    (axes,) = by_bin(rows, _styles("ab"), x_label="x").axes
    assert [len(y) for y in points(axes).values()] == [
        3
    ]  # the second bin has only 0.09% of the tokens


def test_the_first_model_has_a_line_only_with_several_histories():
    rows = [row("a", 64, 3.5, None), row("b", 64, 3.5, 0.2), row("b", 128, 3.5, 0.1)]
    (axes,) = by_history(rows, _styles("ab")).axes
    assert names(axes) == {"b"} and list(points(axes).values()) == [[0.2, 0.1]]
    rows.insert(0, row("a", 32, 3.6, 0.3))
    (axes,) = by_history(rows, _styles("ab")).axes
    assert names(axes) == {"a", "b"}
    assert list(points(axes).values()) == [[0.3, 0], [0.2, 0.1]]


def test_every_panel_shows_all_histories():
    rows = [row("a", 64, 3.5, None), *(row(label, 256, 3.5, 0.2) for label in LABELS)]
    rows.append(row("last", 128, 3.5, 0.1))
    first, second = by_history(rows, _styles(["a", *LABELS, "last"])).axes
    assert first.get_xticks().tolist() == second.get_xticks().tolist() == [64, 128, 256]


def test_names_at_line_ends_do_not_overlap():
    axes = Figure().subplots()
    axes.set_ylim(0, 10)
    name_ends(axes, {"low": (1, "red"), "same": (5, "red"), "too": (5, "red")}, gap=0.1)
    heights = {text.get_text(): text.get_position()[1] for text in axes.texts}
    assert heights == pytest.approx({"low": 0.1, "same": 0.45, "too": 0.55})


def test_no_two_models_look_alike():
    looks = styles_of(map(str, range(4 * len(COLOURS))))
    assert len({tuple(look.values()) for look in looks.values()}) == 4 * len(COLOURS)
