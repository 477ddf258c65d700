"""Tiny models of transformers, and a comparison of their training."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

B, T, VOCAB = 3, 23, 31
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    ),
    "llama4": lambda: Llama4ForCausalLM(
        Llama4TextConfig(
            **SIZES, intermediate_size_mlp=48, num_local_experts=2, attention_chunk_size=6,
            no_rope_layers=[1, 0], pad_token_id=0,
        )
    ),
}  # fmt: skip


def pair(
    make: Callable[[], PreTrainedModel],
    reference: str = "sdpa",
    dtype: torch.dtype = torch.float64,
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same model with the reference attention and with ours."""
    theirs = make().to(dtype).eval()
    ours = copy.deepcopy(theirs)
    theirs.set_attn_implementation(reference)
    ours.set_attn_implementation("papilio")
    return theirs, ours


def tokens(batch: int = B, length: int = T) -> Tensor:
    return torch.randint(1, VOCAB, (batch, length))


def padding(*lengths: int, left: bool) -> Tensor:
    """Attention mask (B, T) int64: 1 at a token, 0 at padding."""
    position = torch.arange(T).expand(len(lengths), T)
    n = torch.tensor(lengths)[:, None]
    return (position >= T - n if left else position < n).long()


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {n: g for n, g in zip(parameters, grads, strict=True) if g is not None}


def assert_same_training(
    theirs: nn.Module, ours: nn.Module, where: Tensor, **inputs: Tensor
) -> None:
    """Assert equal logits at `where`, and equal gradients of a loss on these logits."""
    grads, results = [], []
    for model in (theirs, ours):
        logits = model(**inputs, use_cache=False).logits[where.bool()]
        results.append(logits)
        grads.append(gradients(model, logits.square().mean()))
    torch.testing.assert_close(results[1], results[0])
    assert grads[0].keys() == grads[1].keys() and len(grads[0]) > 10
    for name, gradient in grads[0].items():
        torch.testing.assert_close(grads[1][name], gradient, msg=lambda m, n=name: f"{n}: {m}")
