"""Classifier: effects of padding, token order and positions on the logits."""

from typing import Any

import pytest
import torch

from model.classifier import Classifier, TokenEmbedding
from model.classifier_config import ClassifierConfig
from model.mask_config import MaskConfig

B, W = 4, 8
T = W * W
IMAGE = {"grid_width": W, "embedding": "row_column", "rotary": "axial", "tokens": "intensities"}
LEARNED = {"embedding": "learned", "grid_width": W}
POOLINGS = ["mean", "max", "mean_max", "cls"]
POSITIONS = [
    {"embedding": "learned"},
    {"embedding": "sinusoidal"},
    {"embedding": "none", "rotary": "sequence"},
    IMAGE,
]


def make(**changes: Any) -> Classifier:
    torch.manual_seed(0)
    config = {"vocab_size": 50, "n_classes": 3, "context_length": T, "n_inner": 48}
    return Classifier(ClassifierConfig(**(config | changes))).double().eval()


def tokens(n: int = B) -> torch.Tensor:
    return torch.randint(1, 50, (n, T), generator=torch.Generator().manual_seed(1))


def equal(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("layout", POSITIONS)
def test_padding_changes_nothing(pooling: str, layout: dict[str, Any]) -> None:
    model = make(pooling=pooling, **layout)
    lengths = torch.tensor([1, 7, T - 1, T], dtype=torch.int32)
    one = tokens()
    other = torch.where(torch.arange(T) < lengths[:, None], one, 3)
    assert not torch.equal(one, other)
    equal(model(one, lengths), model(other, lengths))
    # without lengths, padding counts as tokens
    assert (model(one) - model(other))[:3].abs().min() > 1e-9


@pytest.mark.parametrize("pooling", POOLINGS)
def test_gradients_of_padding_are_zero(pooling: str) -> None:
    model = make(pooling=pooling, embedding="learned")
    model(tokens(), torch.full((B,), 5, dtype=torch.int32)).sum().backward()
    assert model.pos_emb.grad is not None
    assert model.pos_emb.grad[:5].abs().min() > 0
    assert model.pos_emb.grad[5:].abs().max() == 0


def test_gradients_of_learned_positions_add_up_over_rows() -> None:
    """Permute tokens with their positions, per row or the same for all rows: the same images."""
    model, ids, weights = make(embedding="learned"), tokens(), torch.randn(B, 3).double()
    generator = torch.Generator().manual_seed(2)
    row_orders = torch.stack([torch.randperm(T, generator=generator) for _ in range(B)])
    gradients = []
    for order in (None, row_orders[0], row_orders):
        permuted = ids if order is None else ids.gather(1, order.expand(B, T))
        loss = (model(permuted, None, order) * weights).sum()
        gradients.append(torch.autograd.grad(loss, model.pos_emb)[0])
    equal(gradients[1], gradients[0])
    equal(gradients[2], gradients[0])


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("layout", POSITIONS)
def test_only_positions_determine_the_order(pooling: str, layout: dict[str, Any]) -> None:
    """Permuted tokens with their positions give the same logits."""
    model, ids = make(pooling=pooling, **layout), tokens()
    order = torch.randperm(T, generator=torch.Generator().manual_seed(2))
    expected = model(ids)
    equal(model(ids[:, order], None, order), expected)
    equal(model(ids[:, order], None, order.expand(B, T)), expected)
    assert (model(ids[:, order]) - expected).abs().max() > 1e-6


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("extra", [0, 5])
@pytest.mark.parametrize("layout", [IMAGE, LEARNED])
def test_packed_images_equal_masked_ones(pooling: str, extra: int, layout: dict[str, Any]) -> None:
    """Packing equals masking pixels in attention and pooling, for outputs and gradients."""
    model = make(pooling=pooling, **layout)
    ids = tokens()
    ink = torch.rand(B, T, generator=torch.Generator().manual_seed(3)) < 0.3
    lengths = ink.sum(1)
    room = int(lengths.max()) + extra
    positions = ink.int().argsort(dim=1, descending=True, stable=True)[:, :room]
    packed = model(ids.gather(1, positions), lengths.int(), positions)
    packed.sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    # the same for one image at a time, without padding
    alone = []
    for i in range(B):
        position = ink[i].nonzero().T
        alone.append(model(ids[i : i + 1].gather(1, position), None, position))
    alone = torch.cat(alone)
    equal(packed, alone)
    alone.sum().backward()
    others = [p.grad for p in model.parameters() if p.grad is not None]
    for one, other in zip(gradients, others, strict=True):
        equal(one, other)


def test_mean_and_max_pooling() -> None:
    model = make(pooling="mean_max", n_layer=1)
    lengths = torch.tensor([3, 9, 20, T], dtype=torch.int32)
    x = model.encode(model.tok_emb(tokens()), lengths, None)
    pooled = model._pool(x, lengths)
    for i, length in enumerate(lengths.tolist()):
        kept = x[i, :length]
        equal(pooled[i], torch.cat((kept.mean(0), kept.amax(0))))


def test_the_gradient_of_a_maximum_goes_to_one_of_equal_tokens() -> None:
    """A backward pass that compares with the maximum again may find two equal tokens, or none.

    See also the slow test of compiled gradients.
    """
    x = torch.ones(B, T, 64, dtype=torch.float64, requires_grad=True)
    make(pooling="max")._pool(x, None).sum().backward()
    assert x.grad is not None
    assert set(x.grad.unique().tolist()) == {0, 1} and (x.grad.sum(1) == 1).all()


def test_documents_of_a_pair_are_encoded_separately() -> None:
    model, ids = make(documents=2), tokens(6)
    logits = model(ids)
    assert logits.shape == (3, 3)
    equal(model(ids[2:4]), logits[1:2])
    swapped = ids.view(3, 2, T).flip(1).flatten(0, 1)
    assert (model(swapped) - logits).abs().max() > 1e-6  # the difference has a sign


def test_dense_and_full_butterfly_agree() -> None:
    ids = tokens()
    dense = make(pooling="cls")
    mask = MaskConfig(pattern="butterfly", block_size=32, window_blocks=3)  # all three blocks
    sparse = make(pooling="cls", mask=mask)
    equal(sparse(ids), dense(ids))


def test_the_one_hot_embedding_equals_a_lookup() -> None:
    table = TokenEmbedding(7, 5)
    table.init_weights(ordered=False)
    ids = torch.tensor([[0, 6, 6], [3, 2, 0]])
    assert torch.equal(table(ids), table.weight[ids])
    table(ids).sum().backward()
    assert table.weight.grad is not None
    assert table.weight.grad[:, 0].tolist() == [2, 0, 1, 1, 0, 0, 2]


def test_intensities_start_in_order() -> None:
    table = TokenEmbedding(256, 64)
    torch.manual_seed(0)
    table.init_weights(ordered=True)
    distance = (table.weight - table.weight[255]).norm(dim=-1)
    assert distance[250] < distance[200] < distance[100] < distance[0]


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("layout", POSITIONS[:3])
def test_padding_shared_by_all_rows_may_be_left_out(pooling: str, layout: dict[str, Any]) -> None:
    model = make(pooling=pooling, **layout)
    lengths = torch.tensor([1, 7, 12, 13], dtype=torch.int32)
    equal(model(tokens()[:, :13], lengths), model(tokens(), lengths))


BUTTERFLY = {"mask": MaskConfig(pattern="butterfly", block_size=16)}


@pytest.mark.parametrize(
    ("ids", "changes"),
    [
        (tokens()[0], {}),
        (tokens()[:, :0], {}),
        (torch.cat([tokens(), tokens()], 1), {}),
        (tokens()[:, :-1], IMAGE),
        (tokens()[:, :-16], BUTTERFLY),
    ],
)
def test_tokens_of_other_shapes_are_refused(ids: torch.Tensor, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"tokens have shape .*context_length=64"):
        make(**changes)(ids)


def test_an_odd_number_of_documents_is_refused() -> None:
    with pytest.raises(ValueError, match=r"3 sequences must be a multiple of model.documents=2"):
        make(documents=2)(tokens(3))


@pytest.mark.parametrize("layout", [IMAGE, LEARNED])
def test_compiles_without_a_graph_break(layout: dict[str, Any]) -> None:
    model = make(**layout, pooling="mean_max").float()
    lengths = torch.full((B,), 9, dtype=torch.int32)
    positions = torch.arange(T).expand(B, T)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    gradients = []
    for run in (compiled, model):
        logits = run(tokens(), lengths, positions)
        gradients.append((logits, *torch.autograd.grad(logits.square().sum(), model.parameters())))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary": "axial"}, r"model.rotary=axial needs rows and columns"),
        ({"embedding": "row_column"}, r"model.embedding=row_column needs rows"),
        ({"pooling": "sum"}, r"model.pooling='sum' must be one of mean, max, mean_max, cls"),
        ({"documents": 3}, r"model.documents=3 must be 1 or 2"),
        ({"n_inner": 0}, r"model.n_inner=0 must be at least 1"),
        ({"grid_width": 0}, r"model.grid_width=0"),
        ({"grid_width": 8, "rotary": "axial", "n_head": 32}, r"heads of 2, .*multiple of 4"),
        ({"min_wavelength": 9.0, "max_wavelength": 8.0}, r"model.min_wavelength=9.0 must be"),
        ({"local_start": 9.0}, r"model.local_start=9.0 requires rotary positions"),
        ({"local_start": -1.0, "rotary": "sequence"}, r"model.local_start=-1.0 must be"),
        (
            {"local_start": 9.0, "rotary": "sequence", "bias": False},
            "model.local_start=9.0 requires biases .* set model.bias=true",
        ),
        (
            {"local_start": 9.0, "rotary": "sequence", "pooling": "cls"},
            r"model.local_start=9.0 would make the cls .* set model.pooling to mean, max or",
        ),
        ({"n_embd": 65, "n_head": 5, "embedding": "sinusoidal"}, r"n_embd=65 must be even"),
    ],
)
def test_invalid_options_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changes)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [None, torch.tensor([5, 20, 40, T], dtype=torch.int32)])
def test_compiled_bfloat16_gradients_are_finite(lengths: torch.Tensor | None) -> None:
    """Recomputed values with other rounding may not contain the maximum, which gave NaN."""
    model = make(**IMAGE, pooling="mean_max").float().train()
    gradients = []
    for run in (model, torch.compile(model, fullgraph=True, dynamic=False)):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run(tokens(), lengths).float().square().sum()
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    plain, compiled = gradients
    assert compiled.isfinite().all()
    assert (compiled - plain).norm() < 0.1 * plain.norm()
