"""Losses of single tokens, compared with loops over unbatched windows."""

from contextlib import nullcontext
from functools import partial
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from torch import nn

from data.text.batches import ValidationBatches
from data.text.shards import TokenStream
from evaluation.score import token_losses
from evaluation.windows import Scoring, ScoringWindows
from model.config import ModelConfig
from model.gpt import GPT
from tests.training_runs import call_on_two_processes
from training.distributed import Processes, start_processes
from training.language.task import evaluate
from training.numerics import autocast

CPU = torch.device("cpu")
ALONE = Processes(rank=0, world_size=1, device=CPU)


def make_model(vocab_size, **changes):
    torch.manual_seed(0)
    shape = {"context_length": 40, "n_layer": 2, "n_head": 2, "n_embd": 16, **changes}
    model = GPT(ModelConfig(vocab_size=vocab_size, **shape)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    return model


def score(model, stream, scoring, processes=ALONE, batch_size=5, context=nullcontext):
    windows = ScoringWindows(
        stream, scoring, batch_size, rank=processes.rank, world_size=processes.world_size
    )
    return token_losses(model, windows, len(stream), processes, context)


@pytest.fixture(scope="module")
def stream(corpus):
    return TokenStream(corpus, "val")


@pytest.fixture(scope="module")
def model(stream):
    return make_model(stream.manifest.tokenizer.vocab_size)


def brute_force(model, text, history, stride, first, eot_id=None):
    """Score window by window and, if eot_id is given, document by document within a window."""
    losses = np.full(len(text), np.nan, dtype=np.float32)
    begin = first + stride - history
    while begin + history < len(text):
        window = text[begin : begin + history]
        ends = [i + 1 for i, token in enumerate(window) if token == eot_id]
        borders = [0, *(end for end in ends if end < history), history]
        logits = torch.cat(
            [model(torch.tensor([window[start:end]]))[0] for start, end in pairwise(borders)]
        )
        for index in range(history - stride, history):
            position = begin + index + 1
            losses[position] = -logits[index].log_softmax(-1)[text[position]]
        begin += stride
    return losses


SHAPES = [(40, 9, 31), (40, 9, 60), (17, 17, 0), (8, 3, 40), (1, 1, 0)]


@pytest.mark.parametrize(("history", "stride", "first"), SHAPES)
def test_losses_and_perplexity_match_brute_force(model, stream, history, stride, first):
    losses = score(model, stream, Scoring(history=history, stride=stride, first=first))
    expected = brute_force(model, stream.read(0, len(stream)).tolist(), history, stride, first)
    assert losses.dtype == np.float32 and losses.shape == (len(stream),)
    assert np.array_equal(np.isnan(losses), np.isnan(expected))
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-5)
    perplexity = np.exp(np.nanmean(losses, dtype=np.float64))
    assert perplexity == pytest.approx(np.exp(np.nanmean(expected, dtype=np.float64)), rel=1e-5)
    last = first + (len(stream) - 1 - first) // stride * stride
    assert np.flatnonzero(~np.isnan(losses)).tolist() == list(range(first + 1, last + 1))


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_masked_documents_equal_separate_documents(stream, positions):
    tokenizer = stream.manifest.tokenizer
    model = make_model(tokenizer.vocab_size, positions=positions)
    shape = {"history": 40, "stride": 13, "first": 27}
    losses = score(model, stream, Scoring(**shape, document_mask=True))
    text = stream.read(0, len(stream)).tolist()
    expected = brute_force(model, text, **shape, eot_id=tokenizer.eot_id)
    np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-5)
    packed = score(model, stream, Scoring(**shape))
    differs = np.abs(losses - packed) > 1e-3
    assert 0 < differs.sum() < len(text) / 2


def test_chunks_match_the_validation_of_training(model, stream):
    scoring = Scoring(history=32, stride=32)
    full = scoring.n_windows(len(stream))
    batches = islice(ValidationBatches(stream, 32, 1), full)
    loss, n_tokens = evaluate(model, batches, ALONE, nullcontext)
    losses = score(model, stream, scoring)
    assert n_tokens == (~np.isnan(losses)).sum() == 32 * full
    assert np.nanmean(losses, dtype=np.float64) == pytest.approx(loss, rel=1e-6)


def test_autocast_covers_the_forward_pass(model, stream):
    scoring = Scoring(history=32, stride=32)
    losses = score(model, stream, scoring)
    rounded = score(model, stream, scoring, context=partial(autocast, "bfloat16", CPU))
    assert rounded.dtype == np.float32
    assert 1e-4 < np.nanmax(np.abs(rounded - losses)) < 0.5
    same = score(model, stream, scoring, context=partial(autocast, "float32", CPU))
    assert np.array_equal(same, losses, equal_nan=True)


class Echo(nn.Module):
    """Model whose losses are the targets."""

    def forward(self, tokens, targets, *, doc_start, reduction):
        assert doc_start is None and reduction == "none"
        assert not torch.is_grad_enabled()
        return targets.float()


def echo(*batches):
    """Call token_losses on a stream of 5 tokens with batches of (targets, positions)."""
    return token_losses(
        Echo(),
        [
            (torch.zeros(2, 3, dtype=torch.int64), torch.tensor(targets), None, positions)
            for targets, positions in ((t, torch.tensor(p)) for t, p in batches)
        ],
        5,
        ALONE,
        nullcontext,
    )


def test_rows_after_the_last_window_do_not_count():
    losses = echo(([[3, 7], [1, 0]], [[4, 1], [2, 0]]), ([[5, 6], [8, 9]], np.zeros((0, 2), int)))
    assert np.array_equal(losses, [0, 7, 1, np.nan, 3], equal_nan=True)


@pytest.mark.parametrize(
    "batches",
    [
        [([[3, 7], [1, 0]], [[4, 1], [1, 0]])],
        [([[3, 7], [1, 0]], [[4, 1]]), ([[3, 7], [1, 0]], [[0, 4]])],
    ],
    ids=["in one batch", "in two"],
)
def test_a_position_scored_twice_is_a_defect(batches):
    with pytest.raises(AssertionError, match="a position was scored twice"):
        echo(*batches)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_losses_that_are_not_finite_are_an_error(value):
    with pytest.raises(FloatingPointError, match="losses of 1 of 4 tokens are not finite"):
        echo(([[3.0, value], [1.0, 0.0]], [[4, 1], [2, 0]]))


SHARED = Scoring(history=40, stride=9, first=60)


@pytest.mark.distributed
def test_two_processes_give_the_losses_of_one(model, stream, tmp_path):
    ends = call_on_two_processes(tmp_path, one_of_two, stream.path, tmp_path)
    assert [status for status, _ in ends] == [0, 0], ends
    alone = score(model, stream, SHARED)
    for rank in (0, 1):
        losses = np.load(tmp_path / f"rank_{rank}.npy")
        assert np.array_equal(np.isnan(losses), np.isnan(alone))
        np.testing.assert_allclose(losses, alone, rtol=1e-5, atol=1e-6)
    assert (tmp_path / "rank_0.npy").read_bytes() == (tmp_path / "rank_1.npy").read_bytes()


def one_of_two(shards, out):
    """Body of each process in the test above."""
    stream = TokenStream(shards, "val")
    with start_processes("cpu") as processes:
        assert processes.world_size == 2
        model = make_model(stream.manifest.tokenizer.vocab_size)
        np.save(out / f"rank_{processes.rank}.npy", score(model, stream, SHARED, processes))
