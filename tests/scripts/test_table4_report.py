"""The report of Table 4 on made-up runs; that of trained ones: test_reproduce_table4.py."""

import json
import math

import pytest

from scripts import table4_plan
from scripts.table4_models import Model
from scripts.table4_report import curves, markdown, rows, with_first_parts
from training.metrics import METRICS


@pytest.fixture
def made_up_runs(monkeypatch, tmp_path):
    """Two seeds of a model and of one that starts with its weights: {folder: model}."""
    models = {"first": Model(context="1k"), "second": Model(context="4k", starts_from="first")}
    monkeypatch.setattr(table4_plan, "MODELS", models)
    runs = {}
    for model, tokens, hours in (("first", 100, (1.0, 3.0)), ("second", 30, (0.25, 0.5))):
        for seed, whole in enumerate(hours, start=1):
            folder = tmp_path / f"{model}_seed{seed}"
            folder.mkdir()
            records = [
                {"step": 5, "tokens": tokens // 2, "gpu_hours": whole / 2, "val_loss": 3.0 + seed},
                {"step": 8, "tokens": tokens - 1, "gpu_hours": whole, "loss": 9.0},
                {"step": 10, "tokens": tokens, "gpu_hours": whole, "val_loss": 2.0 + seed},
            ]
            (folder / METRICS).write_text("".join(json.dumps(r) + "\n" for r in records))
            runs[folder] = model
    return runs


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
    one = {folder: model for folder, model in made_up_runs.items() if folder.name == "second_seed2"}
    assert curves(one)["second"][:2] == [
        {"tokens": 100, "gpu_hours": 3.0, "val_loss": 4.0},
        {"tokens": 115, "gpu_hours": 3.25, "val_loss": 5.0},
    ]


def test_first_parts_count_for_those_that_start_with_them(made_up_runs):
    first = {"label": "first", "tokens": 100, "gpu_hours": 2.0, "nats": 1.0}
    second = {"label": "second", "tokens": 30, "gpu_hours": 0.375, "nats": 0.9}
    summed = second | {"tokens": 130, "gpu_hours": 2.375}
    assert with_first_parts([first, second], made_up_runs) == [first, summed]
    # the first part's hours are those of the seeds that were extended, in the table or not
    one = {folder: model for folder, model in made_up_runs.items() if folder.name == "second_seed2"}
    assert with_first_parts([second], one) == [second | {"tokens": 130, "gpu_hours": 3.375}]


def test_rows_take_each_model_as_it_was_trained():
    chunk = {"perplexity": 2.0, "nats": 0.7, "difference": None}
    strided = {"perplexity": 1.9, "nats": 0.6, "difference": None, "tokens": 5, "stride": 16}
    runs = [
        {"label": "a", "tokens": 10, "gpu_hours": hours, "tokens_per_s": 2.0} for hours in (1, 3)
    ]
    (row,) = rows(
        {
            "runs": runs,
            "as_trained_chunk": [{"label": "a", **chunk}],
            "as_trained": [{"label": "a", **strided}],
        }
    )
    assert (row["gpu_hours"], row["paper_perplexity"], row["perplexity"]) == (2, 2.0, 1.9)


def row_of(label, seeds=1, paper_difference=None, difference=None):
    return {
        "label": label, "seeds": seeds, "tokens": 10, "gpu_hours": 2.0, "tokens_per_s": 2.0,
        "paper_perplexity": 2.0, "paper_difference": paper_difference,
        "perplexity": 1.9, "difference": difference,
    }  # fmt: skip


def markdown_of(*table):
    result = {"budget": "smoke", "paper": [], "runs": []}
    return markdown({**result, "rows": {"shards": list(table)}, "comparisons": {"shards": []}})


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
