"""Code and pages are in plain English: no word that `tests.words` lists, in no commit's subject."""

from pathlib import Path

import pytest

from tests import words

ROOT = Path(__file__).resolve().parent.parent
ROOMS = (
    *("kernels", "model", "data", "training", "evaluation", "experiments", "scripts", "configs"),
    *("papilio", "examples", "tests", "docs", ".github"),
)


@pytest.mark.parametrize("room", [*ROOMS, "."])
def test_no_avoided_word(room, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    places = [room] if room != "." else [str(path) for path in Path().glob("*.*") if path.is_file()]
    assert words.main(places) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("the run goes on from there", "continue or resume"),
        ("def test_a_run_goes_on():", "continue or resume"),
        ("it is checked, too.", "also"),
        ('"""Those that are on."""', "a noun phrase or an imperative"),
        ("a list is no tensor", "is not"),
    ],
)
def test_an_avoided_word_is_named_with_what_to_write(line, instead):
    (offence,) = words.offences(f"plain\n{line}")
    assert offence.startswith("2: ") and f"write {instead} for" in offence


@pytest.mark.parametrize(
    "line",
    ["there is no checkpoint", "it took so much that it stopped", "a bit stands for two blocks"],
)
def test_plain_english_passes(line):
    assert not list(words.offences(line))


@pytest.mark.parametrize(
    ("message", "n"),
    [
        ("kernels/hopper: keep the phase in one type\n\nWhy.", 0),
        ("Merge branch 'main'", 0),
        ("Keep the phase", 1),
        ("kernels: " + "x" * 64, 1),
        ("kernels: keep it\n\nIt goes on.\n# --- >8 ---", 1),
        ("kernels: keep it\n# ------------------------ >8 ---\n-it goes on", 0),
    ],
)
def test_commit_messages(message, n, tmp_path):
    (tmp_path / "message").write_text(message)
    assert words.main(["--commit-message", str(tmp_path / "message")]) == n
