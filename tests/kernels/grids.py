"""Which dtypes, dropout and causal masks the tests of attention go through."""

import pytest
import torch

on_gpu = pytest.mark.gpu
in_bf16 = pytest.param(torch.bfloat16, marks=on_gpu)
# one option changes no step that depends on the dtype; several of them are tried in fp16 as well
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, in_bf16])
each_dtype_and_fp16 = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, in_bf16])
each_dtype_and_dropout = pytest.mark.parametrize(
    ("dtype", "dropout_p"),
    [
        (torch.float32, 0.0),
        (torch.float16, 0.3),
        pytest.param(torch.bfloat16, 0.0, marks=on_gpu),
        pytest.param(torch.bfloat16, 0.3, marks=on_gpu),
    ],
)
causal_or_full = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
