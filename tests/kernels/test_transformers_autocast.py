"""fp32 models of transformers train under autocast, as `Trainer(bf16=True)` runs them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kernels.for_transformers import register_with_transformers

each_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)
VOCAB, T = 64, 40
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# The attention of transformers to compare with: "sdpa", or "eager" for families with a softcap or
# sinks, which PyTorch's scaled_dot_product_attention lacks.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "sdpa", HEADS),
    "mistral": ("Mistral", "sdpa", {**HEADS, "sliding_window": 16}),
    "qwen2": ("Qwen2", "sdpa", HEADS),
    "qwen3": ("Qwen3", "sdpa", {**HEADS, "head_dim": 16}),
    "gemma2": ("Gemma2", "eager", {**HEADS, "head_dim": 16, "sliding_window": 16}),
    "gemma3": ("Gemma3Text", "sdpa", {**HEADS, "head_dim": 16, "sliding_window": 16}),
    "gpt_neox": ("GPTNeoX", "sdpa", {"num_attention_heads": 4}),
    "phi3": ("Phi3", "sdpa", HEADS),
    "smollm3": ("SmolLM3", "sdpa", HEADS),
    "gpt_oss": (
        "GptOss",
        "eager",
        {**HEADS, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "granite": ("Granite", "sdpa", HEADS),
    "starcoder2": ("Starcoder2", "sdpa", HEADS),
    "stablelm": ("StableLm", "sdpa", HEADS),
}


@pytest.fixture(autouse=True)
def registered() -> None:
    register_with_transformers()


def config_of(family: str) -> PreTrainedConfig:
    name, _, own = FAMILIES[family]
    return getattr(transformers, f"{name}Config")(**SIZES, **own)


def model_on(device: str, attention: str, family: str) -> PreTrainedModel:
    """The model of a family in fp32, with the same weights at each call."""
    torch.manual_seed(0)
    config = config_of(family)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(device)


def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, VOCAB, (2, T), generator=generator)


def two_losses(model: PreTrainedModel) -> Tensor:
    """The loss before and after one step of SGD under autocast."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = tokens().to(model.device)
    losses = []
    for _ in range(2):
        with torch.autocast(ids.device.type, torch.bfloat16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float().cpu())
    return torch.stack(losses)


@each_device
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_under_autocast_matches_pytorch(family: str, device: str) -> None:
    peer = FAMILIES[family][1]
    expected = two_losses(model_on(device, peer, family))
    got = two_losses(model_on(device, "papilio", family))
    assert expected[1] < expected[0] - 0.01  # it learns
    torch.testing.assert_close(got, expected, rtol=0, atol=4e-3)


@each_device
def test_the_trainer_in_bf16(tmp_path: Path, device: str) -> None:
    """transformers.Trainer itself, with the weights in fp32."""
    pytest.importorskip("accelerate")
    rows = [{"input_ids": row, "labels": row} for row in tokens()]
    losses = {}
    for attention in ("sdpa", "papilio"):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            bf16=True,
            use_cpu=device == "cpu",
            max_steps=3,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            model=model_on(device, attention, "qwen3"), args=arguments, train_dataset=rows
        )
        trainer.train()
        losses[attention] = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        assert trainer.model.dtype == torch.float32
    assert losses["sdpa"][-1] < losses["sdpa"][0] - 0.1
    assert losses["papilio"] == pytest.approx(losses["sdpa"], abs=4e-3)
