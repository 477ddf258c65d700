"""Context parallelism: attention over a sequence that is sharded across processes.

    torchrun --nproc-per-node=2 examples/context_parallel.py

Each process uses its own GPU, or all use the CPU. Prints the largest difference from
attention on the whole sequence, in the output and in the gradients.
"""

import torch
import torch.distributed as dist

from papilio.kernels import ContextGroup, context_attention, flash_attention

dist.init_process_group()  # gloo for tensors on the CPU, NCCL for those on GPUs
context = ContextGroup(dist.group.WORLD)
device = torch.device("cpu")
if torch.cuda.device_count() >= context.size:
    device = torch.device("cuda", context.rank)
    torch.cuda.set_device(device)


def attend(function, q, k, v, grad_out, **options) -> list[torch.Tensor]:
    """Return the output and the gradients of q, k and v."""
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
    if context.rank == 0:
        print(f"{method}: output differs by {out:.0e}, gradients by {max(grads):.0e}")
del context  # gloo's threads end with the last reference to the group
dist.destroy_process_group()
