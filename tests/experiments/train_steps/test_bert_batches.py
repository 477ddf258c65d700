import json
import zipfile
from itertools import pairwise

import pytest
import torch

from experiments.train_steps import bert_batches
from experiments.train_steps.bert_batches import (
    CLS,
    IGNORED,
    MASK,
    SEP,
    encode,
    make_batches,
    read_articles,
    sequences,
)


def test_sequences_of_padded_are_whole_articles_and_of_full_have_no_padding(articles):
    length = bert_batches.LENGTH
    padded = sequences([*articles, [9] * 100], "padded")
    inside = [token for ids in padded for token in ids[1:-1]]
    assert inside == [token for ids in articles for token in ids] + [9] * (length - 2)
    assert max(map(len, padded)) <= length and len({len(ids) for ids in padded}) > 5
    full = sequences(articles, "full")
    assert {len(ids) for ids in full} == {length}
    assert {ids[0] for ids in full} == {CLS} and {ids[-1] for ids in full} == {SEP}
    assert len(full) == sum(len(ids) + 1 for ids in articles) // (length - 2)


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


def test_articles_are_read_from_the_wheel(tmp_path):
    wheel = tmp_path / "a.whl"
    articles = {"Ant": {"title": "Ant", "extract": "Ants are insects. Ants work."}}
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(bert_batches.SUMMARIES, json.dumps(articles))
    texts = read_articles(wheel)
    assert texts == ["Ants are insects. Ants work."]
    (ids,) = encode(texts)
    assert len(ids) > 6 and MASK < min(ids) <= max(ids) < 30_522
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("another", "file")
    with pytest.raises(ValueError, match=r"--text=.*a\.whl must be the wheel of ovos-skill"):
        read_articles(wheel)
