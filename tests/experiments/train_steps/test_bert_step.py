import copy
import json
import zipfile
from itertools import pairwise

import pytest
import torch

from experiments.train_steps import bert_step
from experiments.train_steps.bert_step import (
    CLS,
    CONTENDERS,
    IGNORED,
    LARGE,
    MASK,
    PAD,
    SEP,
    Batch,
    Trainer,
    bert_table,
    compare,
    draw,
    encode,
    make_batches,
    our_loss,
    read_articles,
    sequences,
)

LENGTH = 40
SMALL = {
    **LARGE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": LENGTH,
}


@pytest.fixture
def articles(monkeypatch):
    monkeypatch.setattr(bert_step, "LENGTH", LENGTH)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 30, (60,), generator=generator).tolist()
    return [torch.randint(5, 30_522, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture
def bert():
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(**SMALL))


def gradients(loss, model):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", [name for name in CONTENDERS if name != bert_step.BASE])
@pytest.mark.parametrize("case", bert_step.CASES)
def test_all_contenders_have_the_same_loss_and_gradients(name, case, articles, bert):
    (batch,) = make_batches(sequences(articles, case), 1, size=3)
    assert (len(batch.row) < 3 * LENGTH) == (case == "padded")
    bert_step.set_attention(bert, case)
    expected = CONTENDERS[bert_step.BASE][0](bert, batch)
    loss = CONTENDERS[name][0](bert, batch)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    theirs, ours = gradients(expected, bert), gradients(loss, bert)
    assert ours.keys() == theirs.keys()
    for parameter, grad in theirs.items():
        assert torch.allclose(ours[parameter], grad, atol=1e-6, rtol=1e-4), parameter


def test_without_padding_transformers_makes_no_mask(articles, bert, monkeypatch):
    (batch,) = make_batches(sequences(articles, "full"), 1, size=3)
    bert_step.set_attention(bert, "full")
    masks = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def seen(*args, attn_mask=None, **options):
        masks.append(attn_mask)
        return attend(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    # What older versions of transformers answer in a compiled model
    unskipped = "transformers.masking_utils._ignore_bidirectional_mask_sdpa"
    monkeypatch.setattr(unskipped, lambda *args, **options: False)
    CONTENDERS[bert_step.COMPILED][0](bert, batch)
    assert masks == [None] * 2


def test_padding_does_not_change_papilios_loss(articles, bert):
    (batch,) = make_batches(sequences(articles, "padded"), 1, size=3)
    tokens = batch.tokens.masked_fill(batch.tokens == PAD, 77)
    assert our_loss(bert, batch._replace(tokens=tokens)).equal(our_loss(bert, batch))


def test_sequences_of_padded_are_whole_articles_and_of_full_have_no_padding(articles):
    padded = sequences([*articles, [9] * 100], "padded")
    inside = [token for ids in padded for token in ids[1:-1]]
    assert inside == [token for ids in articles for token in ids] + [9] * (LENGTH - 2)
    assert max(map(len, padded)) <= LENGTH and len({len(ids) for ids in padded}) > 5
    full = sequences(articles, "full")
    assert {len(ids) for ids in full} == {LENGTH}
    assert {ids[0] for ids in full} == {CLS} and {ids[-1] for ids in full} == {SEP}
    assert len(full) == sum(len(ids) + 1 for ids in articles) // (LENGTH - 2)


def test_batches_mask_15_percent_and_share_their_shapes(articles):
    batches = make_batches(sequences(articles, "padded"), 20, size=8)
    assert all([x.shape for x in a] == [x.shape for x in b] for a, b in pairwise(batches))
    hidden, real, masks = 0, 0, 0
    for batch in batches:
        chosen = batch.labels != IGNORED
        assert batch.targets[batch.targets != IGNORED].equal(batch.labels[chosen])
        assert (batch.tokens[~chosen] != MASK).all()
        hidden += int(chosen.sum())
        masks += int((batch.tokens == MASK).sum())
        real += int(batch.lengths.sum()) - 2 * len(batch.lengths)
    assert hidden / real == pytest.approx(0.15, abs=0.02)
    assert masks / hidden == pytest.approx(0.8, abs=0.05)
    orders = torch.cat([batch.lengths for batch in batches[:3]])
    assert not torch.cat([batch.lengths for batch in batches[3:6]]).equal(orders)


def test_training_starts_with_a_small_learning_rate_and_learns(articles, bert):
    before = bert.bert.embeddings.word_embeddings.weight.clone()
    (batch,) = make_batches(sequences(articles, "padded"), 1, size=3)
    losses = Trainer(bert, our_loss, capture=False).train([batch])
    change = (bert.bert.embeddings.word_embeddings.weight - before).abs().max().item()
    assert len(losses) == 1 and change == pytest.approx(1e-4 / 100, rel=0.1)
    assert Trainer(bert, our_loss, capture=False).train([batch] * 120)[-1] < losses[0] - 0.3


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, how in CONTENDERS.items() if how[1]])
def test_captured_steps_have_the_losses_of_eager_ones(name, articles, bert):
    batches = make_batches(sequences(articles, "padded"), 12, size=4)
    batches = [Batch(*(x.cuda() for x in batch)) for batch in batches]
    losses = []
    for loss_of, capture in ((our_loss, False), (torch.compile(CONTENDERS[name][0]), True)):
        model = copy.deepcopy(bert).cuda()
        losses.append(Trainer(model, loss_of, capture=capture).train(batches))
    assert losses[1] == pytest.approx(losses[0], abs=0.02)


def test_different_losses_give_no_speed():
    with pytest.raises(SystemExit, match=r"ours: .* 2\.5000 nats, but that of .* 2\.0000"):
        compare([9.0, *[2.5] * 50], [9.0, *[2.0] * 50], "ours")
    row = compare([9.0, *[2.0] * 49, 2.1], [9.0, *[2.0] * 50], "ours")
    assert row["difference"] == pytest.approx(0.002) and row["largest"] == pytest.approx(0.1)


def test_articles_are_read_from_the_wheel(tmp_path):
    wheel = tmp_path / "a.whl"
    articles = {"Ant": {"title": "Ant", "extract": "Ants are insects. Ants work."}}
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(bert_step.SUMMARIES, json.dumps(articles))
    texts = read_articles(wheel)
    assert texts == ["Ants are insects. Ants work."]
    (ids,) = encode(texts)
    assert len(ids) > 6 and MASK < min(ids) <= max(ids) < 30_522
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("another", "file")
    with pytest.raises(ValueError, match=r"--text=.*a\.whl must be the wheel of ovos-skill"):
        read_articles(wheel)


def test_table_and_picture_of_bert():
    def row(name, speed, **losses):
        same = {"case": "full", "peak_gib": 9.0}
        return {**same, "name": name, "tokens_per_s": speed, **losses}

    equal = {"last_loss": 7.0, "difference": 0.001}
    rows = [
        row(bert_step.BASE, 100.0, **equal),
        row(bert_step.COMPILED, 200.0, **equal),
        row("ours", 300.0, **equal),
        row("ModernBERT-large, compiled", 250.0),
    ]
    lines = bert_table({"rows": rows}).splitlines()
    assert "| no padding | Papilio | 300 | 1.50 | 9.0 GiB | 7.000 | +0.0010 |" in lines
    assert "| no padding | ModernBERT-large, compiled | 250 | 1.25 | 9.0 GiB | - | - |" in lines
    best = row(bert_step.BEST, 200.0) | {"case": "padded"}
    without, padded = draw({"rows": rows}, {"rows": [best]}).axes
    assert [text.get_text() for text in without.texts] == ["0", "0", "0", "0"]
    assert [text.get_text() for text in padded.texts] == ["0, 1.00x"]
