import pytest
import torch
from torch._dynamo.testing import CompileCounter

from experiments.long_documents import classifier
from experiments.long_documents.classifier import (
    GPTClassifier,
    compile_blocks,
    fine_tune,
    pooled_states,
    rows_of,
    score,
)  # fmt: skip
from model.config import ModelConfig
from model.gpt import GPT

SHAPE = {"vocab_size": 60, "n_layer": 3, "n_head": 2, "n_embd": 32, "context_length": 16}


def random_documents(*lengths):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(60, (n,), generator=generator) for n in lengths]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_documents_in_a_row_do_not_see_each_other(source, pooling):
    model = GPTClassifier(source, 32, pooling).eval()
    torch.nn.init.normal_(model.head.weight)
    documents = random_documents(7, 1, 32, 16)  # 56 tokens
    together = model(documents)
    alone = torch.cat([model([document]) for document in documents])
    assert together.shape == (4, 2)
    assert torch.allclose(together, alone, atol=1e-5)


def test_short_documents_keep_the_positions_of_pretraining(source):
    documents = random_documents(16)
    states = source.hidden(documents[0][None])
    for pooling, expected in (("mean", states.mean(1)), ("last", states[:, -1])):
        model = GPTClassifier(source, 16, pooling).eval()
        assert torch.allclose(model.pool(documents), expected, atol=1e-5)
        assert model(documents).equal(model.head(model.pool(documents)))


def test_states_of_documents_in_several_rows(source):
    model = GPTClassifier(source, 32)
    documents = random_documents(30, 32, 5, 16)  # rows hold 64 tokens
    states = pooled_states(model, documents)
    alone = torch.cat([model.pool([document]) for document in documents])
    assert not states.requires_grad and torch.allclose(states, alone, atol=1e-5)


def test_positions_are_extended(source):
    model = GPTClassifier(source, 32)
    if source.config.positions == "learned":
        table, old = model.gpt.pos_emb.weight, source.pos_emb.weight
        assert table[:32:2].equal(old) and not table[32:].any()
        assert torch.allclose(table[1], (old[0] + old[1]) / 2)
    else:
        config = model.gpt.config
        assert (config.rope_scaling, config.rope_factor) == ("yarn", 2.0)


@pytest.mark.gpu
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_compiled_models_have_the_gradients_of_eager_ones(positions, monkeypatch):
    monkeypatch.setitem(classifier.ROW, "cuda", 256)
    source, graphs = GPT(ModelConfig(**SHAPE, positions=positions)), []
    for length, sizes in ((16, (16, 5)), (32, (32, 9, 17)), (128, (128, 3))):
        with torch.device("cuda"):
            model = GPTClassifier(source, length)
        torch.nn.init.normal_(model.head.weight)
        documents = [document.cuda() for document in random_documents(*sizes)]
        results = []
        for stance in ("default", "force_eager"):
            with torch.compiler.set_stance(stance):
                logits = model(documents)
                grads = torch.autograd.grad(logits[:, 0].sum(), [*model.parameters()])
            results.append(torch.cat([logits.flatten(), *(grad.flatten() for grad in grads)]))
        assert (results[0] - results[1]).norm() < 0.02 * results[1].norm()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert positions == "rotary" or graphs[0] == graphs[-1]


@pytest.mark.parametrize("scaling", ["none", "linear", "ntk", "yarn"])
def test_rotary_frequencies_are_those_of_the_run(scaling):
    torch.manual_seed(0)
    schedule = {"context_schedule": [[8, 0.5], [16, 0.5]], "window_grows": True, "window_size": 8}
    options = {"positions": "rotary", "rope_scaling": scaling, "attention": "reference"}
    factor = 1.0 if scaling == "none" else 4.0
    source = GPT(ModelConfig(**SHAPE, **options, rope_factor=factor, **schedule)).eval()
    document = random_documents(16)[0]
    expected = source.hidden(document[None])
    for length in (8, 16):
        assert torch.allclose(GPTClassifier(source, length).gpt.hidden(document[None]), expected)


@pytest.mark.parametrize(
    ("scaling", "trained", "length", "context", "row_size"),
    [
        ("none", 16, 8, 64, 64),
        ("none", 128, 8, 128, 64),
        ("none", 16, 32, 32, 32),  # becomes YaRN
        ("linear", 16, 32, 64, 64),
        ("yarn", 16, 8, 16, 16),
        ("yarn", 128, 8, 128, 64),
        ("yarn", 128, 256, 256, 64),
    ],
)
def test_rows_end_within_the_context_and_the_limit(scaling, trained, length, context, row_size):
    factor = 1.0 if scaling == "none" else 4.0
    options = {"positions": "rotary", "rope_scaling": scaling, "rope_factor": factor}
    source = GPT(ModelConfig(**SHAPE | {"context_length": trained}, **options))
    model = GPTClassifier(source, length)
    assert (model.gpt.config.context_length, model.row_size) == (context, row_size)


def test_code_of_a_block_serves_all_models_blocks_and_lengths(source):
    torch.compiler.reset()
    counter = CompileCounter()
    for length, size in ((8, 60), (16, 33), (16, 5)):
        gpt = GPTClassifier(source, length).gpt
        compile_blocks(gpt, counter)
        tokens = torch.zeros(1, size, dtype=torch.int64)
        gpt.hidden(tokens, doc_start=tokens.int())
    assert counter.frame_count == 3  # the embedding, the first block and all others


def test_each_document_has_its_own_row_on_a_cpu(source, monkeypatch):
    monkeypatch.undo()
    documents = random_documents(5, 1, 16)
    rows = rows_of(documents, range(3), GPTClassifier(source, 16).row_size)
    assert list(rows) == [[0], [1], [2]]


def test_rows_hold_as_many_documents_as_fit():
    documents = random_documents(30, 30, 5, 64, 1)
    assert list(rows_of(documents, [0, 1, 2, 3, 4], 64)) == [[0, 1], [2], [3], [4]]
    assert list(rows_of(documents, [4, 2, 1], 36)) == [[4, 2, 1]]
    assert list(rows_of(documents, [], 64)) == []


def test_fine_tuning_finds_a_token_far_from_the_end(source, monkeypatch):
    monkeypatch.setattr(classifier, "LR", 1e-2)
    documents = [document % 10 for document in random_documents(*[8] * 64)]
    labels = torch.arange(64) % 2
    for document, label in zip(documents, labels, strict=True):
        document[2] = 58 + label
    torch.manual_seed(0)
    model = GPTClassifier(source, 32).train()
    assert len([*fine_tune(model, documents, labels, range(48), epochs=30, seed=1)]) == 30
    scores = torch.tensor(score(model, documents, range(48, 64)))
    assert ((scores > 0) == labels[48:].bool()).float().mean() > 0.75
