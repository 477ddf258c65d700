"""The pictures of an evaluation show the numbers of its tables."""

import math

import numpy as np
import pytest
from matplotlib.colors import to_hex

from evaluation import pictures, style
from tests.evaluation.made_up_evaluation import CONTEXTS, LONG, SHORT, find


def styles():
    return {
        label: {"color": style.COLOURS[number], "marker": "o"}
        for number, label in enumerate(CONTEXTS)
    }


def test_picture_of_histories(result):
    rows = [row for row in result["strided"] if row["stride"] == 4 and not row["document_mask"]]
    loss, difference = pictures.by_history(rows, styles()).axes
    assert [tuple(axes.get_xticks()) for axes in (loss, difference)] == [(16, 64)] * 2
    for axes in (loss, difference):
        short, long = axes.containers
        assert [c.get_label() for c in (short, long)] == [SHORT, LONG]
        assert to_hex(long[0].get_color()) == style.COLOURS[1].lower()
    wanted = [find(rows, LONG, history) for history in (16, 64)]
    line, _, (bars,) = loss.containers[1]
    assert line.get_ydata() == pytest.approx([row["nats"] for row in wanted])
    ends = [segment[:, 1] for segment in bars.get_segments()]
    assert np.array(ends) == pytest.approx(np.array([row["nats_interval"] for row in wanted]))
    line, _, (bars,) = difference.containers[1]
    assert line.get_ydata() == pytest.approx([row["difference"]["nats"] for row in wanted])
    assert difference.containers[0][0].get_ydata() == [0.0]


def test_a_model_is_one_line_where_each_history_has_its_stride(result):
    stride = {16: 4, 64: 8}
    packed = [row for row in result["strided"] if not row["document_mask"]]
    rows = [row for row in packed if row["stride"] == stride[row["history"]]]
    loss, _ = pictures.by_history(rows, styles()).axes
    assert [(line.get_label(), len(line[0].get_xdata())) for line in loss.containers] == [
        (SHORT, 1), (LONG, 2)
    ]  # fmt: skip


def test_what_is_compared_with_nothing_is_not_drawn_at_zero(result):
    packed, masked = (
        [row for row in result["strided"] if row["stride"] == 4 and row["document_mask"] == masks]
        for masks in (False, True)
    )
    alone = {**find(masked, LONG, 64), "difference": None}  # no such row of the first model
    _, difference = pictures.by_history([*packed, alone], styles()).axes
    short, long, nothing = (container[0].get_ydata() for container in difference.containers)
    assert (len(short), len(long), len(nothing)) == (1, 2, 0)


def test_picture_of_positions(result):
    rows = result["chunk_position"]
    figure = pictures.by_bin(rows, styles(), "tokens")
    loss, difference = figure.axes
    for number, (label, context) in enumerate(CONTEXTS.items()):
        line = loss.lines[number]
        wanted = [row for row in rows if row["label"] == label]
        assert list(line.get_ydata()) == [row["nats"] for row in wanted]
        assert list(line.get_xdata())[1:] == [
            math.sqrt(2 ** (row["bin"] - 1) * (2 ** row["bin"] - 1)) for row in wanted[1:]
        ]
        assert line.get_xdata()[-1] < context
        assert to_hex(line.get_color()) == style.COLOURS[number].lower()
        gaps = [math.nan if row["difference"] is None else row["difference"] for row in wanted]
        np.testing.assert_array_equal(difference.lines[number].get_ydata(), gaps)
        assert len(loss.collections) == 2
    low, high = difference.get_ylim()
    known = [row["difference"] for row in rows if row["difference"] is not None]
    assert low < min(known) and high > 0 and len(known) < len(rows)
    assert loss.get_xscale() == "log" and loss.xaxis.get_transform().base == 2


def test_the_first_token_of_a_document_is_drawn_at_zero(result):
    loss, _ = pictures.by_bin(result["document_position"], styles(), "tokens").axes
    assert loss.lines[0].get_xdata()[:2] == pytest.approx([0.5, 1])
    assert [loss.xaxis.get_major_formatter()(x) for x in (0.5, 1, 512, 4096)] == [
        "0", "1", "512", "4K"
    ]  # fmt: skip


def test_no_two_models_look_alike():
    first, *looks = style.styles_of(str(number) for number in range(43)).values()
    assert len({(look["color"], look["marker"]) for look in looks}) == 42
    assert first["color"] not in {look["color"] for look in looks}
    assert list(style.styles_of("aba")) == ["a", "b"]
    # and not two of one colour by their markers alone, which are small
    assert len({(look["color"], look["linestyle"]) for look in looks[:24]}) == 24


@pytest.mark.parametrize(
    ("picture", "table"),
    [(pictures.by_history, "strided"), (pictures.by_bin, "document_position")],
)
def test_many_models_are_drawn_in_rows_of_panels(result, picture, table):
    packed = [r for r in result[table] if not r.get("document_mask")]
    first = [row for row in packed if row["label"] == SHORT]
    names = [f"model {number}" for number in range(8)]
    others = [{**r, "label": name} for name in names for r in packed if r["label"] == LONG]
    looks = style.styles_of([SHORT, *names])
    more = () if picture is pictures.by_history else ("tokens",)
    figure = picture([*first, *others], looks, *more)
    assert len(figure.axes) == 4
    for part, shown in zip(figure.subfigs, (names[:6], names[6:]), strict=True):
        (legend,) = part.legends
        drawn = dict.fromkeys(text.get_text().split(",")[0] for text in legend.get_texts())
        assert list(drawn) == [SHORT, *shown]
        colours = {to_hex(line.get_color()) for line in part.axes[0].lines}
        assert colours == {looks[name]["color"].lower() for name in drawn}
