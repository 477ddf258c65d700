"""How commands end, seen from outside."""

import os
import signal
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
HELP = """
import argparse, sys
import command_line
sys.argv[1:] = ["--help"]
sys.stdin.read()  # until nobody reads what we print
if %r == "options":
    @command_line.read_first
    def options():
        argparse.ArgumentParser().parse_args()
else:
    command_line.help_if_asked("How to call it.")
"""
WAITS = """
import sys, time
from command_line import errors_as_sentences, if_interrupted
step = 0
with errors_as_sentences(), if_interrupted(lambda: f" at step {step}"):
    step = 7
    print("ready", flush=True)
    %s
"""
SLEEPS = """
    while True:
        time.sleep(0.01)  # a signal just before a long one would wait for its end
"""
STUCK = """
    import ctypes, threading
    lock = ctypes.CDLL(None).pthread_mutex_lock  # waits through signals, and here for itself
    mutex = ctypes.create_string_buffer(64)
    lock(mutex)
    threading.Timer(0.5, print, ["ready"], {"flush": True}).start()
    lock(mutex)
"""
SWALLOWS = """
    try:
        while True:
            time.sleep(0.01)
    except BaseException:
        raise RuntimeError("a library's own")
"""
READY = """
def sleep(seconds, sleep=command_line.time.sleep):
    print("ready", flush=True)
    sleep(seconds)
command_line.time.sleep = sleep
"""
FAILS = """
import sys
import command_line
command_line._PATIENCE = %r
with command_line.errors_as_sentences():
    raise %s("too long")
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


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("by", ["options", "help_if_asked"])
def test_help_that_nobody_reads(by, unbuffered, monkeypatch, alone):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", HELP % by], **pipes) as process:
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) in (0, 141)  # argparse itself overlooks a broken pipe


def stopped(program, *signals, **environment):
    """Exit status and stderr of a program that gets signals once it is ready."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, **pipes, env=os.environ | environment) as process:
        assert process.stdout.readline() == "ready\n"
        for number in signals:
            process.send_signal(number)
        _, said = process.communicate(timeout=60)
        return process.returncode, said


@pytest.mark.parametrize("until", [SLEEPS, SWALLOWS])
def test_a_signal_is_a_sentence(until, alone):
    assert stopped(WAITS % until, signal.SIGINT) == (130, "interrupted at step 7\n")
    assert stopped(WAITS % until, signal.SIGTERM) == (143, "terminated at step 7\n")


def test_signals_under_torchrun(alone):
    """The first process speaks, once, although the terminal and torchrun tell it each."""
    first, second = ({"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": rank} for rank in "01")
    twice = signal.SIGINT, signal.SIGINT
    assert stopped(WAITS % SLEEPS, *twice, **first) == (130, "interrupted at step 7\n")
    assert stopped(WAITS % SLEEPS, *twice, **second) == (130, "")
    assert stopped(WAITS % SLEEPS, signal.SIGTERM, **first) == (143, "terminated at step 7\n")
    assert stopped(WAITS % SLEEPS, signal.SIGTERM, **second) == (143, "")


def test_a_process_that_is_stuck_under_torchrun(alone):
    program = WAITS.replace('print("ready", flush=True)', "")
    soon = "command_line._SOON, command_line._LONG_STEP = 0.05, 0.1"
    program = program.replace("step = 0", f"import command_line\n{soon}")
    worker = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "0"}
    assert stopped(program % STUCK, signal.SIGTERM, **worker) == (143, "terminated at step 7\n")


def test_a_signal_that_is_ignored_stays_ignored(alone):
    program = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)" + WAITS
    ended = stopped(program % "time.sleep(0.2)", signal.SIGINT)
    assert ended == (0, "")


@pytest.mark.parametrize("kind", ["ValueError", "RuntimeError"])
def test_an_error_of_one_process_is_shown(kind, monkeypatch, alone):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    for rank in "01":
        monkeypatch.setenv("LOCAL_RANK", rank)
        command = [sys.executable, "-c", FAILS % (0.1, kind)]
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode == 1 and ended.stderr.endswith("rror: too long\n")
        assert ("Traceback" in ended.stderr) == (kind == "RuntimeError")


@pytest.mark.parametrize(("rank", "kind"), [("1", "ValueError"), ("0", "RuntimeError")])
def test_another_process_speaks(rank, kind, monkeypatch, alone):
    """What torchrun ends because of another says nothing; here it would only after hours."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("LOCAL_RANK", rank)
    program = FAILS % (9999.0, kind)
    program = program.replace("with command_line", READY + "with command_line")
    assert stopped(program, signal.SIGTERM) == (-signal.SIGTERM, "")


@pytest.fixture
def same_signals():
    """What Ctrl-C does to pytest itself."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("same_signals")
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help(option, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "configs/quickstart.yaml", option])
    with pytest.raises(SystemExit) as ended:
        help_if_asked("Train a GPT.")
    assert ended.value.code == 0 and capsys.readouterr().out == "Train a GPT.\n"


@pytest.mark.usefixtures("same_signals")
def test_no_help(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "configs/quickstart.yaml", "run.out_dir=--help"])
    help_if_asked("Train a GPT.")
    assert capsys.readouterr().out == ""
