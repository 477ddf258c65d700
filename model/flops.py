"""FLOPs of a model, and model FLOPs utilisation (MFU).

A multiply and an add are two FLOPs. Per token, a forward pass costs 2 N for the weights and 4 L C T
for attention. The backward pass costs twice as much (Kaplan et al. 2020, arXiv 2001.08361;
Chowdhery et al. 2022, arXiv 2204.02311, appendix B):

    training, full     6 N + 12 L C T     every query times every key
    training, causal   6 N +  6 L C T     half of that, the part a causal model uses

N counts all parameters except learned positions and vocabulary padding. The embedding counts once,
as the tied head; if the head is not tied, only the head counts, because a lookup costs no FLOPs.
Attention counts only the (query, key) pairs that masks and windows keep. nanoGPT and torchtitan
report "full". At long contexts the two differ (1.6x for GPT-2 small at 16K tokens), so we always
report both.
With model.head_size, attention costs 4 L A T, where A is the width of all heads together.
Shapes: L n_layer, C n_embd, T tokens in a sequence, V vocab.
"""

import re
from dataclasses import dataclass
from functools import cache

from model.classifier_config import ClassifierConfig
from model.config import ModelConfig

# Dense (no structured sparsity) bf16 tensor-core FLOP/s with float32 accumulation, from the
# vendor's data sheets. Keys match torch.cuda.get_device_name; the first match is used.
_PEAK_BF16 = {
    r"B200": 2250e12,
    r"H200 NVL": 835e12,
    r"H200": 989e12,
    r"H100 NVL": 835e12,
    r"H100 PCIe": 756e12,
    r"H100 80GB HBM3": 989e12,  # the SXM card
    r"A100": 312e12,
    r"L40S": 362e12,
    r"L4": 121e12,
    r"A10G": 70e12,
    r"A10": 125e12,
    r"RTX 4090(?! D)": 165e12,
    r"RTX 3090(?! Ti)": 71e12,
}
# A slice of a GPU, or a slower chip with the name of a faster one. Their peak is unknown.
_PARTIAL_GPU = re.compile(r"\b(MIG|Laptop|Max-Q)\b")


@dataclass(frozen=True, kw_only=True)
class MFU:
    """Model FLOPs utilisation: model FLOPs per second over the GPU's peak, 0 to 1."""

    causal: float
    """Counts the half of attention that a causal model uses."""
    full: float
    """Counts attention between all pairs of tokens, as most reports do."""


def count_params(config: ModelConfig) -> int:
    """Count the parameters (N), without lookup tables and vocabulary padding."""
    C, W, A = config.n_embd, config.mlp_width, config.attention_width
    qkv = A + 2 * config.kv_heads * config.head_dim
    fc_in = 2 * W if config.mlp == "swiglu" else W
    linear = qkv * C + A * C + fc_in * C + W * C  # qkv_proj, out_proj, fc_in, fc_out
    biases = qkv + C + fc_in + C if config.bias else 0
    # two per block, and one after the last block
    norm = 2 * C if config.bias and config.norm == "layer_norm" else C
    heads = 2 * config.head_dim if config.qk_norm else 0
    layers = config.n_layer * (linear + biases + heads + 2 * norm)
    return config.vocab_size * C + layers + norm


@cache  # a run needs it for each log record
def attention_share(config: ModelConfig | ClassifierConfig, layer: int, *, causal: bool) -> float:
    """Return the fraction of dense attention's (query, key) pairs that a layer computes."""
    T, W = config.context_length, config.window_size
    if config.attends_to_all(layer):
        return 1.0
    share = config.mask.density(T, causal=causal)
    if W is None or W >= T:
        return share
    # A layer with both a mask and a window computes at most the smaller of the two shares.
    pairs = W * (W + 1) // 2 + (T - W) * W
    return min(share, pairs / (T * (T + 1) // 2))


def forward_flops_per_token(config: ModelConfig, *, causal: bool) -> float:
    """FLOPs per token of a forward pass: 2 N + 4 L C T, or with `causal` 2 N + 2 L C T.

    `causal` counts only the half of attention that a causal model uses.
    """
    T = config.context_length
    layers = sum(attention_share(config, n, causal=causal) for n in range(config.n_layer))
    attention = 4 * layers * config.attention_width * T
    return 2.0 * count_params(config) + (attention / 2 if causal else attention)


def train_flops_per_token(config: ModelConfig, *, causal: bool) -> float:
    """FLOPs per token of forward and backward: 6 N + 12 L C T, or with `causal` 6 N + 6 L C T.

    Recomputation by activation checkpointing or FlashAttention is not counted. The arguments are
    those of `forward_flops_per_token`.
    """
    return 3.0 * forward_flops_per_token(config, causal=causal)


def classifier_train_flops(config: ClassifierConfig) -> float:
    """FLOPs of one example's forward and backward pass at full length, without embeddings and head.

    Every token sees all others: 6 N T + 12 L C T^2, N the weights of the blocks.
    """
    T, C, L, W = config.context_length, config.n_embd, config.n_layer, config.mlp_width
    A, kv = config.attention_width, config.kv_heads * config.head_dim
    linear = C * (A + 2 * kv) + A * C + W * C * (3 if config.mlp == "swiglu" else 2)
    layers = sum(attention_share(config, layer, causal=False) for layer in range(L))
    return config.documents * T * (6.0 * L * linear + 12.0 * layers * A * T)


def peak_flops(device_name: str) -> float | None:
    """Peak dense bf16 FLOP/s of a GPU, by `torch.cuda.get_device_name`; None if unknown."""
    if _PARTIAL_GPU.search(device_name):
        return None
    matches = (peak for name, peak in _PEAK_BF16.items() if re.search(rf"\b{name}\b", device_name))
    return next(matches, None)


def hours_at(flops: float, device_name: str, utilisation: float) -> float:
    """Hours that a GPU of known peak needs for `flops` at `utilisation` (0 to 1) of that peak."""
    peak = peak_flops(device_name)
    assert peak is not None
    return flops / (peak * utilisation) / 3600


def mfu(tokens_per_s: float, config: ModelConfig, device_name: str) -> MFU | None:
    """MFU of a training speed in tokens per second on ONE GPU, in both conventions.

    None if the peak of `device_name` (from `torch.cuda.get_device_name`) is unknown.
    """
    peak = peak_flops(device_name)
    if peak is None:
        return None
    causal, full = (train_flops_per_token(config, causal=half) for half in (True, False))
    return MFU(causal=tokens_per_s * causal / peak, full=tokens_per_s * full / peak)
