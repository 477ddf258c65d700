import pytest
import torch

from data.text.batches import IGNORE, TrainBatches, ValidationBatches
from data.text.config import DataConfig
from data.text.shards import TokenStream


@pytest.fixture
def stream(make_shards):
    return TokenStream(
        make_shards([list(range(1, 30)), list(range(30, 99))], shard_tokens=10), "train"
    )


def test_batches_are_windows_of_the_stream_across_shards(stream):
    assert len(stream.info.shards) > 1
    batches = TrainBatches(stream, context_length=7, seed=3)
    n = batches.sampler.windows_per_epoch
    inputs, targets, doc_start = batches.batch(0, n)
    assert doc_start is None
    assert inputs.shape == targets.shape == (n, 7)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous() and targets.is_contiguous()
    tokens = torch.from_numpy(stream.read(0, len(stream)))
    for row, start in enumerate(batches.sampler.position(range(n))):
        assert torch.equal(inputs[row], tokens[start : start + 7])
        assert torch.equal(targets[row], tokens[start + 1 : start + 8])


def test_any_batch_at_any_time(stream):
    inputs, targets, _ = TrainBatches(stream, 7, seed=3).batch(95, 6)
    for row in range(6):
        alone = TrainBatches(stream, 7, seed=3).batch(95 + row, 1)
        assert torch.equal(alone[0][0], inputs[row])
        assert torch.equal(alone[1][0], targets[row])


def brute_force_doc_start(stream, start, length):
    """Token by token: one past the last end of text before the token, if that is in the window."""
    eot = stream.manifest.tokenizer.eot_id
    tokens = stream.read(start, length).tolist()
    result, begin = [], 0
    for position, token in enumerate(tokens):
        result.append(begin)
        if token == eot:
            begin = position + 1
    return result


def test_training_batches_say_where_documents_start(make_shards):
    documents = [[1], [2, 3, 4, 5, 6, 7, 8, 9], [], [10, 11], [12] * 20]
    stream = TokenStream(make_shards(documents, shard_tokens=10), "train")
    batches = TrainBatches(stream, context_length=5, seed=3, document_mask=True)
    n = batches.sampler.windows_per_epoch
    doc_start = batches.batch(0, n).doc_start
    assert doc_start.dtype == torch.int32
    starts = batches.sampler.position(range(n)).tolist()
    expected = [brute_force_doc_start(stream, start, 5) for start in starts]
    assert doc_start.tolist() == expected
    assert any(any(row) for row in expected)


def test_validation_batches_say_where_documents_start(make_shards):
    stream = TokenStream(make_shards([[1], [2, 3, 4, 5], [], [6, 7], [8]]), "train")
    (batch,) = ValidationBatches(stream, 6, 3, document_mask=True)
    scored = (len(stream) - 1) // 6 * 6
    expected = [brute_force_doc_start(stream, start, 6) for start in range(0, scored, 6)]
    assert batch.doc_start[: len(expected)].tolist() == expected


@pytest.mark.parametrize(("batch_size", "world_size"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_every_validation_batch_says_where_documents_start(make_shards, batch_size, world_size):
    documents = [[1], [2, 3, 4, 5], [], [6] * 9, [8, 9], [10, 11, 12], [13] * 7]
    stream = TokenStream(make_shards(documents), "train")
    options = {"world_size": world_size, "document_mask": True}
    checked = 0
    for rank in range(world_size):
        batches = ValidationBatches(stream, 5, batch_size, rank=rank, **options)
        for number, batch in enumerate(batches):
            for row, doc_start in enumerate(batch.doc_start.tolist()):
                start = 5 * ((number * world_size + rank) * batch_size + row)
                if start + 5 < len(stream):
                    assert doc_start == brute_force_doc_start(stream, start, 5)
                    checked += any(doc_start)
    assert checked > 2


def test_consecutive_windows_say_where_documents_start(make_shards):
    documents = [[1], [2, 3, 4, 5, 6, 7, 8, 9], [], [10, 11], [12] * 9, [13], [14, 15], [16] * 5]
    stream = TokenStream(make_shards(documents, shard_tokens=10), "train")
    batches = TrainBatches(stream, 4, seed=3, document_mask=True, consecutive_windows=3)
    n = batches.sampler.windows_per_epoch
    starts = [s + 4 * part for s in batches.sampler.position(range(n)) for part in range(3)]
    expected = [brute_force_doc_start(stream, start, 4) for start in starts]
    assert batches.batch(0, 3 * n).doc_start.tolist() == expected
    assert any(any(row) for row in expected[1::3] + expected[2::3])


def test_consecutive_windows_are_a_longer_context_cut_up(stream):
    long = TrainBatches(stream, context_length=12, seed=3)
    short = TrainBatches(stream, context_length=4, seed=3, consecutive_windows=3)
    n = long.sampler.windows_per_epoch + 2
    tokens, targets, _ = long.batch(0, n)
    assert torch.equal(short.batch(0, 3 * n).tokens, tokens.reshape(-1, 4))
    assert torch.equal(short.batch(0, 3 * n).targets, targets.reshape(-1, 4))
    assert torch.equal(short.batch(4, 7).tokens, tokens.reshape(-1, 4)[4:11])
    with pytest.raises(ValueError, match=r"has 100 tokens.* needs 101"):
        TrainBatches(stream, context_length=20, seed=0, consecutive_windows=5)
    with pytest.raises(ValueError, match=r"data.consecutive_windows=0 must be at least 1"):
        DataConfig(path="x", consecutive_windows=0)


def test_context_longer_than_the_corpus(stream):
    with pytest.raises(ValueError, match=r"has 100 tokens.* needs 101"):
        TrainBatches(stream, context_length=100, seed=0)


@pytest.mark.parametrize("context_length", [1, 7, 33, 99, 100, 500])
@pytest.mark.parametrize(("batch_size", "world_size"), [(1, 1), (3, 1), (2, 3), (50, 2)])
def test_validation_scores_every_token_but_the_first_once(
    stream, context_length, batch_size, world_size
):
    ranks = [
        ValidationBatches(stream, context_length, batch_size, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    seen_inputs, seen_targets = [], []
    for per_rank in zip(*ranks, strict=True):
        for inputs, targets, _ in per_rank:
            assert inputs.shape == targets.shape == (batch_size, context_length)
            assert inputs.dtype == targets.dtype == torch.int64
            scored = targets != IGNORE
            seen_inputs += inputs[scored].tolist()
            seen_targets += targets[scored].tolist()
            assert (inputs[~scored] == 0).all()
    tokens = stream.read(0, len(stream)).tolist()
    assert (seen_inputs, seen_targets) == (tokens[:-1], tokens[1:])


def test_validation_refuses_what_cannot_be_scored(make_shards):
    stream = TokenStream(make_shards([[1]], val=[[]]), "val")
    with pytest.raises(ValueError, match="has 1 token, but scoring needs at least 2"):
        ValidationBatches(stream, 4, 1)
    stream = TokenStream(stream.path, "train")
    with pytest.raises(ValueError, match="rank=1"):
        ValidationBatches(stream, 4, 1, rank=1, world_size=1)
    with pytest.raises(ValueError, match=r"rank=-1 must lie in \[0, world_size=2\)"):
        ValidationBatches(stream, 4, 1, rank=-1, world_size=2)
    with pytest.raises(ValueError, match="batch_size=0"):
        ValidationBatches(stream, 4, 0)
    with pytest.raises(ValueError, match="context_length=0"):
        ValidationBatches(stream, 0, 1)
