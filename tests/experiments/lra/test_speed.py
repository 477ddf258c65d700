"""Times of training steps on a CPU, and what is made of the times of a made-up GPU."""

import json
import sys

import pytest
import torch

from experiments.lra import speed
from experiments.lra.speed import (
    ApproximateAttention,
    add_speedups,
    logit_difference,
    measure,
    timed_tasks,
)
from experiments.lra.tables import approximate_speed_table
from experiments.lra.tasks import ATTENTIONS
from kernels import flash_attention
from model.attention import SelfAttention
from model.block_config import BlockConfig
from tests.experiments.tiny_lra import CONTEXT, TINY, make_tasks

CPU = torch.device("cpu")


def made_up_row(task, attention, ms, *, captured=True):
    return {
        "task": task, "data": task, "context_length": 1024, "documents": 1, "tokens_share": 1.0,
        "attention": attention, "captured": captured, "step_ms": ms, "peak_gib": 0.5,
    }  # fmt: skip


def test_steps_of_each_attention_are_timed(tmp_path):
    make_tasks(tmp_path, "listops", "pairs")
    listops, pairs = timed_tasks(["listops", "pairs"], tmp_path, TINY).items()
    ((*rows,),) = measure(*listops, CPU, steps=1, repeats=2)
    assert [row["attention"] for row in rows] == list(ATTENTIONS)
    for row in rows:
        assert 0 < row["step_ms_fastest"] <= row["step_ms"] <= row["step_ms_slowest"]
        assert (row["data"], row["batch_size"], row["captured"]) == ("listops", 8, False)
        assert 4 / CONTEXT < row["tokens_share"] < 10 / CONTEXT
    dense = rows[1]
    assert 0 < dense["logits_differ_by"] < 1e-4  # of other operations, in float32
    ((row, *_),) = measure(*pairs, CPU, steps=1, repeats=1)
    assert (row["documents"], row["tokens_share"]) == (2, 0.5)


def test_pathfinder_is_timed_without_the_images_of_earlier_phases(tmp_path):
    make_tasks(tmp_path, "pathfinder32")
    settings = [setting for setting in TINY if not setting.startswith("data.phases=")]
    (timed,) = timed_tasks(["pathfinder"], tmp_path, settings).items()
    ((*rows,),) = measure(*timed, CPU, steps=1, repeats=1)
    assert {row["data"] for row in rows} == {"pathfinder32"}


def test_approximations_are_timed_in_the_same_model(tmp_path, capsys):
    make_tasks(tmp_path, "listops", "pairs")
    names = ("Linformer", "Performer", "Longformer")
    for timed in timed_tasks(["listops", "pairs"], tmp_path, TINY).items():
        ((*rows,),) = measure(*timed, CPU, names, steps=1, repeats=1)
        assert [row["attention"] for row in rows] == [*ATTENTIONS, "Linformer", "Performer"]
        assert all(row["step_ms"] > 0 for row in rows)
    reason = "leaving out Longformer, which requires a multiple of 512 tokens"
    assert capsys.readouterr().out.count(reason) == 2
    add_speedups(rows := [{**row, "captured": True, "task": "text"} for row in rows], means := {})
    lines = approximate_speed_table({"rows": rows, "geometric_means": means}).splitlines()
    assert lines[0] == "| attention | Text (on pairs) | geometric mean of 1 |"
    assert "| standard attention | 1.00x | 1.00x |" in lines and len(lines) == 2 + 5


@pytest.mark.parametrize(
    ("name", "reason"),
    [("Longformer", "requires a multiple of 512 tokens"), ("Linformer", "cannot be imported")],
)
def test_a_comparison_without_any_approximation_is_refused(
    name, reason, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "linformer.linformer", None)  # as if not installed
    make_tasks(tmp_path, "listops")
    (timed,) = timed_tasks(["listops"], tmp_path, TINY).items()
    with pytest.raises(ValueError, match=r"listops: none .* pip install '\.\[peers\]'"):
        next(measure(*timed, CPU, [name], steps=1, repeats=1))
    assert f"leaving out {name}, which {reason}" in capsys.readouterr().out


def test_layers_around_an_approximation_are_those_of_the_model():
    config = BlockConfig(n_layer=1, n_head=2, n_embd=32)
    torch.manual_seed(0)
    inner = SelfAttention(config, 0, causal=False)
    x = torch.randn(3, 20, 32)
    results = []
    for attention in (inner, ApproximateAttention(inner, flash_attention)):
        branch, bias = attention(x, kv_lengths=None)
        (branch + bias).square().sum().backward()
        results.append([branch, *(p.grad for p in inner.parameters())])
        inner.zero_grad()
    for expected, result in zip(*results, strict=True):
        assert torch.allclose(result, expected, atol=1e-5)


def test_fused_attention_is_not_timed_as_standard(tmp_path):
    make_tasks(tmp_path, "listops")
    (timed,) = timed_tasks(["listops"], tmp_path, [*TINY, "run.compile=true"]).items()
    with pytest.raises(ValueError, match=r"run\.dtype=float32 .* Try --set run\.dtype=bfloat16"):
        next(measure(*timed, CPU, steps=1, repeats=1))


@pytest.mark.gpu
def test_steps_are_timed_as_graphs_too(tmp_path):
    make_tasks(tmp_path, "listops")
    overrides = [*TINY, "run.device=cuda", "run.dtype=bfloat16", "run.compile=true"]
    (timed,) = timed_tasks(["listops"], tmp_path, overrides).items()
    device = torch.device("cuda", torch.cuda.current_device())
    (rows,) = measure(*timed, device, ("Linformer", "Performer"), steps=3, repeats=2)
    names = [*ATTENTIONS, "Linformer", "Performer"]
    assert [(row["captured"], row["attention"]) for row in rows] == [
        (captured, attention) for captured in (False, True) for attention in names
    ]
    means = {}
    add_speedups(rows, means)
    for row in rows:
        assert row["step_ms"] > 0 and row["speedup"] > 0 and row["peak_gib"] > 0
    assert {"captured", "plain"} == means.keys()


def test_another_task_replaces_missing_texts(tmp_path, capsys):
    make_tasks(tmp_path, "image", "pairs")
    timed = timed_tasks(["image", "retrieval"], tmp_path, TINY)
    paths = {task: configs["dense"].data.path for task, configs in timed.items()}
    assert paths == {"image": str(tmp_path / "image"), "retrieval": str(tmp_path / "pairs")}
    with pytest.raises(FileNotFoundError, match="prepare_lra listops"):
        timed_tasks(["listops"], tmp_path, TINY)


def test_speed_ups_are_averaged_as_the_paper_does():
    times = {"listops": (8.0, 4.0, 2.0), "image": (9.0, 0.5, 3.0), "pairs": (1.0, 1.0, 1.0)}
    rows = [
        made_up_row(task, attention, ms)
        for task, of_task in times.items()
        for attention, ms in zip(ATTENTIONS, of_task, strict=True)
    ]
    rows += [made_up_row("image", attention, 2.0, captured=False) for attention in ATTENTIONS]
    means = {"left": "over"}
    add_speedups(rows, means)
    assert [row["speedup"] for row in rows[:6]] == [1, 2, 4, 1, 18, 3]
    assert means["captured"]["tasks"] == ["listops", "image"]  # the paper has no pairs
    assert means["captured"]["speedup"] == pytest.approx({
        "standard": 1, "dense": 6, "butterfly": 12**0.5
    })  # fmt: skip
    assert means["plain"] == {"tasks": ["image"], "speedup": dict.fromkeys(ATTENTIONS, 1.0)}
    add_speedups([row for row in rows if row["task"] == "pairs"], means)
    assert means == {}


@pytest.mark.parametrize("wrong", [0.06, float("nan")])
def test_wrong_attention_gets_no_speed(wrong):
    logits = {name: torch.zeros(3, 2) for name in ATTENTIONS}
    logits["dense"][1, 1] = 0.04
    assert logit_difference(logits, "image") == pytest.approx(0.04)
    logits["dense"][2, 0] = -wrong
    with pytest.raises(
        ValueError, match=r"image: logits of Papilio's dense .* \(allowed 0.05\): no spe"
    ):
        logit_difference(logits, "image")


def test_writes_rows_and_means_and_resumes(monkeypatch, tmp_path, capsys):
    make_tasks(tmp_path / "data", "image", "pathfinder32")
    broken = {"pathfinder"}

    def made_up(task, configs, device, approximate, *, steps, repeats):
        if task in broken:
            raise ValueError("the GPU is gone")
        yield [made_up_row(task, name, steps * n) for n, name in enumerate(ATTENTIONS, 1)]

    monkeypatch.setattr(speed, "measure", made_up)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a made-up GPU")
    out = tmp_path / "speed.json"
    options = ["--data", str(tmp_path / "data"), "--out", str(out), "--steps", "3"]
    options += ["--tasks", "image", "pathfinder"]
    with pytest.raises(ValueError, match="the GPU is gone"):
        speed.main(options)
    assert not out.exists()
    broken.clear()
    speed.main([*options, "--resume"])
    result = json.loads(out.read_text())
    assert [row["task"] for row in result["rows"][::3]] == ["image", "pathfinder"]
    means = result["geometric_means"]["captured"]
    assert means["tasks"] == ["image", "pathfinder"]
    assert means["speedup"]["butterfly"] == pytest.approx(1 / 3)
    assert result["environment"]["device"] == "a made-up GPU"
    assert "6.00 ms (0.50x)" in capsys.readouterr().out
