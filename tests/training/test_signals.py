"""Exit status and message of a command stopped by a signal, run as a subprocess."""

import os
import signal
import subprocess
import sys
from textwrap import indent

import pytest

from tests.training.programs import stopped

WAITS = """
import sys, time
from training.command_line import user_errors_as_messages
from training.signals import on_interrupt
step = 0
with user_errors_as_messages(), on_interrupt(lambda: f" at step {step}"):
    step = 7
    %s
"""
SLEEPS = """
    print("ready", flush=True)
    while True:
        time.sleep(0.01)  # short: a signal just before a sleep is handled only after it
"""
STUCK = """
    import ctypes, threading
    lock = ctypes.CDLL(None).pthread_mutex_lock  # not interrupted by signals; here it deadlocks
    mutex = ctypes.create_string_buffer(64)
    lock(mutex)
    threading.Timer(0.5, print, ["ready"], {"flush": True}).start()
    lock(mutex)
"""
SWALLOWS = """
    print("ready", flush=True)
    try:
        while True:
            time.sleep(0.01)
    except BaseException:
        raise RuntimeError("a library's own")
"""
IGNORES = """
    class Slow:
        def __del__(self):
            print("ready", flush=True)
            time.sleep(60)  # what is raised here is ignored
    Slow()
    while True:
        time.sleep(0.01)
"""
CLEANS = f"""
    try:
{indent(IGNORES, "    ")}
    finally:
        print("cleaning", flush=True)
        time.sleep(0.3)
        sys.stderr.write("cleaned, ")
"""
NOTES = """
import sys, time
from training import signals
from training.command_line import user_errors_as_messages
from training.signals import stop_by_signal, on_interrupt, deferred_signals
signals._ECHO = 0.3
saved = False
with (
    user_errors_as_messages(),
    on_interrupt(lambda: " where all is saved", is_saved=lambda: saved),
    deferred_signals() as noted,
):
    print("ready", flush=True)
    while noted() is None:
        time.sleep(0.01)
    print("noted", flush=True)
    time.sleep(%f)
    saved = %r
    stop_by_signal(noted())
"""
CLOSED = """
import os, sys
from training.signals import TerminalStream
stream = TerminalStream(sys.stdout)
print("shown", file=stream, flush=True)
sys.stdin.read(1)
print("lost", file=stream, flush=True)
stream.flush()
sys.stderr.write(f"still running, {os.readlink('/proc/self/fd/1')}")
"""


@pytest.mark.parametrize("until", [SLEEPS, SWALLOWS, IGNORES])
def test_a_signal_prints_one_sentence(until):
    assert stopped(WAITS % until, signal.SIGINT) == (130, "interrupted at step 7\n")
    assert stopped(WAITS % until, signal.SIGTERM) == (143, "terminated at step 7\n")


def test_signals_under_torchrun():
    """The first process prints one message, although the terminal and torchrun both signal it."""
    first, second = ({"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": rank} for rank in "01")
    twice = signal.SIGINT, signal.SIGINT
    assert stopped(WAITS % SLEEPS, *twice, **first) == (130, "interrupted at step 7\n")
    assert stopped(WAITS % SLEEPS, *twice, **second) == (130, "")
    assert stopped(WAITS % SLEEPS, signal.SIGTERM, **first) == (143, "terminated at step 7\n")
    assert stopped(WAITS % IGNORES, *twice, **first) == (130, "interrupted at step 7\n")
    assert stopped(WAITS % SLEEPS, signal.SIGTERM, **second) == (143, "")


def test_a_signal_that_is_raised_again_is_not_raised_in_the_cleanup():
    """torchrun forwards it late, to a process that saves or ends its process group."""
    worker = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "0"}
    late = signal.SIGTERM, "cleaning", signal.SIGTERM
    expected = (143, "cleaned, terminated at step 7\n")
    assert stopped(WAITS % CLEANS, *late, **worker) == expected


def test_a_stuck_process_ends_under_torchrun():
    soon = "signals._MESSAGE_S, signals._EXIT_S = 0.05, 0.1"
    program = WAITS.replace("step = 0", f"from training import signals\n{soon}")
    worker = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "0"}
    assert stopped(program % STUCK, signal.SIGTERM, **worker) == (143, "terminated at step 7\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])  # as by `&` and by nohup
def test_an_ignored_signal_stays_ignored(number):
    program = f"import signal; signal.signal({int(number)}, signal.SIG_IGN)" + WAITS
    ended = stopped(program % 'print("ready", flush=True); time.sleep(0.2)', number)
    assert ended == (0, "")


def test_torchrun_under_nohup_handles_sighup():
    """torchrun forwards SIGHUP even under nohup, to processes that inherited ignoring it."""
    program = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)" + WAITS % SLEEPS
    worker = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "0"}
    assert stopped(program, signal.SIGHUP, **worker) == (129, "hung up at step 7\n")


@pytest.mark.parametrize(
    ("number", "status", "word"),
    [
        (signal.SIGTERM, 0, "terminated"),
        (signal.SIGUSR1, 0, "stopped by SIGUSR1"),
        (signal.SIGHUP, 0, "hung up"),
        (signal.SIGINT, 130, "interrupted"),
    ],
)
def test_deferred_signals_end_the_process_after_its_save(number, status, word):
    program = NOTES % (0.1, True)
    assert stopped(program, number) == (status, f"{word} where all is saved\n")
    not_saved = stopped(NOTES % (0.1, False), number)
    assert not_saved == (128 + number, f"{word} where all is saved\n")


def test_later_signals_do_not_interrupt_the_save():
    again = signal.SIGUSR1, "noted", signal.SIGTERM, signal.SIGUSR1
    assert stopped(NOTES % (0.2, True), *again) == (0, "stopped by SIGUSR1 where all is saved\n")


def test_a_second_ctrl_c_exits_at_once():
    for first in (signal.SIGINT, signal.SIGTERM):
        twice = first, "noted", signal.SIGINT
        assert stopped(NOTES % (60, True), *twice) == (130, "")
    # torchrun forwards the signal at once, which is not a second Ctrl-C
    worker = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "0"}
    twice = signal.SIGINT, "noted", signal.SIGINT
    assert stopped(NOTES % (0.2, True), *twice, **worker)[0] == 130
    later = signal.SIGINT, "noted", 0.4, signal.SIGINT
    assert stopped(NOTES % (60, True), *later, **worker) == (130, "")


def test_output_to_a_closed_terminal_is_dropped():
    ours, theirs = os.openpty()
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", CLOSED], stdout=theirs, **pipes) as process:
        os.close(theirs)
        assert os.read(ours, 100).split() == [b"shown"]
        os.close(ours)
        _, said = process.communicate(b"x", timeout=60)
    assert (process.returncode, said) == (0, b"still running, /dev/null")


def test_other_write_errors_are_raised():
    program = CLOSED.replace("sys.stdout)", "open('/dev/full', 'w'))")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, input=b"x")
    assert done.returncode == 1 and b"No space left on device" in done.stderr
