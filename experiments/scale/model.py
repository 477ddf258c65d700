"""Performance model of more GPUs on one long sequence, from bytes and FLOPs.

A step on T tokens takes a T + b w(T) seconds on one GPU. a is the cost per token of all layers, the
same under every mask. b is the cost per pair of query and key, and w(T) the number of pairs that
the mask keeps. Both are fitted to steps of one GPU. P GPUs divide this time. They wait for a
transfer only as long as it exceeds the computation that hides it:

    ring      Each layer passes on 2 t C numbers P - 1 times, t = T / P. Each transfer is hidden by
              t T / P pairs (under a butterfly, its share of them). The backward pass also sends
              their gradients, two steps later, and does 2.5 times the work.
    weights   An all-reduce of N gradients, hidden by the backward pass.

Within a machine of 8 GPUs, transfers use NVLink; beyond it, the network.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from kernels.limits import MAX_RECEIVE_BUFFER
from model.config import ModelConfig
from model.flops import attention_share, count_params

# Bytes per second of one GPU that sends and receives at once. Over NVLink: profiled between two
# H200s, by driver copies and by NCCL. Over the network: 400 Gbit/s per GPU.
COPIED, BY_NCCL, NETWORK = 380e9, 230e9, 50e9
MACHINE = 8
BYTES = 2  # per element of a key or a value
COUNTED = 2**19  # longest sequence whose pairs are counted exactly, tokens
FORWARD = 1 / 3.5  # share of attention's work in the forward pass


@dataclass(frozen=True)
class Growth:
    """Step time as a function of the length of its one sequence."""

    model: ModelConfig
    per_token: float
    """Seconds per token outside attention."""
    per_pair: float
    """Seconds per visible pair of query and key, in all layers and both passes."""

    def seconds(self, length: int, n_gpus: int) -> float:
        """Time of a step on one sequence sharded over `n_gpus`.

        Each GPU needs at least 2,048 tokens: shorter shards use another algorithm.
        """
        model, t = self.model, length // n_gpus
        attention, rest = self.per_pair * pairs(model, length) / n_gpus, self.per_token * t
        if n_gpus == 1:
            return attention + rest
        work = attention / (model.n_layer * n_gpus)  # one ring step, both passes
        sent = 2 * model.kv_heads * model.head_dim * BYTES * t
        keys = _hop(sent, n_gpus)
        # sums of more than two parts are sent in float32
        sums = _hop(sent if n_gpus == 2 else 4 / BYTES * sent, n_gpus)
        forward = (n_gpus - 1) * max(0.0, keys - FORWARD * work)
        sent_in_step = (keys * (i < n_gpus - 1) + sums * (i >= 2) for i in range(n_gpus))
        waits = (max(0.0, sending - (1 - FORWARD) * work) for sending in sent_in_step)
        backward = sums + sum(waits)  # nothing hides the last transfer of sums
        link = BY_NCCL if n_gpus <= MACHINE else NETWORK
        gradients = 2 * (1 - 1 / n_gpus) * 4 * count_params(model) / link
        late = max(0.0, gradients - (attention + rest) / 2)
        return attention + rest + model.n_layer * (forward + backward) + late


def _hop(n_bytes: float, n_gpus: int) -> float:
    """Seconds until every GPU has received `n_bytes` from its predecessor."""
    within = COPIED if n_bytes <= MAX_RECEIVE_BUFFER else BY_NCCL
    return n_bytes / (within if n_gpus <= MACHINE else NETWORK)


def pairs(model: ModelConfig, length: int) -> float:
    """Number of visible pairs of query and key in a layer, under a causal mask."""
    if model.mask.pattern == "dense" or length <= COUNTED:
        return _keys(model, length) * length
    # Extrapolate, as the block layout is too large to count: each doubling adds as many keys.
    doubling = _keys(model, COUNTED) - _keys(model, COUNTED // 2)
    return (_keys(model, COUNTED) + doubling * math.log2(length / COUNTED)) * length


@cache
def _keys(model: ModelConfig, length: int) -> float:
    """Average number of keys visible to a query."""
    shape = replace(model, context_length=length)
    return attention_share(shape, 0, causal=True) * (length + 1) / 2


def fit(
    models: Mapping[str, ModelConfig], measured: Sequence[tuple[str, int, float]]
) -> dict[str, Growth]:
    """Fit a Growth per model to steps on one GPU: least squares of relative errors.

    Args:
        models: by name; they differ in their masks only.
        measured: name of the model, tokens of the sequence, seconds of the step.

    Raises:
        ValueError: the fitted cost of a token or a pair is not positive.
    """
    costs = np.zeros((len(measured), 1 + len(models)))
    for row, (name, length, seconds) in zip(costs, measured, strict=True):
        row[0] = length / seconds
        row[1 + [*models].index(name)] = pairs(models[name], length) / seconds
    scale = costs.max(axis=0, initial=np.finfo(float).tiny)
    solution, _, rank, _ = np.linalg.lstsq(costs / scale, np.ones(len(measured)), rcond=None)
    per_token, *per_pair = (solution / scale).tolist()
    if rank < len(solution) or solution.min() <= 0:
        raise ValueError(
            f"measured={list(measured)} (model, tokens, seconds) must separate attention from the "
            f"rest, but fits {per_token:.3g} s per token and {per_pair} s per pair. Try more "
            "lengths, further apart"
        )
    return {
        name: Growth(model, per_token, cost)
        for (name, model), cost in zip(models.items(), per_pair, strict=True)
    }
