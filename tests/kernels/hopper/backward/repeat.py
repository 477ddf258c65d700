"""Repeat the backward pass, and print as JSON which repeats differ from the first run."""

import itertools
import json
import sys

import torch

from kernels.hopper.backward.launch import attn_bwd
from kernels.hopper.forward.launch import attn_fwd
from kernels.options import AttentionOptions

REPEATS = 50


def main() -> None:
    differ = []
    for head_dim, causal in itertools.product([64, 128], [True, False]):
        q, k, v, dout = (
            torch.randn(1, 16_384, heads, head_dim, dtype=torch.bfloat16, device="cuda")
            for heads in (8, 4, 4, 8)
        )
        options = AttentionOptions(causal=causal, softmax_scale=head_dim**-0.5)
        out, lse = attn_fwd(q, k, v, options)
        first, grads = ([torch.empty_like(x) for x in (q, k, v)] for _ in range(2))
        attn_bwd(dout, None, q, k, v, out, lse, options, first)
        for repeat in range(REPEATS):
            attn_bwd(dout, None, q, k, v, out, lse, options, grads)
            if not all(map(torch.equal, grads, first)):
                differ.append((head_dim, causal, repeat))
    sys.stdout.write(json.dumps(differ))


if __name__ == "__main__":
    main()
