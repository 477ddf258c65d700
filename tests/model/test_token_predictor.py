"""Token prediction: what the model can see, and the weights shared with the classifier."""

from typing import Any

import pytest
import torch

from model.classifier import Classifier
from model.classifier_config import ClassifierConfig
from model.mask_config import MaskConfig
from model.token_predictor import TokenPredictor

B, W, V = 4, 8, 50
T = W * W
IMAGE = {"grid_width": W, "embedding": "row_column", "rotary": "axial", "tokens": "intensities"}
SEQUENCE = {"embedding": "none", "rotary": "sequence"}
BUTTERFLY = {"mask": MaskConfig(pattern="butterfly", block_size=32, window_blocks=2)}
MODELS = [
    {"pooling": "mean"},
    {"pooling": "cls"},
    {"pooling": "cls", **SEQUENCE},
    {"pooling": "mean_max", **IMAGE},
    {"pooling": "cls", **BUTTERFLY},
]


def config(**changes: Any) -> ClassifierConfig:
    defaults = {"vocab_size": V, "n_classes": 3, "context_length": T, "n_inner": 48}
    return ClassifierConfig(**(defaults | changes))


def make(*, causal: bool = False, **changes: Any) -> TokenPredictor:
    torch.manual_seed(0)
    return TokenPredictor(config(**changes), causal=causal).double().eval()


def tokens(n: int = B) -> torch.Tensor:
    return torch.randint(1, V, (n, T), generator=torch.Generator().manual_seed(1))


def some_hidden() -> torch.Tensor:
    return torch.rand(B, T, generator=torch.Generator().manual_seed(2)) < 0.5


def equal(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("changes", MODELS)
def test_hidden_tokens_do_not_leak(changes: dict[str, Any]) -> None:
    model, ids, hidden = make(**changes), tokens(), some_hidden()
    logits = model(ids, None, None, hidden)
    assert logits.shape == (B, T, V)
    others = torch.where(hidden, (ids + 7) % V, ids)
    assert torch.equal(model(others, None, None, hidden), logits)
    other_visible = ids.clone()
    row, column = (~hidden).nonzero()[0]
    other_visible[row, column] = (ids[row, column] + 7) % V
    changed = (model(other_visible, None, None, hidden) - logits).abs().amax(-1) > 1e-9
    assert changed[row].any() and not changed[torch.arange(B) != row].any()
    assert (model(ids) - logits).abs().max() > 1e-6


@pytest.mark.parametrize("changes", MODELS)
def test_later_tokens_do_not_leak_in_causal_attention(changes: dict[str, Any]) -> None:
    model, ids = make(causal=True, **changes), tokens()
    logits = model(ids)
    assert logits.shape == (B, T, V)
    for position in (0, 1, 33, T - 1):
        other = ids.clone()
        other[:, position] = (ids[:, position] + 7) % V
        changed = (model(other) - logits).abs().amax((0, 2)) > 1e-9
        assert not changed[:position].any()
        assert changed[position]
    bidirectional = make(causal=False, **changes)
    bidirectional.load_state_dict(model.state_dict(), strict=False)
    assert (bidirectional(ids)[:, 0] - logits[:, 0]).abs().max() > 1e-6


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("changes", MODELS)
def test_padding_changes_nothing(changes: dict[str, Any], causal: bool) -> None:
    model, ids = make(causal=causal, **changes), tokens()
    lengths = torch.tensor([1, 7, T - 1, T], dtype=torch.int32)
    inside = torch.arange(T) < lengths[:, None]
    others = torch.where(inside, ids, 3)
    equal(model(others, lengths)[inside], model(ids, lengths)[inside])


def test_logits_come_from_the_states_of_their_tokens() -> None:
    """The cls token, which comes first, has no logits."""
    model, ids = make(pooling="cls"), tokens()
    states = model.classifier.encode(model.classifier.tok_emb(ids), None, None)
    equal(model(ids), model.tokens_out(states[:, 1:]))


def test_only_positions_identify_hidden_tokens() -> None:
    model, ids, hidden = make(**IMAGE), tokens(), some_hidden()
    order = torch.randperm(T, generator=torch.Generator().manual_seed(3))
    expected = model(ids, None, None, hidden)[:, order]
    equal(model(ids[:, order], None, order, hidden[:, order]), expected)


def test_starts_with_the_weights_of_the_classifier_alone() -> None:
    torch.manual_seed(0)
    alone = Classifier(config(pooling="cls")).double().state_dict()
    for causal in (False, True):
        within = make(causal=causal, pooling="cls").classifier.state_dict()
        assert within.keys() == alone.keys()
        assert all(torch.equal(within[name], alone[name]) for name in alone)


@pytest.mark.parametrize("causal", [False, True])
def test_all_weights_but_the_head_have_a_gradient(causal: bool) -> None:
    """Otherwise DistributedDataParallel would wait, and weight decay would shrink the head."""
    model = make(causal=causal, pooling="cls", embedding="learned")
    model(tokens(), None, None, None if causal else some_hidden()).square().sum().backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    heads = {f"classifier.head_{end}.{x}" for end in ("in", "out") for x in ("weight", "bias")}
    assert without == heads
    assert not any(p.requires_grad for name, p in model.named_parameters() if name in heads)
    trained = sum(p.numel() for p in model.parameters() if p.grad is not None)
    assert model.n_params() == trained


def test_invalid_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"hidden must be None .* causal=True"):
        make(causal=True)(tokens(), None, None, some_hidden())
    for ids in (torch.cat([tokens(), tokens()], 1), tokens()[0]):
        with pytest.raises(ValueError, match=r"tokens have shape .*context_length=64"):
            make()(ids)


def test_compiles_without_a_graph_break() -> None:
    model = make(**IMAGE).float()
    inputs = tokens(), torch.full((B,), 9, dtype=torch.int32), torch.arange(T), some_hidden()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    torch.testing.assert_close(compiled(*inputs), model(*inputs))
