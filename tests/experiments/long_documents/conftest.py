"""A small pretrained model."""

import pytest
import torch

from experiments.long_documents import classifier
from model.config import ModelConfig
from model.gpt import GPT

SHAPE = {"vocab_size": 60, "n_layer": 2, "n_head": 2, "n_embd": 32, "context_length": 16}


@pytest.fixture(params=["learned", "rotary"])
def source(request):
    torch.manual_seed(0)
    return GPT(ModelConfig(**SHAPE, positions=request.param, attention="reference")).eval()


@pytest.fixture(autouse=True)
def short_rows(monkeypatch):
    monkeypatch.setattr(classifier, "ROW", {"cuda": 64, "cpu": 64})
