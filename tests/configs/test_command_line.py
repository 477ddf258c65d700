"""How commands end, seen from outside."""

import subprocess
import sys
from pathlib import Path

import pytest

from configs import command_line
from configs.command_line import errors_as_sentences, help_if_asked

ENDLESS = """
import sys
from command_line import errors_as_sentences
with errors_as_sentences():
    print("more", flush=True)
    sys.stdin.read()  # until nobody reads any more
    for _ in range(%d):
        print("more")
"""
OTHER_PIPE = """
import os
from command_line import errors_as_sentences
reads, writes = os.pipe()
os.close(reads)
with errors_as_sentences():
    os.write(writes, b"more")
"""


@pytest.fixture
def alone(monkeypatch):
    """Processes find the module without its package, whose PyTorch takes seconds to load."""
    monkeypatch.setenv("PYTHONPATH", str(Path(command_line.__file__).parent))


@pytest.mark.parametrize("kind", [ValueError, OSError, FloatingPointError])
def test_what_a_user_can_mend_is_a_sentence(kind):
    with pytest.raises(SystemExit, match="^error: too long$"), errors_as_sentences():
        raise kind("too long")


def test_a_defect_keeps_its_trace():
    with pytest.raises(TypeError), errors_as_sentences():
        raise TypeError


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("lines", [1, 10_000])  # less and more than a buffer
def test_a_reader_that_has_seen_enough(lines, unbuffered, monkeypatch, alone):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", ENDLESS % lines], **pipes) as process:
        assert process.stdout.readline() == b"more\n"
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141


def test_another_pipe_that_breaks(alone):
    command = [sys.executable, "-c", OTHER_PIPE]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (1, "error: [Errno 32] Broken pipe\n")


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
