"""Whole evaluations of tiny runs on the CPU."""

import json
import math
import shutil
from functools import partial

import numpy as np
import pytest
import torch

from data.files import load_sealed, sealed, to_json
from data.text.shards import TokenStream
from evaluation import score
from evaluation.runs import open_run
from evaluation.sums import read_scored
from evaluation.tables import tabulate
from evaluation.windows import Scoring
from scripts import evaluate
from tests.evaluation.known_losses import find
from tests.training_runs import call_on_two_processes

BUTTERFLY = ("model.mask.pattern=butterfly", "model.mask.block_size=16", "model.context_length=64")


def by_hand(folder, stream, scoring, skip=0):
    """Mean loss and number of the scored tokens, computed window by window.

    The first `skip` of the tokens that a window scores do not count.
    """
    run = open_run(folder)
    text = torch.from_numpy(stream.read(0, len(stream)))
    losses = []
    for begin in range(
        scoring.first + scoring.stride - scoring.history,
        len(text) - scoring.history,
        scoring.stride,
    ):
        window = text[begin : begin + scoring.history]
        targets = text[begin + 1 : begin + scoring.history + 1]
        doc_start = torch.zeros_like(window, dtype=torch.int32)
        for end in (
            (window == run.tokenizer.eot_id).nonzero()[:, 0] if scoring.document_mask else ()
        ):
            doc_start[end + 1 :] = end + 1
        with torch.no_grad():
            log_p = run.model(window[None], doc_start=doc_start[None])[0].log_softmax(-1)
        losses += (-log_p[range(len(window)), targets])[-scoring.stride + skip :].tolist()
    return np.mean(losses), len(losses)


def test_two_models_one_with_two_seeds(train, result_of, corpus, tmp_path):
    short = [train(f"short_seed{seed}", f"run.seed={seed}") for seed in (1, 2)]
    long = train("long", "model.context_length=64", steps=4)
    result = result_of(*short, long, "--stride", 8, "--out", tmp_path / "out")
    assert [(row["label"], row["history"], row["stride"]) for row in result["strided"]] == [
        ("short", 32, 8), ("long", 32, 8), ("long", 64, 8)
    ]  # fmt: skip
    assert {row["first"] for row in result["strided"] + result["control"]} == {64}
    assert [(run["label"], run["seed"], run["step"]) for run in result["runs"]] == [
        ("short", 1, 2), ("short", 2, 2), ("long", 1111, 4)
    ]  # fmt: skip

    stream = TokenStream(corpus, "val")
    strided = {h: Scoring(history=h, stride=8, first=64) for h in (32, 64)}
    n_tokens = (len(stream) - 1 - 64) // 8 * 5  # short windows give 5 of 8 tokens enough context
    for row in result["strided"]:
        folders = short if row["label"] == "short" else [long]
        expected = [by_hand(folder, stream, strided[row["history"]], 3) for folder in folders]
        assert {count for _, count in expected} == {row["tokens"]} == {n_tokens}
        means = [mean for mean, _ in expected]
        assert row["nats_of_seeds"] == pytest.approx(means, rel=1e-5)
        assert row["nats"] == pytest.approx(np.mean(means), rel=1e-5)
        assert row["perplexity"] == pytest.approx(math.exp(np.mean(means)), rel=1e-4)
    chunk = find(result["chunk"], "long")
    expected, count = by_hand(long, stream, Scoring(history=64, stride=64))
    assert (chunk["tokens"], chunk["nats"]) == (count, pytest.approx(expected, rel=1e-5))

    first, *others = result["strided"]
    for row in others:
        assert row["difference"]["nats"] == pytest.approx(row["nats"] - first["nats"], abs=1e-6)
    intact, *disturbed = result["control"]
    expected, count = by_hand(long, stream, Scoring(history=64, stride=16, first=64))
    assert (intact["tokens"], intact["nats"]) == (count, pytest.approx(expected, rel=1e-5))
    for row in disturbed:
        difference = row["difference"]
        assert difference["nats"] == pytest.approx(row["nats"] - intact["nats"], abs=1e-6)
        assert difference["nats"] != 0 and difference["to_history"] == 64
        assert row["tokens"] == difference["tokens"] == count


def fail(*_, **__):
    raise AssertionError("scored again")


def test_losses_are_reused_until_the_run_trains_further(train, result_of, monkeypatch):
    short, long = train("short"), train("long", "model.context_length=64")
    command = (short, long, "--stride", 8, "--modes", "chunk", "strided", "cross")
    first = result_of(*command)
    files = sorted(path.name for path in (long / "scores" / "shards").iterdir())
    assert files == ["h32_s8_f64.npz", "h64_s64_f0.npz", "h64_s8_f64.npz"]
    with monkeypatch.context() as patch:
        patch.setattr(score, "token_losses", fail)
        patch.setattr(score.Run, "model", property(fail))
        assert result_of(*command) == first
        assert result_of(short, "--modes", "chunk")["chunk"] == first["chunk"][:1]
        with pytest.raises(AssertionError, match="scored again"):
            result_of(*command, "--documents", "both")

    train("long", "model.context_length=64", steps=4)
    scored = []
    token_losses = score.token_losses
    monkeypatch.setattr(
        score,
        "token_losses",
        lambda model, *rest: scored.append(1) or token_losses(model, *rest),
    )
    second = result_of(*command)
    assert len(scored) == 3  # only the long run is scored again
    assert find(second["chunk"], "short")["nats"] == find(first["chunk"], "short")["nats"]
    for row, before in zip(second["strided"], first["strided"], strict=True):
        assert (row["nats"] == before["nats"]) == (row["label"] == "short")
    assert result_of(*command) == second
    assert len(scored) == 3


def test_a_butterfly_with_and_without_document_masks(train, result_of, corpus):
    folder = train("butterfly", *BUTTERFLY, "model.mask.global_blocks=0", steps=1)
    result = result_of(
        folder, "--stride", 7, "--histories", 37, "--documents", "both", "--batch-tokens", 200
    )
    stream = TokenStream(corpus, "val")
    rows = result["chunk"] + result["strided"]
    assert len(rows) == 6
    for row in rows:
        scoring = Scoring(**{name: row[name] for name in Scoring.__dataclass_fields__})
        # in windows of 37, the first and second scored tokens see 31 and 32 tokens: too few
        skip = 0 if row in result["chunk"] else 2
        expected, _ = by_hand(folder, stream, scoring, skip)
        assert row["nats"] == pytest.approx(expected, rel=1e-5)
    assert len({row["nats"] for row in rows}) == 6


def test_documents_are_masked_as_in_training(train, result_of, corpus):
    masked = train("masked", "data.document_mask=true", steps=1)
    packed = train("packed", steps=1)
    result = result_of(masked, packed, "--stride", 3, "--near", 4, "--histories", 17)
    stream = TokenStream(corpus, "val")
    rows = result["chunk"] + result["strided"]
    assert [(row["label"], row["history"], row["document_mask"]) for row in rows] == [
        (label, history, label == "masked")
        for histories in ((32,), (17, 32))
        for label in ("masked", "packed")
        for history in histories
    ]
    for row in rows:
        scoring = Scoring(**{name: row[name] for name in Scoring.__dataclass_fields__})
        expected, _ = by_hand(masked if row["label"] == "masked" else packed, stream, scoring)
        assert row["nats"] == pytest.approx(expected, rel=1e-5)
    assert {row["label"] for row in result["control"]} == {"packed"}


def test_each_corpus_gets_its_own_report(
    train, results_of, monkeypatch, corpus, other_corpus, tmp_path
):
    folders = train("short", steps=1), train("long", "model.context_length=64", steps=1)
    command = (*folders, "--stride", 8, "--near", 20, "--out", tmp_path / "out", "--data")
    both = results_of(*command, other_corpus, corpus)
    assert [(out, result["data"]["name"]) for out, result in both] == [
        (tmp_path / "out" / "birds", "birds"),
        (tmp_path / "out" / "shards", "shards"),
    ]
    tables = [result for _, result in both]
    assert tables[0]["data"]["documents"] == 11
    scoring = Scoring(history=64, stride=8, first=64)
    for path, result in zip((other_corpus, corpus), tables, strict=True):
        expected, count = by_hand(folders[1], TokenStream(path, "val"), scoring, 3)
        row = find(result["strided"], "long", history=64)
        assert (row["nats"], row["tokens"]) == (pytest.approx(expected, rel=1e-5), count)
    for folder, count in zip(folders, (5, 6), strict=True):
        for name in ("birds", "shards"):
            assert len(list((folder / "scores" / name).iterdir())) == count

    monkeypatch.setattr(score, "token_losses", fail)
    for path, result in zip((other_corpus, corpus), tables, strict=True):
        assert results_of(*command, path) == [(tmp_path / "out", result)]


def test_reports_are_built_from_sums(
    train, results_of, monkeypatch, corpus, other_corpus, tmp_path
):
    folders = [train(f"short_seed{seed}", f"run.seed={seed}", steps=1) for seed in (1, 2)]
    folders.append(train("long", "model.context_length=64", steps=1))
    command = (*folders, "--stride", 8, "--data", corpus, other_corpus)
    reports = results_of(*command)
    monkeypatch.setattr(score, "token_losses", fail)
    sums = tmp_path / "sums"
    assert results_of(*command, "--sums", sums) == []
    for (_, report), path in zip(reports, (corpus, other_corpus), strict=True):
        files = [sums / path.name / f"{folder.name}.npz" for folder in folders]
        assert sorted((sums / path.name).iterdir()) == sorted(files)
        runs, texts = zip(*map(read_scored, files), strict=True)
        assert {(text.sha256, text.counted) for text in texts} == {
            (texts[0].sha256, texts[0].counted)
        }
        assert tabulate(runs, texts[0]) == report
    with pytest.raises(ValueError, match="--out is for a report, and --sums writes none"):
        results_of(*command, "--sums", sums, "--out", tmp_path / "out")
    shutil.copytree(folders[0], tmp_path / "elsewhere" / "long")
    with pytest.raises(ValueError, match="--sums keeps runs by .* these are long, long: rename"):
        results_of(folders[-1], tmp_path / "elsewhere" / "long", "--sums", sums)


def test_scoring_one_run_counts_the_same_tokens_as_all_together(
    train, results_of, corpus, tmp_path
):
    """A stride of 40 is too long for short windows; in long ones, fewer tokens have context."""
    long, short = train("long", "model.context_length=64", steps=1), train("short", steps=1)
    command = ("--stride", 8, 40, "--histories", 32, 64, "--near", 4, "--first", 64)
    ((_, together),) = results_of(long, short, *command)
    for folder in (long, short):
        results_of(folder, *command, "--sums", tmp_path)
    files = [tmp_path / corpus.name / f"{folder.name}.npz" for folder in (long, short)]
    runs, (text, same) = zip(*map(read_scored, files), strict=True)
    assert text.counted == same.counted
    assert tabulate(runs, text) == together


def test_compiled_once_for_every_shape(train, result_of, monkeypatch):
    folder = train("run", *BUTTERFLY, "model.n_layer=1", steps=1)
    command = (folder, "--stride", 8, "--histories", 48, "--near", 20)
    eager = result_of(*command)
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("compile: false", "compile: true"))
    shutil.rmtree(folder / "scores")  # losses are the same with and without compilation
    shapes = []
    compiler = partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", lambda *a, **k: shapes.append(1) or compiler(*a, **k))
    assert result_of(*command)["strided"] == eager["strided"] and not shapes  # too little text
    monkeypatch.setattr("evaluation.score.COMPILE_FROM", {"cpu": 0.0})
    compiled = result_of(*command)  # losses of eager code are not reused
    assert len(shapes) == 4  # chunk, cross, strided, and all controls
    for table in ("chunk", "strided", "control"):
        assert len(compiled[table]) == len(eager[table])
        for row, expected in zip(compiled[table], eager[table], strict=True):
            assert row["nats"] == pytest.approx(expected["nats"], rel=1e-5)


@pytest.mark.parametrize(
    ("option", "modes", "better"),
    [
        ("--first", ["chunk"], "strided, cross, control"),
        ("--histories", ["chunk", "strided"], "cross"),
        ("--near", ["chunk"], "control, strided, cross"),
        ("--stride", ["chunk"], "strided, cross, control"),
    ],
)
def test_options_that_change_nothing_are_refused(option, modes, better, tmp_path):
    with pytest.raises(ValueError, match=rf"{option} changes .*{' '.join(modes)}: .*\({better}\)"):
        evaluate.main([str(tmp_path), option, "8", "--modes", *modes])


def test_text_of_another_tokenizer_or_of_the_same_name_is_refused(train, corpus, tmp_path):
    folder, other = train("run", steps=1), train("run_of_the_other_text", steps=1)
    elsewhere = shutil.copytree(corpus, tmp_path / "elsewhere" / corpus.name)
    shutil.copytree(corpus, tmp_path / "other")
    manifest = tmp_path / "other" / "manifest.json"
    values = load_sealed(manifest)
    values["tokenizer"]["sha256"] = "abc"
    manifest.write_bytes(to_json(sealed(values)))
    spec = json.loads((other / "tokenizer.json").read_text())
    spec["model"]["merges"].pop()
    (other / "tokenizer.json").write_text(json.dumps(spec))
    same, text = "are both called shards, but", "was prepared with a tokenizer of sha256="
    for runs, corpora, message in (
        ([folder], [corpus, elsewhere], same),
        ([folder], [corpus, corpus], same),
        ([folder], [manifest.parent], rf"other {text}abc, but .*run"),
        ([folder], [corpus, manifest.parent], text),  # the second corpus is wrong
        ([folder, other], [corpus], "run_of_the_other_text/tokenizer.json is not the tokenizer"),
    ):
        arguments = [*runs, "--data", *corpora, "--stride", 8, "--device", "cpu"]
        with pytest.raises(ValueError, match=message):
            evaluate.main([*map(str, arguments)])
    assert not (folder / "scores").exists()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("device", "tolerance"), [("cpu", 1e-5), pytest.param("cuda", 1e-3, marks=pytest.mark.gpu(2))]
)
def test_two_processes_save_the_losses_of_one(train, result_of, device, tolerance, tmp_path):
    folder = train("run", steps=1)
    command = [str(folder), "--stride", "5", "--near", "11"]
    scores = folder / "scores"
    result = result_of(*command)
    alone = scores.rename(folder / "alone")
    more = ["--device", device, "--sums", str(folder / "sums")]
    ends = call_on_two_processes(tmp_path, evaluate.main, [*command, *more])
    assert [status for status, _ in ends] == [0, 0], ends
    expected = sorted(path.relative_to(alone) for path in alone.rglob("*.npz"))
    assert len(expected) == 5
    assert sorted(path.relative_to(scores) for path in scores.rglob("*.npz")) == expected
    for path in expected:
        two, one = (np.load(folder / path)["losses"] for folder in (scores, alone))
        np.testing.assert_allclose(two, one, rtol=tolerance, atol=tolerance / 10)
    run, text = read_scored(folder / "sums" / "shards" / "run.npz")
    (row,), (expected,) = tabulate([run], text)["strided"], result["strided"]
    assert row["tokens"] == expected["tokens"]
    assert row["nats"] == pytest.approx(expected["nats"], rel=tolerance)
