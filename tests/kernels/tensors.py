"""Random tensors that are the same on any device, and the dtypes to test."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

each_dtype = pytest.mark.parametrize(
    ("dtype", "device"),
    [
        (torch.float32, "cpu"),
        (torch.float16, "cpu"),
        pytest.param(torch.float32, "cuda", marks=pytest.mark.gpu),
        pytest.param(torch.bfloat16, "cuda", marks=pytest.mark.gpu),
    ],
)


def random_tensors(
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    device: str = "cpu",
    scales: Sequence[float] | None = None,
) -> list[Tensor]:
    """Normal tensors of these shapes, times `scales`, drawn on the CPU in fp64 and then rounded."""
    generator = torch.Generator().manual_seed(1)
    return [
        (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(device, dtype)
        for shape, dtype, scale in zip(shapes, dtypes, scales or [1.0] * len(shapes), strict=True)
    ]
