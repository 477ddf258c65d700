import copy

import pytest
import torch

from experiments.train_steps.bert_batches import Batch, make_batches, sequences
from experiments.train_steps.bert_losses import BASE, BEST, COMPILED, CONTENDERS, our_loss
from experiments.train_steps.bert_step import Trainer, bert_table, compare, draw


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


def test_table_and_picture_of_bert():
    def row(name, speed, **losses):
        same = {"case": "full", "peak_gib": 9.0}
        return {**same, "name": name, "tokens_per_s": speed, **losses}

    equal = {"last_loss": 7.0, "difference": 0.001}
    rows = [
        row(BASE, 100.0, **equal),
        row(COMPILED, 200.0, **equal),
        row("ours", 300.0, **equal),
        row("ModernBERT-large, compiled", 250.0),
    ]
    lines = bert_table({"rows": rows}).splitlines()
    assert "| no padding | Papilio | 300 | 1.50 | 9.0 GiB | 7.000 | +0.0010 |" in lines
    assert "| no padding | ModernBERT-large, compiled | 250 | 1.25 | 9.0 GiB | - | - |" in lines
    best = row(BEST, 200.0) | {"case": "padded"}
    without, padded = draw({"rows": rows}, {"rows": [best]}).axes
    assert [text.get_text() for text in without.texts] == ["0", "0", "0", "0"]
    assert [text.get_text() for text in padded.texts] == ["0, 1.00x"]
