"""Losses summed by document and bin, and the files that store them."""

from dataclasses import replace

import numpy as np
import pytest

from configs.reader import to_yaml
from data.text.shards import TokenStream
from data.text.tokenizer import load_tokenizer
from evaluation.sums import (
    MIN_DOCUMENTS,
    N_PARTS,
    Corpus,
    Text,
    add_up,
    describe_corpus,
    describe_text,
    effective_number,
    log_bins,
    read_scored,
    units_of,
    well_seen,
    write_scored,
)
from evaluation.windows import Scoring
from tests.evaluation.known_losses import CHUNK_LONG, LONG, SHORT, added_up

CONTROL = Scoring(history=64, stride=8, first=64, control="shuffle", near=5)


def described(stream, *scorings):
    return describe_corpus(stream, load_tokenizer(str(stream.path)).token_bytes(), scorings)


@pytest.mark.parametrize("scoring", [CHUNK_LONG, LONG, CONTROL], ids=lambda s: s.name)
def test_sums_match_a_loop_over_tokens(stream, base, scoring):
    corpus = described(stream, SHORT, LONG)
    losses = np.where(scoring.seen(len(stream)) > 0, base, np.nan).astype(np.float32)
    sums = add_up(losses, scoring, corpus)
    nats, tokens, n_bytes = np.zeros_like(sums.nats), np.zeros_like(sums.tokens), 0
    for position, loss in enumerate(losses.tolist()):
        counts = corpus.well_seen[position] or scoring is not LONG
        if not np.isnan(loss) and counts:
            in_window = (position - 1) % 64
            in_document = int(corpus.history[position]) if scoring is LONG else 0
            place = in_window if scoring is CHUNK_LONG else in_document
            cell = corpus.unit[position], place.bit_length()
            nats[cell] += loss
            tokens[cell] += 1
            n_bytes += int(corpus.n_bytes[position])
    np.testing.assert_allclose(sums.nats, nats, rtol=1e-12)
    np.testing.assert_array_equal(sums.tokens, tokens)
    assert sums.n_bytes == n_bytes
    assert sums.tokens.sum() < len(stream)


def test_files_round_trip(scored, stream, base, tmp_path):
    (run,), text = added_up([scored("a", {SHORT: base, CHUNK_LONG: base + 1}, seed=3)], stream)
    path = write_scored(run, text, tmp_path / "sums")
    assert path == tmp_path / "sums" / stream.path.name / "a_seed3.npz"
    assert path.stat().st_size < 10_000
    again, its_text = read_scored(path)
    for name in ("label", "number", "about", "config"):
        assert getattr(again, name) == getattr(run, name)
    assert list(again.sums) == [SHORT, CHUNK_LONG]
    for scoring, sums in run.sums.items():
        assert again.sums[scoring].n_bytes == sums.n_bytes
        for name in ("nats", "tokens"):
            ours, theirs = getattr(sums, name), getattr(again.sums[scoring], name)
            assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    assert np.array_equal(its_text.document_lengths, text.document_lengths)
    assert vars(its_text) | {"document_lengths": 0} == vars(text) | {"document_lengths": 0}


def test_damaged_files_are_reported(scored, stream, base, tmp_path):
    (run,), text = added_up([scored("a", {SHORT: base})], stream)
    path = write_scored(run, text, tmp_path)
    whole = path.read_bytes()
    flipped = [
        whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :]
        for place in range(0, len(whole), 101)
    ]
    refused = 0
    for damaged in (b"", whole[:100], whole[:-1], *flipped):
        path.write_bytes(damaged)
        try:
            read_scored(path)
        except ValueError as error:
            assert "a_seed1.npz is damaged, or was written by another version (" in str(error)
            refused += 1
    assert refused > 3 + len(flipped) / 2  # some bytes of a zip file have no meaning


def test_a_file_of_a_newer_version_is_refused(scored, stream, base, tmp_path, monkeypatch):
    (run,), text = added_up([scored("a", {SHORT: base})], stream)
    newer = to_yaml(run.config) + "  of_the_future: 1\n"
    monkeypatch.setattr("evaluation.sums.to_yaml", lambda _: newer)
    path = write_scored(run, text, tmp_path)
    with pytest.raises(
        ValueError, match=r"written by another version \(.* run\.of_the_future is not"
    ):
        read_scored(path)
    with pytest.raises(FileNotFoundError):
        read_scored(tmp_path / "nothing")


def test_descriptions_identify_the_text_and_the_counted_tokens(stream, other_corpus):
    text, counted = describe_text(stream, [SHORT, LONG])
    assert vars(text).items() >= {"name": stream.path.name, "tokens": len(stream)}.items()
    assert counted.tolist() == well_seen([SHORT, LONG], len(stream)).tolist()
    coarse = Scoring(history=32, stride=16, first=64)
    assert describe_text(stream, [LONG, SHORT])[0].counted == text.counted
    assert describe_text(stream, [LONG, coarse])[0].counted != text.counted
    later = replace(coarse, first=65)  # the same number of tokens, but different ones
    kept = [describe_text(stream, [scoring]) for scoring in (coarse, later)]
    assert kept[0][1].sum() == kept[1][1].sum() and kept[0][0].counted != kept[1][0].counted
    other, _ = describe_text(TokenStream(other_corpus, "val"), [SHORT, LONG])
    assert other.sha256 != text.sha256


@pytest.mark.parametrize("length", [64, 65, 66])
def test_the_last_bin_contains_the_last_token(length):
    """With one bin too few, the last token of a document would count for the next document."""
    n = 3 * length
    lengths = np.full(3, length)
    text = Text(
        name="x", sha256="", counted="", tokens=n, text_bytes=n, document_lengths=lengths
    )  # fmt: skip
    corpus = Corpus(
        stream=None,
        text=text,
        unit=np.repeat(np.arange(3), length),
        history=np.tile(np.arange(length), 3),
        n_bytes=np.ones(n, dtype=np.int64),
        well_seen=np.ones(n, dtype=bool),
    )
    losses = np.repeat([1.0, 2.0, 4.0], length).astype(np.float32)
    expected = np.bincount(log_bins(np.arange(length)))
    sliding = add_up(losses, Scoring(history=8, stride=1, first=8), corpus)
    assert sliding.tokens.tolist() == [expected.tolist()] * 3
    assert sliding.nats.tolist() == [(expected * mean).tolist() for mean in (1, 2, 4)]
    losses[0] = np.nan
    chunk = add_up(losses, Scoring(history=length, stride=length), corpus)
    assert chunk.tokens.sum(axis=0).tolist() == (3 * expected - np.eye(len(expected))[-1]).tolist()
    assert chunk.nats.sum(axis=1).tolist() == [length - 1, 2 * length, 4 * length]


@pytest.mark.parametrize("lengths", [[100] * 5, [5] * 3, [30, 30, 30, 30, 30, 1]])
def test_documents_are_not_cut_if_there_are_enough_or_too_little_text(lengths):
    units, document = units_of(np.array(lengths, dtype=np.int64))
    assert units.tolist() == lengths
    assert document.tolist() == list(range(len(lengths)))


@pytest.mark.parametrize("lengths", [[1000], [20], [600, 399, 1], [1000, 10, 10, 10, 10, 10]])
def test_few_documents_are_cut_into_parts_of_about_equal_length(lengths):
    units, document = units_of(np.array(lengths, dtype=np.int64))
    assert np.bincount(document, units).tolist() == lengths
    assert (np.diff(document) >= 0).all() and units.min() > 0
    assert abs(len(units) - N_PARTS) <= len(lengths)
    assert units.max() <= 2 * sum(lengths) / N_PARTS
    assert effective_number(units) >= MIN_DOCUMENTS
