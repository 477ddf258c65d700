"""Whole runs of the trainer on the CPU, on a corpus of a few thousand tokens."""

import itertools
import json
import re
import runpy
import shutil
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from configs.reader import ConfigError
from data.text.shards import Manifest
from tests.training_runs import by_torchrun, in_two_processes, losses, stop_after
from training.checkpoint.folders import latest_checkpoint
from training.checkpoint.reader import Checkpoint
from training.command_line import user_errors_as_messages
from training.language.config import load_config
from training.metrics import read_metrics


def test_learns_and_evaluates_on_the_whole_validation_set(run, corpus):
    result = run("optim.max_steps=40", "run.eval_every=20")
    manifest = json.loads((corpus / "manifest.json").read_text())
    assert result["val_tokens"] == manifest["splits"]["val"]["tokens"] - 1
    assert result["val_loss"] < losses(run.out_dir)[1] - 1.5
    evaluations = [r for r in read_metrics(run.out_dir) if "val_loss" in r]
    assert [r["step"] for r in evaluations] == [20, 40]
    assert evaluations[-1]["val_loss"] == result["val_loss"]


GPU = ["run.device=cuda", "run.compile=true", "run.dtype=bfloat16", "model.attention_dropout=0.1"]


MODERN = [
    *("optim.name=normuon", "model.positions=rotary", "model.n_kv_head=1", "model.qk_norm=true"),
    *("model.norm=rms_norm", "model.mlp=swiglu", "model.window_size=9", "model.full_every=2"),
    *("model.logit_softcap=15", "optim.batch_schedule=[[128,0.5],[256,0.5]]"),
]


@pytest.mark.parametrize(
    "options",
    [
        [],
        MODERN,
        pytest.param(GPU, marks=pytest.mark.gpu),
        pytest.param(GPU + MODERN, marks=pytest.mark.gpu),
    ],
    ids=["cpu", "cpu-modern", "gpu", "gpu-modern"],
)
def test_resuming_changes_no_loss(run, tmp_path, options):
    whole = run(*options, f"run.out_dir={tmp_path / 'whole'}")
    # only the process ends early: the schedule is that of the whole run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.Trainer.record", stop_after(5))
        with pytest.raises(KeyboardInterrupt) as stopped:
            run(*options)
    end = f" at step 6: the same command resumes from {latest_checkpoint(run.out_dir)}"
    assert stopped.value.__notes__ == [end]
    assert latest_checkpoint(run.out_dir).name == "step_00000004"
    parts = run(*options)
    assert parts == whole
    assert losses(run.out_dir) == losses(tmp_path / "whole")
    assert set(losses(run.out_dir)) == set(range(1, 9))


def test_micro_batches_add_up_to_the_same_step(run, tmp_path):
    steps = []
    for micro in (1, 2, 8):
        out = tmp_path / f"micro_{micro}"
        run("model.dropout=0.0", f"optim.micro_batch_size={micro}", f"run.out_dir={out}")
        steps.append(losses(out))
    for step in steps[0]:
        torch.testing.assert_close(steps[1][step], steps[0][step], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(steps[2][step], steps[0][step], rtol=1e-4, atol=1e-5)


def test_document_and_butterfly_masks_change_the_loss(run, tmp_path):
    butterfly = ["model.mask.pattern=butterfly", "model.mask.block_size=16"]
    butterfly += ["model.context_length=64"]
    results = {}
    for name, options in (
        ("packed", []),
        ("masked", ["data.document_mask=true"]),
        ("butterfly", [*butterfly, "model.mask.global_blocks=0"]),
        ("both", [*butterfly, "data.document_mask=true"]),
    ):
        results[name] = run(*options, f"run.out_dir={tmp_path / name}")
    assert len({result["val_loss"] for result in results.values()}) == 4
    assert len({result["val_tokens"] for result in results.values()}) == 1


def test_finished_run_is_evaluated_again_and_recorded_once(run):
    first = run()
    records = read_metrics(run.out_dir)
    assert run() == first
    assert read_metrics(run.out_dir) == records


@pytest.fixture
def slow_clock(monkeypatch):
    """Replace the training clock with one that advances an hour at each reading."""
    clock = itertools.count(0, 3600)
    monkeypatch.setattr("training.profiling.time", SimpleNamespace(perf_counter=clock.__next__))


def hours(folder, kind):
    return [(r["step"], r["gpu_hours"]) for r in read_metrics(folder) if kind in r]


def test_gpu_hours_count_each_step_once_and_survive_a_resume(run, slow_clock):
    # intervals of one hour each: steps 1 to 4 (the first step is not timed), 5 and 6, 7 and 8
    options = ("run.log_every=4", "run.eval_every=6")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.Trainer.record", stop_after(4))
        with pytest.raises(KeyboardInterrupt):
            run(*options)
    assert Checkpoint.open(latest_checkpoint(run.out_dir)).progress.gpu_hours == pytest.approx(
        4 / 3
    )
    run(*options)
    # step 5, the first of the second process, counts as much as step 6
    assert hours(run.out_dir, "loss") == [(4, pytest.approx(4 / 3)), (8, pytest.approx(13 / 3))]
    assert hours(run.out_dir, "val_loss") == [
        (6, pytest.approx(4 / 3 + 2)),
        (8, pytest.approx(4 / 3 + 3)),
    ]
    assert Checkpoint.open(latest_checkpoint(run.out_dir)).progress.gpu_hours == pytest.approx(
        13 / 3
    )


def test_first_step_has_no_speed(run):
    run("optim.max_steps=3")
    speeds = [r.get("tokens_per_s") for r in read_metrics(run.out_dir) if "loss" in r]
    assert speeds[0] is None
    assert speeds[1] > 0


@pytest.mark.distributed
@pytest.mark.parametrize(
    "options",
    [
        [],
        pytest.param(
            # CUDA graph replays start after the first twelve steps
            ["run.device=cuda", "run.compile=true", "optim.max_steps=20", "optim.lr=1e-3"],
            marks=pytest.mark.gpu(2),
        ),
    ],
    ids=["cpu", "gpu"],
)
def test_two_processes_give_the_losses_of_one(run, tmp_path, options):
    one, two = tmp_path / "one", tmp_path / "two"
    options = [*options, "model.dropout=0.0"]
    result = run(*options, f"run.out_dir={one}")
    by_torchrun(run, *options, f"run.out_dir={two}")
    for step, loss in losses(one).items():
        torch.testing.assert_close(losses(two)[step], loss, rtol=1e-4, atol=1e-5)
    evaluation = [r for r in read_metrics(two) if "val_loss" in r][-1]
    torch.testing.assert_close(evaluation["val_loss"], result["val_loss"], rtol=1e-4, atol=1e-5)
    assert evaluation["val_tokens"] == result["val_tokens"]
    # the processes wait for each other, so two of them spend twice the time of their steps; a step
    # that compiles or is captured counts as much as the step after it
    seconds = step_seconds = 0
    for record in reversed([r for r in read_metrics(two) if "loss" in r]):
        if "tokens_per_s" in record:
            step_seconds = 256 / record["tokens_per_s"]
        seconds += step_seconds
    assert evaluation["gpu_hours"] * 3600 == pytest.approx(2 * seconds, rel=1e-6)


@pytest.mark.distributed
def test_two_processes_resume_bit_for_bit(run, tmp_path):
    options = ("optim.schedule=constant", "optim.batch_tokens=128")
    whole, parts = f"run.out_dir={tmp_path / 'whole'}", f"run.out_dir={tmp_path / 'parts'}"
    in_two_processes(run, *options, whole)
    in_two_processes(run, *options, parts, "optim.max_steps=4")
    in_two_processes(run, *options, parts)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


@pytest.mark.distributed
@pytest.mark.parametrize("first", [1, 2])
def test_resumes_with_another_number_of_processes(run, tmp_path, first):
    """Resume between two records, so that the sums of the metrics are also sharded."""
    options = ("optim.schedule=constant", "model.dropout=0.0", "run.log_every=3")
    run(*options, f"run.out_dir={tmp_path / 'one'}")
    trains = [run, partial(in_two_processes, run)]
    trains[first - 1](*options)
    shutil.rmtree(latest_checkpoint(run.out_dir))  # leaves the checkpoint of step 4
    trains[2 - first](*options)
    assert [*losses(run.out_dir)] == [3, 6, 8]
    for step, loss in losses(tmp_path / "one").items():
        torch.testing.assert_close(losses(run.out_dir)[step], loss, rtol=1e-4, atol=1e-5)


def test_trains_on_interpreted_triton_kernels(run, tmp_path):
    """Training with Papilio's kernels gives the same losses as with PyTorch's."""
    # each block of each layer and head is slow when interpreted; the second loss is the first that
    # depends on gradients
    options = ("optim.max_steps=2", "optim.warmup_steps=0", "model.dropout=0.0")
    options += ("model.n_layer=1", "model.context_length=64", "optim.batch_tokens=128")
    run(*options, "model.attention=triton", f"run.out_dir={tmp_path / 'triton'}")
    run(*options, "model.attention=sdpa", f"run.out_dir={tmp_path / 'sdpa'}")
    for step, loss in losses(tmp_path / "sdpa").items():
        torch.testing.assert_close(losses(tmp_path / "triton")[step], loss, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["data.path=nowhere"], FileNotFoundError, "nowhere does not exist; create it"),
        (
            ["model.vocab_size=500"],
            ValueError,
            r"model.vocab_size=500 must be \d+, .*Remove model.vocab_size to use .* or prepare",
        ),
        (
            ["model.vocab_size=257", "run.init_from=nowhere"],
            ValueError,
            r"model.vocab_size=257 must be \d+, the size of",
        ),
        (["run.device=cuda"], ValueError, "run.device=cuda needs a GPU, and PyTorch sees none"),
        (
            ["model.context_length=100000", "optim.batch_tokens=200_000"],
            ValueError,
            "context_length=100000",
        ),
        (["model.attention=triton"], ValueError, "needs a CUDA GPU"),
        (
            ["optim.lr=1e30", "run.max_skipped=2"],
            FloatingPointError,
            "the last 2 steps up to step 3 were skipped .*no usable checkpoint found",
        ),
        (["optim.batch_tokens=100"], ConfigError, "Try 128|Try 64"),
        ([f"optim.max_steps={10**20}"], ConfigError, f"optim.max_steps={10**20} must be at most"),
        (["model.n_layer=1000000000"], ConfigError, "model.n_layer=1000000000 must be at most"),
    ],
)
def test_errors(run, overrides, error, message, monkeypatch):
    if "run.device=cuda" in overrides:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    if "model.attention=triton" in overrides:
        monkeypatch.setattr("kernels.triton._INTERPRETED", False)
    with pytest.raises(SystemExit) as end, user_errors_as_messages():
        run(*overrides)
    assert isinstance(end.value.__cause__, error)
    assert re.match(f"error: .*({message})", str(end.value))


def test_a_replaced_tokenizer_is_refused(run, corpus, tmp_path):
    data = shutil.copytree(corpus, tmp_path / "data")
    path = data / "tokenizer.json"
    spec = json.loads(path.read_text())
    vocabulary = spec["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(spec))
    out = tmp_path / "other"
    with pytest.raises(ValueError, match="tokenizer.json was replaced. Prepare data.path=.* again"):
        run(f"data.path={data}", f"run.out_dir={out}")
    assert not out.exists()


def test_more_processes_than_gpus_are_refused(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ValueError, match="this machine has 1 GPU.*Try --nproc_per_node=1"):
        run("run.device=auto")


def test_stopped_before_the_first_checkpoint(run, monkeypatch):
    monkeypatch.setattr("train.Trainer.record", stop_after(1))
    with pytest.raises(KeyboardInterrupt) as stopped:
        run()
    assert stopped.value.__notes__ == [
        " at step 2: the same command starts again from step 0; the first checkpoint is at step 4 "
        "(run.save_every)"
    ]


def test_a_longer_run_reports_the_changed_schedule(run, capsys):
    run("optim.max_steps=4")
    capsys.readouterr()
    run("optim.max_steps=8")
    said = next(line for line in capsys.readouterr().out.splitlines() if "learning rate" in line)
    assert said.startswith("optim.max_steps changed from 4 to 8: the learning rate ")
    rates = [r["lr"] for r in read_metrics(run.out_dir) if "lr" in r]
    assert said.endswith(f"continues at {rates[4]:.3g} instead of 0")
    run("optim.max_steps=12")
    run("optim.max_steps=12", "run.keep_last=3")
    assert "learning rate" not in capsys.readouterr().out.partition("already finished")[2]


def test_a_finished_run_says_so_and_how_to_continue(run, capsys):
    run("optim.max_steps=8")
    for fewer in (8, 6):
        capsys.readouterr()
        run(f"optim.max_steps={fewer}")
        said = capsys.readouterr().out
        assert (
            f"already finished: {latest_checkpoint(run.out_dir)} is at step 8, which is at least "
            f"optim.max_steps={fewer}. Evaluating again; to train on, set optim.max_steps above 8"
        ) in said
        assert "step 8/8  val loss" in said and "8/6" not in said


def test_a_finished_run_keeps_its_configuration(run):
    run("optim.max_steps=8", "optim.lr=1e-3")
    settings = run.out_dir / "config.yaml"
    trained = settings.read_text()
    run("optim.max_steps=8", "optim.lr=2e-3")
    assert settings.read_text() == trained and "lr: 0.001\n" in trained
    settings.unlink()
    run("optim.max_steps=8", "optim.lr=1e-3")
    assert settings.read_text() == trained
    run("optim.max_steps=9", "optim.lr=2e-3")
    assert "lr: 0.002\n" in settings.read_text()


def test_a_constant_schedule_reports_no_change(run, capsys):
    run("optim.max_steps=4", "optim.schedule=constant")
    run("optim.max_steps=8", "optim.schedule=constant")
    said = capsys.readouterr().out
    assert "resuming from" in said and "learning rate" not in said


def test_a_checkpoint_of_another_model_is_refused(run):
    run("optim.max_steps=4")
    with pytest.raises(ValueError, match=r"model.n_layer is 2 there and 3 here"):
        run("model.n_layer=3")
    with pytest.raises(ValueError, match="run.resume=never. Choose another folder"):
        run("run.resume=never")


def test_a_run_keeps_the_vocabulary_of_its_data(run, corpus, tmp_path):
    entries = Manifest.load(corpus).tokenizer.vocab_size
    run("optim.max_steps=4", f"model.vocab_size={entries}")  # as older configurations had to
    run()
    config = run.out_dir / "config.yaml"
    config.write_text(config.read_text().replace(str(corpus), str(tmp_path / "moved")))
    assert load_config([str(config)]).model.vocab_size == entries


def test_a_run_folder_of_another_task_is_refused(run, monkeypatch):
    run("optim.max_steps=4")
    monkeypatch.setattr("training.checkpoint.reader.Checkpoint.task", "classification")
    with pytest.raises(ValueError, match=r"has a run of task=classification, and .*=language. Try"):
        run()


def test_command_line_error_is_one_sentence(run, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["train.py", str(run.config), "optim.inertia=1"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path("train.py", run_name="__main__")
    # Python prints this message to stderr and exits with 1; nothing else was printed before
    assert re.fullmatch(r"error: optim.inertia is not a setting: .*", end.value.code)
    assert capfd.readouterr() == ("", "")
