"""How commands end, seen from outside."""

import subprocess
import sys

import pytest

from configs.command_line import errors_as_sentences, help_if_asked

ENDLESS = """
from configs.command_line import errors_as_sentences
with errors_as_sentences():
    while True:
        print("more", flush=True)
"""


@pytest.mark.parametrize("kind", [ValueError, OSError, FloatingPointError])
def test_what_a_user_can_mend_is_a_sentence(kind):
    with pytest.raises(SystemExit, match="^error: too long$"), errors_as_sentences():
        raise kind("too long")


def test_a_defect_keeps_its_trace():
    with pytest.raises(TypeError), errors_as_sentences():
        raise TypeError


def test_a_reader_that_has_seen_enough():
    command = [sys.executable, "-c", ENDLESS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"more\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help(option, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "configs/quickstart.yaml", option])
    with pytest.raises(SystemExit) as ended:
        help_if_asked("Train a GPT.")
    assert ended.value.code == 0 and capsys.readouterr().out == "Train a GPT.\n"


def test_no_help(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "configs/quickstart.yaml", "run.out_dir=--help"])
    help_if_asked("Train a GPT.")
    assert capsys.readouterr().out == ""
