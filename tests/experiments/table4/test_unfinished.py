"""Runs that a call of the sweep trains, trains again or skips, and runs that it reports."""

import json
import shutil
from dataclasses import replace

import pytest

from evaluation import score
from evaluation.sums import read_scored, write_scored
from experiments import sweep
from experiments.table4 import sweep as table4_sweep
from tests.experiments.table4 import tiny_sweep
from tests.experiments.table4.tiny_sweep import trained


def without_folders(out):
    for folder in out.glob("*_seed?"):
        shutil.rmtree(folder)


def test_a_pattern_leaves_out_what_is_known_and_a_full_name_does_not(tiny, capsys):
    names = ("--models", "short", "long", "--seeds", "1", "--only")
    out, ran = tiny(*names, "*_seed1")
    assert sorted(trained(ran)) == ["long_seed1", "short_seed1"]
    without_folders(out)  # to save room
    capsys.readouterr()
    _, ran = tiny(*names, "*_seed1")
    assert ran == []
    assert "full names in --only): long_seed1, short_seed1\n" in capsys.readouterr().out
    _, ran = tiny(*names, "short_seed1")
    assert trained(ran) == ["short_seed1"]
    assert "training again: short_seed1 (its weights" in capsys.readouterr().out


def test_the_reason_for_training_again_is_printed(tiny, capsys):
    out, _ = tiny("--models", "short", "--seeds", "1")
    without_folders(out)
    capsys.readouterr()
    _, ran = tiny("--models", "short", "longest", "--seeds", "1")
    assert sorted(trained(ran)) == ["longest_seed1", "short_seed1"]
    reason = "scored with other --models, --stride or --histories"
    assert f"training again: short_seed1 ({reason})\n" in capsys.readouterr().out


@pytest.mark.slow
def test_further_seeds_have_the_steps_of_the_first(tiny, monkeypatch):
    out, _ = tiny("--models", "long_from_short", "--seeds", "1")
    without_folders(out)
    # the times are measured again, because the weights of the first seed are needed
    monkeypatch.setattr("experiments.table4.jobs._affordable_steps", lambda *_: 40)
    _, ran = tiny("--models", "long_from_short", "short_then_long", "--seeds", "2")
    (train,) = (command for command in ran if trained([command]) == ["long_from_short_seed2"])
    assert "optim.max_steps=10" in train and "optim.max_steps=40" not in train


@pytest.mark.slow
def test_seeds_that_start_together_have_the_same_steps(tiny, monkeypatch):
    """Steps follow from new times, not from the sums of a first seed that is trained again."""
    out, _ = tiny("--models", "long_from_short", "--seeds", "2")
    without_folders(out)
    monkeypatch.setattr("experiments.table4.jobs._affordable_steps", lambda *_: 20)
    trained_for = {}

    def all_at_once(tasks, *_):
        for task in tasks:
            train, _ = task.commands(1)
            steps = [word for word in train if word.startswith("optim.max_steps=")]
            trained_for[task.name] = steps[-1]
        return []

    monkeypatch.setattr(sweep, "run_tasks", all_at_once)
    with pytest.raises(ValueError, match="has no run to report on"):
        tiny("--models", "long_from_short", "longest", "--seeds", "2")
    assert {trained_for[f"long_from_short_seed{n}"] for n in (1, 2)} == {"optim.max_steps=20"}


def test_a_pattern_brings_what_is_needed_and_matches_it(tiny):
    names = ("--models", "short", "long", "--seeds", "1")
    out, _ = tiny(*names)
    without_folders(out)
    _, ran = tiny("--models", "long_from_short", "--seeds", "1", "--only", "*_seed1")
    # the weights of one, and with them the time of the other on this machine
    assert sorted(trained(ran)) == ["long_from_short_seed1", "long_seed1", "short_seed1"]


def test_runs_on_another_text_are_refused(monkeypatch, corpus, other_corpus, tmp_path):
    data = shutil.copytree(corpus, tmp_path / "data")
    here = tiny_sweep.sweep(monkeypatch, data, tmp_path)
    here("--models", "short", "--seeds", "1")
    shutil.rmtree(data)
    shutil.copytree(other_corpus, data)
    with pytest.raises(ValueError, match=r"short_seed1 belongs to .* Use the .*another --out"):
        here("--models", "short", "long", "--seeds", "1", "--sums", str(tmp_path / "elsewhere"))


def test_a_finished_run_is_known_without_its_checkpoint_its_folder_or_its_text(
    tiny, corpus, tmp_path
):
    names = ("--models", "short", "--seeds", "1")
    out, _ = tiny(*names)
    begun = out / "short_seed1" / "config.yaml"
    begun.write_text(begun.read_text().replace(str(corpus), str(tmp_path / "on_another_machine")))
    assert tiny(*names)[1] == []
    (state,) = (out / "short_seed1" / "checkpoints").glob("*/state.json")
    state.write_text("{")
    tiny(*names, "--report-only")
    without_folders(out)
    (out / "short_seed1").mkdir()  # an empty folder is not a run
    assert tiny(*names)[1] == []


def report_only(tiny, monkeypatch, *names):
    """Labels, and seeds of each, of a report for which nothing may be trained or scored."""

    def fail(*_, **__):
        raise AssertionError("trained or scored")

    with monkeypatch.context() as patch:
        patch.setattr(score, "token_losses", fail)
        patch.setattr(score.Run, "model", property(fail))
        patch.setattr("experiments.gpu_pool._start", fail)
        patch.setattr(table4_sweep, "write_report", lambda *_: None)  # pictures take seconds
        patch.setattr("experiments.reports.save", lambda *_: None)
        out, _ = tiny("--models", *names, "--report-only")
    result = json.loads((out / "table4.json").read_text())
    (table,) = result["rows"].values()
    assert list(result["curves"]) == [row["label"] for row in table]
    return {row["label"]: row["seeds"] for row in table}, table


@pytest.mark.slow
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

    with pytest.raises(ValueError, match="scored with other --models, --stride or --hist"):
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


def test_sums_of_half_a_run_or_of_another_text_or_run_are_not_reported(
    tiny, monkeypatch, corpus, capsys
):
    names = ["short", "long_from_short"]
    out, _ = tiny("--models", *names)
    _, complete = report_only(tiny, monkeypatch, *names)
    sums = out / "sums"
    scored, text = read_scored(sums / corpus.name / "short_seed2.npz")
    half = replace(scored, about=scored.about | {"step": 10})
    for run, of_text, why in (
        (half, text, "scored before it was finished"),
        (scored, replace(text, sha256="0"), "scored on another text with the name shards"),
    ):
        write_scored(run, of_text, sums)
        seeds, _ = report_only(tiny, monkeypatch, *names)
        assert seeds == {"short": 1, "long": 2, "long_from_short": 2}
        assert f"{why}: short_seed2\n" in capsys.readouterr().out
    other = replace(scored.config, optim=replace(scored.config.optim, lr=7.0))
    write_scored(replace(scored, config=other), text, sums)
    with pytest.raises(ValueError, match=r"short_seed2.npz holds .*: optim.lr is 7.0 there and"):
        report_only(tiny, monkeypatch, *names)
    more = replace(next(iter(scored.sums)), stride=5, history=9, first=70)
    more_sums = {more: scored.sums[next(iter(scored.sums))], **scored.sums}
    write_scored(replace(scored, sums=more_sums), text, sums)  # what no other was scored by
    assert report_only(tiny, monkeypatch, *names)[1] == complete

    # seeds of a model must have the same steps
    scored, text = read_scored(sums / corpus.name / "long_from_short_seed2.npz")
    step = scored.config.optim.max_steps + 10
    other = replace(scored.config, optim=replace(scored.config.optim, max_steps=step))
    evaluations = [r | {"step": step} for r in scored.about["evaluations"]]
    about = scored.about | {"step": step, "evaluations": evaluations}
    write_scored(replace(scored, config=other, about=about), text, sums)
    with pytest.raises(ValueError, match=rf"seed2.npz has {step} steps, but another"):
        report_only(tiny, monkeypatch, *names)


def test_an_extended_run_is_reported_without_its_first_part_but_with_its_cost(
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
    assert "it starts from is unknown: short_then_long_seed1\n" in capsys.readouterr().out


def test_corpora_of_other_trainings_are_not_mixed(tiny, monkeypatch, corpus, other_corpus, capsys):
    on_both = ("--score-on", str(corpus), str(other_corpus))
    out, _ = tiny("--models", "short", *on_both)
    path = out / "sums" / other_corpus.name / "short_seed1.npz"
    scored, text = read_scored(path)
    write_scored(replace(scored, about=scored.about | {"gpu_hours": 9.0}), text, out / "sums")
    tiny("--models", "short", *on_both, "--report-only")
    said = capsys.readouterr().out
    assert "trained again between the scorings of two texts: short_seed1\n" in said
    path.unlink()
    tiny("--models", "short", *on_both, "--report-only")
    assert "not in the report: not trained and scored: short_seed1\n" in capsys.readouterr().out
