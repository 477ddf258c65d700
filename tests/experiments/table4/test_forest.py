"""The differences between models, drawn: the numbers are those of the results."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.container import ErrorbarContainer
from matplotlib.text import Annotation

from experiments.table4 import forest
from experiments.table4.questions import PAIRS

RESULTS = Path("docs/results")


@pytest.fixture(scope="module")
def results():
    return [json.loads((RESULTS / f"table4_{b}.json").read_text()) for b in ("hours", "minutes")]


def texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_every_row_is_of_a_question():
    pairs = [pair for rows in forest.ROWS.values() for pair in rows.values()]
    assert len(set(pairs)) == len(pairs) and set(pairs) <= set(PAIRS)


def test_numbers_and_marks_are_those_of_the_results(results):
    axes = forest.draw(*results).axes[0]
    drawn = []
    for bars in axes.containers:
        assert isinstance(bars, ErrorbarContainer)
        mark, _, ends = bars.lines
        if ends:  # those of the legend have none
            drawn.append((*np.ravel(mark.get_xdata()), *ends[0].get_segments()[0][:, 0]))
    expected, far, written = [], [], texts(axes.figure)
    for pair in (pair for rows in forest.ROWS.values() for pair in rows.values()):
        for result in results:
            gap = forest.differences(result).get(pair)
            if gap is None:
                continue
            assert f"{gap['nats']:+.3f}" in written
            near = abs(gap["nats"]) <= forest.LIMIT
            (expected if near else far).append((gap["nats"], *gap["interval"]))
    assert drawn == [pytest.approx(row) for row in expected]
    assert len(expected) > 20
    # an arrow marks a distant value; its number is in the column
    arrows = [text for text in axes.texts if isinstance(text, Annotation)]
    assert [np.sign(arrow.xy[0]) for arrow in arrows] == [np.sign(nats) for nats, *_ in far]
    assert len(far) > 2


def test_untrained_models_have_no_row(results):
    larger, smaller = results
    (corpus,) = larger["comparisons"]
    rows = [r for r in larger["comparisons"][corpus] if r["label"] == "1k_then_4k"]
    few = {**larger, "comparisons": {corpus: rows}}
    written = texts(forest.draw(few, {**smaller, "comparisons": {corpus: rows[:1]}}))
    assert "1K model continued at 4K instead of 1K" in written
    assert forest.BUTTERFLY not in written
