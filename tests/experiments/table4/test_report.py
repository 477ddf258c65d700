"""The report of Table 4 on made-up runs; that of trained ones: test_reproduce_table4.py."""

import math

import pytest

from experiments.table4.report import curves, draw, markdown, rows


def made_up_run(label, tokens, hours, seed, before=None):
    evaluations = [
        {"step": 5, "tokens": tokens // 2, "gpu_hours": hours / 2, "val_loss": 3.0 + seed},
        {"step": 10, "tokens": tokens, "gpu_hours": hours, "val_loss": 2.0 + seed},
    ]
    return {
        "label": label, "tokens": tokens, "gpu_hours": hours, "tokens_per_s": 2.0,
        "evaluations": evaluations, "before": before,
    }  # fmt: skip


@pytest.fixture
def made_up_runs():
    """Two seeds of a model and of one that starts with its weights."""
    first = [made_up_run("first", 100, hours, seed) for seed, hours in ((1, 1.0), (2, 3.0))]
    second = [
        made_up_run("second", 30, hours, seed, first[seed - 1]["evaluations"][-1])
        for seed, hours in ((1, 0.25), (2, 0.5))
    ]
    return [*first, *second]


def test_curves_go_on_where_the_first_part_ends(made_up_runs):
    assert curves(made_up_runs) == {
        "first": [
            {"tokens": 50, "gpu_hours": 1.0, "val_loss": 4.5},
            {"tokens": 100, "gpu_hours": 2.0, "val_loss": 3.5},
        ],
        "second": [
            {"tokens": 100, "gpu_hours": 2.0, "val_loss": 3.5},
            {"tokens": 115, "gpu_hours": 2.0 + 0.375 / 2, "val_loss": 4.5},
            {"tokens": 130, "gpu_hours": 2.0 + 0.375, "val_loss": 3.5},
        ],
    }
    assert curves(made_up_runs[3:])["second"][:2] == [
        {"tokens": 100, "gpu_hours": 3.0, "val_loss": 4.0},
        {"tokens": 115, "gpu_hours": 3.25, "val_loss": 5.0},
    ]


def rows_of(runs):
    chunk = {"perplexity": 2.0, "nats": 0.7, "difference": {"nats": 0.03}}
    strided = {"perplexity": 1.9, "nats": 0.6, "difference": {"nats": 0.02}}
    strided |= {"tokens": 5, "stride": 16}
    labels = dict.fromkeys(run["label"] for run in runs)
    return rows(
        {
            "runs": runs,
            "as_trained_chunk": [{"label": label, **chunk} for label in labels],
            "as_trained": [{"label": label, **strided} for label in labels],
        }
    )


def test_first_parts_count_for_those_that_start_with_them(made_up_runs):
    cost = [(row["label"], row["tokens"], row["gpu_hours"]) for row in rows_of(made_up_runs)]
    assert cost == [("first", 100, 2.0), ("second", 130, 2.375)]
    # the first part's hours are those of the seeds that were extended, in the table or not
    (alone,) = rows_of(made_up_runs[3:])
    assert (alone["tokens"], alone["gpu_hours"]) == (130, 3.5)


def test_rows_take_each_model_as_it_was_trained():
    runs = [made_up_run("a", 10, hours, hours) for hours in (1, 3)]
    runs[1]["tokens_per_s"] = 3.0
    (row,) = rows_of(runs)
    assert (row["seeds"], row["tokens_per_s"], row["gpu_hours"]) == (2, 2.5, 2)
    assert (row["paper_perplexity"], row["paper_nats"]) == (2.0, 0.7)
    assert (row["perplexity"], row["nats"], row["scored_tokens"]) == (1.9, 0.6, 5)
    assert [row[name]["nats"] for name in ("paper_difference", "difference")] == [0.03, 0.02]
    runs[0]["tokens_per_s"] = None  # a run of few steps
    assert rows_of(runs)[0]["tokens_per_s"] is None


def row_of(label, seeds=1, paper_difference=None, difference=None):
    return {
        "label": label, "seeds": seeds, "tokens": 10, "gpu_hours": 2.0, "tokens_per_s": 2.0,
        "paper_perplexity": 2.0, "paper_difference": paper_difference,
        "perplexity": 1.9, "difference": difference,
    }  # fmt: skip


def markdown_of(*table):
    result = {"budget": "smoke", "paper": [], "runs": []}
    return markdown({**result, "rows": {"shards": list(table)}, "comparisons": {"shards": []}})


def test_a_run_of_one_step_has_no_time():
    untimed, timed = row_of("a") | {"gpu_hours": 0.0}, row_of("b")
    lines = markdown_of(untimed, timed).splitlines()
    cells = [line.split(" | ")[5] for line in lines if line.startswith(("| a |", "| b |"))]
    assert cells == ["-", "-"]


def test_costs_are_those_of_the_rows():
    first = row_of("a") | {"tokens": 118_000_000, "gpu_hours": 0.5, "tokens_per_s": 12_345.6}
    second = row_of("b", seeds=3) | {"tokens": 1_234_000_000, "gpu_hours": 1.25}
    lines = markdown_of(first, second).splitlines()
    cells = [line.split(" | ")[1:6] for line in lines if line.startswith(("| a |", "| b |"))]
    assert cells == [
        ["1", "118M", "12,346", "0.500", "1.00"],
        ["3", "1,234M", "2", "1.250", "2.50"],
    ]


def test_picture_of_what_training_took(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr("experiments.table4.report.save", lambda figure, _: figures.append(figure))
    points = [
        {"tokens": 1e6 * n, "gpu_hours": 0.5 * n, "val_loss": 4.0 - 0.1 * n} for n in (1, 2, 3)
    ]
    draw({"a": points, "b": [p | {"val_loss": 3.0} for p in points]}, (), tmp_path / "x.png")
    ((left, right),) = (figure.axes for figure in figures)
    for axes, x in ((left, [1.0, 2.0, 3.0]), (right, [0.5, 1.0, 1.5])):
        a, b = axes.get_lines()
        assert (a.get_label(), b.get_label()) == ("a", "b")
        assert a.get_xdata() == pytest.approx(x) and b.get_xdata() == pytest.approx(x)
        assert a.get_ydata() == pytest.approx([math.exp(p["val_loss"]) for p in points])
    low, high = left.get_ylim()
    assert low < math.exp(3.0) and math.exp(3.7) < high


def test_models_that_go_on_have_a_row_of_their_own(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr("experiments.table4.report.save", lambda figure, _: figures.append(figure))
    points = [{"tokens": 1e6 * n, "gpu_hours": 0.5 * n, "val_loss": 4.0} for n in (1, 2)]
    lower = [p | {"tokens": 2e6 + p["tokens"], "val_loss": 2.0} for p in points]
    draw({"a": points, "a_then_b": lower, "c": points}, {"a_then_b"}, tmp_path / "x.png")
    scratch, _, after, _ = figures[0].axes
    assert [line.get_label() for line in scratch.get_lines()] == ["a", "c"]
    assert [line.get_label() for line in after.get_lines()] == ["a_then_b"]
    assert scratch.get_ylim()[0] > after.get_ylim()[1]
    assert scratch.get_xlim()[1] < after.get_xlim()[0]
    looks = {
        (line.get_color(), line.get_marker(), line.get_linestyle())
        for axes in (scratch, after)
        for line in axes.get_lines()
    }
    assert len(looks) == 3


@pytest.mark.parametrize(
    ("shared", "words"),
    [
        ((2, 3), "documents and seeds."),
        ((1, 2), "documents and seeds, but over documents alone where one seed is compared: b."),
        ((1, 1), "documents alone, as all are compared over one seed."),
    ],
)
def test_what_intervals_count(shared, words):
    gaps = [{"nats": 0.1, "interval": [0.0, 0.2], "seeds": seeds} for seeds in shared]
    table = [row_of(label, 3, gap, gap) for label, gap in zip("abc", (None, *gaps), strict=True)]
    assert (
        f"nats a token, over the seeds that both models have, with 95% intervals over {words}\n"
        in markdown_of(*table)
    )


@pytest.mark.parametrize(
    ("difference", "cell"),
    [
        (None, ""),
        ({"nats": -0.031, "interval": [-0.035, -0.027]}, "-0.0310 (-0.0350 to -0.0270)"),
        ({"nats": 0.031, "interval": [None, None]}, "0.0310"),
        ({"nats": -0.031, "interval": [math.nan, math.nan]}, "-0.0310"),
    ],
)
def test_differences_with_and_without_an_interval(difference, cell):
    if difference is not None:
        difference = {**difference, "seeds": 1}
    text = markdown_of(row_of("a", paper_difference=difference))
    (line,) = [x for x in text.splitlines() if x.startswith("| a |")]
    assert [some.strip() for some in line.split("|")][8:11] == [cell, "1.90", ""]
