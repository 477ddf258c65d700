"""Every option is timed, where our kernels agree on the result."""

import pytest
import torch

from experiments.attention import features
from kernels import flash_attention


@pytest.fixture
def kernels(monkeypatch):
    """Standard attention in the place of our kernels; by how much the results of each are off."""
    added = {None: 0.0, "triton": 0.0}

    def attend(q, k, v, impl=None, **options):
        return flash_attention(q, k, v, impl="reference", **options) * (1 + added[impl])

    def gpu_ms(run):
        run()
        return {"ms": 1.0}

    monkeypatch.setattr(features, "SEQ_LEN", 32)
    monkeypatch.setattr(features, "TOKENS", 64)
    monkeypatch.setattr(features, "flash_attention", attend)
    monkeypatch.setattr(features, "gpu_ms", gpu_ms)
    return added


def test_a_row_for_each_option_and_a_plain_one_for_the_other_head_dims(kernels):
    rows = [row for (row,) in features.measure(64, "cpu")]
    assert [row["name"] for row in rows] == [
        *(
            "",
            "dropout",
            "padding",
            "sinks",
            "softcap",
            "ALiBi",
            "a window of a quarter",
            "four documents",
        )
    ]
    assert [row["name"] for (row,) in features.measure(192, "cpu")] == [""]
    assert {row["difference"] for row in rows} == {0.0}
    times = ("forward_ms", "backward_ms", "portable_forward_ms", "portable_backward_ms")
    assert {row[x] for row in rows for x in times} == {1.0}


def test_options_change_the_result(kernels):
    asked = features.case(64)
    qkv = [x.detach() for x in features.make_tensors(asked, "cpu")[:3]]
    plain, *others = (
        flash_attention(*qkv, impl="reference", causal=True, **options)
        for options in features.option_sets(asked, "cpu").values()
    )
    assert all(not torch.equal(plain, other) for other in others)


@pytest.mark.parametrize("error", [0.1, float("nan")])
def test_kernels_that_differ_get_no_speed(error, kernels):
    kernels[None] = error
    with pytest.raises(SystemExit, match=r"head_dim 64, plain: the kernels differ by .*no speed"):
        next(features.measure(64, "cpu"))


def test_times_are_compared_with_plain_attention_and_the_portable_kernels():
    rows = [
        {
            "head_dim": 64,
            "name": name,
            "forward_ms": ms,
            "portable_forward_ms": 3.0,
            "backward_ms": 2 * ms,
            "portable_backward_ms": 5.0,
        }
        for name, ms in (("", 2.0), ("dropout", 2.5))
    ]
    printed = features.features_table({"rows": rows}).splitlines()[2:]
    assert [[x.strip() for x in line.split("|")[1:-1]] for line in printed] == [
        ["64", "none", "2.000", "1.00", "1.50", "4.000", "1.00", "1.25"],
        ["64", "dropout", "2.500", "1.25", "1.20", "5.000", "1.25", "1.00"],
    ]
