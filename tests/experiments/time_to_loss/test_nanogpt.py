"""nanoGPT gets our text and settings, and its log and checkpoint are read."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from data.text.prepare import prepare
from data.text.shards import Manifest, TokenStream
from data.text.sources import open_source
from experiments import gpu_pool
from experiments.time_to_loss import nanogpt
from tests.experiments.table4.tiny_sweep import FinishedProcess

LOG = """\
tokens per iteration will be: 32,768
step 0: train loss 10.9, val loss 10.9412
iter 0: loss 10.9, time 61234.50ms, mfu -100.00%
"""


def test_a_log_has_the_median_time_of_a_step():
    times = [9.0] * 9 + [80.0, 81.0, 2000.0, 82.0]  # after iteration 0; one evaluates
    lines = [f"iter {n}: loss nan, time {ms}ms, mfu 40%" for n, ms in enumerate(times, 1)]
    lines.insert(-2, "step 12: train loss 3.9, val loss 4.0125\nsaving checkpoint to x")
    log = nanogpt.parse_log(LOG + "\n".join(lines))
    assert log.last == 13 and log.first_s == 61.2345
    assert log.step_s == pytest.approx(0.0815)
    assert log.losses == {0: 10.9412, 12: 4.0125}


def test_a_log_may_be_unfinished():
    log = nanogpt.parse_log("tokens per iteration will be: 32,768\n")
    assert log.last == -1 and math.isnan(log.step_s) and math.isnan(log.first_s)
    assert math.isnan(nanogpt.parse_log(LOG).step_s)


def test_a_checkout_needs_its_sources(checkout, corpus):
    nanogpt.check_nanogpt(checkout, corpus)
    (checkout / "train.py").unlink()
    with pytest.raises(FileNotFoundError, match=r"--nanogpt=.*nanoGPT.* has no train.py\. Try git"):
        nanogpt.check_nanogpt(checkout, corpus)


def test_ids_must_be_uint16(checkout, corpus, tmp_path):
    manifest = Manifest.load(corpus)
    tokenizer = replace(manifest.tokenizer, vocab_size=65_536)
    replace(manifest, dtype="uint32", tokenizer=tokenizer).save(tmp_path)
    with pytest.raises(ValueError, match=r"--data=.*ids in uint32 for a vocabulary of 65,536.*at "):
        nanogpt.check_nanogpt(checkout, tmp_path)


def test_the_text_is_that_of_all_shards(checkout, corpus, tmp_path):
    for split in ("train", "val"):
        lines = [json.dumps({"text": f"the cat sees bird {split} {n}."}) for n in range(20)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    source = open_source([str(tmp_path / "train.jsonl")], val=[str(tmp_path / "val.jsonl")])
    shards, folder = tmp_path / "shards", tmp_path / "work"
    prepare(source, shards, tokenizer=str(corpus / "tokenizer.json"), shard_tokens=100)
    for _ in range(2):  # again, as a resumed command does
        nanogpt.set_up(checkout, shards, folder)
    for split in ("train", "val"):
        stream = TokenStream(shards, split)
        assert len(stream.info.shards) > 1
        ids = np.fromfile(folder / "data" / "text" / f"{split}.bin", "<u2")
        assert np.array_equal(ids, stream.read(0, len(stream)))
    assert (folder / "train.py").resolve() == checkout / "train.py"


def test_an_interrupted_training_starts_again_with_a_new_log(tmp_path, monkeypatch):
    commands = []

    def start(command, log, _):
        commands.append(command)
        log.write("iter 60: loss 1.0, time 20.00ms, mfu 1%\n")
        log.flush()
        return FinishedProcess()

    monkeypatch.setattr(gpu_pool, "_start", start)
    (tmp_path / "steps_60.log").write_text(LOG)
    log = nanogpt.train(tmp_path, 60, eval_every=10, eval_batches=3)
    assert log.last == 60 and log.first_s == 0.02  # not that of the first start
    nanogpt.train(tmp_path, 60, eval_every=10, eval_batches=3)  # only read
    (command,) = commands
    settings = dict(argument.removeprefix("--").split("=") for argument in command[5:])
    assert command[4] == str(tmp_path) and settings["out_dir"] == "steps_60"
    asked = ("max_iters", "lr_decay_iters", "warmup_iters", "eval_interval", "eval_iters")
    assert [settings[name] for name in asked] == ["60", "60", "15", "10", "3"]
    sizes = ("block_size", "batch_size", "gradient_accumulation_steps")
    assert math.prod(int(settings[name]) for name in sizes) == 32_768


def test_a_failed_training_ends_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_pool, "_start", lambda *_: FinishedProcess(3))
    with pytest.raises(SystemExit):
        nanogpt.train(tmp_path, 60, eval_every=10, eval_batches=3)
    assert "nanoGPT, 60 steps: FAILED: exit code 3" in capsys.readouterr().out


def test_a_machine_may_be_too_slow(checkout, corpus, tmp_path, monkeypatch):
    pilot = SimpleNamespace(step_s=10.0)
    monkeypatch.setattr(nanogpt, "train", lambda *_, **__: pilot)
    with pytest.raises(ValueError, match="took 10.00 s, so that 600 s are too short"):
        nanogpt.measure(checkout, corpus, tmp_path / "work")
