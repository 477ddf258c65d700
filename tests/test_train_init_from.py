"""Whole runs that start with the weights of another run."""

import json
import math
import re
import shutil
from types import SimpleNamespace

import pytest
import torch

from tests.training_runs import in_two_processes, losses, stop_after
from training.checkpoint.contents import OPTIMIZER, PROCESSES
from training.checkpoint.folders import latest_checkpoint
from training.checkpoint.reader import Checkpoint
from training.environment import total_cost
from training.metrics import read_metrics

# one step that changes nothing: the evaluated weights are the initial weights of the run
ONE_FROZEN_STEP = (
    "optim.max_steps=1", "optim.warmup_steps=0", "optim.lr=1e-12", "optim.weight_decay=0",
    "model.dropout=0",
)  # fmt: skip

THIRTY_STEPS = ("optim.max_steps=30", "run.save_every=30", "run.eval_every=30")


@pytest.fixture(scope="module")
def trained(make_run, tmp_path_factory):
    """A finished run, trained once, and its last evaluation."""
    run = make_run(tmp_path_factory.mktemp("trained"))
    return run.out_dir, run(*THIRTY_STEPS)


@pytest.fixture
def source(trained, tmp_path):
    """Run whose weights other runs start from; `source.result` is its last evaluation."""
    folder = shutil.copytree(trained[0], tmp_path / "source")
    return SimpleNamespace(folder=folder, result=trained[1], init=f"run.init_from={folder}")


def test_starts_with_the_weights_of_another_run(run, source, capsys):
    capsys.readouterr()
    # with another seed, neither the weights nor the data order match the source by chance
    result = run(source.init, "run.seed=7", *ONE_FROZEN_STEP)
    assert result["val_loss"] == pytest.approx(source.result["val_loss"], rel=1e-5)
    assert losses(run.out_dir)[1] == pytest.approx(source.result["val_loss"], abs=0.3)
    assert source.result["val_loss"] < math.log(300) - 1.5
    checkpoint = latest_checkpoint(source.folder)
    assert f"initial weights: {checkpoint}\n" in capsys.readouterr().out
    progress = Checkpoint.open(latest_checkpoint(run.out_dir)).progress
    assert (progress.step, progress.tokens) == (1, 256)


def test_learned_positions_extend_to_a_longer_context(run, source):
    result = run(source.init, "model.context_length=64", *ONE_FROZEN_STEP)
    assert result["val_tokens"] == source.result["val_tokens"]
    assert result["val_loss"] < math.log(300) - 1
    old, new = (
        Checkpoint.open(latest_checkpoint(folder)).weights()["pos_emb.weight"]
        for folder in (source.folder, run.out_dir)
    )
    assert new.shape == (64, 32)
    torch.testing.assert_close(new[::2], old)
    torch.testing.assert_close(new[1:-1:2], (old[:-1] + old[1:]) / 2)


def test_rotary_positions_extend_to_a_longer_context(run, tmp_path, capsys):
    source = tmp_path / "source"
    init = f"run.init_from={source}"
    first = run("model.positions=rotary", *THIRTY_STEPS, f"run.out_dir={source}")
    longer = ("model.positions=rotary", "model.context_length=64", *ONE_FROZEN_STEP)
    scaling = ("model.rope_scaling=linear", "model.rope_factor=2")
    for name, options in (("scaled", scaling), ("base", ["model.rope_base=40000"])):
        result = run(init, *longer, *options, f"run.out_dir={tmp_path / name}")
        assert result["val_tokens"] == first["val_tokens"]
        assert result["val_loss"] < math.log(300) - 1
    scaled, base = re.findall("initial weights: .*", capsys.readouterr().out)
    assert scaled.endswith(
        "; model.rope_scaling is 'none' there and 'linear' here"
        "; model.rope_factor is 1.0 there and 2.0 here"
    )
    assert base.endswith("; model.rope_base is 10000.0 there and 40000.0 here")
    # only the context changes: the rotation at each position stays the same
    result = run(init, *longer)
    assert result["val_loss"] == pytest.approx(first["val_loss"], abs=0.3)
    with pytest.raises(ValueError, match="model.positions is 'rotary' there and 'learned' here"):
        run(init, f"run.out_dir={tmp_path / 'learned'}")
    # starting from the scaled run with the same context, the scaling is easily forgotten
    with pytest.raises(ValueError, match="model.rope_scaling is 'linear' there and 'none' here"):
        run(f"run.init_from={tmp_path / 'scaled'}", *longer, f"run.out_dir={tmp_path / 'on'}")


def test_a_shorter_context_keeps_its_positions(run, source):
    result = run(source.init, "model.context_length=16", *ONE_FROZEN_STEP)
    # the same weights at the same positions, but less context for each token
    assert result["val_loss"] == pytest.approx(source.result["val_loss"], abs=0.3)


def test_resumes_from_its_own_checkpoint(run, source, tmp_path):
    whole = run(source.init, f"run.out_dir={tmp_path / 'whole'}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("train.Trainer.record", stop_after(5))
        with pytest.raises(KeyboardInterrupt):
            run(source.init)
    # on resume, the source may have moved or been deleted
    source.folder.rename(tmp_path / "elsewhere")
    assert run("run.init_from=moved/source/") == whole
    assert losses(run.out_dir) == losses(tmp_path / "whole")
    for other, said in (((), "None"), (("run.init_from=elsewhere",), "'elsewhere'")):
        with pytest.raises(ValueError, match=f"run.init_from is 'source' there and {said} here"):
            run(*other)


def test_starts_from_weights_without_optimizer_state(run, source):
    checkpoint = latest_checkpoint(source.folder)
    for name in (OPTIMIZER, PROCESSES):
        (checkpoint / name).unlink()
    result = run(source.init, *ONE_FROZEN_STEP)
    assert result["val_loss"] == pytest.approx(source.result["val_loss"], rel=1e-5)


def test_starts_with_a_chosen_checkpoint_of_another_run(run, tmp_path, capsys):
    source = tmp_path / "source"
    run(f"run.out_dir={source}", "run.save_every=2", "run.eval_every=2", "run.keep_last=9")
    evaluations = {r["step"]: r["val_loss"] for r in read_metrics(source) if "val_loss" in r}
    best = min(evaluations, key=evaluations.__getitem__)
    folder = source / "checkpoints" / "step_00000006"
    for choice, step in ((None, 8), (2, 2), ("best", best), (folder, 6), (folder.name, 6)):
        out = tmp_path / str(step)
        options = [] if choice is None else [f"run.init_checkpoint={choice}"]
        capsys.readouterr()
        run(f"run.init_from={source}", *options, *ONE_FROZEN_STEP, f"run.out_dir={out}")
        assert f"initial weights: {source}/checkpoints/step_{step:08d}" in (capsys.readouterr().out)
        # the cost of the run includes the chosen checkpoint, and no later steps of the source
        assert total_cost(out)["tokens"] == 256 * (step + 1)
        shutil.rmtree(out)


def test_init_checkpoint_must_not_change_on_resume(run, source):
    run(source.init, "run.init_checkpoint=30", "optim.max_steps=4")
    for options, said in (([], "None"), (["run.init_checkpoint=best"], "'best'")):
        with pytest.raises(ValueError, match=f"run.init_checkpoint is 30 there and {said} here"):
            run(source.init, *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["run.init_checkpoint=7"], "source has no checkpoint 7: it has step_00000030. Give a st"),
        (["run.init_checkpoint=nowhere"], "source has no checkpoint nowhere: it has step_00000030"),
        (["run.init_from=null", "run.init_checkpoint=best"], "best has no effect without run.init"),
    ],
)
def test_a_checkpoint_that_does_not_exist_is_refused(run, source, options, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run(source.init, *options)


@pytest.mark.distributed
def test_two_processes_start_with_the_weights_of_another_run(run, source, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    options = (source.init, "optim.max_steps=3", "model.dropout=0")
    run(*options, f"run.out_dir={one}")
    in_two_processes(run, *options, f"run.out_dir={two}")
    assert losses(two)[1] < math.log(300) - 1.5
    for step, loss in losses(one).items():
        torch.testing.assert_close(losses(two)[step], loss, rtol=1e-4, atol=1e-5)


def test_weights_of_another_model_are_refused(run, source):
    with pytest.raises(ValueError, match=r"source has another model") as refused:
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
    with pytest.raises(ValueError, match=r"sha256 \w{64}, that of this run has \w{64}"):
        run(source.init)


def test_init_from_a_folder_without_a_checkpoint_is_refused(run, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"run.init_from=.*/none has no checkpoint"):
        run(f"run.init_from={tmp_path / 'none'}")


def test_scaled_positions_that_are_scaled_too_little_are_reported(run, tmp_path, capsys):
    source = tmp_path / "source"
    rotary, short = "model.positions=rotary", ("optim.max_steps=2", "optim.warmup_steps=0")
    run(rotary, "model.rope_scaling=ntk", "model.rope_factor=4", *short, f"run.out_dir={source}")
    longer = (
        rotary,
        f"run.init_from={source}",
        "model.context_length=64",
        "model.rope_scaling=ntk",
    )
    for factor, warned in ((2, True), (8, False)):
        out = f"run.out_dir={tmp_path / str(factor)}"
        run(*longer, f"model.rope_factor={factor}", *ONE_FROZEN_STEP, out)
        said = capsys.readouterr().out
        assert ("For 64 instead of 32 tokens, set model.rope_factor=8" in said) == warned
