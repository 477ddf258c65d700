"""Runs and text for measurements on prompts, such as scripts.passkey and scripts.repeats."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import torch

from data.text.shards import TokenStream
from evaluation.runs import Run, labels, open_run
from evaluation.score import check_tokenizer
from training.checkpoint.choice import find_checkpoint
from training.numerics import autocast


def open_runs(
    folders: Sequence[Path], checkpoint: str | None, data: Path | None
) -> tuple[dict[str, Run], TokenStream]:
    """Open runs by unique label, and the validation split of `data` or of the first run's text.

    Args:
        folders: folders of the runs.
        checkpoint: checkpoint of each run, in the format of `find_checkpoint`.
        data: folder of token shards, or None.

    Raises:
        ValueError: the text was prepared with another tokenizer than a run's, or runs with the same
            name are not seeds of one model.
    """
    runs = [open_run(folder, find_checkpoint(folder, checkpoint)) for folder in folders]
    stream = TokenStream(data or runs[0].config.data.path, "val")
    for run in runs:
        check_tokenizer(run, stream)
    names = labels(runs)
    unique = [
        name if names.count(name) == 1 else f"{name}, seed {run.seed_number}"
        for name, run in zip(names, runs, strict=True)
    ]
    return dict(zip(unique, runs, strict=True)), stream


def precision_of(run: Run, device: torch.device) -> Callable[[], AbstractContextManager]:
    """Context of a forward pass: autocast as in training on a GPU, float32 elsewhere."""
    return partial(autocast, run.config.run.dtype if device.type == "cuda" else "float32", device)
