"""Block-sparse attention of the Hopper kernels on an H100 or H200, against standard attention.

These calls test their lists, schedule and dq semaphores. The folder above tests what all kernels
promise for masks.
"""

import itertools
from functools import partial

import pytest
import torch

from kernels import flash_attention
from kernels.mask.block_mask import BlockSparseMask
from kernels.mask.patterns import butterfly, random
from kernels.testing import check_attention, make_qkv, poison_empty

hopper_attention = partial(flash_attention, impl="hopper", return_lse=True)

pytestmark = pytest.mark.gpu
causal_or_full = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
each_block_size = pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
each_head_dim = pytest.mark.parametrize("head_dim", [64, 128])


@pytest.fixture(autouse=True)
def on_hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("these kernels are for H100 and H200")


def check(batch, seq_q, seq_k, n_head, n_kv_head, head_dim, dtype=torch.bfloat16, **options):
    qkv = make_qkv(batch, seq_q, seq_k, n_head, n_kv_head, head_dim, dtype=dtype, device="cuda")
    options = {k: x.cuda() if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    with poison_empty():
        return check_attention(hopper_attention, *qkv, with_dlse=True, **options)


def coin_flips(n_head, seq_q, seq_k, block_size, seed=0):
    """Random mask with empty rows and columns, and full rows; small blocks also form some of 64."""
    generator = torch.Generator().manual_seed(seed)
    shape = (n_head, -(-seq_q // block_size), -(-seq_k // block_size))
    density = 0.7 if block_size == 32 else 0.4  # blocks of 32 have to be dense enough to be packed
    layout = torch.rand(shape, generator=generator) < density
    layout[:, 1::5] = False
    layout[:, 3::7] = True
    layout[:, :, 2::6] = False
    if block_size < 64:
        n = 64 // block_size
        layout[:, : 4 * n, : 4 * n] &= (
            torch.eye(4, dtype=torch.bool).repeat_interleave(n, 0).repeat_interleave(n, 1)
        )
    return BlockSparseMask(layout, block_size)


@each_head_dim
@pytest.mark.parametrize("seq", [1, 65, 1000, 4097])
@causal_or_full
@each_block_size
def test_butterflies(block_size, causal, seq, head_dim):
    mask = BlockSparseMask(butterfly(-(-seq // block_size)), block_size)
    check(1, seq, seq, 3, 3, head_dim, causal=causal, mask=mask)


@each_head_dim
@pytest.mark.parametrize(
    "lengths", [(2304, 2304), (700, 1300), (1300, 700), (1000, 1256), (1000, 1192)]
)
@pytest.mark.parametrize("n_kv_head", [2, 4])
@causal_or_full
@each_block_size
def test_any_layout(block_size, causal, n_kv_head, lengths, head_dim):
    """A layout per head, grouped or not; the diagonal cuts two blocks of a row, or none."""
    mask = coin_flips(4, *lengths, block_size)
    check(2, *lengths, 4, n_kv_head, head_dim, causal=causal, mask=mask)


OPTIONS = {
    "window": {"window_size": 300},
    "causal window": {"causal": True, "window_size": 50},
    "documents": {"causal": True, "doc_start": torch.tensor([0] * 500 + [500] + [501] * 799)},
    "documents in no order": {"doc_start": torch.tensor([900] * 500 + [3] + [501] * 799)},
    "padding": {"kv_lengths": torch.tensor([0, 777])},
    "causal padding": {"causal": True, "kv_lengths": torch.tensor([1299, 640])},
    "softcap": {"softcap": 5.0},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 2**40 + 11},
    "causal dropout": {"causal": True, "dropout_p": 0.3, "dropout_seed": 3},
    "sinks": {"causal": True, "sinks": torch.tensor([0.5, -1.0])},
}
OPTIONS["all"] = {name: x for options in OPTIONS.values() for name, x in options.items()}
OPTIONS["all"] |= {"kv_lengths": torch.tensor([1200, 1300]), "window_size": 400}


@each_head_dim
@each_block_size
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, block_size, head_dim):
    options = dict(OPTIONS[name])
    if "doc_start" in options:
        options["doc_start"] = options["doc_start"].expand(2, -1)
    mask = coin_flips(1, 1300, 1300, block_size)
    check(2, 1300, 1300, 2, 2, head_dim, mask=mask, **options)


@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(40, 16), (96, 32), (40, 128), (96, 128), (192, 128), (256, 128)]
)
@causal_or_full
def test_head_dims(causal, head_dim, block_size):
    mask = BlockSparseMask(butterfly(-(-1000 // block_size)), block_size)
    check(1, 1000, 1000, 2, 1, head_dim, torch.float16, causal=causal, mask=mask)


@pytest.mark.parametrize("layout", ["nothing", "a row", "a column"])
@each_block_size
def test_few_blocks(block_size, layout):
    n = -(-777 // block_size)
    blocks = torch.zeros(n, n, dtype=torch.bool)
    if layout == "a row":
        blocks[-1] = True
    if layout == "a column":
        blocks[:, 0] = True
    for causal, head_dim in itertools.product([True, False], [64, 128]):
        check(1, 777, 777, 2, 2, head_dim, causal=causal, mask=BlockSparseMask(blocks, block_size))


@each_head_dim
@causal_or_full
@pytest.mark.parametrize("n_layouts", [1, 4])
@each_block_size
def test_columns_that_all_rows_see(block_size, n_layouts, causal, head_dim):
    """Such columns are split; some heads have several of them, and the last one is ragged."""
    seq = 32 * min(max(block_size, 64), 128) - 5
    n = -(-seq // block_size)
    layout = butterfly(n, global_blocks=max(1, 64 // block_size)).repeat(n_layouts, 1, 1)
    layout[0, :, -1] = True
    mask = BlockSparseMask(layout, block_size)
    list_block_size = min(max(64, block_size), 128)
    lists = mask.lists(seq, seq, causal=causal, dq_schedule=True, block_size=list_block_size)
    assert lists.cuts is not None
    check(2, seq, seq, 4, 2, head_dim, causal=causal, mask=mask)


@each_head_dim
@causal_or_full
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_runs_are_repeatable(block_size, causal, head_dim):
    """Repeated runs with rows of all lengths on all SMs have the same bits."""
    q, k, v = make_qkv(
        2, 4096, 4096, 16, 16, head_dim, dtype=torch.bfloat16, device="cuda", requires_grad=True
    )
    list_block_size, n = max(block_size, 64), 4096 // max(block_size, 64)
    layout = torch.stack([random(n, 1 + head % 9, seed=head) for head in range(16)])
    layout |= torch.eye(n, dtype=torch.bool)
    layout[:, :, 1] = True  # this column is split
    layout = layout.repeat_interleave(list_block_size // block_size, 1)
    layout = layout.repeat_interleave(list_block_size // block_size, 2)
    layout &= coin_flips(16, 4096, 4096, block_size).layout | (block_size == list_block_size)
    mask = BlockSparseMask(layout, block_size)
    dout = torch.randn_like(q)
    first = None
    for _ in range(30):
        out, lse = hopper_attention(q, k, v, causal=causal, mask=mask)
        results = (out, lse, *torch.autograd.grad(out, (q, k, v), dout))
        first = first or results
        assert all(torch.equal(a, b) for a, b in zip(results, first, strict=True))
