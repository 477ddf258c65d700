"""Whole runs whose context grows."""

import re

import pytest

from tests.training_runs import in_two_processes, losses
from training.metrics import read_evaluations, read_metrics

SCHEDULE = ("model.positions=rotary", "model.context_schedule=[[8,0.5],[32,0.5]]")


def test_validation_has_the_longest_context_throughout(run, tmp_path):
    run(*SCHEDULE)
    contexts = [r["context_length"] for r in read_metrics(run.out_dir) if "loss" in r]
    assert contexts == [8] * 4 + [32] * 4
    # Learning nothing, the model has the same validation loss in both stages.
    out = tmp_path / "frozen"
    frozen = ["optim.lr=1e-12", "optim.weight_decay=0", f"run.out_dir={out}"]
    run(*SCHEDULE, *frozen)
    first, last = (record["val_loss"] for record in read_evaluations(out))
    assert first == pytest.approx(last, abs=1e-6)
    plain = tmp_path / "plain"
    run("model.positions=rotary", *frozen[:2], f"run.out_dir={plain}")
    assert last == pytest.approx(read_evaluations(plain)[-1]["val_loss"], abs=1e-6)


@pytest.mark.parametrize("stop", [2, 4, 6])
def test_resuming_in_any_stage_changes_no_loss(run, tmp_path, stop, monkeypatch):
    from train import Trainer

    options = [*SCHEDULE, "run.save_every=2"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(*options, f"run.out_dir={whole}")
    loop = Trainer.loop

    def loop_to(self):
        take_step = self.take_step

        def take_or_stop(batch):
            if self.step == stop:
                self.saver.finish()
                raise KeyboardInterrupt
            take_step(batch)

        self.take_step = take_or_stop
        return loop(self)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "loop", loop_to)
        with pytest.raises(KeyboardInterrupt):
            run(*options, f"run.out_dir={parts}")
    run(*options, f"run.out_dir={parts}")
    assert losses(parts) == losses(whole)
    assert read_evaluations(parts)[-1]["val_loss"] == read_evaluations(whole)[-1]["val_loss"]


@pytest.mark.parametrize("contexts", [(1, 2), (5, 15, 45)])
def test_contexts_of_any_length(run, contexts):
    shares = [[context, 1 / len(contexts)] for context in contexts]
    tokens = f"optim.batch_tokens={4 * contexts[-1]}"
    kind = [SCHEDULE[0], "model.rope_scaling=yarn", f"model.context_schedule={shares}"]
    run(*kind, f"model.context_length={contexts[-1]}", tokens, "data.document_mask=true")
    seen = [r["context_length"] for r in read_metrics(run.out_dir) if "loss" in r]
    assert list(dict.fromkeys(seen)) == [*contexts] and len(seen) == 8


@pytest.mark.parametrize(
    ("schedule", "max_steps", "there", "here"),
    [
        ("[[16,0.5],[32,0.5]]", 8, "[[8, 1], [32, 5]]", "[[16, 1], [32, 5]]"),
        ("[[8,0.5],[32,0.5]]", 16, "[[8, 1], [32, 5]]", "[[8, 1], [32, 9]]"),
        ("[]", 16, "[[8, 1], [32, 5]]", "None"),
    ],
)
def test_other_stages_are_refused(run, schedule, max_steps, there, here):
    run(*SCHEDULE)
    message = f"of optim.max_steps in model.context_schedule) is {there} there and "
    with pytest.raises(ValueError, match=re.escape(message + f"{here} here")):
        run(SCHEDULE[0], f"model.context_schedule={schedule}", f"optim.max_steps={max_steps}")


def test_a_run_can_be_extended_in_its_last_stage(run, tmp_path):
    constant = (SCHEDULE[0], "optim.schedule=constant")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    longer = ("model.context_schedule=[[8,0.25],[32,0.75]]", "optim.max_steps=16")
    run(*constant, *longer, f"run.out_dir={whole}")
    run(*constant, SCHEDULE[1], f"run.out_dir={parts}")
    run(*constant, *longer, f"run.out_dir={parts}")
    assert losses(parts) == losses(whole)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "options",
    [[], ["parallel.mode=fsdp"], ["parallel.context=2"]],
    ids=["ddp", "fsdp", "context"],
)
def test_two_processes_give_the_losses_of_one(run, tmp_path, options):
    one, two = tmp_path / "one", tmp_path / "two"
    same = (*SCHEDULE, "model.dropout=0.0")
    run(*same, f"run.out_dir={one}")
    in_two_processes(run, *same, *options, f"run.out_dir={two}")
    assert losses(two) == pytest.approx(losses(one), rel=1e-4)


@pytest.mark.slow
def test_compiled_stages_give_the_losses_of_eager_ones(run, tmp_path):
    eager, compiled = tmp_path / "eager", tmp_path / "compiled"
    same = (*SCHEDULE, "model.dropout=0.0", "model.mask.pattern=butterfly")
    same += ("model.mask.block_size=16", "model.attention=reference")
    run(*same, f"run.out_dir={eager}")
    run(*same, "run.compile=true", f"run.out_dir={compiled}")
    assert losses(compiled) == pytest.approx(losses(eager), rel=1e-4)


@pytest.mark.gpu
def test_captured_stages_give_the_losses_of_eager_ones(run, tmp_path):
    eager, captured = tmp_path / "eager", tmp_path / "captured"
    same = ("model.positions=rotary", "model.context_schedule=[[64,0.5],[256,0.5]]")
    same += ("model.context_length=256", "model.rope_scaling=yarn", "optim.batch_tokens=2048")
    same += ("model.dropout=0.0", "run.device=cuda", "optim.max_steps=20", "optim.lr=1e-3")
    run(*same, "run.cuda_graph=false", f"run.out_dir={eager}")
    run(*same, "run.compile=true", f"run.out_dir={captured}")
    assert losses(captured) == pytest.approx(losses(eager), rel=1e-4)
    expected, got = (read_evaluations(out)[-1]["val_loss"] for out in (eager, captured))
    assert got == pytest.approx(expected, rel=1e-4)
