"""Kernels by what they are for, as a profiler names them."""

import pytest
import torch
from torch.profiler import ProfilerActivity

from training.parts import IDLE, REST, add_up, part_of, recorded, time_by_part

NORM, OPTIMIZER = "residuals and normalisation", "optimizer and clipping"


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "matrix products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matrix products"),
        ("product_kernel", "matrix products"),
        ("attn_bwd_kernel", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("cross_entropy_kernel", "loss"),
        ("triton_red_fused__log_softmax__to_copy_masked_fill_19", "loss"),
        ("bias_gelu_bwd_kernel", "MLP: bias and GELU"),
        ("triton_poi_fused_gelu_gelu_backward_view_6", "MLP: bias and GELU"),
        # torch.compile names operators of ours, too, whose results it reads
        ("triton_poi_fused_gelu_mlp_bwd_native_layer_norm_backward_3", NORM),
        ("triton_per_fused_linear_cross_entropy_grad_native_layer_norm_7", NORM),
        ("void multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata>", OPTIMIZER),
        ("triton_poi_fused__to_copy_6", REST),
    ],
)
def test_parts(kernel, part):
    assert part_of(kernel) == part


def test_times_and_launches_are_of_one_step():
    kernels = [("attn_fwd_kernel", 6.0, 24), ("attn_bwd_kernel", 9.0, 24), ("memset", 1.0, 2)]
    assert add_up(kernels, steps=2) == {"attention": (7.5, 24), REST: (0.5, 1)}


def test_what_is_counted_is_the_steps_after_the_warmup_and_no_whole_step():
    x = torch.randn(8, 8)
    sizes = iter([4, 4, 8, 8, 8])

    def step():
        n = next(sizes)
        return x[:n, :n] @ x[:n, :n] if n == 8 else x[:n].exp()

    events = recorded(step, ProfilerActivity.CPU, steps=3, warmup=2)
    counts = {name: count for name, _, count in events}
    assert counts["aten::mm"] == 3
    assert "aten::exp" not in counts
    assert not any(key.startswith("ProfilerStep") for key in counts)


@pytest.mark.gpu
def test_the_time_of_a_product_is_that_of_a_product():
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    parts = time_by_part(lambda: x @ x, step_ms=1000.0)
    assert parts["matrix products"].launches == 1
    assert 0.05 < parts["matrix products"].ms < 5
    assert parts[IDLE].ms == pytest.approx(1000 - parts["matrix products"].ms, abs=0.1)
