"""Tables from known losses."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.text.tokenizer import load_tokenizer
from evaluation.sums import Scored, Sums, Text
from evaluation.tables import tabulate
from evaluation.windows import Scoring
from tests.evaluation.known_losses import (
    CHUNK_LONG,
    CHUNK_SHORT,
    LONG,
    SHORT,
    find,
    scored_from,
    scored_to,
    tables_of,
)
from training.language.config import load_config


def test_strided_rows_use_identical_tokens(scored, stream, base):
    coarse = Scoring(history=64, stride=48, first=64)
    masked = Scoring(history=64, stride=8, first=64, document_mask=True)
    ends = {scored_to(scoring, len(stream)) for scoring in (LONG, coarse)}
    assert len(ends) == 2
    down = {SHORT: 1, LONG: 2, coarse: 3, masked: 4}
    a = scored("a", {SHORT: base, coarse: base})
    b = scored("b", {scoring: base - less for scoring, less in down.items()})
    rows = tables_of([a, b], stream)["strided"]
    # in the coarse windows, only the last 9 of 48 tokens see 7/8 of the 64
    counted = [position for position in range(65, min(ends)) if (position - 65) % 48 >= 39]
    expected = [base[counted].mean() - less for less in (0, 0, *down.values())]
    assert sorted(row["nats"] for row in rows) == pytest.approx(sorted(expected), rel=1e-6)
    for row in rows:
        assert row["tokens"] == len(counted)
        assert row["perplexity"] == pytest.approx(math.exp(row["nats"]), rel=1e-5)
        low, high = row["nats_interval"]
        assert low < row["nats"] < high


def test_chunk_rows_use_their_own_tokens(scored, stream, base):
    odd = Scoring(history=50, stride=50)
    result = tables_of([scored("a", {odd: base}), scored("b", {CHUNK_LONG: base - 1})], stream)
    a, b = find(result["chunk"], "a"), find(result["chunk"], "b")
    assert (a["tokens"], b["tokens"]) == (950, 960)
    assert a["nats"] == pytest.approx(base[1:951].mean(), rel=1e-6)
    assert b["nats"] == pytest.approx(base[1:961].mean() - 1, rel=1e-6)
    assert a["difference"] is None
    assert (b["difference"]["tokens"], b["difference"]["to_history"]) == (960, 50)
    assert b["difference"]["nats"] == pytest.approx(b["nats"] - a["nats"], abs=1e-6)
    for table in ("strided", "control", "document_position", "document_length"):
        assert result[table] == []


def test_controls_are_compared_with_their_own_intact_windows(scored, stream, base):
    control = {"history": 64, "stride": 8, "first": 64, "near": 5}
    shuffle = Scoring(**control, control="shuffle")
    swapped = Scoring(**control, control="replace")
    intact = Scoring(**control, control="intact")
    others = {  # each differs from `intact` in one field, with losses that would show in the result
        replace(intact, **{name: value}): base + 90 + number
        for number, (name, value) in enumerate(
            (("history", 32), ("stride", 4), ("first", 72), ("near", 6))
        )
    }
    a = scored(
        "a",
        {**others, LONG: base + 9, intact: base + 1, shuffle: base + 1.25, swapped: base + 1.5},
    )
    b = [
        scored("b", {SHORT: base, intact: base + d, shuffle: base + d + 0.5}, seed=seed)
        for seed, d in ((1, 3), (2, 4))
    ]
    result = tables_of([a, *b], stream)
    assert len(result["control"]) == len(others) + 5
    here = slice(scored_from(intact), scored_to(intact, len(stream)))
    for label, up in (("a", 1), ("b", 3.5)):
        row = find(result["control"], label, control="intact", **control)
        assert row["difference"] is None
        assert row["nats"] == pytest.approx(base[here].mean() + up, rel=1e-6)
    for label, kind, rise in (("a", "shuffle", 0.25), ("a", "replace", 0.5), ("b", "shuffle", 0.5)):
        row = find(result["control"], label, control=kind)
        difference = row["difference"]
        assert (row["near"], difference["to_label"], difference["to_history"]) == (5, label, 64)
        assert difference["nats"] == pytest.approx(rise, abs=1e-5)
        assert difference["interval"] == pytest.approx([rise, rise], abs=1e-5)
        if label == "b":  # the same rise in both seeds
            assert difference["half_width_of_seeds"] == pytest.approx(0, abs=1e-5)
    alone = tables_of([scored("c", {shuffle: base})], stream)
    assert alone["control"][0]["difference"] is None
    assert [(row["label"], row["history"]) for row in result["strided"]] == [("a", 64), ("b", 32)]
    assert [row["label"] for row in result["as_trained"]] == ["a", "b"]


def test_bits_per_byte_by_hand(scored, stream, base):
    (row,) = tables_of([scored("a", {CHUNK_LONG: base})], stream)["chunk"]
    tokenizer = load_tokenizer(str(stream.path))
    n_bytes, nats = 0, 0.0
    for position, token in enumerate(stream.read(0, len(stream)).tolist()[1:961], start=1):
        n_bytes += 0 if token == tokenizer.eot_id else len(tokenizer.decode([token]).encode())
        nats += base[position]
    assert row["bytes"] == n_bytes
    assert row["bits_per_byte"] == pytest.approx(nats / n_bytes / math.log(2), rel=1e-6)


def brute_force_bins(values, lengths):
    """Count and mean of the values that are not NaN, by the number of bits of their length."""
    bins = {}
    for value, length in zip(values.tolist(), lengths, strict=True):
        if not math.isnan(value):
            bins.setdefault(int(length).bit_length(), []).append(value)
    return {number: (len(some), np.mean(some)) for number, some in bins.items()}


def test_bins_of_positions_in_the_window_and_in_the_document(scored, stream, base):
    n = len(stream)
    position = np.arange(n)
    a = scored("a", {CHUNK_SHORT: base, SHORT: base + 0.25}, context_length=32)
    steps = base - position / n
    b = scored("b", {CHUNK_LONG: steps, SHORT: base + 9, LONG: steps})
    masked = Scoring(history=64, stride=64, document_mask=True)
    b.losses[masked] = b.losses[CHUNK_LONG] + 5
    result = tables_of([a, b], stream)

    def check(table, label, history, expected, first):
        mine = [row for row in result[table] if row["label"] == label]
        assert [row["bin"] for row in mine] == sorted(expected)
        for row in mine:
            count, mean = expected[row["bin"]]
            assert (row["history"], row["tokens"]) == (history, count)
            assert row["nats"] == pytest.approx(mean, rel=1e-5)
            if row["bin"] in first:
                gap = mean - first[row["bin"]][1]
                assert row["difference"] == pytest.approx(gap, abs=1e-5)
            else:
                assert (row["difference"], row["difference_interval"]) == (None, [None, None])

    # the last 7 tokens fill no chunk
    shared = np.where((position >= 1) & (position < 961), 0.0, np.nan)
    before = {h: [(p - 1) % h for p in position] for h in (32, 64)}
    first = brute_force_bins(base + shared, before[32])
    check("chunk_position", "a", 32, first, first)
    check("chunk_position", "b", 64, brute_force_bins(steps + shared, before[64]), first)
    end = scored_to(LONG, n)
    shared = np.where((position >= 65) & (position < end), 0.0, np.nan)
    for table, places in (("document_position", position % 121), ("document_length", [121] * n)):
        first = brute_force_bins(base + 0.25 + shared, places)
        check(table, "a", 32, first, first)
        check(table, "b", 64, brute_force_bins(steps + shared, places), first)
    assert {row["range"] for row in result["document_length"]} == {"64 to 127"}


def test_as_trained_uses_the_longest_history_and_the_training_masks(scored, stream, base):
    finer = Scoring(history=64, stride=2, first=64)
    masked, chunk_masked = (replace(s, document_mask=True) for s in (LONG, CHUNK_LONG))
    scorings = (SHORT, LONG, finer, masked, chunk_masked, CHUNK_LONG)
    packed = scored("packed", {scoring: base + n for n, scoring in enumerate(scorings)})
    scorings = (LONG, masked, CHUNK_LONG, chunk_masked)
    losses = {scoring: base + n for n, scoring in enumerate(scorings, start=6)}
    alone = scored("alone", losses, document_mask=True)
    result = tables_of([packed, alone], stream)
    for table, strides, gap in (("as_trained", [2, 4], 5), ("as_trained_chunk", [64, 64], 4)):
        first, second = result[table]
        assert [row["label"] for row in (first, second)] == ["packed", "alone"]
        assert [row["stride"] for row in (first, second)] == strides
        assert [row["document_mask"] for row in (first, second)] == [False, True]
        assert first["difference"] is None
        assert second["difference"]["nats"] == pytest.approx(gap, abs=1e-5)
    assert len({row["tokens"] for row in result["as_trained"]}) == 1
    gaps = [row["difference"] for row in result["document_position"] if row["label"] == "alone"]
    assert gaps == pytest.approx([5] * len(gaps), abs=1e-5)


def test_tables_are_valid_json(scored, stream, base):
    early = Scoring(history=64, stride=8, first=300)
    last = Scoring(
        history=64, stride=8, first=3 * 121 + 7
    )  # scores five documents, four of them whole
    a = scored("a", {early: base, CHUNK_LONG: base}, context_length=128)
    (a.run.folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": i, "tokens_per_s": i * 1.0}) + "\n" for i in (1, 9, 2))
    )
    result = tables_of([a, scored("b", {last: base})], stream)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    for row in result["document_position"]:
        none = row["bin"] < 4  # at most 7 tokens before the target
        assert (row["interval"] == [None, None]) == none
        assert (row["difference_interval"] == [None, None]) == none
    assert {row["bin"] for row in result["document_position"]} == set(range(8))
    data = {"name": Path(stream.path).name, "tokens": 968, "documents": 8}
    assert result["data"] == data | {"text_bytes": stream.info.text_bytes}
    described, without = result["runs"]
    assert described["tokens_per_s"] == 2.0 and without["tokens_per_s"] is None
    assert (described["step"], described["tokens"], described["gpu_hours"]) == (7, 700, 0.25)


def test_document_lengths_at_powers_of_two():
    lengths = np.array([63, 64, 64, 127, 128, 1])
    tokens = np.array([[1, 60], [1, 60], [1, 61], [1, 99], [0, 100], [0, 0]])
    nats = tokens * np.array([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0]])
    sums = {LONG: Sums(nats=nats, tokens=tokens, n_bytes=7)}
    about = {"document_mask": False}
    config = load_config(["configs/quickstart.yaml"])
    scored = Scored(label="a", number=1, about=about, config=config, sums=sums)
    text = Text(
        name="x", sha256="", counted="", tokens=9, text_bytes=9, document_lengths=lengths
    )  # fmt: skip
    rows = tabulate([scored], text)["document_length"]
    assert [(row["range"], row["tokens"]) for row in rows] == [
        ("32 to 63", 61), ("64 to 127", 223), ("128 to 255", 100)
    ]  # fmt: skip
    assert rows[1]["nats"] == pytest.approx((61 * 2 + 62 * 3 + 100 * 4) / 223)
