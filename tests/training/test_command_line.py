"""Exit status and output of commands, run as subprocesses."""

import signal
import subprocess
import sys

import pytest

from tests.training.programs import stopped
from training.command_line import handle_help, user_errors_as_messages

ENDLESS = """
import sys
from training.command_line import user_errors_as_messages
with user_errors_as_messages():
    print("more", flush=True)
    sys.stdin.read()  # until stdout is closed
    for _ in range(%d):
        print("more")
"""
OTHER_PIPE = """
import os
from training.command_line import user_errors_as_messages
reads, writes = os.pipe()
os.close(reads)
with user_errors_as_messages():
    os.write(writes, b"more")
"""
HELP = """
import argparse, sys
from training import command_line
sys.argv[1:] = ["--help"]
sys.stdin.read()  # until stdout is closed
if %r == "options":
    @command_line.parse_before_imports
    def options():
        argparse.ArgumentParser().parse_args()
else:
    command_line.handle_help("How to call it.")
"""
READY = """
def sleep(seconds, sleep=command_line.time.sleep):
    print("ready", flush=True)
    sleep(seconds)
command_line.time.sleep = sleep
"""
FAILS = """
import sys
from training import command_line
command_line._TORCHRUN_GRACE_S = %r
with command_line.user_errors_as_messages():
    raise %s("too long")
"""


@pytest.mark.parametrize("kind", [ValueError, OSError, FloatingPointError])
def test_user_errors_print_one_sentence(kind):
    with pytest.raises(SystemExit, match="^error: too long$"), user_errors_as_messages():
        raise kind("too long")


def test_out_of_memory_prints_one_sentence():
    with pytest.raises(SystemExit, match="^error: not enough memory$"), user_errors_as_messages():
        raise MemoryError
    with pytest.raises(SystemExit, match=r"enough memory \(3 GiB"), user_errors_as_messages():
        raise MemoryError("3 GiB")


def test_other_errors_keep_their_traceback():
    with pytest.raises(TypeError), user_errors_as_messages():
        raise TypeError


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("lines", [1, 10_000])  # less and more than a buffer
def test_a_closed_stdout_ends_quietly(lines, unbuffered, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", ENDLESS % lines], **pipes) as process:
        assert process.stdout.readline() == b"more\n"
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141


def test_another_broken_pipe_is_an_error():
    command = [sys.executable, "-c", OTHER_PIPE]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (1, "error: [Errno 32] Broken pipe\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("by", ["options", "handle_help"])
def test_help_to_a_closed_stdout_ends_quietly(by, unbuffered, monkeypatch):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", HELP % by], **pipes) as process:
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) in (0, 141)  # argparse itself ignores a broken pipe


@pytest.mark.parametrize("kind", ["ValueError", "RuntimeError"])
def test_the_error_of_each_failed_process_is_printed(kind, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    for rank in "01":
        monkeypatch.setenv("LOCAL_RANK", rank)
        command = [sys.executable, "-c", FAILS % (0.1, kind)]
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode == 1 and ended.stderr.endswith("rror: too long\n")
        assert ("Traceback" in ended.stderr) == (kind == "RuntimeError")


@pytest.mark.parametrize(("rank", "kind"), [("1", "ValueError"), ("0", "RuntimeError")])
def test_only_the_failed_process_prints_its_error(rank, kind, monkeypatch):
    """A process that torchrun ends because another failed is silent. Here it waits for hours."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("LOCAL_RANK", rank)
    program = FAILS % (9999.0, kind)
    program = program.replace("with command_line", READY + "with command_line")
    assert stopped(program, signal.SIGTERM) == (-signal.SIGTERM, "")


@pytest.fixture
def restore_sigint():
    """Restore pytest's own Ctrl-C handler after the test."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("restore_sigint")
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help(option, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "configs/quickstart.yaml", option])
    with pytest.raises(SystemExit) as ended:
        handle_help("Train a GPT.")
    assert ended.value.code == 0 and capsys.readouterr().out == "Train a GPT.\n"


@pytest.mark.usefixtures("restore_sigint")
def test_help_inside_a_value_is_not_an_option(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "configs/quickstart.yaml", "run.out_dir=--help"])
    handle_help("Train a GPT.")
    assert capsys.readouterr().out == ""
