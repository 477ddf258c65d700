"""Local attention at initialisation: the key that each head attends to before training."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.fused.reference.rotary import apply_rotary
from model.attention import SelfAttention
from model.classifier import Classifier
from model.classifier_config import ClassifierConfig
from model.neighbours import neighbour_offsets

W = 8
T = W * W
SEQUENCE = {"rotary": "sequence", "embedding": "none"}
GRID = {"rotary": "axial", "embedding": "row_column", "grid_width": W}


def make(**changes: Any) -> Classifier:
    torch.manual_seed(0)
    config = {"vocab_size": 50, "n_classes": 3, "context_length": T, "n_head": 4, "n_embd": 128}
    return Classifier(ClassifierConfig(**(config | {"n_layer": 3} | changes)))


def scores_of_biases(model: Classifier, attention: SelfAttention) -> Tensor:
    """Scaled scores (H, T, T) of the biases alone; the initial weights are small."""
    D = attention.head_dim
    biases = attention.qkv_proj.bias.detach().view(3, 1, 1, attention.n_head, D)
    q, k = (
        apply_rotary(bias.expand(1, T, -1, -1), model.rotary_cos, model.rotary_sin)[0]
        for bias in biases[:2]
    )
    return torch.einsum("qhd,khd->hqk", q, k) * attention.softmax_scale


@pytest.mark.parametrize("layout", [SEQUENCE, GRID])
def test_every_head_attends_to_its_neighbour(layout: dict[str, Any]) -> None:
    model = make(**layout, local_start=12.0)
    positions = torch.arange(T)
    width = W if layout is GRID else T
    for layer, block in enumerate(model.blocks):
        scores = scores_of_biases(model, block.attn)
        torch.testing.assert_close(scores.amax(), torch.tensor(12.0))
        for head, (down, right) in enumerate(
            zip(*neighbour_offsets(4, layer, grid=layout is GRID), strict=True)
        ):
            row, column = positions // width + down, positions % width + right
            inside = (row >= 0) & (row < T // width) & (column >= 0) & (column < width)
            assert inside.sum() > T // 2
            neighbour = (row * width + column)[inside]
            assert torch.equal(scores[head].argmax(-1)[inside], neighbour)
            runner_up = scores[head][inside].topk(2, dim=-1).values[:, 1]
            assert (12.0 - runner_up).min() > 0.1


def test_directions_and_distances() -> None:
    assert torch.equal(neighbour_offsets(4, 1, grid=False)[1], torch.tensor([-1, 1, -2, 2]))
    assert torch.equal(neighbour_offsets(4, 5, grid=False)[1], torch.tensor([-4, 4, -8, 8]))
    assert not neighbour_offsets(4, 5, grid=False)[0].any()
    rows, columns = neighbour_offsets(6, 2, grid=True)
    assert torch.equal(rows, torch.tensor([-2, 2, 0, 0, -4, 4]))
    assert torch.equal(columns, torch.tensor([0, 0, -2, 2, 0, 0]))


def test_scores_include_the_layer_scale() -> None:
    model = make(**SEQUENCE, local_start=5.0, scale_attn_by_inverse_layer_idx=True)
    for block in model.blocks:
        scores = scores_of_biases(model, block.attn)
        torch.testing.assert_close(scores.amax(), torch.tensor(5.0))


@pytest.mark.parametrize("layout", [SEQUENCE, GRID])
def test_only_the_qkv_biases_differ(layout: dict[str, Any]) -> None:
    plain, local = make(**layout), make(**layout, local_start=3.0)
    assert plain.n_params() == local.n_params()
    others = dict(local.named_parameters())
    for name, parameter in plain.named_parameters():
        same = torch.equal(parameter, others[name])
        assert same != name.endswith("qkv_proj.bias"), name


def test_token_order_matters_at_initialisation() -> None:
    """A bag-of-words classifier would give a shuffled text the same logits."""
    tokens = torch.randint(50, (2, T), generator=torch.Generator().manual_seed(1))
    shuffled = tokens[:, torch.randperm(T, generator=torch.Generator().manual_seed(2))]
    changes = []
    for score in (0.0, 30.0):
        model = make(**SEQUENCE, local_start=score).eval()
        changes.append((model(tokens) - model(shuffled)).abs().max().item())
    assert changes[1] > 2 * changes[0], changes
