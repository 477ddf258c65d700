"""Whole runs of the trainer on the CPU, on a corpus of a few thousand tokens."""

import itertools
import json
import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

from configs import ConfigError, load_config
from configs.command_line import errors_as_sentences
from training.checkpoint import latest_checkpoint, read_progress, read_weights
from training.distributed import Processes
from training.metrics import read_metrics

from train import record_step  # isort: skip


def losses(folder):
    return {r["step"]: r["loss"] for r in read_metrics(folder) if "loss" in r}


def test_learns_and_evaluates_the_whole_validation_set(run, corpus):
    result = run("optim.max_steps=40", "run.eval_every=20")
    manifest = json.loads((corpus / "manifest.json").read_text())
    assert result.tokens == manifest["splits"]["val"]["tokens"] - 1
    assert result.loss < losses(run.out_dir)[1] - 1.5
    evaluations = [r for r in read_metrics(run.out_dir) if "val_loss" in r]
    assert [r["step"] for r in evaluations] == [20, 40]
    assert evaluations[-1]["val_loss"] == result.loss


GPU = ["run.device=cuda", "run.compile=true", "run.dtype=bfloat16", "model.attention_dropout=0.1"]


@pytest.mark.parametrize(
    "options", [[], pytest.param(GPU, marks=pytest.mark.gpu)], ids=["cpu", "gpu"]
)
def test_stopping_and_going_on_changes_no_loss(run, tmp_path, options):
    whole = run(*options, f"run.out_dir={tmp_path / 'whole'}")
    # the schedule is the whole run's: only the process ends early
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.record_step", stop_after(5))
        with pytest.raises(KeyboardInterrupt):
            run(*options)
    assert latest_checkpoint(run.out_dir).name == "step_00000004"
    parts = run(*options)
    assert parts == whole
    assert losses(run.out_dir) == losses(tmp_path / "whole")
    assert set(losses(run.out_dir)) == set(range(1, 9))


def stop_after(last_step):
    def record(log, config, processes, step, *rest):
        if step > last_step:
            raise KeyboardInterrupt
        record_step(log, config, processes, step, *rest)

    return record


def test_micro_batches_add_up_to_the_same_step(run, tmp_path):
    steps = []
    for micro in (1, 2, 8):
        out = tmp_path / f"micro_{micro}"
        run("model.dropout=0.0", f"optim.micro_batch_size={micro}", f"run.out_dir={out}")
        steps.append(losses(out))
    for step in steps[0]:
        torch.testing.assert_close(steps[1][step], steps[0][step], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(steps[2][step], steps[0][step], rtol=1e-4, atol=1e-5)


def test_documents_masked_or_not_and_a_butterfly(run, tmp_path):
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
    assert len({result.loss for result in results.values()}) == 4
    assert len({result.tokens for result in results.values()}) == 1


def test_finished_run_is_evaluated_again_and_recorded_once(run):
    first = run()
    records = read_metrics(run.out_dir)
    assert run() == first
    assert read_metrics(run.out_dir) == records


@pytest.fixture
def slow_clock(monkeypatch):
    """An hour passes between any two looks at the clock of training."""
    clock = itertools.count(0, 3600)
    monkeypatch.setattr("training.stopwatch.time", SimpleNamespace(perf_counter=clock.__next__))


def hours(folder, kind):
    return [(r["step"], r["gpu_hours"]) for r in read_metrics(folder) if kind in r]


def test_gpu_hours_count_each_step_once_and_survive_a_resume(run, slow_clock):
    # stretches of steps, an hour each: 1 to 4 (the first step untimed), 5 and 6, 7 and 8
    options = ("run.log_every=4", "run.eval_every=6")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.record_step", stop_after(4))
        with pytest.raises(KeyboardInterrupt):
            run(*options)
    assert read_progress(latest_checkpoint(run.out_dir))[0].gpu_hours == pytest.approx(4 / 3)
    run(*options)
    # and step 5, the first of the second process, counts as long as step 6
    assert hours(run.out_dir, "loss") == [(4, pytest.approx(4 / 3)), (8, pytest.approx(13 / 3))]
    assert hours(run.out_dir, "val_loss") == [
        (6, pytest.approx(4 / 3 + 2)),
        (8, pytest.approx(4 / 3 + 3)),
    ]
    assert read_progress(latest_checkpoint(run.out_dir))[0].gpu_hours == pytest.approx(13 / 3)


def test_first_step_has_no_speed(run):
    run("optim.max_steps=3")
    speeds = [r.get("tokens_per_s") for r in read_metrics(run.out_dir) if "loss" in r]
    assert speeds[0] is None
    assert speeds[1] > 0


def on_two_processes(run, *overrides):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
        "train.py", str(run.config), *overrides,
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.distributed
@pytest.mark.parametrize(
    "options",
    [
        [],
        pytest.param(["run.device=cuda", "run.compile=true"], marks=pytest.mark.gpu(2)),
    ],
    ids=["cpu", "gpu"],
)
def test_two_processes_give_the_losses_of_one(run, tmp_path, options):
    one, two = tmp_path / "one", tmp_path / "two"
    options = [*options, "model.dropout=0.0"]
    result = run(*options, f"run.out_dir={one}")
    on_two_processes(run, *options, f"run.out_dir={two}")
    for step, loss in losses(one).items():
        torch.testing.assert_close(losses(two)[step], loss, rtol=1e-4, atol=1e-5)
    evaluation = [r for r in read_metrics(two) if "val_loss" in r][-1]
    torch.testing.assert_close(evaluation["val_loss"], result.loss, rtol=1e-4, atol=1e-5)
    assert evaluation["val_tokens"] == result.tokens
    # each waits for the other, so two processes spend twice the time of their speed, and no less
    spent = [r for r in read_metrics(two) if "loss" in r][1:]
    seconds = sum(256 / r["tokens_per_s"] for r in spent)
    first_step = 256 / spent[0]["tokens_per_s"]
    assert evaluation["gpu_hours"] * 3600 == pytest.approx(2 * (seconds + first_step), rel=1e-6)


@pytest.mark.distributed
def test_two_processes_go_on_bit_for_bit(run, tmp_path):
    options = ("optim.schedule=constant", "optim.batch_tokens=128")
    whole, parts = f"run.out_dir={tmp_path / 'whole'}", f"run.out_dir={tmp_path / 'parts'}"
    on_two_processes(run, *options, whole)
    on_two_processes(run, *options, parts, "optim.max_steps=4")
    on_two_processes(run, *options, parts)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


@pytest.mark.distributed
def test_one_process_goes_on_from_two(run, tmp_path):
    options = ("optim.schedule=constant", "model.dropout=0.0")
    run(*options, f"run.out_dir={tmp_path / 'one'}")
    on_two_processes(run, *options, "optim.max_steps=4")
    run(*options)
    assert len(losses(run.out_dir)) == 8
    for step, loss in losses(tmp_path / "one").items():
        torch.testing.assert_close(losses(run.out_dir)[step], loss, rtol=1e-4, atol=1e-5)


def test_trains_on_interpreted_triton_kernels(run, tmp_path):
    """The trainer on this project's own kernels gives the losses that it gives on PyTorch's."""
    options = ("optim.max_steps=3", "model.dropout=0.0", "optim.batch_tokens=64")
    run(*options, "model.attention=triton", f"run.out_dir={tmp_path / 'triton'}")
    run(*options, "model.attention=sdpa", f"run.out_dir={tmp_path / 'sdpa'}")
    for step, loss in losses(tmp_path / "sdpa").items():
        torch.testing.assert_close(losses(tmp_path / "triton")[step], loss, rtol=1e-4, atol=1e-5)


# one step that moves nothing: what is evaluated are the weights that the run starts with
STAND_STILL = (
    "optim.max_steps=1", "optim.warmup_steps=0", "optim.lr=1e-12", "optim.weight_decay=0",
    "model.dropout=0",
)  # fmt: skip


@pytest.fixture
def source(run, tmp_path):
    """A run to start others from; `source.result` is its last evaluation."""
    folder = tmp_path / "source"
    result = run("optim.max_steps=30", "run.save_every=30", f"run.out_dir={folder}")
    return SimpleNamespace(folder=folder, result=result, init=f"run.init_from={folder}")


def test_starts_with_the_weights_of_another_run(run, source, capsys):
    capsys.readouterr()
    # another seed: neither weights nor order of the data are those of the source by chance
    result = run(source.init, "run.seed=7", *STAND_STILL)
    assert result.loss == pytest.approx(source.result.loss, rel=1e-5)
    assert losses(run.out_dir)[1] == pytest.approx(source.result.loss, abs=0.3)
    assert source.result.loss < math.log(300) - 1.5
    checkpoint = latest_checkpoint(source.folder)
    assert f"starting with the weights of {checkpoint}\n" in capsys.readouterr().out
    progress = read_progress(latest_checkpoint(run.out_dir))[0]
    assert (progress.step, progress.tokens) == (1, 256)


def test_learned_positions_reach_over_a_longer_context(run, source):
    result = run(source.init, "model.context_length=64", *STAND_STILL)
    assert result.tokens == source.result.tokens
    assert result.loss < math.log(300) - 1
    old, new = (
        read_weights(latest_checkpoint(folder))["pos_emb.weight"]
        for folder in (source.folder, run.out_dir)
    )
    assert new.shape == (64, 32)
    torch.testing.assert_close(new[::2], old)
    torch.testing.assert_close(new[1:-1:2], (old[:-1] + old[1:]) / 2)


def test_rotary_positions_reach_over_a_longer_context(run, tmp_path, capsys):
    source = tmp_path / "source"
    init = f"run.init_from={source}"
    there = run("model.positions=rotary", "optim.max_steps=30", f"run.out_dir={source}")
    longer = ("model.positions=rotary", "model.context_length=64", *STAND_STILL)
    for name, option in (("scaled", "model.rope_scaling=2"), ("base", "model.rope_base=40000")):
        result = run(init, *longer, option, f"run.out_dir={tmp_path / name}")
        assert result.tokens == there.tokens
        assert result.loss < math.log(300) - 1
    scaled, base = re.findall("starting with the weights of .*", capsys.readouterr().out)
    assert scaled.endswith("; model.rope_scaling is 1.0 there and 2.0 here")
    assert base.endswith("; model.rope_base is 10000.0 there and 40000.0 here")
    # the other context alone: no position is turned otherwise than it was
    result = run(init, *longer)
    assert result.loss == pytest.approx(there.loss, abs=0.3)
    with pytest.raises(ValueError, match="model.positions is 'rotary' there and 'learned' here"):
        run(init, f"run.out_dir={tmp_path / 'learned'}")
    # from the scaled run over the same context, whose scaling is easily forgotten
    with pytest.raises(ValueError, match=r"model.rope_scaling is 2.0 there and 1.0 here"):
        run(f"run.init_from={tmp_path / 'scaled'}", *longer, f"run.out_dir={tmp_path / 'on'}")


def test_a_shorter_context_starts_with_the_positions_it_has(run, source):
    result = run(source.init, "model.context_length=16", *STAND_STILL)
    # the same weights at the same positions, each token with less before it
    assert result.loss == pytest.approx(source.result.loss, abs=0.3)


def test_goes_on_from_its_own_checkpoint(run, source, tmp_path):
    whole = run(source.init, f"run.out_dir={tmp_path / 'whole'}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.record_step", stop_after(5))
        with pytest.raises(KeyboardInterrupt):
            run(source.init)
    # where the source was then does not matter, nor whether it is still there
    source.folder.rename(tmp_path / "elsewhere")
    assert run("run.init_from=moved/source/") == whole
    assert losses(run.out_dir) == losses(tmp_path / "whole")
    for other, said in (((), "None"), (("run.init_from=elsewhere",), "'elsewhere'")):
        with pytest.raises(ValueError, match=f"run.init_from is 'source' there and {said} here"):
            run(*other)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_starts_with_weights_that_have_no_optimizer(run, source):
    checkpoint = latest_checkpoint(source.folder)
    weights = read_weights(checkpoint)
    for file in checkpoint.iterdir():
        if file.name != "state.json":
            file.unlink()
    dcp.save({"model": weights}, checkpoint_id=checkpoint, no_dist=True)
    result = run(source.init, *STAND_STILL)
    assert result.loss == pytest.approx(source.result.loss, rel=1e-5)


@pytest.mark.distributed
def test_two_processes_start_with_the_weights_of_another_run(run, source, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    options = (source.init, "optim.max_steps=3", "model.dropout=0")
    run(*options, f"run.out_dir={one}")
    on_two_processes(run, *options, f"run.out_dir={two}")
    assert losses(two)[1] < math.log(300) - 1.5
    for step, loss in losses(one).items():
        torch.testing.assert_close(losses(two)[step], loss, rtol=1e-4, atol=1e-5)


def test_weights_of_another_model_are_refused(run, source):
    with pytest.raises(ValueError, match=r"source is a run of another model") as refused:
        run(source.init, "model.n_layer=3", "model.positions=rotary", "model.n_embd=64")
    for difference in (
        "model.n_layer is 2 there and 3 here",
        "model.n_embd is 32 there and 64 here",
        "model.positions is 'learned' there and 'rotary' here",
    ):
        assert difference in str(refused.value)
    assert not run.out_dir.exists()


def test_weights_for_another_tokenizer_are_refused(run, source):
    tokenizer = source.folder / "tokenizer.json"
    spec = json.loads(tokenizer.read_text())
    spec["model"]["merges"].pop()
    tokenizer.write_text(json.dumps(spec))
    with pytest.raises(ValueError, match=r"the tokenizer has sha256 \w{64} there and \w{64} here"):
        run(source.init)


def test_first_weights_from_a_folder_that_has_none(run, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"run.init_from=.*/none has no checkpoint"):
        run(f"run.init_from={tmp_path / 'none'}")


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        (["data.path=nowhere"], FileNotFoundError, "nowhere does not exist; prepare it with"),
        (
            ["model.vocab_size=500"],
            ValueError,
            "entries, and model.vocab_size=500: prepare the data with the model's tokenizer",
        ),
        (
            ["model.vocab_size=257", "run.init_from=nowhere"],
            ValueError,
            r"of \d+ entries, and model.vocab_size=257",
        ),
        (["run.device=cuda"], ValueError, "run.device=cuda, but PyTorch sees no GPU"),
        (
            ["model.context_length=100000", "optim.batch_tokens=200_000"],
            ValueError,
            "context_length=100000",
        ),
        (["model.attention=triton"], ValueError, "needs a CUDA GPU"),
        (["optim.lr=1e30"], FloatingPointError, "the training loss is .* at step"),
        (["optim.batch_tokens=100"], ConfigError, "128 would do|64 would do"),
    ],
)
def test_errors(run, overrides, error, message, monkeypatch):
    if "run.device=cuda" in overrides:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    if "model.attention=triton" in overrides:
        monkeypatch.setattr("kernels.attention._INTERPRETED", False)
    with pytest.raises(SystemExit) as end, errors_as_sentences():
        run(*overrides)
    assert isinstance(end.value.__cause__, error)
    assert re.match(f"error: .*({message})", str(end.value))


def test_more_processes_than_gpus(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ValueError, match="which has 1 GPU.*use --nproc_per_node=1"):
        run("run.device=auto")


def test_checkpoint_of_another_model(run):
    run("optim.max_steps=4")
    with pytest.raises(ValueError, match=r"model.n_layer is 2 there and 3 here"):
        run("model.n_layer=3")
    with pytest.raises(ValueError, match="run.resume=never: choose another folder"):
        run("run.resume=never")


def test_command_line_error_is_one_sentence(run):
    done = subprocess.run(
        [sys.executable, "train.py", str(run.config), "optim.momentum=1"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert re.fullmatch(r"error: optim.momentum: .*\n", done.stderr), done.stderr


def test_unknown_gpu_has_no_mfu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A GPU of next year")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 3 * 2**30)
    device = torch.device("cuda")
    processes = Processes(rank=0, local_rank=0, world_size=1, device=device)
    config, log = load_config(["configs/quickstart.yaml"]), Mock()
    watch = Mock(gpu_hours=0.5, **{"tokens_per_s.return_value": 5000.0})
    record_step(log, config, processes, 1, 4.0, 1e-3, 1.0, watch)
    text, values = log.record.call_args.args[0], log.record.call_args.kwargs
    assert text == "loss 4.0000  5,000 tokens/s  unknown GPU: MFU not reported  3.0 GiB"
    assert (values["mfu_causal"], values["gpu_hours"]) == (None, 0.5)
