"""Progress output of an evaluation."""

import re

import pytest

from evaluation.scoring_bar import ScoringBar


def test_a_line_for_each_scoring_and_the_time_left(capsys):
    with ScoringBar(300, is_main=True) as bar:
        bar.skip(100)
        assert list(bar.track(range(4), 4, "a, chunks", 150)) == [0, 1, 2, 3]
        assert list(bar.track(range(1), 1, "a, history 8", 50)) == [0]
    first, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"a, chunks: \d+\.\d s(, 0:00:0\d left)?", first)
    assert re.fullmatch(r"a, history 8: \d+\.\d s", last)  # the last line


def test_other_processes_show_nothing(capsys):
    with ScoringBar(4, is_main=False) as bar:
        assert list(bar.track("ab", 2, "a", 4)) == ["a", "b"]
    assert capsys.readouterr().out == ""


def test_a_terminal_shows_the_progress(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes this for a terminal
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(KeyboardInterrupt), ScoringBar(4, is_main=True) as bar:
        for batch in bar.track("abcd", 4, "a, chunks of 8 tokens", 4):
            if batch == "d":
                raise KeyboardInterrupt
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert " 75% " in shown and "left a, chunks of 8 tokens" in shown
