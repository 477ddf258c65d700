"""Our GPT gives the same numbers as the GPT-2 of Hugging Face transformers with equal weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from model.config import ModelConfig
from model.gpt import GPT

VOCAB, CONTEXT, LAYERS, HEADS, WIDTH = 61, 40, 3, 4, 32

# our name -> transformers' name, and whether it is transposed (Conv1D is (in, out))
BLOCK_NAMES = {
    "ln_1.weight": ("ln_1.weight", False),
    "ln_1.bias": ("ln_1.bias", False),
    "attn.qkv_proj.weight": ("attn.c_attn.weight", True),
    "attn.qkv_proj.bias": ("attn.c_attn.bias", False),
    "attn.out_proj.weight": ("attn.c_proj.weight", True),
    "attn.out_proj.bias": ("attn.c_proj.bias", False),
    "ln_2.weight": ("ln_2.weight", False),
    "ln_2.bias": ("ln_2.bias", False),
    "mlp.fc_in.weight": ("mlp.c_fc.weight", True),
    "mlp.fc_in.bias": ("mlp.c_fc.bias", False),
    "mlp.fc_out.weight": ("mlp.c_proj.weight", True),
    "mlp.fc_out.bias": ("mlp.c_proj.bias", False),
}
NAMES = {
    "tok_emb.weight": ("transformer.wte.weight", False),
    "pos_emb.weight": ("transformer.wpe.weight", False),
    "ln_f.weight": ("transformer.ln_f.weight", False),
    "ln_f.bias": ("transformer.ln_f.bias", False),
} | {
    f"blocks.{i}.{ours}": (f"transformer.h.{i}.{theirs}", transposed)
    for i in range(LAYERS)
    for ours, (theirs, transposed) in BLOCK_NAMES.items()
}


def make_pair(dtype: torch.dtype, inverse_layer: bool) -> tuple[GPT, GPT2LMHeadModel]:
    """Make our model and transformers' with the same weights, large enough for nonlinearity."""
    torch.manual_seed(0)
    ours = GPT(
        ModelConfig(
            vocab_size=VOCAB,
            context_length=CONTEXT,
            n_layer=LAYERS,
            n_head=HEADS,
            n_embd=WIDTH,
            scale_attn_by_inverse_layer_idx=inverse_layer,
        )
    ).to(dtype)
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_positions=CONTEXT,
            n_layer=LAYERS,
            n_head=HEADS,
            n_embd=WIDTH,
            scale_attn_by_inverse_layer_idx=inverse_layer,
            attn_implementation="eager",
            bos_token_id=0,
            eos_token_id=0,
        )
    ).to(dtype)
    parameters = dict(theirs.named_parameters())
    assert len(parameters) == len(NAMES)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
            their_name, transposed = NAMES[name]
            source = parameter[:VOCAB] if name == "tok_emb.weight" else parameter
            parameters[their_name].copy_(source.T if transposed else source)
    return ours.eval(), theirs.eval()


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("inverse_layer", [False, True])
@pytest.mark.parametrize("seq_len", [1, 2, 7, 33, CONTEXT])
def test_logits_and_all_gradients_in_float64(seq_len: int, inverse_layer: bool) -> None:
    ours, theirs = make_pair(torch.float64, inverse_layer)
    tokens, targets = torch.randint(VOCAB, (2, 3, seq_len))
    logits, their_logits = ours(tokens), theirs(tokens).logits
    torch.testing.assert_close(logits, their_logits, rtol=1e-9, atol=1e-9)

    next_token_loss(logits, targets).backward()
    next_token_loss(their_logits, targets).backward()
    their_gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        their_name, transposed = NAMES[name]
        expected = their_gradients[their_name]
        assert parameter.grad is not None and expected is not None
        gradient = parameter.grad[:VOCAB] if name == "tok_emb.weight" else parameter.grad
        if transposed:
            gradient = gradient.T
        torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("seq_len", [1, 19])
def test_logits_and_loss_in_float32(seq_len: int) -> None:
    ours, theirs = make_pair(torch.float32, inverse_layer=False)
    tokens, targets = torch.randint(VOCAB, (2, 3, seq_len))
    their_logits = theirs(tokens).logits
    torch.testing.assert_close(ours(tokens), their_logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours(tokens, targets), next_token_loss(their_logits, targets))
