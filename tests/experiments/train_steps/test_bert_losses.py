import pytest
import torch

from experiments.train_steps.bert_batches import PAD, make_batches, sequences
from experiments.train_steps.bert_losses import (
    BASE,
    COMPILED,
    CONTENDERS,
    our_loss,
    set_attention,
)
from experiments.train_steps.bert_step import CASES


def gradients(loss, model):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", [name for name in CONTENDERS if name != BASE])
@pytest.mark.parametrize("case", CASES)
def test_all_contenders_have_the_same_loss_and_gradients(name, case, articles, bert):
    (batch,) = make_batches(sequences(articles, case), 1, size=3)
    assert (len(batch.row) < len(batch.token)) == (case == "padded")
    set_attention(bert, case)
    expected = CONTENDERS[BASE][0](bert, batch)
    loss = CONTENDERS[name][0](bert, batch)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    theirs, ours = gradients(expected, bert), gradients(loss, bert)
    assert ours.keys() == theirs.keys()
    for parameter, grad in theirs.items():
        assert torch.allclose(ours[parameter], grad, atol=1e-6, rtol=1e-4), parameter


def test_without_padding_transformers_makes_no_mask(articles, bert, monkeypatch):
    (batch,) = make_batches(sequences(articles, "full"), 1, size=3)
    set_attention(bert, "full")
    masks = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def seen(*args, attn_mask=None, **options):
        masks.append(attn_mask)
        return attend(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    # What older versions of transformers answer in a compiled model
    unskipped = "transformers.masking_utils._ignore_bidirectional_mask_sdpa"
    monkeypatch.setattr(unskipped, lambda *args, **options: False)
    CONTENDERS[COMPILED][0](bert, batch)
    assert masks == [None] * 2


def test_padding_does_not_change_papilios_loss(articles, bert):
    (batch,) = make_batches(sequences(articles, "padded"), 1, size=3)
    tokens = batch.tokens.masked_fill(batch.tokens == PAD, 77)
    assert our_loss(bert, batch._replace(tokens=tokens)).equal(our_loss(bert, batch))
