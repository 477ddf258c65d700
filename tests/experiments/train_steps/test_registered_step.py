"""Models without Papilio take the same steps on its kernels, and other losses are refused."""

from contextlib import nullcontext

import pytest
import torch

from experiments.attention.peers import registered
from experiments.train_steps import registered_step
from experiments.train_steps.registered_step import (
    CHOICE,
    PAPILIO,
    check_losses,
    encoder,
    llama,
    operator_of,
    registered_table,
)

TINY = {
    **{"vocab_size": 31, "hidden_size": 32, "intermediate_size": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("make", [lambda: llama(1, TINY, 64), lambda: encoder(1, 64, 40, 2)])
def test_losses_are_equal_after_registering(make, monkeypatch):
    monkeypatch.setattr("experiments.train_steps.transformers_step.TOKENS_A_STEP", 128)
    model = make()
    model.module.float()  # the interpreter computes no bfloat16
    expected = model.loss()
    with registered():
        assert torch.nn.attention.current_flash_attention_impl() == "papilio"
        actual = model.loss()
        assert operator_of(model).startswith("_scaled_dot_product_flash_attention")
    assert torch.nn.attention.current_flash_attention_impl() is None
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_differing_losses_are_refused():
    check_losses({CHOICE: 0.0, "cuDNN": 0.05, PAPILIO: 0.04}, "a model")
    for gap in (0.06, float("nan")):
        with pytest.raises(SystemExit, match="a model: losses differ from those of PyTorch's"):
            check_losses({CHOICE: 0.0, "cuDNN": 0.05, PAPILIO: gap}, "a model")


def test_rows_and_table(monkeypatch):
    backends = {CHOICE: nullcontext, PAPILIO: registered}
    monkeypatch.setattr(registered_step, "BACKENDS", backends)
    monkeypatch.setattr(registered_step, "LOSS_STEPS", 2)
    monkeypatch.setattr(registered_step, "STEPS", 1)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**30)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)

    def make() -> registered_step.Model:
        model = encoder(1, 64, 20, 1)
        model.module.float()
        return model

    (rows,) = registered_step.benchmark(make, 2)
    assert [row["backend"] for row in rows] == [CHOICE, PAPILIO]
    assert rows[0]["loss_gap"] == 0 and rows[1]["loss_gap"] < 1e-4
    assert "| 1.000 | 1.0 GiB | 0 nats |" in registered_table({"rows": rows})
