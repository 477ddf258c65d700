"""The effects of the recipe's parts, computed from a made-up result of the sweep."""

import math

import pytest

from experiments.recipe import (
    BASE,
    count_parameters,
    draw,
    effects,
    loss_per_log_tokens,
    overview,
    parts_table,
)
from experiments.table4.models import MODELS
from experiments.table4.parts import CANDIDATES, NAMES, PAIRS_OF_PARTS, PARTS
from experiments.table4.questions import PAIRS

SECONDS = {
    "recipe": 2.0,
    "recipe_without_windows": 2.2,
    "recipe_with_untied_head": 2.4,
}
PARAMETERS = dict.fromkeys(MODELS, 100) | {"recipe_with_untied_head": 5_000_100}


def row(label, tokens=100e6):
    return {"label": label, "tokens": tokens}


def gap(label, other, nats, seeds=1, half_width=None):
    difference = {
        "nats": nats,
        "interval_of_documents": [nats - 0.01, nats + 0.01],
        "seeds": seeds,
        "half_width_of_seeds": half_width,
    }
    return {"label": label, "to_label": other, "strided": difference}


@pytest.fixture
def result():
    """Windows save a tenth of the time and cost 0.02; an untied head costs time and gains 0.03."""
    return {
        "rows": {
            "text": [
                row("recipe"),
                row("recipe_same_time", tokens=200e6),
                row("recipe_without_windows"),
                row("recipe_with_untied_head"),
            ]
        },
        "comparisons": {
            "text": [
                gap("recipe_same_time", "recipe", -0.2 * math.log(2)),
                gap("recipe", "recipe_without_windows", 0.02),
                gap("recipe_with_untied_head", "recipe", -0.03),
            ]
        },
        "runs": [],
    }


def test_tables_count_as_parameters():
    counts = count_parameters(["recipe", "recipe_with_untied_head", "recipe_with_higher_lr"])
    assert counts["recipe_with_untied_head"] - counts["recipe"] >= 50_257 * 768
    assert counts["recipe_with_higher_lr"] == counts["recipe"]


def test_a_slower_part_leaves_fewer_tokens_in_equal_time(result):
    assert loss_per_log_tokens(result) == pytest.approx(0.2)
    windows, head = effects(result, SECONDS, PARAMETERS)
    assert windows["part"] == PARTS["windows"].title and windows["in_recipe"]
    assert windows["time"] == pytest.approx(1 / 1.1)
    assert windows["same_time"]["nats"] == pytest.approx(0.02 - 0.2 * math.log(1.1))
    assert head["part"] == CANDIDATES["untied_head"].title and not head["in_recipe"]
    shift = 0.2 * math.log(1.2)
    assert head["same_time"]["nats"] == pytest.approx(-0.03 + shift)
    assert head["same_time"]["interval"] == pytest.approx([-0.04 + shift, -0.02 + shift])
    assert head["parameters"] == 5_000_000


def test_a_single_seed_varies_as_the_comparisons_with_several(result):
    gaps = result["comparisons"]["text"]
    gaps[1] = gap("recipe", "recipe_without_windows", 0.02, seeds=3, half_width=0.02)
    windows, head = effects(result, SECONDS, PARAMETERS)
    for effect, half_width in ((windows, 0.02), (head, 0.02 * 3**0.5)):
        low, high = effect["tokens"]["interval"]
        assert (high - low) / 2 == pytest.approx(math.hypot(0.01, half_width))
    # other pairs say nothing about these
    gaps += [gap("4k_same_lr", "4k", 1.0, seeds=3, half_width=5.0)]
    assert effects(result, SECONDS, PARAMETERS)[1]["tokens"] == head["tokens"]


def test_too_few_documents_leave_no_interval(result):
    result["comparisons"]["text"][1]["strided"]["interval_of_documents"] = [None, None]
    windows, _ = found = effects(result, SECONDS, PARAMETERS)
    assert all(map(math.isnan, windows["same_time"]["interval"]))
    assert "| 1 | 0.0200 | 0.909 |" in parts_table({"effects": found})
    draw({"effects": found})


def test_table_and_picture_have_every_part(result):
    table = parts_table({"effects": effects(result, SECONDS, PARAMETERS)})
    assert "| windows in three of four layers | yes | 1 | 0.0200 (" in table
    assert "| no | 1 | -0.0300 (-0.0400 to -0.0200) | 1.200 | 0.0065 (" in table
    assert table.rstrip().endswith("| +5.0M |")
    drawn = [
        text.get_text()
        for text in draw({"effects": effects(result, SECONDS, PARAMETERS)}).axes[0].texts
    ]
    assert {"Parts of the recipe", "Candidates", "+0.020", "-0.030", "+0.006"} <= {*drawn}


@pytest.mark.parametrize("missing", ["run", "difference"])
def test_equal_time_is_unknown_without_a_longer_run(result, missing):
    if missing == "run":
        del result["comparisons"]["text"][0]
    else:
        result["rows"]["text"][1]["tokens"] = 100e6
    assert [effect["same_time"] for effect in effects(result, SECONDS, PARAMETERS)] == [None, None]
    assert "| 1.200 | - |" in parts_table({"effects": effects(result, SECONDS, PARAMETERS)})
    draw({"effects": effects(result, SECONDS, PARAMETERS)})


def test_equal_time_is_unknown_where_no_time_was_measured(result):
    windows, head = effects(result, {"recipe": 2.0, "recipe_without_windows": 2.2}, PARAMETERS)
    assert windows["time"] is not None
    assert (head["time"], head["same_time"]) == (None, None)
    assert "| -0.0300 (-0.0400 to -0.0200) | - | - |" in parts_table({"effects": [head]})


def test_a_part_of_the_same_steps_needs_no_time(result):
    gaps = result["comparisons"]["text"]
    gaps.append(gap("recipe_with_higher_lr", "recipe", -0.01))
    (higher_lr,) = (
        e for e in effects(result, {}, PARAMETERS) if e["part"] == CANDIDATES["higher_lr"].title
    )
    assert higher_lr["time"] == 1.0
    assert higher_lr["same_time"]["nats"] == pytest.approx(-0.01)


def test_overview_has_the_recipe_and_no_part(result):
    whole = overview(result)
    assert [row["label"] for row in whole["rows"]["text"]] == ["recipe", "recipe_same_time"]
    (kept,) = whole["comparisons"]["text"]
    assert (kept["label"], kept["to_label"]) == ("recipe_same_time", "recipe")
    assert whole["runs"] == result["runs"]


def test_every_part_is_a_model_and_a_pair():
    assert {*NAMES} == {*PARTS, *CANDIDATES}
    assert {*BASE, *NAMES.values()} <= {*MODELS}
    assert {*PAIRS_OF_PARTS} <= {*PAIRS}
    assert len({part.title for part in [*PARTS.values(), *CANDIDATES.values()]}) == len(NAMES)
