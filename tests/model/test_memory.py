"""Models that are too large are refused before memory is allocated."""

import pytest
import torch

from model.classifier import Classifier
from model.classifier_config import ClassifierConfig
from model.config import ModelConfig
from model.gpt import GPT


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_layer": 10**9}, "model.n_layer=1000000000 must be at most 10,000"),
        ({"n_embd": 10**9, "n_head": 10**4}, "model.n_embd=1000000000 must be at most"),
        ({"vocab_size": 4 * 10**9}, "model.vocab_size=4000000000 must be at most"),
        ({"vocab_multiple": 10**9}, "model.vocab_multiple=1000000000 must be at most 65,536"),
        ({"context_length": 10**12}, "model.context_length=1000000000000 must be at most"),
    ],
)
def test_absurd_sizes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**options)


def test_a_classifier_with_a_large_vocabulary_is_refused():
    with pytest.raises(ValueError, match="model.vocab_size=1025 must be at most 1,024"):
        ClassifierConfig(vocab_size=1025, n_classes=2, context_length=8)


def test_the_weights_are_counted_exactly(monkeypatch):
    sizes = {"n_head": 4, "n_kv_head": 2, "head_size": 24, "n_inner": 50, "mlp": "swiglu"}
    sizes |= {"tie_embeddings": False, "n_embd": 48, "n_layer": 2}
    config = ModelConfig(**sizes, vocab_size=61, context_length=8)
    matrices = sum(4 * p.numel() for p in GPT(config).parameters() if p.dim() == 2)
    memory = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": matrices}
    monkeypatch.setattr("os.sysconf", memory.__getitem__)
    GPT(config)
    memory["SC_PHYS_PAGES"] -= 1
    with pytest.raises(ValueError, match="GiB of weights, and this machine has"):
        GPT(config)


def test_a_model_larger_than_the_memory_is_refused():
    large = {"n_layer": 10_000, "n_embd": 2**20, "n_head": 2**12}
    with pytest.raises(ValueError, match=r"model.n_layer=10000, .* GiB of weights, and this mach"):
        GPT(ModelConfig(**large, context_length=8))
    with pytest.raises(ValueError, match=r"model.n_layer=10000, .* GiB of weights, and this mach"):
        Classifier(ClassifierConfig(**large, vocab_size=2, n_classes=2, context_length=8))
    with torch.device("meta"):  # a model without storage
        assert GPT(ModelConfig(n_layer=2, n_embd=2**16, n_head=2**8, context_length=8)) is not None
