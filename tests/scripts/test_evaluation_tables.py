"""Tables made of losses that are known."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from configs import load_config
from data.shards import TokenStream
from data.tokenizer import load_tokenizer
from data.windows import Scoring
from scripts.evaluation_statistics import seed_half_width
from scripts.evaluation_tables import Scored, compare, tabulate
from scripts.runs import Run
from training.checkpoint import Progress

SHORT = Scoring(history=32, stride=8, first=64)
LONG = Scoring(history=64, stride=8, first=64)
CHUNK_SHORT = Scoring(history=32, stride=32)
CHUNK_LONG = Scoring(history=64, stride=64)


@pytest.fixture(scope="module")
def stream(corpus):
    return TokenStream(corpus, "val")


@pytest.fixture(scope="module")
def base(stream):
    """Losses of a model: some of each token's own."""
    return np.random.default_rng(0).gamma(2.0, 1.5, len(stream))


@pytest.fixture
def scored(stream, tmp_path):
    """Make a run with these losses, of which a scoring sees the tokens that it scores."""

    def make(label, losses, *, seed=1, context_length=64, document_mask=False):
        config = load_config(
            [
                "configs/quickstart.yaml",
                f"run.seed={seed}",
                f"model.context_length={context_length}",
                f"data.document_mask={document_mask}",
            ]
        )
        folder = tmp_path / f"{label}_seed{seed}"
        folder.mkdir()
        run = Run(
            folder=folder,
            config=config,
            tokenizer=load_tokenizer(str(stream.path)),
            checkpoint=folder / "checkpoints" / "step_00000007",
            progress=Progress(step=7, samples=70, tokens=700, gpu_hours=0.25),
        )
        seen = {}
        for scoring, values in losses.items():
            seen[scoring] = np.full(len(stream), np.nan, dtype=np.float32)
            scored = slice(scored_from(scoring), scored_to(scoring, len(stream)))
            seen[scoring][scored] = values[scored]
        return Scored(label=label, run=run, losses=seen)

    return make


def scored_from(scoring):
    return scoring.first + 1


def scored_to(scoring, n_tokens):
    return scoring.first + 1 + (n_tokens - 1 - scoring.first) // scoring.stride * scoring.stride


def find(table, label, **fields):
    (row,) = [
        row
        for row in table
        if row["label"] == label and all(row[name] == value for name, value in fields.items())
    ]
    return row


def test_strided_rows_are_of_identical_tokens(scored, stream, base):
    coarse = Scoring(history=64, stride=50, first=64)
    masked = Scoring(history=64, stride=8, first=64, document_mask=True)
    ends = {scored_to(scoring, len(stream)) for scoring in (LONG, coarse)}
    assert len(ends) == 2
    result = tabulate(
        [
            scored("a", {SHORT: base, coarse: base}),
            scored("b", {SHORT: base - 1, LONG: base - 2, coarse: base - 3, masked: base - 4}),
        ],
        stream,
    )
    rows = result["strided"]
    assert len(rows) == 6
    assert {row["tokens"] for row in rows} == {min(ends) - 65}
    mean = base[65 : min(ends)].mean()
    for row in rows:
        down = (
            0
            if row["label"] == "a"
            else 1
            + [SHORT, LONG, coarse, masked].index(
                Scoring(**{name: row[name] for name in SHORT.__dataclass_fields__})
            )
        )
        assert row["nats"] == pytest.approx(mean - down, rel=1e-6)
        assert row["perplexity"] == pytest.approx(math.exp(mean - down), rel=1e-5)
        low, high = row["nats_interval"]
        assert low < row["nats"] < high


def test_differences_are_to_the_first_model_at_its_longest(scored, stream, base):
    masks = {"document_mask": True}
    masked_short = Scoring(history=32, stride=8, first=64, **masks)
    masked_long = Scoring(history=64, stride=8, first=64, **masks)
    finer = Scoring(history=32, stride=4, first=64)
    a = scored("a", {SHORT: base, masked_short: base + 1, finer: base + 2})
    b = scored("b", {SHORT: base + 3, LONG: base + 4, masked_long: base + 6, finer: base + 7})

    def differences(result):
        return {
            (row["label"], row["history"], row["stride"], row["document_mask"]): (
                row["difference"]
                and (
                    row["difference"]["to_label"],
                    row["difference"]["to_history"],
                    round(row["difference"]["nats"], 4),
                )
            )
            for row in result["strided"]
        }

    assert differences(tabulate([a, b], stream)) == {
        ("a", 32, 8, False): None,
        ("a", 32, 8, True): None,
        ("a", 32, 4, False): None,
        ("b", 32, 8, False): ("a", 32, 3.0),
        ("b", 64, 8, False): ("a", 32, 4.0),
        ("b", 64, 8, True): ("a", 32, 5.0),
        ("b", 32, 4, False): ("a", 32, 5.0),
    }
    assert differences(tabulate([b, a], stream)) == {
        ("b", 32, 8, False): ("b", 64, -1.0),
        ("b", 64, 8, False): None,
        ("b", 64, 8, True): None,
        ("b", 32, 4, False): None,
        ("a", 32, 8, False): ("b", 64, -4.0),
        ("a", 32, 8, True): ("b", 64, -5.0),
        ("a", 32, 4, False): ("b", 32, -5.0),
    }


def test_a_difference_of_every_token_is_sure_and_one_of_some_documents_is_not(scored, stream, base):
    late = Scoring(history=64, stride=8, first=2 * 121)
    halves = base + np.where(np.arange(len(stream)) < 5 * 121, 0.5, -0.1)  # three documents each
    result = tabulate(
        [scored("a", {late: base}), scored("b", {late: base - 0.5}), scored("c", {late: halves})],
        stream,
    )
    for label, expected in (("b", (-0.5, -0.5)), ("c", (-0.1, 0.5))):
        difference = find(result["strided"], label)["difference"]
        assert difference["interval"] == pytest.approx(expected, abs=1e-5)
        assert difference["interval_of_documents"] == difference["interval"]
        assert difference["half_width_of_seeds"] is None


def test_a_difference_on_fewer_documents_has_no_interval(scored, stream, base):
    late = Scoring(history=64, stride=8, first=4 * 121)  # all of four documents
    runs = [
        scored(label, {late: base + up}, seed=seed)
        for label, ups in (("a", (0.0, 0.1)), ("b", (0.9, 1.2)))
        for seed, up in enumerate(ups)
    ]
    _, row = tabulate(runs, stream)["strided"]
    difference = row["difference"]
    assert difference["nats"] == pytest.approx(1.0, abs=1e-5)
    assert difference["half_width_of_seeds"] > 0  # seeds alone make no interval
    none = [None, None]
    assert row["nats_interval"] == none
    assert difference["interval"] == difference["interval_of_documents"] == none


def test_chunks_keep_their_own_tokens_and_differ_over_shared_ones(scored, stream, base):
    odd = Scoring(history=50, stride=50)
    result = tabulate([scored("a", {odd: base}), scored("b", {CHUNK_LONG: base - 1})], stream)
    a, b = find(result["chunk"], "a"), find(result["chunk"], "b")
    assert (a["tokens"], b["tokens"]) == (950, 960)
    assert a["nats"] == pytest.approx(base[1:951].mean(), rel=1e-6)
    assert b["nats"] == pytest.approx(base[1:961].mean() - 1, rel=1e-6)
    assert a["difference"] is None
    assert (b["difference"]["tokens"], b["difference"]["to_history"]) == (950, 50)
    assert b["difference"]["nats"] == pytest.approx(-1, abs=1e-6)
    assert result["strided"] == result["control"] == []
    assert {row["tokens"] for row in result["document_length"]} == {950}


def test_controls_are_compared_with_their_own_intact_windows(scored, stream, base):
    control = {"history": 64, "stride": 8, "first": 64, "near": 5}
    shuffle = Scoring(**control, control="shuffle")
    swapped = Scoring(**control, control="replace")
    intact = Scoring(**control, control="intact")
    others = {  # that differ from it in one field each, with losses that would be seen
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
    result = tabulate([a, *b], stream)
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
        assert difference["half_width_of_seeds"] is None  # the same weights twice
    alone = tabulate([scored("c", {shuffle: base})], stream)
    assert alone["control"][0]["difference"] is None
    assert [(row["label"], row["history"]) for row in result["strided"]] == [("a", 64), ("b", 32)]
    assert [row["label"] for row in result["as_trained"]] == ["a", "b"]


def test_seeds_are_averaged_and_widen_the_interval(scored, stream, base):
    runs = [
        scored(label, {LONG: base + up}, seed=seed)
        for label, ups in (("a", (0.0, 0.1, 0.5)), ("b", (1.0, 1.4)))
        for seed, up in enumerate(ups)
    ]
    result = tabulate(runs, stream)
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
    assert difference["half_width_of_seeds"] == pytest.approx(half, rel=1e-4)
    assert difference["interval"] == pytest.approx([1 - half, 1 + half], rel=1e-4)
    assert difference["interval_of_documents"] == pytest.approx([1.0, 1.0], abs=1e-5)
    assert [(run["label"], run["seed"]) for run in result["runs"]] == [
        ("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1)
    ]  # fmt: skip


def test_the_same_seeds_are_pairs(scored, stream, base):
    rng = np.random.default_rng(1)
    ups = dict(zip((3, 1, 2), rng.normal(size=3), strict=True))  # what both runs of a pair share
    gaps = {1: 0.30, 2: 0.31, 3: 0.32}
    a = [scored("a", {LONG: base + ups[n]}, seed=n) for n in ups]
    b = [scored("b", {LONG: base + ups[n] + gaps[n]}, seed=n) for n in gaps]
    result = tabulate([*a, *b], stream)
    difference = result["strided"][1]["difference"]
    half = 4.303 * 0.01 / math.sqrt(3)
    assert difference["nats"] == pytest.approx(0.31, abs=1e-5)
    assert difference["half_width_of_seeds"] == pytest.approx(half, rel=1e-3)
    for row in result["document_position"]:  # seeds count in every bin as well
        low, high = row["difference_interval"]
        if row["label"] == "b" and low is not None:
            assert [low, high] == pytest.approx([0.31 - half, 0.31 + half], abs=1e-4)


def test_comparisons_of_other_pairs(scored, stream, base):
    shift = np.where(np.arange(len(stream)) % 2, 0.2, 0.4)
    up = {"a": 0.0, "b": 1.0, "c": shift}
    runs = [
        scored(label, {SHORT: base + 9, LONG: base + more, CHUNK_LONG: base + 2 * more})
        for label, more in up.items()
    ]
    pairs = [("c", "b"), ("b", "a"), ("b", "missing"), ("missing", "a")]
    one, two = compare(runs, stream, pairs)
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


def test_bits_per_byte_by_hand(scored, stream, base):
    (row,) = tabulate([scored("a", {CHUNK_LONG: base})], stream)["chunk"]
    tokenizer = load_tokenizer(str(stream.path))
    n_bytes, nats = 0, 0.0
    for position, token in enumerate(stream.read(0, len(stream)).tolist()[1:961], start=1):
        n_bytes += 0 if token == tokenizer.eot_id else len(tokenizer.decode([token]).encode())
        nats += base[position]
    assert row["bytes"] == n_bytes
    assert row["bits_per_byte"] == pytest.approx(nats / n_bytes / math.log(2), rel=1e-6)


def brute_force_bins(values, lengths):
    """Mean of the values that count for each number of bits of their length."""
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
    result = tabulate([a, b], stream)

    def check(table, label, history, lengths, losses, differences):
        mine = [row for row in result[table] if row["label"] == label]
        expected = brute_force_bins(losses, lengths)
        gaps = brute_force_bins(differences, lengths)
        assert [row["bin"] for row in mine] == sorted(expected)
        for row in mine:
            count, mean = expected[row["bin"]]
            assert (row["history"], row["tokens"]) == (history, count)
            assert row["nats"] == pytest.approx(mean, rel=1e-5)
            assert row["difference"] == pytest.approx(gaps[row["bin"]][1], abs=1e-5)

    # the last 7 tokens fill no chunk
    shared = np.where((position >= 1) & (position < 961), 0.0, np.nan)
    before = {h: [(p - 1) % h for p in position] for h in (32, 64)}
    check("chunk_position", "a", 32, before[32], base + shared, shared)
    check("chunk_position", "b", 64, before[64], steps + shared, shared - position / n)
    end = scored_to(LONG, n)
    shared = np.where((position >= 65) & (position < end), 0.0, np.nan)
    of_document = position % 121
    gaps = shared - position / n - 0.25
    check("document_position", "a", 32, of_document, base + 0.25 + shared, shared)
    check("document_position", "b", 64, of_document, steps + shared, gaps)
    check("document_length", "b", 64, [121] * n, steps + shared, gaps)
    assert {row["range"] for row in result["document_length"]} == {"64 to 127"}


def test_as_trained_is_the_longest_history_with_the_masks_of_training(scored, stream, base):
    masked = {"document_mask": True}
    shape = {"history": 64, "stride": 8, "first": 64}
    finer = Scoring(history=64, stride=4, first=64)
    chunk_masked = Scoring(history=64, stride=64, **masked)
    packed = scored(
        "packed",
        {
            SHORT: base,
            LONG: base + 1,
            finer: base + 2,
            Scoring(**shape, **masked): base + 3,
            chunk_masked: base + 4,
            CHUNK_LONG: base + 5,
        },
    )
    alone = scored(
        "alone",
        {
            LONG: base + 6,
            Scoring(**shape, **masked): base + 7,
            CHUNK_LONG: base + 8,
            chunk_masked: base + 9,
        },
        document_mask=True,
    )
    result = tabulate([packed, alone], stream)
    for table, strides, gap in (("as_trained", [4, 8], 5), ("as_trained_chunk", [64, 64], 4)):
        assert [row["label"] for row in result[table]] == ["packed", "alone"]
        assert [row["stride"] for row in result[table]] == strides
        assert [row["document_mask"] for row in result[table]] == [False, True]
        first, second = result[table]
        assert first["difference"] is None
        assert second["difference"]["nats"] == pytest.approx(gap, abs=1e-5)
    assert len({row["tokens"] for row in result["as_trained"]}) == 1
    gaps = [row["difference"] for row in result["document_position"] if row["label"] == "alone"]
    assert gaps == pytest.approx([5] * len(gaps), abs=1e-5)


def test_json_can_hold_all_of_it(scored, stream, base):
    early = Scoring(history=64, stride=64, first=300)
    last = Scoring(history=64, stride=64, first=3 * 121 + 7)  # of five documents, all of four
    a = scored("a", {early: base, CHUNK_LONG: base}, context_length=128)
    (a.run.folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": i, "tokens_per_s": i * 1.0}) + "\n" for i in (1, 9, 2))
    )
    result = tabulate([a, scored("b", {last: base})], stream)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    for row in result["document_position"]:
        none = row["bin"] < 4  # up to 7 tokens before
        assert (row["interval"] == [None, None]) == none
        assert (row["difference_interval"] == [None, None]) == none
    assert {row["bin"] for row in result["document_position"]} == set(range(8))
    assert result["data"] == {
        "name": Path(stream.path).name,
        "tokens": 968,
        "documents": 8,
        "text_bytes": stream.info.text_bytes,
    }
    described, without = result["runs"]
    assert described["tokens_per_s"] == 2.0 and without["tokens_per_s"] is None
    assert (described["folder"], described["context_length"]) == ("a_seed1", 128)
    assert (described["step"], described["tokens"], described["gpu_hours"]) == (7, 700, 0.25)
