"""Run the kernels over odd shapes and all features under a memory checker.

Runs the portable kernels, and on an H100 or H200 also the Hopper kernels if they support the call.

Use `make memcheck`, on a machine with a GPU and compute-sanitizer of the CUDA toolkit. Without
PyTorch's caching allocator, each tensor has its own allocation, so an access past its end shows.
"""

import sys

import torch

from kernels import flash_attention
from kernels.mask.block_mask import BlockSparseMask
from kernels.mask.patterns import butterfly
from kernels.triton import operands

CUDA = torch.device("cuda")


def run(seq_q: int, seq_k: int, head_dim: int, **options: object) -> None:
    """Run forward and backward of 4 heads, in 2 groups."""
    q, k, v = (
        torch.randn(2, seq_len, heads, head_dim, dtype=torch.bfloat16, device=CUDA)
        for seq_len, heads in ((seq_q, 4), (seq_k, 2), (seq_k, 2))
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for impl in ("triton", "hopper"):
        try:
            out, lse = flash_attention(*leaves, impl=impl, return_lse=True, **options)
        except ValueError:  # unsupported call
            assert impl == "hopper"
            continue
        torch.autograd.grad(out.sum() + lse[lse.isfinite()].sum(), leaves)
        torch.cuda.synchronize()
        sys.stdout.write(f"{impl}, T_q {seq_q}, T_k {seq_k}, D {head_dim}: {', '.join(options)}\n")


def main() -> None:
    for head_dim in (40, 64, 128, 256):
        # through pointers, then through TMA if the head dimension allows it
        for seq_q, seq_k, least_work in ((65, 127, 2**62), (1100, 1030, 1)):
            operands.MIN_TMA_WORK = least_work
            run(seq_q, seq_k, head_dim, causal=True)
    documents = torch.tensor([[0] * 700 + [700] * 400] * 2, device=CUDA)
    run(1100, 1100, 64, causal=True, window_size=99, doc_start=documents)
    run(1100, 1100, 64, kv_lengths=torch.tensor([0, 1099], device=CUDA), softcap=3.0)
    run(1100, 1100, 64, causal=True, sinks=torch.zeros(4, device=CUDA), dropout_p=0.1,
        dropout_seed=1)  # fmt: skip
    for block_size in (16, 64, 128, 256):
        mask = BlockSparseMask(butterfly(-(-1100 // block_size)), block_size)
        run(1100, 1100, 64, mask=mask, causal=True)


if __name__ == "__main__":
    main()
