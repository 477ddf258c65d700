"""One step of a classifier's training, against the same written out."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from training.classifier_step import ClassifierStep


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 4)

    def forward(self, tokens, lengths, places):
        return self.layer(tokens)


@pytest.mark.parametrize("grad_clip", [0.0, 0.05])
def test_steps_are_those_written_out(grad_clip: float) -> None:
    model, other = Linear(), Linear()
    optimizer, others = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, other))
    step = ClassifierStep(model, optimizer, nullcontext, torch.device("cpu"), grad_clip=grad_clip)
    losses, right = [], []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randn(6, 3, generator=generator)
        labels = torch.randint(0, 4, (6,), generator=generator)
        step((tokens, None, None, labels))
        others.zero_grad()
        logits = other(tokens, None, None)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in other.parameters()]).norm()
        torch.testing.assert_close(step.grad_norm, norm)
        if grad_clip:
            for parameter in other.parameters():
                parameter.grad *= min(1.0, grad_clip / norm)
        others.step()
        losses.append(loss.item())
        right.append((logits.argmax(1) == labels).float().mean().item())
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
    expected = torch.tensor([sum(losses) / 3, sum(right) / 3])
    torch.testing.assert_close(step.means(3), expected)
    step.forget()
    assert step.means(1).tolist() == [0, 0]
