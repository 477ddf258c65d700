"""The sweep trains, evaluates and reports."""

import argparse
import json
from pathlib import Path

import pytest

from experiments.passkey import __main__ as sweep
from experiments.passkey import report
from experiments.passkey.__main__ import make_runs, prepare_text
from experiments.passkey.attentions import ATTENTIONS

TINY = (
    *("model.n_layer=1", "model.n_embd=32", "model.n_head=2", "run.compile=false"),
    *("run.dtype=float32", "run.device=cpu", "optim.max_steps=2", "optim.warmup_steps=0"),
    *("run.eval_every=2", "run.log_every=1", "model.mask.block_size=16"),
    *("optim.batch_tokens=1024", "run.save_every=2"),
)


@pytest.mark.slow
def test_runs_are_trained_once_and_all_are_asked(corpus, tmp_path, monkeypatch, capsys):
    few = ("--depths", "0", "1", "--trials", "2", "--lengths", "256", "512")
    monkeypatch.setattr(sweep, "QUESTIONS", few)
    out, results = tmp_path / "out", tmp_path / "results"
    results.mkdir()
    command = [
        *("--data", str(corpus), "--contexts", "512", "--documents", "100"),
        *("--attentions", "dense", "butterfly"),
        *("--out", str(out), "--results", str(results), "--set", *TINY),
    ]
    sweep.main(command)
    result = json.loads((results / "passkey.json").read_text())
    names = [(run["attention"], run["mask"], run["context_length"]) for run in result["runs"]]
    assert names == [("dense", "dense", 512), ("butterfly", "butterfly", 512)]
    for run in result["runs"]:
        assert [(row["length"], row["depth"], row["of"]) for row in run["rows"]] == [
            (length, depth, 2) for length in (256, 512) for depth in (0.0, 1.0)
        ]
        assert run["tokens"] == 2048
        assert len(run["starts"]) == 1
    assert len({run["evaluations"][-1]["val_loss"] for run in result["runs"]}) == 2  # two models
    text = (results / "passkey.md").read_text()
    assert (
        "| 512 | butterfly | 1 |" in text
        and "| found at 1/2 context, % | found at full context, % |" in text
    )
    assert (results / "passkey.png").stat().st_size > 10_000

    capsys.readouterr()
    monkeypatch.setattr(report, "publish", lambda *_: None)  # drawn once is enough
    sweep.main(command)
    assert "started" not in capsys.readouterr().out  # nothing is trained or asked again
    (out / "dense_512_seed1").rename(tmp_path / "elsewhere")
    sweep.main([*command, "--report-only", "--add", str(results / "passkey.json")])
    again = json.loads((results / "passkey.json").read_text())
    assert again["runs"] == result["runs"]

    # what is there of other documents is not taken
    capsys.readouterr()
    with pytest.raises(SystemExit):
        sweep.main([*command, "--attentions", "dense", "--documents", "200"])
    printed = capsys.readouterr().out
    assert "text_512: FAILED" in printed and "n_documents" in printed
    assert "dense_512_seed1: skipped, because text_512 failed" in printed
    with pytest.raises(ValueError, match=r"other settings: optim.lr is 0.003 there and 0.1 here"):
        sweep.main([*command, "optim.lr=0.1"])


def arguments(*attentions: str) -> argparse.Namespace:
    folders = {"data": Path("books"), "out": Path("out"), "documents": 100}
    return argparse.Namespace(**folders, contexts=[4096], seeds=[2], attentions=attentions, set=[])


def test_runs_differ_in_their_attention_only() -> None:
    args = arguments(*ATTENTIONS)
    configs = dict(zip(ATTENTIONS, (run.config for run in make_runs(args)), strict=True))
    assert [config.model.window_size for config in configs.values()] == [None, 512, None]
    masks = [config.model.mask.pattern for config in configs.values()]
    assert masks == ["dense", "dense", "butterfly"]
    for config in configs.values():
        assert config.run.seed == 2
        assert config.data.mix[0].path == "out/text_4096"
        assert config.optim.micro_batch_size * 4096 == config.optim.batch_tokens


def test_documents_come_before_what_learns_from_them() -> None:
    args = arguments("dense")
    (run,) = make_runs(args)
    assert run.task().needs == {prepare_text(args, 4096).name}


def test_refusals(tmp_path, corpus):
    with pytest.raises(ValueError, match=r"data.mix for each run. Use --data"):
        sweep.main(["--data", str(corpus), "--set", "data.mix=[]"])
    with pytest.raises(ValueError, match=r"window_size for each run. Use --attentions"):
        sweep.main(["--data", str(corpus), "--set", "model.window_size=64"])
    with pytest.raises(ValueError, match="has no run that scripts.passkey evaluated"):
        report.write_report(tmp_path, tmp_path)
