"""GPT: loss, positions, dropout and tracing (test_gpt2_parity.py compares its numbers)."""

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from model.config import ModelConfig
from model.gpt import GPT
from model.mask_config import MaskConfig

TINY: dict[str, Any] = {
    "vocab_size": 61,
    "context_length": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 32,
}
VOCAB, CONTEXT = TINY["vocab_size"], TINY["context_length"]
POSITIONS = ["learned", "rotary"]


def make_model(*, spread: float = 0.3, **changes: Any) -> GPT:
    """Make a tiny model with weights that are large enough for errors to show."""
    torch.manual_seed(0)
    model = GPT(ModelConfig(**(TINY | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=spread)
    return model


def make_batch(
    batch: int = 3, seq_len: int = 17, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(VOCAB, (2, batch, seq_len), generator=generator)
    return tokens, targets


@pytest.mark.parametrize("pattern", ["dense", "butterfly"])
@pytest.mark.parametrize("positions", POSITIONS)
def test_with_weights_copies_the_model(positions: str, pattern: str) -> None:
    mask = MaskConfig(pattern=pattern, block_size=16)
    model = make_model(positions=positions, mask=mask)
    state = torch.get_rng_state()
    again = GPT.with_weights(model.config, model.state_dict())
    assert torch.equal(torch.get_rng_state(), state)  # no random numbers were drawn
    tokens, targets = make_batch(seq_len=CONTEXT)
    assert torch.equal(again(tokens, targets), model(tokens, targets))
    assert all(p.requires_grad for p in again.parameters())
    with torch.no_grad():
        model.ln_f.weight.zero_()
    assert again.ln_f.weight.any()  # copies, because weights may be memory-mapped


@pytest.mark.parametrize("positions", POSITIONS)
def test_loss_is_the_cross_entropy_of_the_logits(positions: str) -> None:
    model = make_model(positions=positions)
    tokens, targets = make_batch()
    logits, loss = model(tokens), model(tokens, targets)
    assert logits.shape == (*tokens.shape, VOCAB)
    assert loss.shape == () and loss.dtype == torch.float32
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(model(tokens, targets, reduction="sum"), loss * targets.numel())


def test_losses_of_single_tokens_add_up_to_the_sum() -> None:
    model = make_model()
    tokens, targets = make_batch()
    targets[1, 5:] = -100
    losses = model(tokens, targets, reduction="none")
    assert losses.shape == targets.shape and losses.dtype == torch.float32
    assert (losses[targets == -100] == 0).all()
    torch.testing.assert_close(losses.sum(), model(tokens, targets, reduction="sum"))


@pytest.mark.parametrize("n_targets", [1, 6, 16, 17])
def test_fewer_targets_belong_to_the_last_tokens(n_targets: int) -> None:
    model = make_model()
    tokens, targets = make_batch()
    targets[1, -3:] = -100
    doc_start = torch.zeros_like(tokens, dtype=torch.int32)
    doc_start[:, 5:] = 5
    losses = model(tokens, targets, doc_start=doc_start, reduction="none")
    last = targets[:, -n_targets:]
    some = model(tokens, last, doc_start=doc_start, reduction="none")
    assert some.shape == last.shape
    torch.testing.assert_close(some, losses[:, -n_targets:])
    counted = losses[:, -n_targets:][last != -100]
    torch.testing.assert_close(model(tokens, last, doc_start=doc_start), counted.mean())


def test_fewer_targets_have_the_gradients_of_ignored_others() -> None:
    model = make_model()
    tokens, targets = make_batch()
    model(tokens, targets[:, -6:]).backward()
    grads = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(tokens, torch.cat([torch.full((3, 11), -100), targets[:, -6:]], dim=1)).backward()
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-6)


def test_losses_of_single_tokens_come_from_float32_logits() -> None:
    model = make_model(spread=0.5)
    tokens, targets = make_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = model(tokens, targets, reduction="none")
        hidden = model.hidden(tokens).float()
    logits = hidden @ model.tok_emb.weight[:VOCAB].T
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(losses, expected)
    rounded = -logits.bfloat16().float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    assert not torch.allclose(losses, rounded, rtol=1e-4)


MASKS = {
    "dense": MaskConfig(),
    "butterfly": MaskConfig(pattern="butterfly", block_size=16, window_blocks=1, global_blocks=0),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("positions", POSITIONS)
def test_packed_documents_equal_separate_documents(positions: str, mask: str) -> None:
    lengths = [3, 1, 7, 5]  # all in one block, because a document alone has other blocks
    model = make_model(positions=positions, mask=MASKS[mask])
    tokens, targets = make_batch(batch=2, seq_len=sum(lengths))
    starts = torch.tensor([0, 3, 4, 11])
    doc_start = starts.repeat_interleave(torch.tensor(lengths)).int().expand(2, -1)
    packed = model(tokens, targets, doc_start=doc_start)
    packed.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    alone = (
        torch.stack(
            [
                model(some, wanted, reduction="sum")
                for some, wanted in zip(
                    tokens.split(lengths, dim=1), targets.split(lengths, dim=1), strict=True
                )
            ]
        ).sum()
        / tokens.numel()
    )
    alone.backward()
    torch.testing.assert_close(packed, alone)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(tokens, targets), packed)


def test_documents_of_another_shape_are_refused() -> None:
    tokens, targets = make_batch()
    with pytest.raises(ValueError, match=r"doc_start has shape \(2,\) and tokens \(3, 17\)"):
        make_model()(tokens, targets, doc_start=torch.zeros(2))


@pytest.mark.parametrize("seq_len", [17, 31, 100])
def test_a_butterfly_hides_masked_tokens(seq_len: int) -> None:
    mask = MaskConfig(pattern="butterfly", block_size=16, window_blocks=1, global_blocks=0)
    model = make_model(context_length=128, n_layer=1, mask=mask)
    tokens, _ = make_batch(batch=1, seq_len=seq_len)
    visible = mask.build(seq_len).to_dense(seq_len, seq_len)[0].tril()  # type: ignore[union-attr]
    assert bool((visible == torch.ones_like(visible).tril()).all()) == (seq_len < 32)
    logits = model(tokens)
    for changed in (0, 16, seq_len // 2):
        other = tokens.clone()
        other[0, changed] = (other[0, changed] + 1) % VOCAB
        differs = (model(other) != logits).any(-1)[0]
        assert torch.equal(differs, visible[:, changed])


@pytest.mark.parametrize("mask", MASKS)
def test_compiles_with_documents_and_masks(mask: str) -> None:
    torch.compiler.reset()  # graphs of other tests count towards the recompile limit
    model = make_model(mask=MASKS[mask], attention="reference", n_layer=1)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for seq_len in (17, CONTEXT):
        model.prepare_mask(seq_len)
        tokens, targets = make_batch(seq_len=seq_len)
        for doc_start in (None, torch.full_like(tokens, 2, dtype=torch.int32)):
            if doc_start is not None:
                doc_start[:, :2] = 0
            torch.testing.assert_close(
                compiled(tokens, targets, doc_start=doc_start),
                model(tokens, targets, doc_start=doc_start),
            )


def test_ignored_targets_do_not_count() -> None:
    model = make_model()
    tokens, targets = make_batch(batch=2)
    targets[0, 3:9] = -100
    targets[1] = -100
    losses = F.cross_entropy(
        model(tokens)[targets != -100], targets[targets != -100], reduction="none"
    )
    torch.testing.assert_close(model(tokens, targets), losses.mean())
    torch.testing.assert_close(model(tokens, targets, reduction="sum"), losses.sum())
    targets[:] = -100
    assert model(tokens, targets).isnan()
    assert model(tokens, targets, reduction="sum") == 0


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]
)
def test_loss_is_at_least_float32(dtype: torch.dtype, expected: torch.dtype) -> None:
    model = make_model(spread=0.05).to(dtype)
    assert model(*make_batch()).dtype == expected


def test_loss_is_float32_under_autocast() -> None:
    model = make_model(spread=0.05, positions="rotary")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(make_batch()[0]).dtype == torch.bfloat16
        loss = model(*make_batch())
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, model(*make_batch()), rtol=0.02, atol=0)


def test_padding_the_vocabulary_changes_nothing() -> None:
    tokens, targets = make_batch()
    plain = GPT(ModelConfig(**TINY, vocab_multiple=1))
    padded = GPT(ModelConfig(**TINY, vocab_multiple=64))
    for model in (plain, padded):
        torch.manual_seed(5)
        model.init_weights()
    assert plain.tok_emb.weight.shape[0] == VOCAB
    assert padded.tok_emb.weight.shape[0] == 64
    torch.testing.assert_close(padded(tokens), plain(tokens))
    loss, expected = padded(tokens, targets), plain(tokens, targets)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for mine, theirs in zip(padded.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        torch.testing.assert_close(mine.grad[: len(theirs.grad)], theirs.grad)
    assert padded.tok_emb.weight.grad is not None
    assert not padded.tok_emb.weight[VOCAB:].any()
    assert not padded.tok_emb.weight.grad[VOCAB:].any()


@settings(deadline=None, max_examples=20)
@given(st.data(), st.sampled_from(POSITIONS), st.integers(2, CONTEXT))
def test_a_later_token_never_changes_earlier_logits(
    data: st.DataObject, positions: str, seq_len: int
) -> None:
    changed = data.draw(st.integers(1, seq_len - 1))
    model = make_model(positions=positions)
    tokens, _ = make_batch(batch=1, seq_len=seq_len, seed=seq_len)
    other = tokens.clone()
    other[0, changed:] = (other[0, changed:] + 1) % VOCAB
    before, after = model(tokens), model(other)
    torch.testing.assert_close(after[:, :changed], before[:, :changed])
    assert (after[:, changed:] - before[:, changed:]).abs().amax(dim=-1).min() > 1e-3


@pytest.mark.parametrize("positions", POSITIONS)
def test_order_of_the_past_matters(positions: str) -> None:
    model = make_model(positions=positions)
    tokens = torch.arange(12)[None]
    swapped = tokens.clone()
    swapped[0, [2, 7]] = swapped[0, [7, 2]]
    assert (model(tokens)[:, -1] - model(swapped)[:, -1]).abs().max() > 1e-3


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("inverse_layer", [False, True])
def test_attention_implementations_agree(positions: str, inverse_layer: bool) -> None:
    changes = {"positions": positions, "scale_attn_by_inverse_layer_idx": inverse_layer}
    tokens, targets = make_batch(seq_len=31)
    gradients = {}
    for attention in ("auto", "sdpa", "reference"):
        model = make_model(attention=attention, **changes).double()
        model(tokens, targets).backward()
        gradients[attention] = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(gradients["auto"], gradients["reference"], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gradients["sdpa"], gradients["reference"], rtol=1e-5, atol=1e-7)


def test_rotary_reads_more_tokens_than_the_context_length() -> None:
    model = make_model(positions="rotary")
    tokens, _ = make_batch(seq_len=CONTEXT + 9)
    torch.testing.assert_close(model(tokens)[:, :CONTEXT], model(tokens[:, :CONTEXT]))


@pytest.mark.parametrize("rates", [(0.2, 0.0), (0.0, 0.2)])
@pytest.mark.parametrize("attention", ["auto", "sdpa", "reference"])
def test_dropout_in_training_only_and_by_seed(rates: tuple[float, float], attention: str) -> None:
    model = make_model(dropout=rates[0], attention_dropout=rates[1], attention=attention)
    tokens, _ = make_batch()

    def logits(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model(tokens)

    assert torch.equal(logits(1), logits(1))
    assert not torch.allclose(logits(1), logits(2))
    model.eval()
    assert torch.equal(logits(1), logits(2))
    torch.testing.assert_close(logits(1), make_model(attention=attention)(tokens))


@pytest.mark.parametrize("attention", ["auto", "sdpa", "reference"])
def test_checkpointed_blocks_recompute_the_same_dropout(attention: str) -> None:
    model = make_model(dropout=0.1, attention_dropout=0.2, attention=attention)
    tokens, targets = make_batch()

    def gradients() -> list[torch.Tensor | None]:
        model.zero_grad()
        torch.manual_seed(3)
        model(tokens, targets).backward()
        return [parameter.grad for parameter in model.parameters()]

    plain = gradients()
    for block in model.blocks:
        block.forward = _checkpointed(block.forward)  # type: ignore[method-assign]
    torch.testing.assert_close(gradients(), plain, rtol=0, atol=0)


def _checkpointed(forward: Any) -> Any:
    def run(*args: Any, **keywords: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=False, **keywords)

    return run


@pytest.mark.parametrize(("positions", "dropout"), [("learned", 0.0), ("rotary", 0.1)])
def test_compiles_without_a_graph_break(positions: str, dropout: float) -> None:
    torch.compiler.reset()  # graphs of other tests count towards the recompile limit
    # the reference reads its dropout seed on the host, which breaks the graph: use sdpa instead
    rates = {"dropout": dropout, "attention_dropout": dropout}
    model = make_model(positions=positions, attention="sdpa", n_layer=1, **rates)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    tokens, targets = make_batch()
    torch.manual_seed(2)
    expected = model(tokens, targets)
    expected.backward()
    torch.manual_seed(2)
    loss = compiled(tokens, targets)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for mine, theirs in zip(compiled.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("positions", POSITIONS)
def test_one_graph_serves_all_lengths(positions: str) -> None:
    torch.compiler.reset()
    model = make_model(positions=positions, attention="sdpa", n_layer=1)
    counter = CompileCounter()
    compiled = torch.compile(model.hidden, fullgraph=True, backend=counter, dynamic=True)
    for length in (17, 32, 5):
        compiled(torch.zeros(2, length, dtype=torch.int64))
    assert counter.frame_count == 1


def test_errors_name_the_value_and_the_remedy() -> None:
    model = make_model()
    tokens, targets = make_batch()
    with pytest.raises(ValueError, match=r"33 tokens.*model.context_length=32.*raise.*rotary"):
        model(torch.zeros(1, 33, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"shape \(17,\) and must be \(batch, tokens\)"):
        model(tokens[0])
    for unfit in (targets[:, :0], targets[:2], targets[0], torch.cat([targets, targets], dim=1)):
        shape = re.escape(str(tuple(unfit.shape)))
        with pytest.raises(ValueError, match=rf"{shape} and tokens \(3, 17\).*needs one target"):
            model(tokens, unfit)
