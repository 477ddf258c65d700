"""Pictures of rows: their numbers, and gaps where there are none."""

import numpy as np

from experiments.attention.cases import Case
from experiments.attention.pictures import draw_paper, draw_peers
from experiments.style import OURS
from tests.experiments.attention.conftest import made_up_rows

LENGTHS = (1024, 4096, 16_384)


def drawn(axes):
    """By colour, the points of the lines of a panel."""
    return {
        line.get_color(): list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for line in axes.lines
        if line.get_marker() == "o"
    }


def test_peers_are_lines_over_length():
    names = ["ours", "SDPA flash", "SDPA math"]
    cases = [Case(1, n, 2, 64, causal=causal) for causal in (True, False) for n in LENGTHS]
    rows = [row for case in cases for row in made_up_rows(case, names)]
    rows += made_up_rows(Case(1, 65_536, 2, 64), ["ours"])  # where no peer was measured
    figure = draw_peers(rows)
    assert [axes.get_title() for axes in figure.axes[:2]] == [
        "causal, head_dim 64", "full, head_dim 64"
    ]  # fmt: skip
    for axes in figure.axes:
        ours, flash, math = drawn(axes).values()
        assert drawn(axes)[OURS] == ours == [(n, 500) for n in LENGTHS]
        assert [n for n, _ in flash] == [1024, 16_384]  # it is wrong in between
        assert [n for n, _ in math] == [1024, 4096]
        assert [text.get_text() for text in axes.texts] == ["OOM"]
        assert np.ravel(axes.lines[-1].get_xdata()) == [16_384]


def test_the_line_of_what_ran_out_of_memory_says_so():
    rows = [
        {"variant": "plain", **row}
        for n in LENGTHS
        for row in made_up_rows(Case(1, n, 2, 64), ["standard", "ours"])
    ]
    for axes in draw_paper(rows).axes:
        assert {text.get_text() for text in axes.texts} == {
            "Papilio",
            "standard attention,\nthen OOM",
        }
