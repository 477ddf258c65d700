"""Any shape with any options, drawn by hypothesis: the kernels against standard attention."""

from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels.mask.block_mask import BlockSparseMask
from kernels.testing import check_attention, make_qkv, poison_empty
from tests.kernels.implementations import attention_by

few, many = (
    settings(max_examples=n, deadline=None, derandomize=True, database=None) for n in (20, 25)
)


def calls(longest, head_dims):
    """Keyword arguments of `check`; hypothesis shrinks them to a short call without options."""
    lengths = st.integers(1, longest)
    return st.fixed_dictionaries(
        {
            "batch": st.integers(1, 2),
            # as many keys as queries, or any number
            "lengths": st.one_of(lengths.map(lambda n: (n, n)), st.tuples(lengths, lengths)),
            "n_head": st.integers(1, 2),
            "grouped": st.booleans(),
            "head_dim": st.sampled_from(head_dims),
            "causal": st.booleans(),
            "window_size": st.none() | st.integers(1, longest + 5),
            "documents": st.sampled_from([None, "packed", "any"]),
            "padding": st.booleans(),
            "sinks": st.booleans(),
            "softcap": st.sampled_from([None, 1.0, 15.0]),
            "dropout_p": st.sampled_from([0.0, 0.2, 0.7]),
            "block_size": st.sampled_from([None, 16, 32, 64, 128]),
            "density": st.sampled_from([0.0, 0.4, 1.0]),
            "mask_per_head": st.booleans(),
            "copy_engines": st.booleans(),
            "seed": st.integers(0, 2**31),
        }
    )


def check(
    impl, dtype, device, batch, lengths, n_head, grouped, head_dim, causal, window_size, documents,
    padding, sinks, softcap, dropout_p, block_size, density, mask_per_head, copy_engines, seed,
):  # fmt: skip
    """Assert that one call keeps to the error budget of `check_attention`, in every result."""
    (seq_q, seq_k), n_kv_head = lengths, 1 if grouped else n_head
    generator = torch.Generator().manual_seed(seed)

    def draw(low, high, *shape):  # from [low, high]
        return torch.randint(low, high + 1, shape, generator=generator).to(device)

    options = {"causal": causal, "window_size": window_size, "softcap": softcap}
    if documents is not None:
        doc_start = draw(-1, seq_k + 1, batch, seq_q)
        options["doc_start"] = doc_start.sort().values if documents == "packed" else doc_start
    if padding:
        options["kv_lengths"] = draw(0, seq_k, batch)
    if sinks:
        options["sinks"] = torch.randn(n_head, generator=generator).to(device)
    if dropout_p:
        options |= {"dropout_p": dropout_p, "dropout_seed": seed}
    if block_size is not None:
        shape = (n_head if mask_per_head else 1, -(-seq_q // block_size), -(-seq_k // block_size))
        layout = torch.rand(shape, generator=generator) < density
        options["mask"] = BlockSparseMask(layout, block_size)
    q, k, v = make_qkv(
        batch, seq_q, seq_k, n_head, n_kv_head, head_dim, dtype=dtype, device=device, seed=seed
    )
    least_work = 1 if copy_engines else 2**62
    with poison_empty(), mock.patch("kernels.triton.operands.MIN_TMA_WORK", least_work):
        errors = check_attention(attention_by(impl), q, k, v, with_dlse=True, **options)
    checked = {name for name in errors if not name.endswith("_same_dtype")}
    assert checked == {"out", "lse", "dq", "dk", "dv", *(["dsinks"] if sinks else [])}


EVERYTHING = {
    "batch": 2, "lengths": (41, 70), "n_head": 2, "grouped": True, "head_dim": 16, "causal": True,
    "window_size": 20, "documents": "packed", "padding": True, "sinks": True, "softcap": 15.0,
    "dropout_p": 0.2, "block_size": 32, "density": 1.0, "mask_per_head": True,
    "copy_engines": True, "seed": 0,
}  # fmt: skip


@few
@given(st.sampled_from([torch.float32, torch.float16]), calls(longest=70, head_dims=[16, 32]))
@example(torch.float32, EVERYTHING)
@example(torch.float16, EVERYTHING)
def test_any_call(dtype, call):
    check("triton", dtype, "cpu", **call)


# queries that see one key or none
LONELY = EVERYTHING | {
    "batch": 1, "lengths": (625, 25), "grouped": False, "causal": False, "window_size": 136,
    "documents": "any", "sinks": False, "softcap": 1.0, "block_size": None, "seed": 271,
}  # fmt: skip


@pytest.mark.gpu
@many
@given(calls(longest=700, head_dims=[16, 40, 64, 128]))
@example(EVERYTHING | {"lengths": (410, 700)})
@example(LONELY)
def test_any_call_on_a_gpu(call):
    check("triton", torch.bfloat16, "cuda", **call)


# options that the Hopper kernels do not support
OFF = {"block_size": None}


@pytest.mark.gpu
@many
@given(calls(longest=700, head_dims=[16, 40, 64, 128, 256]).map(lambda call: call | OFF))
@example(EVERYTHING | {"lengths": (410, 700)} | OFF)
def test_any_call_on_hopper(call):
    check("hopper", torch.bfloat16, "cuda", **call)
