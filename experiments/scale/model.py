"""What more GPUs would do with one long sequence, by a model of bytes and FLOPs.

A step on one GPU takes a T + b w(T): layers cost the same for every token, and attention as many
pairs w of query and key as its mask keeps. Both come from two measured lengths. P GPUs divide this,
and wait for what they exchange where it takes longer than what it is hidden behind:

    ring      2 t C numbers go by P - 1 times in a layer, t = T / P, each time while t T / P pairs
              are attended to (of a butterfly, its share of them); in the backward pass also their
              gradients, for 2.5 times the work
    weights   N gradients go once round, behind the backward pass

Within a machine of 8 they are exchanged over NVLink, beyond it over the network.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from evaluation.results import Row
from model.config import MaskConfig, ModelConfig
from model.flops import attention_share, count_params

NVLINK = 230e9  # bytes a second of one GPU that sends to another and receives, by NCCL
NETWORK = 50e9  # of a GPU's share of it, 400 Gbit/s
MACHINE = 8
BYTES = 2  # of a number that is exchanged
COUNTED = 2**19  # tokens
FORWARD = 1 / 3.5  # of attention's work


@dataclass(frozen=True)
class Growth:
    """How the time of a step grows with the length of its one sequence."""

    model: ModelConfig
    per_token: float
    """Seconds of a token in all that is no attention."""
    per_pair: float
    """Seconds of a pair of query and key that is attended to, in all layers and both passes."""

    def seconds(self, length: int, n_gpus: int) -> float:
        """Of a step on one sequence that so many GPUs share.

        Each has 2,048 tokens or more: fewer are attended to in another way.
        """
        model, t = self.model, length // n_gpus
        attention = self.per_pair * pairs(model, length) / n_gpus
        rest = self.per_token * t
        link = NVLINK if n_gpus <= MACHINE else NETWORK
        layers, width = model.n_layer, 2 * model.kv_heads * model.head_dim * BYTES
        waiting = 0.0
        if n_gpus > 1:
            hop, work = t * width / link, attention / (layers * n_gpus)
            forward = (n_gpus - 1) * max(0.0, hop - FORWARD * work)
            # beside the first step are keys alone, and beside the last gradients' way home nothing
            backward = max(0.0, hop - (1 - FORWARD) * work) + hop
            backward += (n_gpus - 2) * max(0.0, 2 * hop - (1 - FORWARD) * work)
            waiting = layers * (forward + backward)
        gradients = 2 * (1 - 1 / n_gpus) * 4 * count_params(model) / link
        hidden_behind = (attention + rest) / 2
        return attention + rest + waiting + max(0.0, gradients - hidden_behind)


def pairs(model: ModelConfig, length: int) -> float:
    """Pairs of query and key that a layer attends to, under a causal mask."""

    def keys(at: int) -> float:
        """That a query sees, on average."""
        shape = replace(model, context_length=at)
        return attention_share(shape, 0, causal=True) * (at + 1) / 2

    if model.mask.pattern == "dense" or length <= COUNTED:
        return keys(length) * length
    # each doubling adds as many: a layout of blocks is too large to be counted there
    doubling = keys(COUNTED) - keys(COUNTED // 2)
    return (keys(COUNTED) + doubling * math.log2(length / COUNTED)) * length


def fit(model: ModelConfig, measured: Sequence[tuple[int, float]]) -> Growth:
    """From the seconds of a step at two lengths, on one GPU.

    Raises:
        ValueError: they would make a token or a pair cost nothing or less.
    """
    (short, fast), (long, slow) = measured
    a, b = pairs(model, short), pairs(model, long)
    per_pair = (slow - fast * long / short) / (b - a * long / short)
    per_token = (fast - per_pair * a) / short
    if min(per_token, per_pair) <= 0:
        raise ValueError(
            f"steps of {fast:.4g} s at {short} tokens and {slow:.4g} s at {long} do not tell "
            f"attention from the rest: {per_token:.3g} s a token, {per_pair:.3g} s a pair. Measure "
            "lengths that lie further apart"
        )
    return Growth(model, per_token, per_pair)


def growth_of(rows: Sequence[Row], name: str, mask: MaskConfig) -> Growth:
    """From the rows of one GPU under a mask of this name, the shortest and the longest."""
    alone = [r for r in rows if r["n_gpus"] == 1 and r["way"].startswith(f"{name},")]
    points = sorted((r["context_length"], r["step_s"]) for r in alone)
    return fit(ModelConfig(positions="rotary", mask=mask), [points[0], points[-1]])
