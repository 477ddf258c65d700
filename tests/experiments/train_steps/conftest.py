"""A small BERT, and short articles for it."""

import pytest
import torch

from experiments.train_steps import bert_batches
from experiments.train_steps.bert_step import LARGE

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
    monkeypatch.setattr(bert_batches, "LENGTH", LENGTH)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 30, (60,), generator=generator).tolist()
    return [torch.randint(5, 30_522, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture
def bert():
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(**SMALL))
