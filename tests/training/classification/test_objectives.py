"""Targets and losses of each objective, compared with plain loops."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from training.classification.objectives import (
    Targets,
    label_targets,
    make_target_function,
    masked_token_targets,
    next_token_targets,
)

R, T, V = 6, 9, 5
LENGTHS = torch.tensor([1, 2, 5, 8, 9, 9], dtype=torch.int32)


def batch(*, lengths: torch.Tensor | None = LENGTHS, dtype: torch.dtype = torch.int64) -> Any:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, V, (R, T), generator=generator).to(dtype)
    return tokens, lengths, torch.arange(T), torch.tensor([0, 1, 1, 0, 2, 2])


def logits_of(targets: Targets) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*targets.targets.shape, V, generator=generator, requires_grad=True)


def by_hand(logits: torch.Tensor, answers: torch.Tensor) -> tuple[float, float]:
    """Cross-entropy of one answer, and 1 if the answer is the most likely one."""
    values = [value.item() for value in logits]
    loss = math.log(sum(math.exp(value) for value in values)) - values[int(answers)]
    return loss, float(max(range(len(values)), key=values.__getitem__) == int(answers))


def test_sums_of_labels() -> None:
    *inputs, labels = batch()
    targets = label_targets((*inputs, labels))
    assert all(one is other for one, other in zip(targets.inputs, inputs, strict=True))
    assert targets.targets is labels
    logits = logits_of(targets)
    marks = targets.sums(logits)
    expected = [(*by_hand(logits[i], targets.targets[i]), 1.0) for i in range(R)]
    torch.testing.assert_close(marks, torch.tensor(expected).T)
    # the gradient is exactly that of the mean cross-entropy
    (marks[0].sum() / marks[2].sum()).backward()
    again = logits.detach().clone().requires_grad_()
    F.cross_entropy(again, targets.targets).backward()
    assert torch.equal(logits.grad, again.grad)  # pyright: ignore


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
@pytest.mark.parametrize("lengths", [LENGTHS, None])
def test_sums_of_following_tokens(lengths: torch.Tensor | None, dtype: torch.dtype) -> None:
    tokens, *_ = batch(dtype=dtype)
    targets = next_token_targets(batch(lengths=lengths, dtype=dtype))
    assert torch.equal(targets.inputs[0], tokens)  # pyright: ignore
    logits = logits_of(targets)
    expected = torch.zeros(3, R)
    for row in range(R):
        for position in range(T if lengths is None else int(lengths[row])):
            if position + 1 < (T if lengths is None else lengths[row]):
                marks = *by_hand(logits[row, position], tokens[row, position + 1]), 1.0
                expected[:, row] += torch.tensor(marks)
    torch.testing.assert_close(targets.sums(logits), expected)
    assert expected[2, 0] == (0 if lengths is not None else T - 1)


@pytest.mark.parametrize("numbers", [None, torch.arange(R)])
@pytest.mark.parametrize("lengths", [LENGTHS, None])
def test_sums_of_hidden_tokens(lengths: torch.Tensor | None, numbers: torch.Tensor | None) -> None:
    tokens, _, positions, _ = batch()
    targets = partial(masked_token_targets, share=0.5)(batch(lengths=lengths), numbers)
    *inputs, hidden = targets.inputs
    assert torch.equal(inputs[0], tokens) and torch.equal(inputs[2], positions)  # pyright: ignore
    assert hidden is not None and hidden.dtype == torch.bool
    assert 0 < hidden.sum() < (R * T if lengths is None else lengths.sum())
    logits = logits_of(targets)
    expected = torch.zeros(3, R)
    for row, position in hidden.nonzero().tolist():
        assert lengths is None or position < lengths[row]
        marks = *by_hand(logits[row, position], tokens[row, position]), 1.0
        expected[:, row] += torch.tensor(marks)
    marks = targets.sums(logits)
    torch.testing.assert_close(marks, expected)
    marks[0].sum().backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad.abs().amax(-1) > 0, hidden)


def test_hidden_tokens_in_training_follow_the_generator() -> None:
    torch.manual_seed(3)
    first, second = (
        partial(masked_token_targets, share=0.5)(batch(), None).inputs[3] for _ in range(2)
    )
    torch.manual_seed(3)
    again = partial(masked_token_targets, share=0.5)(batch(), None).inputs[3]
    assert torch.equal(first, again)  # pyright: ignore
    assert not torch.equal(first, second)  # pyright: ignore


def rows(n: int, length: int = 64) -> Any:
    return torch.zeros(n, length, dtype=torch.int64), None, None, torch.zeros(n)


@pytest.mark.parametrize("share", [0.02, 0.5, 0.9])
@pytest.mark.parametrize("numbers", [None, torch.arange(400)])
def test_hidden_tokens_are_independent_with_the_given_share(
    share: float, numbers: torch.Tensor | None
) -> None:
    hidden = partial(masked_token_targets, share=share)(rows(400), numbers).inputs[3]
    assert hidden is not None
    hidden = hidden.double()
    for mean, n in ((hidden.mean(), 400 * 64), (hidden.mean(0), 400), (hidden.mean(1), 64)):
        assert ((mean - share).abs() < 5 * math.sqrt(share * (1 - share) / n)).all()
    # neighbours, in a row or in a column, are hidden independently of each other
    for one, other in ((hidden[1:], hidden[:-1]), (hidden[:, 1:], hidden[:, :-1])):
        assert abs((one * other).mean() - share**2) < 5 * share / math.sqrt(one.numel())


def test_hidden_tokens_depend_only_on_the_example_number() -> None:
    targets_of = partial(masked_token_targets, share=0.5)

    def hidden(numbers: list[int], documents: int = 1) -> torch.Tensor:
        targets = targets_of(rows(len(numbers) * documents), torch.tensor(numbers))
        mask = targets.inputs[3]
        assert mask is not None
        return mask

    whole = hidden(list(range(10)))
    assert torch.equal(hidden([7, 2, 7]), whole[[7, 2, 7]])
    assert len({tuple(row) for row in whole.tolist()}) == 10
    pairs = hidden(list(range(5)), documents=2)
    assert torch.equal(hidden([3], documents=2), pairs[6:8])
    assert not torch.equal(pairs[6], pairs[7])
    # fixed values: current and later scores must use the same tokens
    assert whole[3, :16].int().tolist() == PINNED


PINNED = [0, 0, 1, 0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 0, 0, 1]


def test_make_ask_selects_the_question() -> None:
    assert make_target_function("labels", 0.5) is label_targets
    assert make_target_function("causal", 0.5) is next_token_targets
    masked = make_target_function("masked", 0.25)
    assert isinstance(masked, partial)
    assert masked.func is masked_token_targets and masked.keywords == {"share": 0.25}
