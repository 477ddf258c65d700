"""Packed documents: attention that stays within each document of a sequence.

    python examples/attention_packed_documents.py

Packs three documents into one sequence. For each document, prints the largest difference between
the packed call and attention on that document alone, in the output and in the gradients.
"""

import torch

from papilio.kernels import flash_attention

LENGTHS = [100, 700, 224]  # tokens of each document
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


def random_inputs(n_tokens: int) -> list[torch.Tensor]:
    """Draw q, k, v and the gradient of the output, each (1, T, H, D)."""
    return [torch.randn(1, n_tokens, 4, 64, device=device) for _ in range(4)]


def attend(q, k, v, grad_out, doc_start=None) -> torch.Tensor:
    """Return the output and the gradients of q, k and v: (4, 1, T, H, D)."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = flash_attention(q, k, v, causal=True, doc_start=doc_start)
    return torch.stack([out, *torch.autograd.grad(out, (q, k, v), grad_out)]).detach()


documents = [random_inputs(n) for n in LENGTHS]
sequence = [torch.cat(parts, dim=1) for parts in zip(*documents, strict=True)]

# The position at which the document of each token begins: 0 ... 0, 100 ... 100, 800 ... 800
lengths = torch.tensor(LENGTHS, device=device)
doc_start = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)[None]  # (1, T)

packed = attend(*sequence, doc_start=doc_start).split(LENGTHS, dim=2)
for n_tokens, part, document in zip(LENGTHS, packed, documents, strict=True):
    out, *grads = (part - attend(*document)).abs().flatten(1).amax(1).tolist()
    print(f"{n_tokens:3} tokens: output differs by {out:.0e}, gradients by {max(grads):.0e}")
