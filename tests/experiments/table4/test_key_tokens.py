"""LongPPL in the sweep of Table 4: one choice of key tokens for runs that are scored apart."""

import json
import shutil
from dataclasses import replace

import pytest

from evaluation.markdown import with_interval
from evaluation.sums import read_scored, write_scored
from experiments.table4 import report
from experiments.table4.report import answers_table, markdown, models_table
from scripts import evaluate
from tests.experiments.table4.tiny_sweep import trained

NAMES = ("--models", "short", "long", "--seeds")


@pytest.fixture
def choose(train, corpus, other_corpus, tmp_path, small_gains):
    """Function that lets a run choose key tokens of both corpora, and returns the file."""

    def choose(name="chooser", folder=None, data=(corpus, other_corpus)):
        folder = folder or train(name, "model.context_length=64", "run.seed=9", steps=6)
        file = tmp_path / f"{name}.npz"
        options = ("--near", 32, "--device", "cpu", "--write-key-tokens", file)
        evaluate.main([*map(str, (folder, "--data", *data, *options))])
        return file

    return choose


def table4(out):
    return json.loads((out / "table4.json").read_text())


def test_runs_are_scored_again_on_key_tokens_but_not_trained(
    tiny, choose, corpus, other_corpus, capsys, monkeypatch
):
    monkeypatch.setattr(report, "PAIRS", PAIRS := [("long", "short")])
    monkeypatch.setattr("experiments.table4.sweep.PAIRS", PAIRS)
    monkeypatch.setitem(report.QUESTION_OF, PAIRS[0], report.QUESTION_OF["4k", "1k"])
    both = ("--score-on", str(corpus), str(other_corpus))
    out, _ = tiny(*NAMES, "1", *both)
    before = table4(out)
    assert before["key_tokens"] == {"shards": None, "birds": None}
    assert "LongPPL" not in markdown(before)

    key = ("--key-tokens", str(choose()))
    capsys.readouterr()
    shutil.rmtree(out / "short_seed1" / "checkpoints")  # cannot be scored again
    out, ran = tiny(*NAMES, "1", *both, *key)
    assert [words[2] for words in ran] == [str(out / "long_seed1")]
    assert trained(ran) == []
    said = capsys.readouterr().out
    assert "no LongPPL for short: not scored on the key tokens of the report: short_seed1" in said
    for rows in table4(out)["rows"].values():
        assert rows[0]["key_perplexity"] is None and rows[1]["key_perplexity"] > 1
    assert table4(out)["comparisons"]["shards"][0]["key"] is None

    shutil.rmtree(out / "short_seed1")
    (out / "sums" / corpus.name / "short_seed1.npz").unlink()
    out, ran = tiny(*NAMES, "2", *both, *key)  # further runs are scored on them at once
    assert sorted(trained(ran)) == ["long_seed2", "short_seed1", "short_seed2"]
    result = table4(out)
    for corpus_name, rows in result["rows"].items():
        about = result["key_tokens"][corpus_name]
        assert (about["chooser"], about["missing"]) == ("chooser", [])
        runs = [
            read_scored(out / "sums" / corpus_name / f"{label}_seed{n}.npz")[0]
            for label in ("short", "long")
            for n in (1, 2)
        ]
        for row, seeds in zip(rows, (runs[:2], runs[2:]), strict=True):
            full = [max(run.key.sums.items(), key=lambda i: i[0].history)[1] for run in seeds]
            assert {sums.tokens.sum() for sums in full} == {about["tokens"]}
            means = [sums.nats.sum() / sums.tokens.sum() for sums in full]
            assert row["key_nats"] == pytest.approx(sum(means) / 2)
        (pair,) = result["comparisons"][corpus_name]
        gap = rows[1]["key_nats"] - rows[0]["key_nats"]
        assert pair["key"]["nats"] == pytest.approx(gap) == rows[1]["key_difference"]["nats"]
        assert pair["key"]["seeds"] == 2
    text = markdown(result)
    assert text.count(" LongPPL |\n") == 2 and text.count("LongPPL is the perplexity on") == 2
    assert text.count(f"| {result['rows']['shards'][1]['key_perplexity']:.2f} |\n") == 1
    assert "| nats, on key tokens |" in text

    one = result | {
        name: {"shards": result[name]["shards"]} for name in ("rows", "comparisons", "key_tokens")
    }
    (pair,) = one["comparisons"]["shards"]
    cell = with_interval(pair["key"]["nats"], pair["key"]["interval"])
    fewer = before | {name: {"shards": before[name]["shards"]} for name in ("rows", "comparisons")}
    fewer["rows"] = {"shards": [{**row, "tokens": 2e6} for row in before["rows"]["shards"]]}
    header, _, line = answers_table(one, fewer).splitlines()[:3]
    assert "| 0M tokens, on key tokens | seeds of 2M tokens |" in header
    assert f"| {cell} | 1 |" in line
    assert "2M tokens, on key tokens" not in header
    assert models_table(one).splitlines()[0].endswith("| LongPPL |")

    # a report without the option uses those that all runs share
    out, _ = tiny(*NAMES, "2", *both, "--report-only")
    assert table4(out)["rows"] == result["rows"]


@pytest.mark.slow
def test_different_key_tokens_are_not_reported_together(tiny, choose, corpus, capsys):
    one = ("--key-tokens", str(choose("one")))
    out, _ = tiny(*NAMES, "1", *one)
    path = out / "sums" / corpus.name / "short_seed1.npz"
    scored, text = read_scored(path)
    other = replace(scored.key, about=scored.key.about | {"sha256": "0123"})
    write_scored(replace(scored, key=other), text, out / "sums")
    tiny(*NAMES, "1", "--report-only")
    assert "no LongPPL: the runs were scored on different key tokens" in capsys.readouterr().out
    assert {row["key_nats"] for row in table4(out)["rows"]["shards"]} == {None}
    tiny(*NAMES, "1", "--report-only", *one)
    said = capsys.readouterr().out
    assert "no LongPPL for short: not scored on the key tokens of the report: short_seed1" in said
    short, long = table4(out)["rows"]["shards"]
    assert short["key_nats"] is None and long["key_nats"] > 0
    _, ran = tiny(*NAMES, "1", *one)
    assert [words[2] for words in ran] == [str(out / "short_seed1")]
    assert read_scored(path)[0].key.about == scored.key.about
    _, ran = tiny(*NAMES, "1", *one)
    assert ran == []


def test_wrong_key_tokens_are_refused_before_training(tiny, choose, corpus, other_corpus, tmp_path):
    file = str(choose("elsewhere", data=(other_corpus,)))
    with pytest.raises(ValueError, match=r"key tokens of birds \(.*must include shards"):
        tiny(*NAMES, "1", "--key-tokens", file)
    with pytest.raises(FileNotFoundError, match="--key-tokens=.*none does not exist"):
        tiny(*NAMES, "1", "--key-tokens", str(tmp_path / "none"))
    assert not (tmp_path / "out").exists()
    out, _ = tiny(*NAMES, "2")
    file = str(choose("long_seed2", folder=out / "long_seed2", data=(corpus,)))
    with pytest.raises(ValueError, match="^long_seed2 has the settings and the seed of long_seed2"):
        tiny(*NAMES, "2", "--key-tokens", file)
    out, ran = tiny(*NAMES, "1", "--key-tokens", file)  # is outside of this sweep
    assert len(ran) == 2 and table4(out)["rows"]["shards"][0]["key_nats"] > 0
