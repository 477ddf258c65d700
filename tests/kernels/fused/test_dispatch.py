"""Each implementation has its module, even where it needs a GPU to run."""

import pytest

from kernels.fused.dispatch import module_of

pytest.importorskip("triton")


@pytest.mark.parametrize(
    ("impl", "name", "functions"),
    [
        ("hopper", "gelu", ["linear_gelu", "linear_gelu_bwd"]),
        ("triton", "gelu", ["linear_gelu", "linear_gelu_bwd"]),
        ("reference", "gelu", ["linear_gelu", "linear_gelu_bwd"]),
        ("triton", "cross_entropy", ["row_cross_entropy"]),
        ("reference", "cross_entropy", ["row_cross_entropy"]),
        ("triton", "layer_norm", ["layer_norm_bwd"]),
        ("triton", "adamw", ["AdamWLaunch"]),
        ("triton", "muon", ["MuonUpdate"]),
        ("reference", "muon", ["MuonUpdate"]),
    ],
)
def test_the_module_of_an_implementation_exists(impl, name, functions):
    module = module_of(impl, name)
    assert all(callable(getattr(module, function)) for function in functions)
