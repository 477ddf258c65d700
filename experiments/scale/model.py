"""What more GPUs would do with one long sequence, by a model of bytes and FLOPs.

A step on one GPU takes a T + b w(T): layers cost the same for every token under every mask, and
attention as many pairs w of query and key as its mask keeps. All come from steps of one GPU. P GPUs
divide this, and wait for what they exchange where it takes longer than what it is hidden behind:

    ring      2 t C numbers go by P - 1 times in a layer, t = T / P, each time while t T / P pairs
              are attended to (of a butterfly, its share of them); in the backward pass also their
              gradients, two steps later, for 2.5 times the work
    weights   N gradients go once round, behind the backward pass

Within a machine of 8 they are exchanged over NVLink, beyond it over the network.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from kernels.limits import MAX_RECEIVE_BUFFER
from model.config import ModelConfig
from model.flops import attention_share, count_params

# Bytes a second of one GPU that sends to another and receives. Over NVLink as profiled between two
# H200s, by the driver and by NCCL; over the network its share, 400 Gbit/s.
COPIED, BY_NCCL, NETWORK = 380e9, 230e9, 50e9
MACHINE = 8
BYTES = 2  # of a key's or a value's number
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
        attention, rest = self.per_pair * pairs(model, length) / n_gpus, self.per_token * t
        if n_gpus == 1:
            return attention + rest
        work = attention / (model.n_layer * n_gpus)  # of both passes in a step of the ring
        sent = 2 * model.kv_heads * model.head_dim * BYTES * t
        keys = _hop(sent, n_gpus)
        # sums of more than two parts are exchanged in float32
        sums = _hop(sent if n_gpus == 2 else 4 / BYTES * sent, n_gpus)
        forward = (n_gpus - 1) * max(0.0, keys - FORWARD * work)
        sent_in_step = (keys * (i < n_gpus - 1) + sums * (i >= 2) for i in range(n_gpus))
        waits = (max(0.0, sending - (1 - FORWARD) * work) for sending in sent_in_step)
        backward = sums + sum(waits)  # the last sums, on their way home, hide behind nothing
        link = BY_NCCL if n_gpus <= MACHINE else NETWORK
        gradients = 2 * (1 - 1 / n_gpus) * 4 * count_params(model) / link
        late = max(0.0, gradients - (attention + rest) / 2)
        return attention + rest + model.n_layer * (forward + backward) + late


def _hop(n_bytes: float, n_gpus: int) -> float:
    """Seconds until all have so much from the GPU before."""
    within = COPIED if n_bytes <= MAX_RECEIVE_BUFFER else BY_NCCL
    return n_bytes / (within if n_gpus <= MACHINE else NETWORK)


def pairs(model: ModelConfig, length: int) -> float:
    """Pairs of query and key that a layer attends to, under a causal mask."""
    if model.mask.pattern == "dense" or length <= COUNTED:
        return _keys(model, length) * length
    # each doubling adds as many: a layout of blocks is too large to be counted there
    doubling = _keys(model, COUNTED) - _keys(model, COUNTED // 2)
    return (_keys(model, COUNTED) + doubling * math.log2(length / COUNTED)) * length


@cache
def _keys(model: ModelConfig, length: int) -> float:
    """That a query sees, on average."""
    shape = replace(model, context_length=length)
    return attention_share(shape, 0, causal=True) * (length + 1) / 2


def fit(
    models: Mapping[str, ModelConfig], measured: Sequence[tuple[str, int, float]]
) -> dict[str, Growth]:
    """Growths that are nearest to steps on one GPU, by their relative errors.

    Args:
        models: by name, which differ in their masks alone.
        measured: a model's name, tokens of the sequence, seconds of the step.

    Raises:
        ValueError: by these steps, a token or a pair would cost nothing or less.
    """
    costs = np.zeros((len(measured), 1 + len(models)))
    for row, (name, length, seconds) in zip(costs, measured, strict=True):
        row[0] = length / seconds
        row[1 + [*models].index(name)] = pairs(models[name], length) / seconds
    scale = costs.max(axis=0, initial=np.finfo(float).tiny)
    found, _, rank, _ = np.linalg.lstsq(costs / scale, np.ones(len(measured)), rcond=None)
    per_token, *per_pair = (found / scale).tolist()
    if rank < len(found) or found.min() <= 0:
        raise ValueError(
            f"the steps measured, {list(measured)} (model, tokens, seconds), do not tell attention "
            f"from the rest: {per_token:.3g} s a token, {per_pair} s a pair. Measure more lengths, "
            "further apart"
        )
    return {
        name: Growth(model, per_token, cost)
        for (name, model), cost in zip(models.items(), per_pair, strict=True)
    }
