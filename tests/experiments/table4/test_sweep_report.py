"""Reports of Table 4 on tiny models: of what they are made, and which runs they leave out."""

import json
import shutil
from dataclasses import replace

import pytest

from evaluation import score
from evaluation.sums import read_scored, write_scored
from experiments.table4 import __main__ as reproduce_table4


def report_only(tiny, monkeypatch, *names):
    """Labels, and seeds of each, of a report for which nothing may be trained or scored."""

    def fail(*_, **__):
        raise AssertionError("trained or scored")

    with monkeypatch.context() as patch:
        patch.setattr(score, "token_losses", fail)
        patch.setattr(score.Run, "model", property(fail))
        patch.setattr("experiments.gpu_pool._start", fail)
        patch.setattr(reproduce_table4, "write_report", lambda *_: None)  # pictures take seconds
        patch.setattr("experiments.table4.report.draw", lambda *_: None)
        out, _ = tiny("--models", *names, "--report-only")
    result = json.loads((out / "table4.json").read_text())
    (table,) = result["rows"].values()
    assert list(result["curves"]) == [row["label"] for row in table]
    return {row["label"]: row["seeds"] for row in table}, table


def test_a_report_on_a_part_of_the_sweep_scores_nothing(tiny, monkeypatch, capsys, corpus):
    names = ["short", "long"]
    out, _ = tiny("--models", *names)
    sums = out / "sums" / corpus.name
    capsys.readouterr()
    seeds, complete = report_only(tiny, monkeypatch, *names)
    assert seeds == {"short": 2, "long": 2}
    assert "not in the report" not in capsys.readouterr().out

    (sums / "long_seed1.npz").unlink()
    seeds, table = report_only(tiny, monkeypatch, *names)
    assert seeds == {"short": 2, "long": 1}
    assert "not in the report: not trained and scored: long_seed1\n" in capsys.readouterr().out
    assert table[0] == complete[0] and table[1]["nats"] != complete[1]["nats"]

    with pytest.raises(ValueError, match="not scored as these --models, --stride and --hist"):
        report_only(tiny, monkeypatch, "short")  # whose windows begin earlier without the long one
    shutil.rmtree(out / "short_seed2")  # of a run, the sums alone are needed
    assert report_only(tiny, monkeypatch, *names)[0] == {"short": 2, "long": 1}

    _, ran = tiny("--models", *names)  # long_seed1 has all of its losses
    assert [words[0] for words in ran].count("train.py") == 0
    seeds, table = report_only(tiny, monkeypatch, *names)
    assert seeds == {"short": 2, "long": 2}
    assert [row["nats"] for row in table] == [row["nats"] for row in complete]

    (sums / "short_seed1.npz").unlink()  # differences are to the first model all the same
    seeds, table = report_only(tiny, monkeypatch, *names)
    assert [row["label"] for row in table] == ["short", "long"]
    assert table[0]["seeds"] == 1 and table[0]["difference"] is None


def test_runs_of_which_other_tokens_count_are_not_reported(tiny, monkeypatch):
    strides = ("--seeds", "1", "--stride", "4", "64")
    tiny("--models", "short", "longest", *strides)
    assert report_only(tiny, monkeypatch, "short", "longest", *strides)[0] == {
        "short": 1, "longest": 1
    }  # fmt: skip
    # the long model's windows show 7/8 of its context to fewer tokens
    with pytest.raises(ValueError, match=r"not scored as these .* ask for: short_seed1, longest_s"):
        report_only(tiny, monkeypatch, "short", "long", "longest", *strides)


def test_a_run_that_goes_on_is_not_reported_before_its_end(tiny, monkeypatch, corpus, capsys):
    names = ["short", "long"]
    out, _ = tiny("--models", *names)
    _, complete = report_only(tiny, monkeypatch, *names)
    path = out / "sums" / corpus.name / "short_seed2.npz"
    scored, text = read_scored(path)
    half = replace(scored, about=scored.about | {"step": 10})
    write_scored(half, text, out / "sums")
    assert report_only(tiny, monkeypatch, *names)[0] == {"short": 1, "long": 2}
    assert "scored before it was finished: short_seed2\n" in capsys.readouterr().out
    other = replace(scored.config, optim=replace(scored.config.optim, lr=7.0))
    write_scored(replace(scored, config=other), text, out / "sums")
    with pytest.raises(ValueError, match=r"short_seed2.npz holds .*: optim.lr is 7.0 there and"):
        report_only(tiny, monkeypatch, *names)
    write_scored(scored, replace(text, sha256="0"), out / "sums")
    assert report_only(tiny, monkeypatch, *names)[0] == {"short": 1, "long": 2}
    said = capsys.readouterr().out
    assert "scored on another text that is called shards: short_seed2\n" in said
    more = replace(next(iter(scored.sums)), stride=5, history=9, first=70)
    sums = {more: scored.sums[next(iter(scored.sums))], **scored.sums}
    write_scored(replace(scored, sums=sums), text, out / "sums")  # what no other was scored by
    _, table = report_only(tiny, monkeypatch, *names)
    assert table == complete


def test_seeds_of_other_steps_are_refused(tiny, monkeypatch, corpus):
    names = ["short", "long_from_short"]
    out, _ = tiny("--models", *names)
    scored, text = read_scored(out / "sums" / corpus.name / "long_from_short_seed2.npz")
    step = scored.config.optim.max_steps + 10
    other = replace(scored.config, optim=replace(scored.config.optim, max_steps=step))
    evaluations = [r | {"step": step} for r in scored.about["evaluations"]]
    about = scored.about | {"step": step, "evaluations": evaluations}
    write_scored(replace(scored, config=other, about=about), text, out / "sums")
    with pytest.raises(ValueError, match=rf"seed2.npz was trained for {step} steps, and another"):
        report_only(tiny, monkeypatch, *names)


def test_what_is_extended_is_reported_without_its_first_part_but_not_without_its_cost(
    tiny, monkeypatch, corpus, capsys
):
    names = ["short", "short_then_long"]
    out, _ = tiny("--models", *names)
    sums = out / "sums" / corpus.name
    seeds, table = report_only(tiny, monkeypatch, *names)
    assert seeds == {"short": 2, "short_then_long": 2}
    (extended,) = (row for row in table if row["label"] == "short_then_long")
    assert extended["tokens"] == 20 * 256 + 10 * 256

    for seed in (1, 2):
        (sums / f"short_seed{seed}.npz").unlink()
    seeds, (alone,) = report_only(tiny, monkeypatch, *names)
    assert seeds == {"short_then_long": 2}
    assert (alone["tokens"], alone["gpu_hours"]) == (extended["tokens"], extended["gpu_hours"])

    scored, text = read_scored(sums / "short_then_long_seed1.npz")
    write_scored(replace(scored, about=scored.about | {"before": None}), text, out / "sums")
    assert report_only(tiny, monkeypatch, *names)[0] == {"short_then_long": 1}
    assert "took whose weights it starts with: short_then_long_seed1\n" in capsys.readouterr().out


def test_corpora_of_other_trainings_are_not_mixed(tiny, monkeypatch, corpus, other_corpus, capsys):
    on_both = ("--score-on", str(corpus), str(other_corpus))
    out, _ = tiny("--models", "short", *on_both)
    path = out / "sums" / other_corpus.name / "short_seed1.npz"
    scored, text = read_scored(path)
    write_scored(replace(scored, about=scored.about | {"gpu_hours": 9.0}), text, out / "sums")
    tiny("--models", "short", *on_both, "--report-only")
    said = capsys.readouterr().out
    assert "scored on one text, trained anew, and scored on another: short_seed1\n" in said
    path.unlink()
    tiny("--models", "short", *on_both, "--report-only")
    assert "not in the report: not trained and scored: short_seed1\n" in capsys.readouterr().out
