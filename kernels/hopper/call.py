"""Arguments that all programs of an attention launch share, forward and backward."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Call(NamedTuple):
    """Sizes and options of a call, as in `kernels.options`; None if an option is off."""

    seq_q: gl.tensor
    seq_k: gl.tensor
    n_head: gl.tensor
    group: gl.tensor  # query heads of a key-value head
    window_size: gl.tensor
    scale: gl.tensor | None  # factor from q k^T to scores; None in the forward pass
    scale_log2: gl.tensor  # factor from q k^T, with a softcap `capped`, to scores in log2
    softcap_scale: gl.tensor
    keep_scale: gl.tensor
    threshold: gl.tensor  # a probability is dropped where its 32 random bits are below this
    first_query: gl.tensor  # number of the first query, for dropout
    seed_ptr: gl.tensor
    lengths_ptr: gl.tensor
    doc_ptr: gl.tensor  # (B, T_q): first key of the document of each query
    doc_tiles_ptr: gl.tensor | None = None  # `kernels.triton.document_bounds`, tiles of 64 keys
    doc_blocks_ptr: gl.tensor | None = None
    sinks_ptr: gl.tensor | None = None
    slopes_ptr: gl.tensor | None = None  # of ALiBi, divided by the scale of the scores
    # `kernels.mask.lists.MaskLists` of a block-sparse mask: forward, then backward
    rows_ptr: gl.tensor | None = None
    row_blocks_ptr: gl.tensor | None = None
    ranges_ptr: gl.tensor | None = None
    visits_ptr: gl.tensor | None = None
    splits_ptr: gl.tensor | None = None  # fp32 (splits, B * H_kv, 2, plan.block, D): dk and dv
    mask_stride: gl.tensor | None = None  # between heads in the lists; 0 if all heads share them


@gluon.jit
def doc_starts(query, batch, call):
    """First key of the document of each query; past the end, that of the last query."""
    # A tile may reach past the last query, where there is nothing to read.
    row = batch.to(gl.int64) * call.seq_q
    return gl.load(call.doc_ptr + row + gl.minimum(query, call.seq_q - 1))
