"""Repeated passages: prompts, losses against full logits, and models that copy within a reach."""

import json
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data.text.shards import TokenStream
from evaluation import repeats as module
from evaluation.repeats import Passages, Repeats, draw, prompts, score, table_of, tabulate
from model.config import ModelConfig
from model.gpt import GPT
from scripts import repeats as command

VOCAB = 50
BEFORE = module.TEXT_BEFORE


@pytest.fixture
def text(make_shards):
    """Six documents of random tokens: 1 to 4 are long, 0 and 5 are not."""
    rng = np.random.default_rng(0)
    lengths = [90, 400, 500, 250, 600, 249]
    documents = [rng.integers(1, VOCAB, n).tolist() for n in lengths]
    return TokenStream(make_shards([[1]], documents), "val")


@pytest.fixture
def longer_text(make_shards):
    rng = np.random.default_rng(1)
    documents = [rng.integers(1, VOCAB, 700 + n).tolist() for n in range(8)]
    return TokenStream(make_shards([[1]], documents), "val")


def tiny_gpt(context_length: int) -> GPT:
    config = ModelConfig(
        vocab_size=VOCAB, context_length=context_length, n_layer=2, n_head=2, n_embd=16
    )
    model = GPT(config).eval()
    with torch.no_grad():  # weights far from zero, so that every token matters
        for weight in model.parameters():
            weight.normal_(std=0.5)
    return model


@pytest.mark.parametrize(("distance", "length"), [(100, 16), (100, 7), (33, 33)])
def test_prompts_differ_only_up_to_the_end_of_the_copy(longer_text, distance, length) -> None:
    end = 650
    without, with_copy = prompts(longer_text, end, distance, length)
    n = BEFORE + length + distance
    assert len(without) == len(with_copy) == n
    tokens = longer_text.read(0, end).tolist()
    passage = tokens[end - length :]
    assert without.tolist() == tokens[-n:]
    assert with_copy.tolist() == [
        *tokens[end - distance - BEFORE : end - distance],
        *passage,
        *tokens[end - distance : end - length],
        *passage,
    ]
    # the copy starts `distance` before the passage
    start = n - length - distance
    assert with_copy[start : start + length].tolist() == passage


def test_passages_are_within_documents_that_are_long_enough(text) -> None:
    repeats = Repeats(distances=[50, 150, 4000], lengths=[20, 36], n=403)
    passages = repeats.passages(text, 300)  # the longest prompt that fits has 64 + 150 + 36 tokens
    starts = [0, 91, 492, 993, 1244, 1845]
    stops = [90, 491, 992, 1243, 1844, 2094]
    document = np.searchsorted(starts, passages.ends, side="right") - 1
    counts = np.bincount(document, minlength=6)
    assert counts[[0, 5]].tolist() == [0, 0] and sorted(counts[1:5]) == [100, 101, 101, 101]
    for n, end in zip(document, passages.ends, strict=True):
        assert starts[n] + 250 <= end <= stops[n]
    assert set(passages.ends[document == 3]) == {1243}  # it has exactly 250 tokens
    for n in (1, 2):  # ends are everywhere in a document
        assert min(passages.ends[document == n]) < starts[n] + 260
        assert max(passages.ends[document == n]) > stops[n] - 10
    # four documents are too few for intervals over documents
    assert passages.are_units and passages.units.tolist() == [*range(403)]
    shorter = Repeats(distances=[50], lengths=[20], n=12).passages(text, 300)
    assert shorter.n_documents == 5 and not shorter.are_units
    assert sorted(np.bincount(shorter.units, minlength=6)) == [0, 2, 2, 2, 3, 3]
    again = Repeats(distances=[50], lengths=[20], n=12, seed=1).passages(text, 300)
    assert again.ends.tolist() != shorter.ends.tolist()


def test_losses_match_those_of_full_logits(longer_text) -> None:
    model = tiny_gpt(200)
    repeats = Repeats(distances=[30, 100, 500], lengths=[5, 30], n=5, seed=2)
    passages = repeats.passages(longer_text, 200)
    results = [
        score(model, longer_text, repeats, passages, batch_tokens=batch_tokens, context=nullcontext)
        for batch_tokens in (1, 1000, 10**6)
    ]
    for losses in results:
        assert set(losses) == {(30, 5), (30, 30), (100, 5), (100, 30)}
        for (distance, length), nats in losses.items():
            assert nats.shape == (5, 2)
            for end, pair in zip(passages.ends.tolist(), nats, strict=True):
                both = prompts(longer_text, end, distance, length)
                for tokens, loss in zip(map(torch.from_numpy, both), pair, strict=True):
                    with torch.no_grad():
                        logs = model(tokens[None])[0].float().log_softmax(-1)
                    expected = sum(
                        -float(logs[place - 1, tokens[place]])
                        for place in range(len(tokens) - length // 2, len(tokens))
                    )
                    assert loss == pytest.approx(expected, rel=1e-4)
    # the copy matters to this model
    assert np.abs(results[0][100, 30] @ [1, -1]).min() > 1e-3


class Copier(GPT):
    """Model whose loss is 1 for a token that followed the last 4 within reach, else 3."""

    def __init__(self, context_length: int, reach: int) -> None:
        super().__init__(
            ModelConfig(
                vocab_size=VOCAB, context_length=context_length, n_layer=1, n_head=1, n_embd=8
            )
        )
        self.reach = reach

    def forward(self, tokens, targets, *, reduction):
        assert reduction == "none"
        loss = torch.full(targets.shape, 3.0)
        for row, text in enumerate(torch.cat([tokens, targets[:, -1:]], 1).tolist()):
            for n in range(targets.shape[1]):
                place = len(text) - targets.shape[1] + n
                assert text[place] == targets[row, n]
                for back in range(1, min(self.reach, place - 4) + 1):
                    if text[place - 4 - back : place + 1 - back] == text[place - 4 : place + 1]:
                        loss[row, n] = 1.0
        return loss


def test_a_model_gains_from_copies_within_its_reach(longer_text) -> None:
    repeats = Repeats(distances=[60, 120, 240], lengths=[8, 40], n=16)
    passages = repeats.passages(longer_text, 400)
    assert passages.n_documents == 8
    rows = {}
    for name, context_length, reach in (("near", 400, 120), ("all", 400, 400), ("short", 200, 99)):
        losses = score(
            Copier(context_length, reach),
            longer_text,
            repeats,
            passages,
            batch_tokens=2000,
            context=nullcontext,
        )
        rows[name] = tabulate(losses, repeats, passages)
    gains = {
        name: {
            (row["distance"], row["length"]): row["gain"] and row["gain"]["nats"] for row in rows
        }
        for name, rows in rows.items()
    }
    assert gains["near"] == {(60, 8): 2, (120, 8): 2, (240, 8): 0, (60, 40): 2, (120, 40): 2,
                             (240, 40): 0}  # fmt: skip
    assert set(gains["all"].values()) == {2}
    # a context of 200 has room for 64 + 120 + 8 tokens, but not for 64 + 120 + 40
    assert gains["short"] == {(60, 8): 2, (120, 8): 0, (240, 8): None, (60, 40): 2,
                              (120, 40): None, (240, 40): None}  # fmt: skip
    row = rows["near"][0]
    assert (row["without"]["nats"], row["with"]["nats"]) == (3, 1)
    assert row["gain"]["interval"] == [2, 2]
    assert rows["short"][2] == {
        **{"length": 8, "distance": 240, "without": None, "with": None, "gain": None}
    }
    assert table_of(rows).splitlines()[0] == (
        "| run | passage | gain at 60 | gain at 120 | gain at 240 |"
    )
    assert "| short | 40 | 2.0000 (2.0000 to 2.0000) |  |  |" in table_of(rows)
    # a run that was scored at fewer distances leaves their columns empty
    fewer = {"short": [row for row in rows["short"] if row["distance"] == 120], "all": rows["all"]}
    assert table_of(fewer).splitlines()[0] == table_of(rows).splitlines()[0]
    assert "| short | 8 |  | 0.0000 (0.0000 to 0.0000) |  |" in table_of(fewer)
    axes = draw(rows).axes
    assert [panel.get_title(loc="left") for panel in axes] == [
        "passages of 8 tokens", "passages of 40 tokens"
    ]  # fmt: skip
    lines = [line.get_xydata().tolist() for line in axes[1].lines if len(line.get_xdata()) < 4]
    assert [[60, 2], [120, 2], [240, 0]] in lines and [[60, 2]] in lines
    # the label of a line is at the height of its end
    (name,) = (text for text in axes[1].texts if text.get_text() == "all")
    place = name.get_transform().transform(name.get_position())
    assert axes[1].transData.inverted().transform(place)[1] == pytest.approx(2, abs=0.3)
    # a length that fits no run leaves its panel empty
    empty = draw({"short": [rows["short"][0], *rows["short"][4:]]}).axes
    assert [len(panel.texts) for panel in empty] == [1, 0]


def test_intervals_are_over_documents(longer_text) -> None:
    repeats = Repeats(distances=[60], lengths=[10], n=80)
    units = np.arange(80) % 8
    passages = Passages(np.zeros(80, dtype=int), units, 8)
    # passages of a document agree, so that 80 passages are worth no more than 8
    gains = np.random.default_rng(0).normal(size=8)
    losses = {(60, 10): np.stack([50 + 5 * gains[units], np.full(80, 50.0)], axis=1)}
    (row,) = tabulate(losses, repeats, passages)
    assert row["gain"]["nats"] == pytest.approx(gains.mean())
    low, high = row["gain"]["interval"]
    half_width = 2.365 * gains.std(ddof=1) / 8**0.5  # Student's t with 7 degrees of freedom
    assert (high - low) / 2 == pytest.approx(half_width, rel=0.15)
    (narrow,) = tabulate(losses, repeats, passages._replace(units=np.arange(80)))
    low, high = narrow["gain"]["interval"]
    assert (high - low) / 2 == pytest.approx(1.99 * gains[units].std(ddof=1) / 80**0.5, rel=0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"distances": []}, r"distances=\[\] must be one or more different numbers"),
        ({"lengths": [8, 8]}, r"lengths=\[8, 8\] must be one or more different numbers"),
        ({"lengths": [1]}, "length=1 must be at least 2"),
        ({"distances": [60, 10]}, "distance=10 must be at least length=16"),
        ({"n": 0}, "passages=0 must be at least 1"),
    ],
)
def test_invalid_settings_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        Repeats(**{"distances": [60], "lengths": [8, 16], "n": 4, **settings})


def test_short_contexts_and_short_documents_are_refused(text) -> None:
    repeats = Repeats(distances=[600, 700], lengths=[8, 16], n=4)
    with pytest.raises(ValueError, match="context_length=670 must be at least 671 for distance=60"):
        repeats.passages(text, 670)
    with pytest.raises(ValueError, match="no document of val in .* has the 672 tokens that dist.*"
                                         "up to 600 need: the longest has 600"):  # fmt: skip
        repeats.passages(text, 671)


def test_a_broken_model_is_refused(longer_text) -> None:
    model = tiny_gpt(200)
    torch.nn.init.constant_(model.tok_emb.weight, float("nan"))
    repeats = Repeats(distances=[60], lengths=[8], n=2)
    passages = repeats.passages(longer_text, 200)
    with pytest.raises(FloatingPointError, match="passages of 8 tokens at a distance of 60 are no"):
        score(model, longer_text, repeats, passages, batch_tokens=1, context=nullcontext)


def test_the_command_writes_a_table_and_a_picture(run, tmp_path, capsys) -> None:
    run("model.context_length=110", "optim.batch_tokens=220")
    longer = tmp_path / "seed1"
    shutil.copytree(run.out_dir, longer)
    capsys.readouterr()
    out = tmp_path / "out"
    command.main([
        str(run.out_dir), str(longer), "--distances", "16", "32", "400", "--lengths", "8", "16",
        "--passages", "20", "--device", "cpu", "--out", str(out),
    ])  # fmt: skip
    printed = capsys.readouterr().out
    assert "| run | passage | gain at 16 | gain at 32 | gain at 400 |" in printed
    assert "20 passages of 8 documents; 95% intervals over documents" in printed
    result = json.loads((out / "repeats.json").read_text())
    assert result["documents"] == 8 and result["intervals_over"] == "documents"
    first, second = (entry["rows"] for entry in result["runs"])
    assert first == second  # the same weights on the same prompts
    known = {(row["distance"], row["length"]) for row in first if row["gain"]}
    assert known == {(16, 8), (16, 16), (32, 8)}
    for row in first:
        if row["gain"]:
            difference = row["without"]["nats"] - row["with"]["nats"]
            assert row["gain"]["nats"] == pytest.approx(difference)
            assert row["gain"]["interval"][0] < row["gain"]["nats"] < row["gain"]["interval"][1]
    assert (out / "repeats.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("context", "options", "distances", "lengths"),
    [
        (1151, [], [1024], [64, 128, 256, 512]),
        (4096, [], [1024, 2048], [64, 128, 256, 512]),
        (1150, [], [64, 128, 256, 512], [64]),
        (512, [], [64, 128, 256], [64]),
        (191, [], [64], [64]),
        (512, ["--lengths", "128", "100"], [128, 256], [128, 100]),
        (512, ["--distances", "200"], [200], [64, 128]),
        (4096, ["--distances", "600", "9999"], [600, 9999], [64, 128, 256, 512]),
    ],
)
def test_defaults_fit_the_longest_run(monkeypatch, context, options, distances, lengths) -> None:
    """Each default distance fits a context with the shortest passage at least."""
    run = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(context_length=context)))
    stream = SimpleNamespace(verify=lambda: None)
    monkeypatch.setattr(command, "open_runs", lambda *_: ({"run": run}, stream))

    class Chosen(Exception):  # noqa: N818
        """Raised with the distances and lengths instead of drawing passages."""

    def passages(self, *_):
        raise Chosen(self)

    monkeypatch.setattr(Repeats, "passages", passages)
    with pytest.raises(Chosen) as chosen:
        command.main(["run", *options])
    (repeats,) = chosen.value.args
    assert [*repeats.distances] == distances and [*repeats.lengths] == lengths
    fitting = {distance for distance, _ in repeats.cells(context)}
    assert fitting == {*distances} if "--distances" not in options else 9999 not in fitting


def test_a_context_below_the_default_distances_is_refused(run, tmp_path) -> None:
    run("optim.max_steps=1", "optim.warmup_steps=0")
    message = "context_length=32 must be at least 191 for distance=64 and length=64. Choose shorter"
    with pytest.raises(ValueError, match=message):
        command.main([str(run.out_dir), "--device", "cpu", "--out", str(tmp_path / "out")])
