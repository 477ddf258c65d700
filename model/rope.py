"""Rotary tables of a GPT, scaled to a longer context than its positions were trained for.

The scalings are those of transformers: linear (position interpolation, Chen et al. 2023, arXiv
2306.15595), ntk (a larger base, as its rope_theta), and yarn (Peng et al. 2023, arXiv 2309.00071).
Shapes: T tokens, D head_dim.
"""

import math

import torch
from torch import Tensor

from model.config import ModelConfig
from model.positions import cos_and_sin, rotary_frequencies, rotary_tables
from model.yarn import FAST_TURNS, SLOW_TURNS, yarn_magnitude


def rope_tables(positions: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines by which `rotary_qkv` rotates each position.

    Args:
        positions: (T,) integers, on the device of the tables.
        config: a model with rotary positions.

    Returns:
        cos, sin: each (T, D/2) float32. YaRN multiplies both by `yarn_magnitude`.
    """
    D, base = config.head_dim, config.scaled_rope_base
    if config.rope_scaling == "linear":
        return rotary_tables(positions.double() / config.rope_factor, D, base)
    if config.rope_scaling != "yarn":
        return rotary_tables(positions, D, base)
    frequencies = rotary_frequencies(D, base, positions.device)
    cos, sin = cos_and_sin(positions, _yarn_frequencies(frequencies, config))
    magnitude = yarn_magnitude(config.rope_factor)
    return cos * magnitude, sin * magnitude


def _yarn_frequencies(frequencies: Tensor, config: ModelConfig) -> Tensor:
    """Divide the slow frequencies (D/2,) by the factor, keep the fast ones, blend in between."""
    D, trained = config.head_dim, config.context_length / config.rope_factor

    def pair_with(turns: int) -> float:
        """Number, not rounded, of the pair that makes these turns in the trained context."""
        return D * math.log(trained / (2 * math.pi * turns)) / (2 * math.log(config.rope_base))

    first = max(math.floor(pair_with(FAST_TURNS)), 0)
    last = min(math.ceil(pair_with(SLOW_TURNS)), D - 1)
    pairs = torch.arange(D // 2, device=frequencies.device, dtype=torch.float64)
    slow = ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)
    return frequencies / config.rope_factor * slow + frequencies * (1 - slow)
