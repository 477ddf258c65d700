"""Whole runs with masked documents or consecutive windows."""

import pytest

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


@pytest.mark.parametrize("change", ["data.consecutive_windows=2", "data.document_mask=true"])
def test_resuming_with_other_batches_is_refused(run, change):
    run(*ONE_STEP)
    with pytest.raises(ValueError, match=f"{change.split('=')[0]} is .* there and .* here"):
        run(*ONE_STEP, change)
