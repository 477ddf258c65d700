"""Differences over training tokens: the points of the results, and the curve through them."""

import json
import math
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from experiments.table4 import by_tokens
from experiments.table4.by_tokens import Point
from experiments.table4.questions import PAIRS

RESULTS = Path("docs/results")
LARGE, SMALL = 131_072, 32_768


@pytest.fixture(scope="module")
def results():
    return [json.loads((RESULTS / f"table4_{b}.json").read_text()) for b in ("minutes", "hours")]


def at(tokens, nats, half_width=0.01, batch_tokens=LARGE):
    return Point(tokens, nats, nats - half_width, nats + half_width, batch_tokens)


def result(budget, tokens, nats):
    """A result with the pair 4k, 1k."""
    difference = {"nats": nats, "interval": [nats - 0.01, nats + 0.01], "seeds": 1}
    return {
        "budget": budget,
        "rows": {"books": [{"label": "4k", "tokens": tokens}]},
        "comparisons": {"books": [{"label": "4k", "to_label": "1k", "strided": difference}]},
    }


def test_every_line_is_of_a_question():
    assert by_tokens.LINES.keys() <= {*PAIRS}


def test_points_are_those_of_the_results(results):
    (corpus,) = results[0]["comparisons"]
    assert by_tokens.points(results, ("1k_to_16k", "1k")) == []
    for pair in by_tokens.LINES.keys() - {("1k_to_16k", "1k")}:
        rows = [
            next(r for r in one["comparisons"][corpus] if (r["label"], r["to_label"]) == pair)
            for one in results
        ]
        found = by_tokens.points(results[::-1], pair)
        assert [point.tokens for point in found] == [117_964_800, 288_358_400]
        assert [point.batch_tokens for point in found] == [SMALL, LARGE]
        for point, row in zip(found, rows, strict=True):
            assert (point.nats, [point.low, point.high]) == (
                row["strided"]["nats"],
                row["strided"]["interval"],
            )


def test_the_table_has_steps_and_leaves_out_what_was_not_trained():
    *_, small, large = by_tokens.differences_table(
        result("minutes", 117_964_800, 0.12), result("hours", 288_358_400, 0.05)
    ).splitlines()
    assert small == "| 118M | 32,768 | 3,600 | 1 | 0.1200 (0.1100 to 0.1300) | - | - |"
    assert large == "| 288M | 131,072 | 2,200 | 1 | 0.0500 (0.0400 to 0.0600) | - | - |"


def test_a_curve_through_exact_points_crosses_zero_where_they_do():
    tokens = np.array([1e8, 3e8, 1e9, 2e9])
    falling = 0.25 * (tokens / 1e8) ** -1.5 - 0.05
    curve = by_tokens.fit([at(x, y, 1e-3) for x, y in zip(tokens, falling, strict=True)])
    assert curve.at(tokens)[0] == pytest.approx(falling, abs=1e-3)
    assert curve.crossing == pytest.approx(1e8 * 5 ** (1 / 1.5), rel=0.01)


def test_the_band_around_a_curve_is_as_wide_as_the_intervals_at_the_points():
    curve = by_tokens.fit([at(1e8, 0.2, 0.02), at(3e8, 0.05), at(1e9, -0.03, 0.005)])
    fitted, low, high = curve.at(np.array([1e8, 3e8, 1e9]))
    assert fitted == pytest.approx([0.2, 0.05, -0.03], abs=1e-3)
    assert (low < fitted).all() and (fitted < high).all()
    assert high - low == pytest.approx([0.04, 0.02, 0.01], rel=0.1)


def test_a_precise_point_counts_more_than_a_vague_one():
    vague, precise = (
        by_tokens.fit(
            [at(1e8, 0.0, wide), at(2e8, 0.0, wide), at(4e8, 0.0, wide), at(1e9, 0.1, last)]
        )
        for wide, last in ((1e-3, 1.0), (0.1, 1e-4))
    )
    end = np.array([1e9])
    assert vague.at(end)[0] == pytest.approx([0.0], abs=1e-3)
    assert precise.at(end)[0] == pytest.approx([0.1], abs=2e-3)


@pytest.mark.parametrize("nats", [(0.1, 0.2, 0.28), (0.2, 0.1, 0.09), (-0.1, 0.0, 0.05)])
def test_a_curve_that_does_not_fall_to_zero_never_crosses(nats):
    curve = by_tokens.fit([at(x, y, 1e-4) for x, y in zip((1e8, 3e8, 1e9), nats, strict=True)])
    assert curve.crossing == math.inf


def test_two_points_have_no_fit():
    assert by_tokens.fit([at(1e8, 0.1), at(1e9, 0.0)]) is None


def test_points_that_are_not_on_a_curve_have_no_fit():
    assert by_tokens.fit([at(1e8, 0.0), at(3e8, 0.1), at(1e9, 0.0)]) is None
    assert by_tokens.fit([at(1e8, 0.0), at(3e8, 0.015), at(1e9, 0.0)]) is not None


def test_only_points_of_the_largest_steps_are_fitted():
    large = [result("minutes_131k", 1e8, 0.2), result("hours", 3e8, 0.05)]
    billion = result("billion", 1e9, -0.03)
    names = [
        by_tokens.draw(*some).axes[0].get_legend_handles_labels()[1]
        for some in (
            [*large, billion],
            [*large, billion, result("minutes", 1e8, 9.0)],
            [*large, result("minutes", 1e8, 9.0)],
        )
    ]
    assert re.fullmatch(r"4K from scratch; the curve is zero at 5[67]\dM", names[0][0])
    assert names[1] == [*names[0], "32,768 tokens a step"]
    assert names[2][0] == "4K from scratch"


def test_a_crossing_beyond_the_points_is_called_extrapolated():
    slow = zip((1e8, 3e8, 1e9), (0.2, 0.13, 0.06), strict=True)
    line, *_ = (
        by_tokens.draw(*(result("hours", *point) for point in slow)).axes[0].get_legend().texts
    )
    assert "; extrapolated to zero at" in line.get_text()


def test_a_gain_has_no_crossing_to_tell():
    gains = [result("hours", tokens, -0.02) for tokens in (1e8, 3e8, 1e9)]
    assert by_tokens.draw(*gains).axes[0].get_legend_handles_labels()[1] == [
        "4K from scratch",
        "131,072 tokens a step",
    ]


def test_history_costs_are_those_of_the_evaluations():
    evaluations = {
        tokens: json.loads((RESULTS / f"evaluation_{b}/evaluation.json").read_text())
        for tokens, b in (("118M", "minutes"), ("288M", "hours"), ("1B", "billion"))
    }
    _, _, *lines = by_tokens.history_table(*evaluations.values()).splitlines()
    both = product(("1k_to_4k", "4k"), evaluations.items())
    for line, (label, (tokens, result)) in zip(lines, both, strict=True):
        model, *cells = line.strip("| ").split(" | ")
        assert model == label
        ours = [
            row
            for name in ("strided", "control", "key")
            for row in result[name]
            if row["label"] == label
        ]
        batch = f"{SMALL if tokens == '118M' else LARGE:,}"
        assert cells[:3] == [tokens, batch, str(len(ours[0]["nats_of_seeds"]))]
        full, short = (
            next(r for r in ours if r["history"] == history and r["control"] == "none")
            for history in (4096, 1024)
        )
        assert cells[3].split()[0] == f"{full['difference']['nats']:.4f}"
        assert float(cells[4].split()[0]) == pytest.approx(short["nats"] - full["nats"], abs=1e-4)
        assert cells[5].split()[0] == f"{short['difference']['nats']:.4f}"
        intact, *controls = (r for r in ours if r["control"] != "none")
        assert [float(cell.split()[0]) for cell in cells[6:8]] == [
            pytest.approx(r["nats"] - intact["nats"], abs=1e-4) for r in controls
        ]
        has_key = any(row["label"] == label for row in result["key"])
        short_key, full_key = ours[-2:] if has_key else (None, None)
        if full_key is None:
            assert cells[8:] == ["-", "-"]
        else:
            assert cells[8] == f"{full_key['perplexity']:.2f}"
            cost = short_key["nats"] - full_key["nats"]
            assert float(cells[9].split()[0]) == pytest.approx(cost, abs=1e-4)
