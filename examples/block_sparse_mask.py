"""Create a custom block-sparse mask, plot it, and compute attention with it.

    python examples/block_sparse_mask.py [mask.png]

Prints the density of the mask and the largest difference from dense attention under the same mask,
and writes a picture of the (query, key) pairs that are visible.
"""

import sys

import torch
from matplotlib.figure import Figure
from torch.nn.functional import scaled_dot_product_attention

from papilio.kernels import BlockSparseMask, flash_attention

N_BLOCKS, BLOCK_SIZE = 16, 64
T = N_BLOCKS * BLOCK_SIZE  # tokens
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

# layout[i, j]: whether the queries of block i attend to the keys of block j. Any bool tensor is
# allowed; this one has every fourth block, the previous block, and the first block.
i, j = torch.arange(N_BLOCKS)[:, None], torch.arange(N_BLOCKS)
mask = BlockSparseMask(((i - j) % 4 == 0) | (i - j == 1) | (j == 0), block_size=BLOCK_SIZE)
print(f"computes {mask.density(T, T, causal=True):.0%} of the causal scores")

q, k, v = (torch.randn(1, T, 4, 64, device=device) for _ in range(3))  # (B, T, H, D)
out = flash_attention(q, k, v, causal=True, mask=mask)

visible = mask.to_dense(T, T)[0].tril()  # (T, T), with the causal mask
q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # PyTorch's order is (B, H, T, D)
dense = scaled_dot_product_attention(q, k, v, attn_mask=visible.to(device)).transpose(1, 2)
print(f"output differs from dense attention by {(out - dense).abs().max():.0e}")

path = sys.argv[1] if len(sys.argv) > 1 else "mask.png"
figure = Figure(figsize=(4, 4), layout="constrained")
figure.add_subplot(xlabel="key", ylabel="query").imshow(visible, cmap="Blues")
figure.savefig(path)
print(f"wrote {path}")
