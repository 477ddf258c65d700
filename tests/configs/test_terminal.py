"""A stream whose terminal is closed, in a process of its own: it closes stdout."""

import os
import subprocess
import sys

CLOSED = """
import os, sys
from configs.terminal import TerminalStream
stream = TerminalStream(sys.stdout)
print("shown", file=stream, flush=True)
sys.stdin.read(1)
print("lost", file=stream, flush=True)
stream.flush()
sys.stderr.write(f"goes on, {os.readlink('/proc/self/fd/1')}")
"""


def test_a_closed_terminal_is_left():
    ours, theirs = os.openpty()
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", CLOSED], stdout=theirs, **pipes) as process:
        os.close(theirs)
        assert os.read(ours, 100).split() == [b"shown"]
        os.close(ours)
        _, said = process.communicate(b"x", timeout=60)
    assert (process.returncode, said) == (0, b"goes on, /dev/null")


def test_other_errors_are_raised():
    program = CLOSED.replace("sys.stdout)", "open('/dev/full', 'w'))")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, input=b"x")
    assert done.returncode == 1 and b"No space left on device" in done.stderr
