import json
from dataclasses import replace

import torch

from experiments.attention.cases import Case, Sparsity


def test_flops_count_causal_and_density():
    case = Case(2, 1024, 4, 64)
    full = 4 * 2 * 4 * 1024**2 * 64
    assert case.forward_flops == full
    assert replace(case, causal=True).forward_flops == full / 2
    # 8 blocks of 128, each with itself and one partner
    sparse = replace(case, sparsity=Sparsity("butterfly", 1))
    assert sparse.density == 0.25
    assert sparse.forward_flops == full / 4
    window = replace(case, sparsity=Sparsity("window", 2), causal=True)
    assert 0 < window.forward_flops == full / 2 * window.density < full / 2


def test_padding_is_at_most_twenty_tokens_and_always_the_same():
    case = Case(64, 1000, 1, 16, padded=True)
    lengths = case.kv_lengths("cpu")
    assert lengths.dtype == torch.int32
    assert 980 <= lengths.min() < lengths.max() <= 1000
    assert lengths.equal(case.kv_lengths("cpu"))
    assert replace(case, padded=False).kv_lengths("cpu").unique().tolist() == [1000]


def test_a_case_can_be_written_as_json():
    small = Case(batch=2, seq_len=48, n_head=2, head_dim=16, dtype=torch.float16)
    row = json.loads(json.dumps(replace(small, sparsity=Sparsity("butterfly", 1, 16)).describe()))
    assert (row["dtype"], row["mask"], row["seq_len"]) == ("float16", "butterfly 1", 48)
    assert row["sparsity"] == {"pattern": "butterfly", "reach": 1, "block_size": 16}
    assert small.describe()["mask"] == "dense"
