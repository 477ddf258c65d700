"""Whole runs with masked documents or consecutive windows."""

import pytest

from data.text.batches import TrainBatches
from data.text.shards import TokenStream
from tests.training_runs import losses

# one step that changes nothing: the losses depend on the batches only
ONE_STEP = [
    *("optim.max_steps=1", "optim.warmup_steps=0", "optim.lr=1e-12", "optim.weight_decay=0"),
    "model.dropout=0",
]


def test_documents_are_masked_in_training_and_in_validation(run, tmp_path):
    first, validation = {}, {}
    for name, options in (("packed", []), ("masked", ["data.document_mask=true"])):
        out = tmp_path / name
        validation[name] = run(*ONE_STEP, *options, f"run.out_dir={out}")["val_loss"]
        first[name] = losses(out)[1]
    assert first["packed"] != first["masked"]
    assert validation["packed"] != validation["masked"]


def test_consecutive_windows_change_the_batches(run, tmp_path):
    first = {}
    for consecutive in (1, 2):
        out = tmp_path / str(consecutive)
        run(*ONE_STEP, f"data.consecutive_windows={consecutive}", f"run.out_dir={out}")
        first[consecutive] = losses(out)[1]
    assert first[1] != first[2]


@pytest.mark.parametrize(
    "change", ["data.consecutive_windows=2", "data.document_mask=true", "data.align=document"]
)
def test_resuming_with_other_batches_is_refused(run, change):
    run(*ONE_STEP)
    with pytest.raises(ValueError, match=f"{change.split('=')[0]} is .* there and .* here"):
        run(*ONE_STEP, change)


def test_aligned_samples_begin_with_documents_and_cuts_are_reported(run, corpus, capsys):
    stream = TokenStream(corpus, "train")
    starts = set(stream.document_starts.tolist())
    batches = TrainBatches(stream, 32, seed=1, align="document")
    tokens, _, _ = batches.batch(0, batches.samples_per_epoch)
    text = stream.read(0, len(stream))
    at = {tuple(text[start : start + 32]) for start in starts}
    assert {tuple(row) for row in tokens.numpy()} <= at
    run(*ONE_STEP, "data.align=document")
    line = next(x for x in capsys.readouterr().out.splitlines() if "epochs" in x)
    share = 1 - (32 * batches.samples_per_epoch + 1) / len(stream)
    assert line.endswith(f"data.align=document cuts {share:.1%} at a context of 32")
    assert f"{256 / (32 * batches.samples_per_epoch + 1):.2f} epochs" in line


def test_a_growing_context_has_aligned_samples_in_each_stage(run, corpus, capsys):
    schedule = ["model.positions=rotary", "model.context_schedule=[[8,0.5],[32,0.5]]"]
    run(*schedule, "data.align=document")
    line = next(x for x in capsys.readouterr().out.splitlines() if "epochs" in x)
    assert "% at a context of 8, " in line and line.endswith("% at a context of 32")
