"""Validation losses that end a run."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.checkpoint.resume import last_good
from training.checkpoint.saver import CheckpointSaver
from training.finite_steps import FiniteSteps


def check_validation(
    values: Mapping[str, Any], finite: FiniteSteps, saver: CheckpointSaver, run: Path, step: int
) -> None:
    """End the run where a validation loss is not finite, and name a checkpoint that is good.

    Args:
        values: of the record of the validation, with a loss of each corpus.
        finite: what takes the steps of the run.
        saver: of the run; what it is writing is finished first.
        run: folder of the run.
        step: number of steps so far.

    Raises:
        FloatingPointError: a validation loss is not finite.
    """
    losses = {name: loss for name, loss in values.items() if name.startswith("val_loss")}
    ruined = next((name for name, loss in losses.items() if not math.isfinite(loss)), None)
    if ruined is None:
        return
    saver.finish()
    # The last step that was taken has ruined the weights.
    good = last_good(run, step - finite.skipped_in_a_row())
    raise FloatingPointError(
        f"the validation loss is not finite, {ruined}={losses[ruined]} at step {step}: lower "
        f"optim.lr or raise optim.warmup_steps; {good}"
    )
