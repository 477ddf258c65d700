"""Context parallelism: attention of a sequence that is sharded over processes.

    torchrun --nproc-per-node=2 examples/context_parallel.py

Each process runs on a GPU of its own, or all run on the CPU. Prints the largest difference from
attention on the whole sequence, in the output and in the gradients.
"""

import os

import torch
import torch.distributed as dist

from papilio.kernels import ContextGroup, context_attention, flash_attention

on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
context = ContextGroup(dist.group.WORLD)


def attend(function, q, k, v, grad_out, **options) -> list[torch.Tensor]:
    """The output and the gradients of q, k and v."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = function(q, k, v, causal=True, **options)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out)]


torch.manual_seed(0)  # so that all processes draw the same sequence
whole = [torch.randn(1, 1024, 4, 64, device=device) for _ in range(4)]  # q, k, v, grad_out
expected = attend(flash_attention, *whole)
shards = [context.shard(x, dim=1) for x in whole]  # (1, 512, 4, 64), the tokens of this process

for method in ("ring", "gather"):
    parts = attend(context_attention, *shards, context=context, method=method)
    results = [context.unshard(x, dim=1) for x in parts]
    out, *grads = [(x - y).abs().max().item() for x, y in zip(results, expected, strict=True)]
    if dist.get_rank() == 0:
        print(f"{method}: output differs by {out:.0e}, gradients by {max(grads):.0e}")
dist.destroy_process_group()
