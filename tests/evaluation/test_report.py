"""Report of an evaluation: its numbers and words follow from the tables."""

import copy
import json
import math
import re

import numpy as np
import pytest

from data.text.prepare import prepare
from data.text.shards import TokenStream
from data.text.sources import open_source
from evaluation import report
from evaluation.plan import Plan
from evaluation.report import markdown, verdict, write_report
from evaluation.sums import N_PARTS
from tests.evaluation.known_losses import CHUNK_LONG, made_up_run, tables_of

TABLES = ("chunk", "strided", "control", "chunk_position", "document_position", "document_length")
PICTURES = ("strided", "chunk_position", "document_position", "document_length")


SHORT, LONG = "short", "long"
CONTEXTS = {SHORT: 16, LONG: 64}


def made_up_losses(scoring, n_tokens, shift):
    """Losses that fall with the context of a token, plus noise that all models share."""
    losses = 4 + np.random.default_rng(0).normal(size=n_tokens) + shift
    losses -= 0.2 * np.log2(np.maximum(1, scoring.seen(n_tokens)))
    if scoring.control in ("shuffle", "replace"):
        losses += np.random.default_rng(1).normal(0.05, 0.01, size=n_tokens)
    return losses


@pytest.fixture(scope="module")
def full(stream, tmp_path_factory):
    """All scorings with two strides, documents packed and masked, three seeds."""
    plan = Plan(strides=(8, 4), document_masks=(False, True))
    runs = []
    for label, context_length in CONTEXTS.items():
        scorings = plan.scorings(context_length, tuple(CONTEXTS.values()))
        for seed in range(3):
            losses = {s: made_up_losses(s, len(stream), 0.001 * seed) for s in scorings}
            folder = tmp_path_factory.mktemp("runs")
            options = {"seed": seed, "context_length": context_length}
            runs.append(made_up_run(stream, folder, label, losses, **options))
    return tables_of(runs, stream)


@pytest.fixture
def result(full):
    return copy.deepcopy(full)


def sections(text):
    """Cells of the table in each section, by title."""
    tables = {}
    for part in text.split("\n## ")[1:]:
        rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line[:2] == "| "]
        tables[part.splitlines()[0]] = rows[2:]
    return tables


def summary(result):
    """Cells of the first table, including its header."""
    title, unfinished, table, *_ = markdown(result).split("\n\n")
    assert title == "# Evaluation" and unfinished.startswith("Not trained to the end: ")
    return [line.strip("| ").split(" | ") for line in table.splitlines()]


def test_the_report_shows_the_losses_of_the_tables(result):
    tables = sections(markdown(result))
    table = tables["On identical tokens"]
    assert len(table) == len(result["strided"]) == 12
    for cells, row in zip(table, result["strided"], strict=True):
        low, high = row["nats_interval"]
        differences = [
            f"{d['nats']:.4f} ({d['interval'][0]:.4f} to {d['interval'][1]:.4f})" if d else "-"
            for d in (row["difference"], row["longest_difference"])
        ]
        assert cells == [
            row["label"],
            str(row["history"]),
            str(row["stride"]),
            "masked" if row["document_mask"] else "packed",
            f"{row['tokens']:,}",
            f"{row['nats']:.4f} ({low:.4f} to {high:.4f})",
            f"{row['perplexity']:.2f}",
            f"{row['bits_per_byte']:.4f}",
            *differences,
            "0.0020",  # seeds are 0.001 apart
        ]
    assert [cells[4].split()[0] for cells in tables["As the paper evaluates"]] == [
        f"{row['nats']:.4f}" for row in result["chunk"]
    ]
    short = [row for row in result["document_position"] if row["label"] == SHORT]
    for cells, row in zip(tables["By position in the document"], short, strict=True):
        assert (cells[0], cells[2]) == (row["range"], f"{row['nats']:.4f}")
    controls = zip(tables["Was the distant context used?"], result["control"], strict=True)
    for cells, row in controls:
        low, high = row["nats_interval"]
        assert cells[5:7] == [f"{row['tokens']:,}", f"{row['nats']:.4f} ({low:.4f} to {high:.4f})"]
        assert cells[-1] == (verdict(row["difference"]) if row["difference"] else "-")


def test_costs_include_the_run_that_a_model_started_from(result):
    for run in result["runs"][:3]:
        run["init_from"], run["before"] = "out/other", {"tokens": 4_000, "gpu_hours": 0.25}
    short, long = sections(markdown(result))["What was scored"]
    assert (short[6], short[-1]) == ("4,700", "0.50")
    assert (long[6], long[-1]) == ("700", "0.25")
    result["runs"][2]["before"] = None  # unknown for one run
    short, _ = sections(markdown(result))["What was scored"]
    assert (short[6], short[-1]) == ("-", "-")


def test_times_are_those_of_the_runs_on_their_own_gpu(result):
    first, *others = (run for run in result["runs"] if run["label"] == SHORT)
    first["gpu_hours"] = 0.5
    for run in others:
        run["jobs_per_gpu"] = 2
    short, _ = sections(markdown(result))["What was scored"]
    assert (short[1], short[-1]) == (str(1 + len(others)), "0.50")
    first["jobs_per_gpu"] = 2
    short, _ = sections(markdown(result))["What was scored"]
    assert short[-2:] == ["-", "-"]


def test_invalid_result_files_are_refused(tmp_path):
    path = tmp_path / "evaluation.json"
    with pytest.raises(FileNotFoundError, match=r"must contain evaluation.json. Try the --out"):
        report.main([str(tmp_path)])
    for text, problem in (
        ('{"data": ', r"evaluation.json is damaged \("),
        ('{"rows": {}}', "evaluation.json has no data, strided: pass"),
        ("[]", "evaluation.json has no data, strided: pass"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=problem):
            report.redraw(tmp_path)


def test_the_summary_comes_first_and_matches_the_rows(result):
    short, long = result["as_trained"]
    assert (long["stride"], long["document_mask"]) == (4, False)
    low, high = long["difference"]["interval"]
    chunks = {row["label"]: f"{row['perplexity']:.2f}" for row in result["as_trained_chunk"]}
    header, _, *rows = summary(result)
    assert header[4:] == ["perplexity, on identical tokens", "difference to short, nats", "verdict"]
    assert rows == [
        [SHORT, "16", "700", chunks[SHORT], f"{short['perplexity']:.2f}", "-", "-"],
        [
            *(LONG, "64", "700", chunks[LONG], f"{long['perplexity']:.2f}"),
            f"{long['difference']['nats']:.4f} ({low:.4f} to {high:.4f})",
            "better",
        ],
    ]
    tokens = (
        f"Identical tokens: the same {long['tokens']:,} for all models, each with at least 7/8 of"
    )
    assert tokens in markdown(result) and "One seed only" not in markdown(result)
    long["difference"]["seeds"] = 1
    assert "One seed only: the intervals cover documents but not seeds." in markdown(result)


@pytest.mark.parametrize(
    ("nats", "interval", "word"),
    [
        (-0.031, [-0.035, -0.027], "better"),
        (0.031, [0.027, 0.035], "worse"),
        (-0.031, [-0.07, 0.001], "no difference shown"),
        (-0.031, [None, None], "no interval"),
    ],
)
def test_the_verdict_of_the_summary_follows_the_interval(nats, interval, word, result):
    result["as_trained"][1]["difference"] |= {"nats": nats, "interval": interval}
    assert summary(result)[-1][-1] == word
    assert ("fewer than 5 documents count" in markdown(result)) == (word == "no interval")


def test_comparisons_on_different_tokens_are_reported(result):
    short, long = result["as_trained"]
    long["history"] = 32  # less than its context of 64
    assert [row[2] for row in summary(result)] == ["history", "---", "16", "32"]
    long["document_mask"] = True
    assert [row[3] for row in summary(result)] == ["documents", "---", "packed", "masked"]
    # if one of the two models has no strided row, the paper's windows are compared
    for rows in ([short], [long]):
        result["as_trained"] = rows
        text = markdown(result)
        assert "the paper evaluates, which favours longer contexts: long." in text
        assert "Identical tokens:" not in text
        assert summary(result)[-1][-1] != "-"
    result["as_trained_chunk"] = []
    assert summary(result)[-1][-2:] == ["-", "-"]


def test_a_single_model_has_no_verdict(result):
    for name in ("runs", *TABLES, "as_trained", "as_trained_chunk"):
        result[name] = [row for row in result[name] if row["label"] == SHORT]
    assert summary(result)[0][-1] == "perplexity, on identical tokens"


def test_uncertain_differences_are_in_brackets(result):
    rows = [row for row in result["document_position"] if row["label"] == LONG]
    rows[0] |= {"difference": -0.5, "difference_interval": [-0.6, -0.4]}
    rows[1] |= {"difference": -0.5, "difference_interval": [-1.1, 0.1]}
    rows[2] |= {"difference": -0.5, "difference_interval": [None, None]}
    cells = [row[3] for row in sections(markdown(result))["By position in the document"]]
    assert cells[:3] == ["-0.5000", "(-0.5000)", "(-0.5000)"]


@pytest.mark.parametrize(
    ("nats", "interval", "words"),
    [
        (-0.031, [-0.035, -0.027], "0.0310 nats lower (0.0270 to 0.0350)"),
        (0.031, [0.027, 0.0354], "0.0310 nats higher (0.0270 to 0.0354)"),
        (-0.031, [-0.07, 0.001], "no difference shown: -0.0310 nats (-0.0700 to 0.0010)"),
        (0.031, [0.0, 0.07], "no difference shown: 0.0310 nats (0.0000 to 0.0700)"),
        (-0.031, [None, None], "no difference shown: -0.0310 nats"),
        (None, [None, None], "no difference shown: - nats"),
    ],
)
def test_verdicts_follow_the_interval(nats, interval, words):
    assert verdict({"nats": nats, "interval": interval}) == words


def test_write_report_creates_all_files(result, tmp_path, capsys):
    out = tmp_path / "new" / "folder"
    write_report(result, out)
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["evaluation.json", "report.md", *(f"{name}.png" for name in PICTURES)]
    )
    written = json.loads((out / "evaluation.json").read_text())
    assert written.pop("environment")["torch"]
    assert written == result
    for name in PICTURES:
        assert (out / f"{name}.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert all(f"| {' | '.join(cells)} |" in printed for cells in summary(result))

    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for path in out.iterdir():
        if path.name != "evaluation.json":
            path.unlink()
    report.main([str(out)])
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_nan_is_shown_as_a_dash(result, tmp_path):
    nan = [math.nan, math.nan]
    for row in (result["strided"][-1], result["chunk"][-1]):
        row |= {"nats": math.nan, "nats_interval": nan, "perplexity": math.nan}
        row["difference"] |= {"nats": math.nan, "interval": nan}
        row["nats_of_seeds"][1] = math.nan
    for name in TABLES[3:]:
        result[name][-1] |= {"interval": nan, "difference": math.nan, "difference_interval": nan}
    write_report(result, tmp_path)
    text = (tmp_path / "evaluation.json").read_text()
    assert "NaN" not in text and "Infinity" not in text
    report = (tmp_path / "report.md").read_text()
    assert "nan" not in report
    assert sections(report)["On identical tokens"][-1][5:] == ["-"] * 2 + [
        f"{result['strided'][-1]['bits_per_byte']:.4f}", "-", "-", "-"
    ]  # fmt: skip


@pytest.mark.parametrize("kept", [(), ("chunk",), ("document_length",)], ids=str)
def test_empty_tables_are_left_out(kept, full, tmp_path):
    for name in PICTURES:
        (tmp_path / f"{name}.png").write_text("of an earlier evaluation")
    some = {**full, **{name: [] for name in TABLES if name not in kept}}
    write_report(some, tmp_path)
    assert len(sections(markdown(some))) == 2 + len(kept)
    pictures = {path.stem for path in tmp_path.glob("*.png")}
    assert pictures == set(kept) & set(PICTURES)
    assert set(re.findall(r"\((\w+)\.png\)", markdown(some))) == pictures


def test_a_single_long_document_gets_a_verdict(corpus, tmp_path):
    (tmp_path / "book.txt").write_text("a dog sees the cat. one bird follows a dog. " * 400)
    shards = tmp_path / "shards"
    tokenizer = str(corpus / "tokenizer.json")
    prepare(open_source([str(tmp_path / "book.txt")]), shards, tokenizer=tokenizer)
    stream = TokenStream(shards, "val")
    runs = [
        made_up_run(
            stream, tmp_path, name, {CHUNK_LONG: made_up_losses(CHUNK_LONG, len(stream), by)}
        )
        for name, by in (("first", 0.0), ("second", -0.5))
    ]
    result = tables_of(runs, stream)
    assert (result["data"]["documents"], result["data"]["parts"]) == (1, N_PARTS)
    text = markdown(result)
    assert "| better |" in text and f"cut into {N_PARTS} parts" in text
