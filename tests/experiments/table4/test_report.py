"""The report of Table 4 on made-up runs; that of trained ones: test_reproduce_table4.py."""

import pytest

from experiments.table4.models import MODELS
from experiments.table4.questions import PAIRS
from experiments.table4.report import (
    comparisons_table,
    curves,
    differences_table,
    draw,
    draw_positions,
    markdown,
    models_on_shared_gpus,
    rows,
)


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


def test_curves_continue_where_the_first_part_ends(made_up_runs):
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
    (row,) = rows_of(runs)
    assert (row["seeds"], row["gpu_hours"]) == (2, 2)
    assert row["tokens_per_s"] == pytest.approx((10 / 3600 + 10 / 3 / 3600) / 2)
    assert (row["paper_perplexity"], row["paper_nats"]) == (2.0, 0.7)
    assert (row["perplexity"], row["nats"], row["scored_tokens"]) == (1.9, 0.6, 5)
    assert [row[name]["nats"] for name in ("paper_difference", "difference")] == [0.03, 0.02]
    runs[0]["tokens_per_s"] = None  # a run of few steps
    assert rows_of(runs)[0]["tokens_per_s"] is None


def test_times_are_those_of_the_seeds_on_their_own_gpu(made_up_runs):
    made_up_runs[1]["jobs_per_gpu"] = 2
    first, _ = rows_of(made_up_runs)
    assert (first["seeds"], first["shared_gpu"]) == (2, False)
    assert (first["gpu_hours"], first["tokens_per_s"]) == (1.0, 100 / 3600)
    assert curves(made_up_runs)["first"] == [
        {"tokens": 50, "gpu_hours": 0.5, "val_loss": 4.5},
        {"tokens": 100, "gpu_hours": 1.0, "val_loss": 3.5},
    ]


def test_a_model_shares_its_gpu_if_all_of_its_runs_did(made_up_runs):
    for run in made_up_runs[:2]:
        run["jobs_per_gpu"] = 2
    assert [row["shared_gpu"] for row in rows_of(made_up_runs)] == [True, False]
    hours = draw(curves(made_up_runs), {"second"}, models_on_shared_gpus(made_up_runs)).axes[1::2]
    assert [len(axes.lines) for axes in hours] == [0, 1]


def test_costs_are_those_of_the_rows():
    def row_of(label, **cost):
        return {
            "label": label, "seeds": 1, "paper_perplexity": 2.0, "paper_difference": None,
            "perplexity": 1.9, "difference": None, **cost,
        }  # fmt: skip

    def costs(*table):
        result = {"budget": "smoke", "paper": [], "runs": [], "comparisons": {"shards": []}}
        lines = markdown(result | {"rows": {"shards": table}}).splitlines()
        return [line.split(" | ")[2:6] for line in lines if line.startswith(("| a |", "| b |"))]

    first = row_of("a", tokens=118_000_000, gpu_hours=0.5, tokens_per_s=12_345.6)
    second = row_of("b", tokens=1_234_000_000, gpu_hours=1.25, tokens_per_s=2.0)
    assert costs(first, second) == [
        ["118M", "12,346", "0.500", "1.00"], ["1.23B", "2", "1.250", "2.50"]
    ]  # fmt: skip
    # runs that share a GPU have no times
    shared = {"shared_gpu": True}
    assert [c[1:] for c in costs(first, second | shared)] == [
        ["12,346", "0.500", "1.00"],
        ["-"] * 3,
    ]
    assert [c[1:] for c in costs(first | shared, second)] == [["-"] * 3, ["2", "1.250", "-"]]
    # a run of one step has no time
    assert [cells[-1] for cells in costs(first | {"gpu_hours": 0.0}, second)] == ["-", "-"]


def test_every_pair_is_of_two_models_and_is_asked_about_once():
    assert len(set(PAIRS)) == len(PAIRS)
    assert all(one != other and {one, other} <= set(MODELS) for one, other in PAIRS)


def bins(*means):
    return [
        {
            "bin": number,
            "tokens": 1 if number == 1 else 5000,
            "difference": mean,
            "difference_interval": [None, None] if number == 3 else [mean - 0.1, mean + 0.1],
        }
        for number, mean in enumerate(means)
    ]


def comparison(label, other, *means):
    chunk = {"nats": -0.04, "interval": [-0.05, -0.03]}
    strided = {"nats": -0.02, "interval": [None, None], "seeds": 3}
    start = {"range": "0 to 31", "nats": 0.01, "interval": [-0.01, 0.03]}
    rest = {"range": "32 and more", "nats": None, "interval": [None, None]}
    return {
        "label": label,
        "to_label": other,
        "chunk": chunk,
        "strided": strided,
        "parts": [start, rest],
        "document_position": bins(*means),
    }


def test_picture(tmp_path):
    path = tmp_path / "positions.png"
    rows = [
        comparison("4k", "1k", 0.1, 0.2, 0.3, 0.4),
        comparison("4k_butterfly", "4k", 0.1, 9.0, 0.3, 0.4),
        comparison("4k_documents", "4k", 0.1),
    ]
    draw_positions(rows, path)
    assert path.stat().st_size > 10_000
    draw_positions(rows[-1:], path)  # no two contexts: one of an earlier report would be stale
    assert not path.exists()


def test_comparisons_are_those_of_the_rows():
    rows = [comparison("4k", "1k", 0.0), comparison("4k_from_1k", "4k", 0.0)]
    first, second = comparisons_table(rows).splitlines()[2:]
    assert first.endswith(
        "| 4k | 1k | 3 | -0.0400 (-0.0500 to -0.0300) | -0.0200 | 0.0100 (-0.0100 to 0.0300) | - |"
    )
    assert "| 4k_from_1k | 4k | 3 |" in second


def test_differences_of_several_corpora_name_them():
    rows = [comparison("4k", "1k", 0.0)]
    plain = differences_table({"comparisons": {"books": rows}})
    assert plain == comparisons_table(rows)
    first, second = plain.splitlines()[0], plain.splitlines()[2]
    both = differences_table({"comparisons": {"books": rows, "laws": rows}}).splitlines()
    assert both[0] == f"| scored on {first}"
    assert both[2:] == [f"| books {second}", f"| laws {second}"]
