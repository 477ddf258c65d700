"""Step times of the recipe's parts, of steps that take no time."""

from dataclasses import replace

import pytest
import torch

from experiments.train_steps import recipe_step
from experiments.train_steps.recipe_step import (
    BATCH_TOKENS,
    TIMED,
    configs_of,
    measure,
    relative_time,
    seconds_per_token,
    step_at,
    step_table,
)


@pytest.fixture
def without_gpu(monkeypatch):
    for name in ("reset_peak_memory_stats", "max_memory_allocated", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: 2**30)


def test_a_row_for_each_context(without_gpu):
    config = configs_of(["recipe"])["recipe"]
    asked = []

    def make(config, stage, device):
        asked.append((stage.context_length, stage.micro_batch_size))
        return lambda: torch.ones(1)

    rows = [row for rows in measure("recipe", config, 2, make) for row in rows]
    assert asked == [(512, 64), (1024, 32), (4096, 8)]
    assert [row["context_length"] for row in rows] == [512, 1024, 4096]
    assert [row["steps"] for row in rows] == [900, 1800, 900]
    assert {row["tokens"] for row in rows} == {32_768}


def test_no_time_of_steps_that_are_skipped(without_gpu):
    config = configs_of(["recipe"])["recipe"]
    with pytest.raises(SystemExit, match="recipe at 512 tokens: .* not finite"):
        next(measure("recipe", config, 2, lambda *_: lambda: torch.zeros(1)))


def rows_of(name, *seconds):
    return [
        {
            "name": name,
            "context_length": n,
            "steps": steps,
            "tokens": BATCH_TOKENS,
            "step_s": s,
        }
        for n, steps, s in zip((1024, 4096), (30, 10), seconds, strict=True)
    ]


def test_times_are_means_over_the_training():
    rows = [*rows_of("recipe", 1.0, 2.0), *rows_of("recipe_without_windows", 1.0, 4.0)]
    seconds = seconds_per_token(rows)
    means = {"recipe": 1.25 / BATCH_TOKENS, "recipe_without_windows": 1.75 / BATCH_TOKENS}
    assert seconds == pytest.approx(means)
    assert relative_time(seconds, "recipe", "recipe_without_windows") == pytest.approx(1.25 / 1.75)
    assert relative_time(seconds, "recipe_with_swiglu", "recipe") is None
    assert relative_time({}, "recipe_with_higher_lr", "recipe") == 1.0
    last = step_table({"rows": rows}).splitlines()[-1]
    assert last == "| `recipe_without_windows` | 1000.0 | 4000.0 | 1.400 |"


def test_stages_of_one_context_count_by_their_tokens():
    rows = rows_of("recipe", 1.0, 2.0)
    halved = {"steps": 20, "tokens": BATCH_TOKENS // 2, "step_s": 0.8}
    rows += [row | {"name": "halved first"} for row in (rows[0] | halved, *rows)]
    assert step_table({"rows": rows}).splitlines()[-1] == (
        "| `halved first` | 1150.0 | 2000.0 | 1.056 |"  # 46 s for 40 half batches of 60, and so on
    )


def test_parts_whose_steps_are_the_same_are_not_timed():
    assert {"windows", "swiglu"} <= {*TIMED}
    assert not {"lower_lr", "higher_lr"} & {*TIMED}
    assert recipe_step.AGAIN not in TIMED.values()


@pytest.mark.parametrize("batch_tokens", [32, 64])  # one micro-batch, or two
def test_a_step_trains_at_the_context_and_batch_of_its_stage(batch_tokens):
    config = configs_of(["recipe"])["recipe"]
    small = {"n_layer": 2, "n_head": 2, "n_kv_head": 1, "n_embd": 32, "vocab_size": 50}
    schedule = {"context_schedule": [[8, 0.75], [16, 0.25]], "window_size": 4, "full_every": 2}
    model = replace(config.model, context_length=16, **schedule, **small)
    optim = replace(config.optim, batch_tokens=batch_tokens, micro_batch_size=2)
    run = replace(config.run, compile=False, dtype="float32")
    config = replace(config, model=model, optim=optim, run=run)
    for stage in config.stages:
        step = step_at(config, stage, torch.device("cpu"))
        losses = [step().clone() for _ in range(2)]
        assert all(torch.isfinite(loss).all() for loss in losses)
        assert not torch.equal(*losses)
