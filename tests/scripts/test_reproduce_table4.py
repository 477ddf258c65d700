"""The whole of Table 4 on tiny models: trained, scored, reported, and not done twice."""

import json
import math

import pytest

from configs import load_config
from scripts import gpu_pool, reproduce_table4, table4_plan
from scripts.table4_plan import BUDGETS, Budget, Model
from scripts.table4_report import markdown, rows
from training.metrics import read_metrics

TINY = (
    "model.n_layer=1", "model.n_head=2", "model.n_embd=16", "model.positions=rotary",
    "model.dropout=0", "model.attention_dropout=0", "optim.lr=1e-2",
    "run.device=cpu", "run.dtype=float32", "run.compile=false",
)  # fmt: skip
SHORT, LONG = ("model.context_length=32",), ("model.context_length=64",)
BUTTERFLY = ("model.mask.pattern=butterfly", "model.mask.block_size=16")


@pytest.fixture
def tiny(monkeypatch, corpus, tmp_path):
    """Models of 32 and 64 tokens, in this process; returns a function that runs the command."""
    models = {
        "short": Model(context="1k", overrides=SHORT),
        "long": Model(context="4k", overrides=LONG),
        "long_butterfly": Model(context="4k", overrides=(*LONG, *BUTTERFLY)),
        "long_from_short": Model(
            context="4k", overrides=LONG, starts_from="short", same_time_as="long"
        ),
        "short_documents": Model(context="1k", overrides=(*SHORT, "data.document_mask=true")),
    }
    budget = Budget(steps=20, batch_tokens=256, seeds=2, overrides=TINY)
    for module in (table4_plan, reproduce_table4):
        monkeypatch.setattr(module, "MODELS", models)
    monkeypatch.setitem(BUDGETS, "smoke", budget)
    ran = []

    def run_here(command, *_):
        """Instead of a child, which would take seconds to start."""
        from scripts import evaluate
        from train import main

        ran.append(command[1:])
        program, *arguments = command[1:]
        if program == "train.py":
            main(arguments)
        else:
            assert arguments[0] == "scripts.evaluate"
            evaluate.main([*arguments[1:], "--device", "cpu"])
        return FinishedProcess()

    monkeypatch.setattr("scripts.gpu_pool._start", run_here)

    def reproduce(*options):
        ran.clear()
        out = tmp_path / "out"
        reproduce_table4.main(
            ["--data", str(corpus), "--budget", "smoke", "--out", str(out), "--stride", "16",
             *options]
        )  # fmt: skip
        return out, list(ran)

    return reproduce


class FinishedProcess:
    def wait(self):
        return 0


def test_trains_scores_and_reports_once(tiny, corpus):
    names = ["short", "long_from_short", "long_butterfly", "short_documents"]
    out, ran = tiny("--models", *names)
    trained = [command for command in ran if command[0] == "train.py"]
    assert len(trained) == 2 * 5  # two seeds, and long comes along

    result = json.loads((out / "table4.json").read_text())
    assert result["environment"]["command"].startswith("python -m")
    (table,) = result["rows"].values()
    assert [row["label"] for row in table] == [
        "short", "long", "long_butterfly", "long_from_short", "short_documents",
    ]  # fmt: skip
    assert all(row["seeds"] == 2 for row in table)
    same = [row for row in table if row["label"] != "long_from_short"]
    assert {row["tokens"] for row in same} == {20 * 256}
    assert len({row["scored_tokens"] for row in table}) == 1
    for row in table:
        assert row["perplexity"] == pytest.approx(math.exp(row["nats"]))
    assert table[0]["difference"] is None
    gap = table[1]["difference"]
    assert gap["nats"] == pytest.approx(table[1]["nats"] - table[0]["nats"])
    assert gap["interval"][0] < gap["nats"] < gap["interval"][1]

    text = (out / "table4.md").read_text()
    assert text == markdown(result)
    assert "| FlashAttention, 4K | 17.5 | 3.6 |" in text
    assert f"| long | 2 | 0M | {table[1]['tokens_per_s']:,.0f} |" in text
    assert (out / "table4.png").stat().st_size > 10_000
    assert (out / f"evaluation_{corpus.name}" / "report.md").exists()

    # the extension had the time that was left, and went on from the short model's weights
    begun = load_config([str(out / "long_from_short_seed2" / "config.yaml")])
    assert begun.run.init_from == str(out / "short_seed2")
    hours = [
        read_metrics(out / f"{name}_seed1")[-1]["gpu_hours"]
        for name in ("short", "long", "long_from_short")
    ]
    assert hours[2] > 0

    _, ran = tiny("--models", *names)
    assert [command for command in ran if command[0] == "train.py"] == []
    _, ran = tiny("--models", "short", "long", "--report-only")
    assert ran == []


def test_curves_are_means_over_seeds(tiny):
    out, _ = tiny("--models", "short")
    result = json.loads((out / "table4.json").read_text())
    seeds = [
        [r["val_loss"] for r in read_metrics(out / f"short_seed{seed}") if "val_loss" in r]
        for seed in (1, 2)
    ]
    curve = [point["val_loss"] for point in result["curves"]["short"]]
    assert curve == pytest.approx([sum(pair) / 2 for pair in zip(*seeds, strict=True)])
    assert len(curve) >= 2


def test_nothing_is_finished(tiny):
    with pytest.raises(ValueError, match="no run in .* is finished: there is nothing to report"):
        tiny("--models", "short", "--report-only")


def test_a_run_that_fails_is_named_and_left_out(tiny, monkeypatch):
    class FailedProcess:
        def wait(self):
            return 1

    run_here = gpu_pool._start

    def run_some(command, *rest):
        long = any("long_seed" in word for word in command)
        return FailedProcess() if long else run_here(command, *rest)

    monkeypatch.setattr("scripts.gpu_pool._start", run_some)
    with pytest.raises(SystemExit, match=r"these runs failed.*long_seed1.*long_from_short_seed1"):
        tiny("--models", "short", "long_from_short", "--seeds", "1")


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
    row = {
        "label": "a", "seeds": 1, "tokens": 10, "gpu_hours": 2.0, "tokens_per_s": 2.0,
        "paper_perplexity": 2.0, "paper_difference": difference,
        "perplexity": 1.9, "difference": None,
    }  # fmt: skip
    text = markdown({"budget": "smoke", "paper": [], "rows": {"shards": [row]}})
    (line,) = [x for x in text.splitlines() if x.startswith("| a |")]
    assert [some.strip() for some in line.split("|")][8:11] == [cell, "1.90", ""]
