"""Windows: the tokens they score, the context of each, and the changes of a control."""

from itertools import product

import pytest
import torch

from data.text.shards import TokenStream
from evaluation.windows import Scoring, ScoringWindows

# history, stride, first
SHAPES = [
    (7, 3, 4),
    (7, 3, 13),
    (5, 5, 0),
    (5, 5, 7),
    (8, 1, 7),
    (8, 1, 20),
    (1, 1, 0),
    (40, 9, 31),  # more than a third of the stream
    (90, 17, 73),  # a single window
    (106, 106, 0),  # all of it
]


@pytest.fixture
def stream(make_shards):
    """Stream of 107 tokens with distinct ids, except for the end-of-text tokens."""
    documents = [list(range(1, 8)), [8], [], list(range(9, 60)), list(range(60, 103))]
    return TokenStream(make_shards(documents, shard_tokens=30, vocab_size=200), "train")


@pytest.fixture
def ring(make_shards):
    """Factory of streams of n tokens with distinct ids."""

    def make(n):
        return TokenStream(make_shards([list(range(1, n))], vocab_size=1000), "train")

    return make


def scored_windows(stream, scoring, batch_size=4, **options):
    """Rows that count, as lists of numbers: tokens, targets, positions."""
    rows = []
    batches = ScoringWindows(stream, scoring, batch_size, **options)
    for tokens, targets, _, positions in batches:
        assert tokens.shape == (batch_size, scoring.history)
        assert targets.shape == (batch_size, scoring.stride)
        assert positions.shape[1] == scoring.stride
        assert tokens.dtype == targets.dtype == positions.dtype == torch.int64
        assert tokens.is_contiguous() and targets.is_contiguous()
        count = len(positions)
        rows += zip(
            tokens[:count].tolist(), targets[:count].tolist(), positions.tolist(), strict=True
        )
    return rows


@pytest.mark.parametrize(("history", "stride", "first"), SHAPES)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_each_position_is_scored_once_after_its_context(stream, history, stride, first, batch_size):
    scoring = Scoring(history=history, stride=stride, first=first)
    text = stream.read(0, len(stream)).tolist()
    assert len(text) == 107
    rows = scored_windows(stream, scoring, batch_size)
    scored = [position for _, _, positions in rows for position in positions]
    assert scored == list(range(first + 1, first + 1 + len(rows) * stride))
    assert len(text) - stride <= scored[-1] < len(text)  # fewer tokens than a stride are left out
    assert len(rows) == scoring.n_windows(len(text))
    for tokens, targets, positions in rows:
        assert tokens == text[positions[-1] - history : positions[-1]]
        for number, (target, position) in enumerate(zip(targets, positions, strict=True)):
            assert target == text[position]
            before = history - stride + 1 + number
            assert tokens[:before] == text[position - before : position]


@pytest.mark.parametrize(("history", "stride", "first"), SHAPES)
def test_tokens_seen_count_the_window_before_the_target(stream, history, stride, first):
    scoring = Scoring(history=history, stride=stride, first=first)
    expected = [0] * len(stream)
    for tokens, _, positions in scored_windows(stream, scoring):
        for number, position in enumerate(positions):
            expected[position] = len(tokens[: history - stride + 1 + number])
    assert scoring.seen(len(stream)).tolist() == expected
    assert Scoring(history=200, stride=3, first=200).seen(107).tolist() == [0] * 107


def test_scored_tokens_do_not_depend_on_the_history(stream):
    scorings = [Scoring(history=h, stride=s, first=40) for h, s in ((7, 3), (40, 3), (33, 11))]
    scored = [
        [position for _, _, positions in scored_windows(stream, scoring) for position in positions]
        for scoring in scorings
    ]
    assert scored[0] == scored[1] == scored[2]


@pytest.mark.parametrize(("batch_size", "world_size"), [(1, 1), (2, 3), (3, 2), (50, 2), (1, 40)])
def test_ranks_share_the_windows(stream, batch_size, world_size):
    scoring = Scoring(history=7, stride=3, first=4)
    alone = scored_windows(stream, scoring)
    ranks = [{"rank": rank, "world_size": world_size} for rank in range(world_size)]
    lengths = {len(ScoringWindows(stream, scoring, batch_size, **rank)) for rank in ranks}
    assert lengths == {-(-len(alone) // (batch_size * world_size))}
    shared = [row for rank in ranks for row in scored_windows(stream, scoring, batch_size, **rank)]
    assert sorted(shared, key=lambda row: row[2]) == alone


def brute_force_doc_start(text, start, length):
    """Document start of each token: one past the last end of text before it in the window."""
    result, begin = [], 0
    for index, token in enumerate(text[start : start + length]):
        result.append(begin)
        if token == 0:
            begin = index + 1
    return result


@pytest.mark.parametrize(("history", "stride", "first"), SHAPES)
def test_document_masks(stream, history, stride, first):
    text = stream.read(0, len(stream)).tolist()
    packed = Scoring(history=history, stride=stride, first=first)
    masked = Scoring(history=history, stride=stride, first=first, document_mask=True)
    assert all(batch.doc_start is None for batch in ScoringWindows(stream, packed, 3))
    for batch in ScoringWindows(stream, masked, 3):
        assert batch.doc_start.dtype == torch.int32
        assert batch.doc_start.shape == batch.tokens.shape
        for row, positions in zip(batch.doc_start.tolist(), batch.positions.tolist(), strict=False):
            assert row == brute_force_doc_start(text, positions[-1] - history, history)
    assert scored_windows(stream, masked) == scored_windows(stream, packed)


CONTROLLED = [(12, 3, 9, 0), (12, 3, 20, 4), (12, 3, 9, 8), (9, 1, 8, 7)]


@pytest.mark.parametrize("control", ["shuffle", "replace"])
@pytest.mark.parametrize(("history", "stride", "first", "near"), CONTROLLED)
def test_controls_do_not_change_near_tokens(ring, control, history, stride, first, near):
    stream = ring(101)
    shape = {"history": history, "stride": stride, "first": first}
    clean = scored_windows(stream, Scoring(**shape))
    rows = scored_windows(stream, Scoring(**shape, control=control, near=near))
    assert [row[1:] for row in rows] == [row[1:] for row in clean]
    changed = 0
    for (tokens, _, _), (before, _, _) in zip(rows, clean, strict=True):
        distant = history - stride + 1 - near  # keeps `near` tokens before the first target
        assert tokens[distant:] == before[distant:]
        assert len(tokens) == len(before)
        changed += tokens[distant - 1] != before[distant - 1]
        if control == "shuffle":
            assert sorted(tokens) == sorted(before)
        else:
            assert not set(tokens[:distant]) & set(before[:distant])
    assert changed > len(clean) / 4  # a shuffle may leave a token in place


@pytest.mark.parametrize(("history", "stride", "first", "near"), CONTROLLED)
def test_intact_windows_equal_windows_without_a_control(ring, history, stride, first, near):
    stream = ring(19)  # too short for replacement text, which is not needed
    shape = {"history": history, "stride": stride, "first": min(first, 11)}
    intact = scored_windows(stream, Scoring(**shape, control="intact", near=near))
    assert intact == scored_windows(stream, Scoring(**shape)) != []


def test_shuffles_differ_by_window_and_are_repeatable(ring):
    stream = ring(301)
    scoring = Scoring(history=20, stride=4, first=16, control="shuffle", near=3)
    rows = scored_windows(stream, scoring)

    def orders(rows):
        return [[token - min(tokens[:14]) for token in tokens[:14]] for tokens, _, _ in rows]

    assert all(sorted(order) == list(range(14)) for order in orders(rows))
    assert len({tuple(order) for order in orders(rows)}) == len(rows) > 50
    assert scored_windows(stream, scoring, 7) == rows
    halves = [scored_windows(stream, scoring, rank=rank, world_size=2) for rank in (0, 1)]
    assert sorted(halves[0] + halves[1], key=lambda row: row[2]) == rows


@pytest.mark.parametrize("n_tokens", [42, 43, 60, 301])
def test_replacement_text_comes_from_outside_the_window(ring, n_tokens):
    stream = ring(n_tokens)
    text = stream.read(0, n_tokens).tolist()
    scoring = Scoring(history=20, stride=1, first=19, control="replace")
    for tokens, targets, positions in scored_windows(stream, scoring):
        own = text[positions[-1] - 20 : positions[-1] + 1]
        assert own[-1] == targets[-1]
        assert not set(tokens[:20]) & set(own)
        at = text.index(tokens[0])
        assert tokens == (text + text)[at : at + 20]
        assert abs(at - (positions[-1] - 20)) in (n_tokens // 2, n_tokens - n_tokens // 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"history": 0, "stride": 1}, "history=0 must be at least 1, and stride=1 must be"),
        ({"history": 4, "stride": 0}, "stride=0.*between 1 and history"),
        ({"history": 4, "stride": 5}, "history=4 must be .* stride=5 must be between 1 and"),
        ({"history": 9, "stride": 2, "first": 6}, "first=6 must be at least history - stride = 7"),
        ({"history": 4, "stride": 4, "first": -1}, "first=-1 must be at least"),
        ({"history": 4, "stride": 4, "control": "drop"}, "'drop'.* none, intact, shuffle, replace"),
        (
            {"history": 9, "stride": 2, "first": 7, "control": "shuffle", "near": 7},
            "near=7 with control=shuffle must be at least 0 and below history - stride = 7",
        ),
        (
            {"history": 9, "stride": 2, "first": 7, "control": "replace", "near": -1},
            "near=-1 with control=replace",
        ),
        ({"history": 4, "stride": 4, "control": "shuffle"}, "the window has a distant part"),
        (
            {"history": 9, "stride": 2, "first": 7, "control": "intact", "near": 7},
            "near=7 with control=intact must be at least 0 and below history - stride = 7",
        ),
        (
            {"history": 4, "stride": 1, "first": 3, "control": "intact", "document_mask": True},
            "control=intact must not be combined with document_mask",
        ),
        (
            {"history": 4, "stride": 1, "first": 3, "control": "replace", "document_mask": True},
            "control=replace must not be combined with document_mask",
        ),
        ({"history": 4, "stride": 4, "near": 1}, "near=1 has no effect with control=none"),
    ],
)
def test_invalid_scorings_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Scoring(**fields)


def test_streams_that_are_too_short_are_refused(stream, ring):
    with pytest.raises(ValueError, match=r"has 107 tokens.*first=100 needs 108. Try a longer"):
        ScoringWindows(stream, Scoring(history=9, stride=7, first=100), 1)
    replaced = Scoring(history=20, stride=1, first=19, control="replace")
    with pytest.raises(ValueError, match=r"has 41 tokens, and control=replace.* needs 42"):
        ScoringWindows(ring(41), replaced, 1)


def test_names_of_scorings_are_unique():
    scorings = [
        Scoring(history=h, stride=s, first=f, document_mask=masked, **control)
        for h, s, f, masked, control in product(
            (8, 10),
            (1, 4),
            (11, 12),
            (False, True),
            (
                {},
                {"control": "intact"},
                {"control": "intact", "near": 1},
                {"control": "shuffle"},
                {"control": "shuffle", "near": 1},
                {"control": "replace", "near": 1},
            ),
        )
        if not (masked and control)
    ]
    assert len({scoring.name for scoring in scorings}) == len(set(scorings)) == len(scorings)
    assert scorings[0].name == "h8_s1_f11"


@pytest.mark.parametrize(
    ("scoring", "words"),
    [
        (Scoring(history=1024, stride=1024), "chunks of 1,024 tokens"),
        (Scoring(history=9, stride=3, first=9), "history 9, stride 3"),
        (Scoring(history=9, stride=9, document_mask=True), "chunks of 9 tokens, documents masked"),
        (
            Scoring(history=9, stride=3, first=9, near=2, control="shuffle"),
            "history 9, stride 3, distant text shuffled",
        ),
    ],
)
def test_str_of_a_scoring(scoring, words):
    assert str(scoring) == words
