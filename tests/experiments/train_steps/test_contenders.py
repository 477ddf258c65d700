"""Which steps are measured, and of which models."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from experiments.train_steps import contenders
from model.config import ModelConfig


@pytest.mark.parametrize("loss", [0.0, float("nan"), float("inf")])
def test_timings_that_end_in_skipped_steps_are_refused(loss):
    contenders.check_last_loss(10.8, "ours")
    with pytest.raises(SystemExit, match="ours: the loss or a gradient is not finite"):
        contenders.check_last_loss(loss, "ours")


def test_compared_nanogpt_ours_has_its_model_too(monkeypatch):
    made = []
    monkeypatch.setattr(contenders, "our_step", lambda config, **_: made.append(config))
    config, tokens = ModelConfig(context_length=64), torch.zeros(1, 64, dtype=torch.int64)
    options = {"butterfly": False, "attentions": False, "hugging_face": False}
    alone, compared = (
        contenders.contenders(config, tokens, tokens, Namespace(**options, nanogpt=folder))
        for folder in (None, Path("nanoGPT"))
    )
    assert [*alone] == ["ours"]
    assert [*compared] == ["ours", "ours, no biases", "nanoGPT, flash", "nanoGPT, cuDNN"]
    for name in ("ours", "ours, no biases"):
        compared[name]()
    assert [ours.bias for ours in made] == [True, False]
