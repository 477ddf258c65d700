"""Which runs a call of the sweep trains, once more or not at all, and what it says of them."""

import shutil

import pytest

from experiments import sweep
from tests.experiments.table4 import tiny_sweep


def trained(ran):
    words = [word for command in ran for word in command if word.startswith("run.out_dir")]
    return [word.rpartition("/")[2] for word in words]


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
    assert "(or name them in full in --only): long_seed1, short_seed1\n" in capsys.readouterr().out
    _, ran = tiny(*names, "short_seed1")
    assert trained(ran) == ["short_seed1"]
    assert "trained once more: short_seed1 (its weights" in capsys.readouterr().out


def test_what_is_trained_once_more_is_said_with_the_reason(tiny, capsys):
    out, _ = tiny("--models", "short", "--seeds", "1")
    without_folders(out)
    capsys.readouterr()
    _, ran = tiny("--models", "short", "longest", "--seeds", "1")
    assert sorted(trained(ran)) == ["longest_seed1", "short_seed1"]
    assert (
        "trained once more: short_seed1 (not scored as these --models, --stride and --histories "
        "ask for)\n"
    ) in capsys.readouterr().out


def test_further_seeds_have_the_steps_of_the_first(tiny, monkeypatch):
    out, _ = tiny("--models", "long_from_short", "--seeds", "1")
    without_folders(out)
    # the times are measured anew, for the weights of the first seed are needed
    monkeypatch.setattr("experiments.table4.jobs._affordable_steps", lambda *_: 40)
    _, ran = tiny("--models", "long_from_short", "short_then_long", "--seeds", "2")
    (train,) = (command for command in ran if trained([command]) == ["long_from_short_seed2"])
    assert "optim.max_steps=10" in train and "optim.max_steps=40" not in train


def test_seeds_that_start_together_have_the_same_steps(tiny, monkeypatch):
    """Those of their own times, not of the sums of a first seed that is trained once more, too."""
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
    with pytest.raises(ValueError, match="holds no run to report on"):
        tiny("--models", "long_from_short", "longest", "--seeds", "2")
    assert {trained_for[f"long_from_short_seed{n}"] for n in (1, 2)} == {"optim.max_steps=20"}


def test_a_further_seed_has_the_steps_that_the_first_began_with(tiny, monkeypatch, tmp_path):
    tiny("--models", "long_from_short", "--seeds", "1", "--sums", str(tmp_path / "away"))
    monkeypatch.setattr("experiments.table4.jobs._affordable_steps", lambda *_: 40)
    _, ran = tiny("--models", "long_from_short", "--seeds", "2")
    (train,) = (command for command in ran if trained([command]) == ["long_from_short_seed2"])
    assert "optim.max_steps=10" in train and "optim.max_steps=40" not in train


def test_a_pattern_brings_what_is_needed_and_matches_it(tiny):
    names = ("--models", "short", "long", "--seeds", "1")
    out, _ = tiny(*names)
    without_folders(out)
    _, ran = tiny("--models", "long_from_short", "--seeds", "1", "--only", "*_seed1")
    # the weights of one, and with them the time of the other on this machine
    assert sorted(trained(ran)) == ["long_from_short_seed1", "long_seed1", "short_seed1"]


def test_an_empty_folder_is_no_run(tiny):
    out, _ = tiny("--models", "short", "--seeds", "1")
    without_folders(out)
    (out / "short_seed1").mkdir()
    _, ran = tiny("--models", "short", "--seeds", "1")
    assert ran == []


def test_a_report_needs_no_checkpoint(tiny):
    out, _ = tiny("--models", "short", "--seeds", "1")
    (state,) = (out / "short_seed1" / "checkpoints").glob("*/state.json")
    state.write_text("{")
    tiny("--models", "short", "--seeds", "1", "--report-only")


def test_runs_on_another_text_are_refused(monkeypatch, corpus, other_corpus, tmp_path):
    data = shutil.copytree(corpus, tmp_path / "data")
    here = tiny_sweep.sweep(monkeypatch, data, tmp_path)
    here("--models", "short", "--seeds", "1")
    shutil.rmtree(data)
    shutil.copytree(other_corpus, data)
    with pytest.raises(ValueError, match=r"short_seed1 is of a run .* take the .*another --out"):
        here("--models", "short", "long", "--seeds", "1", "--sums", str(tmp_path / "elsewhere"))


def test_the_text_may_lie_elsewhere(tiny, corpus, tmp_path):
    out, _ = tiny("--models", "short", "--seeds", "1")
    begun = out / "short_seed1" / "config.yaml"
    begun.write_text(begun.read_text().replace(str(corpus), str(tmp_path / "on_another_machine")))
    _, ran = tiny("--models", "short", "--seeds", "1")
    assert ran == []
