"""Differences of known losses: the reference, the counted tokens and the intervals."""

import math

import numpy as np
import pytest

from evaluation.statistics import seed_half_width
from evaluation.windows import Scoring
from tests.evaluation.known_losses import (
    CHUNK_LONG,
    LONG,
    SHORT,
    comparisons_of,
    find,
    scored_from,
    scored_to,
    tables_of,
)


def test_differences_compare_with_the_longest_history_of_the_first_model(scored, stream, base):
    masked = Scoring(history=64, stride=4, first=64, document_mask=True)
    finer = Scoring(history=32, stride=2, first=64)
    a = scored("a", {SHORT: base, finer: base + 2})
    b = scored("b", {SHORT: base + 3, LONG: base + 4, masked: base + 6, finer: base + 7})

    def differences(*runs):
        rows = tables_of(runs, stream)["strided"]
        row_differences = [row["difference"] for row in rows]
        return {
            (row["label"], Scoring(**{name: row[name] for name in Scoring.__dataclass_fields__})): (
                difference and (difference["to_history"], round(difference["nats"], 4))
            )
            for row, difference in zip(rows, row_differences, strict=True)
        }

    # compared with the same stride, and the same document masks if the first model has such a row
    assert differences(a, b) == {
        ("a", SHORT): None, ("a", finer): None, ("b", SHORT): (32, 3.0), ("b", LONG): (32, 4.0),
        ("b", finer): (32, 5.0), ("b", masked): None,
    }  # fmt: skip
    assert differences(b, a) == {
        ("b", SHORT): (64, -1.0), ("b", LONG): None, ("b", masked): None, ("b", finer): (64, 3.0),
        ("a", SHORT): (64, -4.0), ("a", finer): (64, -2.0),
    }  # fmt: skip


def test_shorter_histories_are_compared_with_the_longest_of_their_own_model(scored, stream, base):
    masked = Scoring(history=32, stride=4, first=64, document_mask=True)
    a = scored("a", {SHORT: base, masked: base + 9})
    b = scored("b", {SHORT: base + 3, LONG: base + 1, masked: base + 6})
    rows = tables_of((a, b), stream)["strided"]
    costs = {
        (row["label"], row["history"], row["document_mask"]): row["longest_difference"]
        for row in rows
    }
    cost = costs.pop(("b", 32, False))
    assert cost["nats"] == pytest.approx(2.0, abs=1e-5)
    assert (cost["to_label"], cost["to_history"]) == ("b", 64)
    # each has no longer history with its document mask
    assert costs.keys() == {
        ("a", 32, False), ("a", 32, True), ("b", 64, False), ("b", 32, True),
    }  # fmt: skip
    assert not any(costs.values())


def test_intervals_are_narrow_only_if_documents_agree(scored, stream, base):
    late = Scoring(history=64, stride=8, first=2 * 121)
    halves = base + np.where(np.arange(len(stream)) < 5 * 121, 0.5, -0.1)  # three documents each
    result = tables_of(
        [scored("a", {late: base}), scored("b", {late: base - 0.5}), scored("c", {late: halves})],
        stream,
    )
    for label, expected in (("b", (-0.5, -0.5)), ("c", (-0.1, 0.5))):
        difference = find(result["strided"], label)["difference"]
        assert difference["interval"] == pytest.approx(expected, abs=1e-5)
        assert difference["interval_of_documents"] == difference["interval"]
        assert difference["half_width_of_seeds"] is None


def test_seeds_are_averaged_and_widen_the_interval(scored, stream, base):
    runs = [
        scored(label, {LONG: base + up}, seed=seed)
        for label, ups in (("a", {0: 0.0, 1: 0.1, 2: 0.5}), ("b", {3: 1.0, 4: 1.4}))
        for seed, up in ups.items()
    ]
    result = tables_of(runs, stream)
    assert [row["label"] for row in result["strided"]] == ["a", "b"]
    a, b = result["strided"]
    here = slice(scored_from(LONG), scored_to(LONG, len(stream)))
    mean = base[here].mean()
    assert a["nats"] == pytest.approx(mean + 0.2, rel=1e-6)
    expected = [mean, mean + 0.1, mean + 0.5]
    assert a["nats_of_seeds"] == pytest.approx(expected, rel=1e-6)
    difference = b["difference"]
    assert difference["nats"] == pytest.approx(1.0, abs=1e-5)
    half = seed_half_width([0.0, 0.1, 0.5], [1.0, 1.4])
    assert difference["seeds"] == 2
    assert difference["half_width_of_seeds"] == pytest.approx(half, rel=1e-4)
    assert difference["interval"] == pytest.approx([1 - half, 1 + half], rel=1e-4)
    assert difference["interval_of_documents"] == pytest.approx([1.0, 1.0], abs=1e-5)
    assert [(run["label"], run["seed"]) for run in result["runs"]] == [
        ("a", 0), ("a", 1), ("a", 2), ("b", 3), ("b", 4)
    ]  # fmt: skip


def test_no_difference_in_a_bin_that_one_window_covers_partly(scored, stream, base):
    ends = {"a": 48, "b": 64, "c": 48}
    result = tables_of(
        [scored(label, {Scoring(history=h, stride=h): base}) for label, h in ends.items()], stream
    )
    bins = [row["range"] for row in result["chunk_position"] if row["label"] == "b"]
    assert bins[-1] == "32 to 63"
    for name in bins:
        row = find(result["chunk_position"], "b", range=name)
        assert (row["difference"] is None) == (row["difference_interval"][0] is None)
        assert (row["difference"] is None) == (name == "32 to 63")
    assert find(result["chunk_position"], "c", range="32 to 63")["difference"] == 0


def test_long_strides_do_not_favour_the_longer_context(scored, stream, base):
    runs = []
    for label, history in (("short", 32), ("long", 64)):
        scoring = Scoring(history=history, stride=16, first=64)
        seen = scoring.seen(len(stream))  # at least 17 and 49 tokens
        chunk = Scoring(history=history, stride=history)
        runs.append(scored(label, {chunk: base, scoring: base + np.maximum(0, 28 - seen)}))
    result = tables_of(runs, stream)
    short, long = result["strided"]
    assert short["tokens"] == long["tokens"] == (len(stream) - 65) // 16 * 5
    assert long["difference"]["nats"] == 0
    (row,) = comparisons_of(runs, stream, [("long", "short")])
    assert row["strided"]["nats"] == 0


def test_equal_seeds_are_paired(scored, stream, base):
    rng = np.random.default_rng(1)
    ups = dict(zip((3, 1, 2), rng.normal(size=3), strict=True))  # shared by both runs of a pair
    gaps = {1: 0.30, 2: 0.31, 3: 0.32}
    a = [scored("a", {LONG: base + ups[n]}, seed=n) for n in ups]
    b = [scored("b", {LONG: base + ups[n] + gaps[n]}, seed=n) for n in gaps]
    result = tables_of([*a, *b], stream)
    difference = result["strided"][1]["difference"]
    half = 4.302653 * 0.01 / math.sqrt(3)
    assert difference["nats"] == pytest.approx(0.31, abs=1e-5)
    assert difference["half_width_of_seeds"] == pytest.approx(half, rel=1e-3)
    for row in result["document_position"]:  # seeds count in every bin as well
        low, high = row["difference_interval"]
        if row["label"] == "b" and low is not None:
            assert [low, high] == pytest.approx([0.31 - half, 0.31 + half], abs=1e-4)


def test_unpaired_seeds_do_not_count(scored, stream, base):
    a = [scored("a", {LONG: base + up}, seed=n) for n, up in {1: 0.0, 2: 0.3, 3: 9.0}.items()]
    b = [scored("b", {LONG: base + up}, seed=n) for n, up in {5: 7.0, 2: 0.5, 1: 0.1}.items()]
    a_row, b_row = tables_of([*a, *b], stream)["strided"]
    assert [len(row["nats_of_seeds"]) for row in (a_row, b_row)] == [3, 3]
    assert b_row["difference"]["seeds"] == 2
    assert b_row["difference"]["nats"] == pytest.approx(0.15, abs=1e-5)
    half = 12.706205 * 0.05
    assert b_row["difference"]["half_width_of_seeds"] == pytest.approx(half, rel=1e-3)

    one = tables_of([a[0], *b], stream)["strided"][1]["difference"]
    assert one["seeds"] == 1 and one["half_width_of_seeds"] is None
    assert one["nats"] == pytest.approx(0.1, abs=1e-5)


def test_comparisons_of_other_pairs(scored, stream, base):
    shift = np.where(np.arange(len(stream)) % 2, 0.2, 0.4)
    up = {"a": 0.0, "b": 1.0, "c": shift}
    runs = [
        scored(label, {SHORT: base + 9, LONG: base + more, CHUNK_LONG: base + 2 * more})
        for label, more in up.items()
    ]
    pairs = [("c", "b"), ("b", "a"), ("b", "missing"), ("missing", "a")]
    one, two = comparisons_of(runs, stream, pairs)
    assert [(row["label"], row["to_label"]) for row in (one, two)] == pairs[:2]
    assert two["strided"]["nats"] == pytest.approx(1.0, abs=1e-5)
    assert two["chunk"]["nats"] == pytest.approx(2.0, abs=1e-5)
    here = slice(scored_from(LONG), scored_to(LONG, len(stream)))
    assert one["strided"]["nats"] == pytest.approx((shift[here] - 1).mean(), abs=1e-5)
    bins = one["document_position"]
    assert {row["label"] for row in bins} == {"c"}
    assert sum(row["tokens"] for row in bins) == one["strided"]["tokens"]
    total = sum(row["tokens"] * row["difference"] for row in bins)
    assert total / one["strided"]["tokens"] == pytest.approx(one["strided"]["nats"], abs=1e-6)


@pytest.mark.parametrize("shortest", [16, 32])
def test_comparisons_split_at_the_shortest_context(scored, stream, base, shortest):
    history = np.arange(len(stream)) % 121  # the length of a document
    gains = np.where(history < shortest, -0.1, 0.3)
    runs = [
        scored("short", {LONG: base, CHUNK_LONG: base}, context_length=shortest),
        scored("long", {LONG: base + gains, CHUNK_LONG: base}),
    ]
    (row,) = comparisons_of(runs, stream, [("long", "short")])
    start, rest = row["parts"]
    assert start["range"] == f"0 to {shortest - 1}" and rest["range"] == f"{shortest} and more"
    assert start["nats"] == pytest.approx(-0.1, abs=1e-5)
    assert rest["interval"] == pytest.approx([0.3, 0.3], abs=1e-5)
    here = history[scored_from(LONG) : scored_to(LONG, len(stream))]
    assert start["tokens"] == np.count_nonzero(here < shortest)
    assert start["tokens"] + rest["tokens"] == row["strided"]["tokens"]
