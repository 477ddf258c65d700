"""The command's rows, table and picture, from a made-up GPU."""

import json

import pytest
import torch

from experiments.attention import __main__ as benchmark_attention
from experiments.lra import speed as lra_speed
from experiments.train_steps import contenders, speed

NAMES = ("ours", "nanoGPT, cuDNN")
BENCHMARK = speed.benchmark


@pytest.fixture
def losses(monkeypatch):
    """The first losses that a made-up GPU finds, 10.9 where a test puts in no other."""
    found = {}

    def benchmark(size, context_length, args):
        for number, name in enumerate(NAMES, start=1):
            yield [
                {
                    "size": size,
                    "context_length": context_length,
                    "name": name,
                    "step_s": 0.1,
                    "parts": {"matrix products": {"ms": 40.0, "launches": 183}},
                    "tokens_per_s": args.steps * 1e5 / number,
                    "mfu": {"causal": 0.4, "full": 0.5} if number == 1 else None,
                    "peak_gib": 15.0,
                    "first_loss": found.get((context_length, name), 10.9),
                }
            ]

    monkeypatch.setattr(speed, "benchmark", benchmark)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a made-up GPU")
    return found


def run(folder, *options):
    out = folder / "speed.json"
    sizes = [] if "--butterfly" in options else ["--sizes", "small"]
    contexts = ["--contexts", "64", "256"]
    speed.main([*sizes, *contexts, "--steps", "3", "--out", str(out), *options])
    return json.loads(out.read_text())["rows"]


def test_rows_table_and_picture(losses, tmp_path, capsys):
    rows = run(tmp_path)
    assert [(r["context_length"], r["name"]) for r in rows] == [
        (n, x) for n in (64, 256) for x in NAMES
    ]
    assert (tmp_path / "speed.png").stat().st_size > 1000
    printed = capsys.readouterr().out
    assert printed.count("300,000 tokens/s") == printed.count("40.0%") == 2
    assert "2.00" in printed and "unknown GPU" in printed
    assert "| matmuls | 40.0, 183 |" in printed


def test_medium_ends_where_its_memory_does(losses, tmp_path, monkeypatch):
    out = tmp_path / "speed.json"
    contexts = ["--contexts", "1024", "4096", "16384"]
    speed.main([*contexts, "--steps", "3", "--out", str(out)])
    shapes = {(r["size"], r["context_length"]) for r in json.loads(out.read_text())["rows"]}
    assert shapes == {
        *(("small", n) for n in (1024, 4096, 16384)),
        *(("medium", n) for n in (1024, 4096)),
    }


def test_a_butterfly_is_measured_next_to_dense_attention(losses, tmp_path, monkeypatch):
    measured = {"first_loss": 10.9, "step_s": 0.1, "peak_gib": 1.0, "parts": {}}
    configs = []

    def our_step(config, tokens, targets, *, deterministic):
        configs.append(config)

    monkeypatch.setattr(speed, "benchmark", BENCHMARK)
    monkeypatch.setattr(contenders, "our_step", our_step)
    monkeypatch.setattr(speed, "batch_of", lambda context_length: (None, None))
    monkeypatch.setattr(speed, "measure", lambda make, steps: make() or measured)
    rows = run(tmp_path, "--butterfly")
    assert [(r["context_length"], r["name"]) for r in rows] == [
        (n, x) for n in (64, 256) for x in ("ours", "ours, butterfly")
    ]
    assert [config.mask.pattern for config in configs] == ["dense", "butterfly"] * 2
    for other in (["--nanogpt", "x"], ["--hugging-face"], ["--attentions"], ["--sizes", "medium"]):
        with pytest.raises(SystemExit):
            run(tmp_path, "--butterfly", *other)


@pytest.mark.parametrize("loss", [11.0, float("nan")])
def test_another_loss_gets_no_speed(loss, losses, tmp_path, capsys):
    losses[256, "nanoGPT, cuDNN"] = loss
    with pytest.raises(SystemExit, match=r"nanoGPT, cuDNN at 256: the first loss is .*no speed"):
        run(tmp_path)
    assert capsys.readouterr().out.count("tokens/s") == 3
    assert not (tmp_path / "speed.json").exists()
    losses.clear()
    assert len(run(tmp_path, "--resume")) == 4
    assert capsys.readouterr().out.count("tokens/s\n") == 2  # those of the second context


@pytest.mark.parametrize("command", [benchmark_attention, speed, lra_speed])
def test_a_gpu_is_needed(command, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs a GPU, but PyTorch finds none"):
        command.main(["--preset", "peers"] if command is benchmark_attention else [])
