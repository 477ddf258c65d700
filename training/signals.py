"""How a signal stops a command: at once, or after what must not be torn, and in one sentence."""

import errno
import os
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TextIO

_STOPPED = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "hung up",  # the terminal was closed, or its ssh connection lost
    signal.SIGUSR1: "told to end",  # by Slurm, with --signal=USR1@SECONDS before a time limit
}
_received: list[int] = []
"""The signal that ends this process: what it raises, others may catch and raise anew."""
_noted: list[tuple[int, float]] | None = None
"""While stops are noted, the first signal and when it came; None while they are raised."""
_SOON, _LONG_STEP, _KILLED = 2.0, 10.0, 25.0
"""Seconds after a signal in which it is told, and in which the process ends, though the main thread
waits: the longer where stops are noted, as a step takes its time; torchrun kills after 30."""
_ECHO = 2.0
"""Seconds in which torchrun sends a signal on to those who have got it already."""
_advice: list[Callable[[], str]] = []
"""Of the blocks of `if_interrupted` that run, the innermost last."""
_told: list[int] = []
"""The signal that was told while the main thread waited."""
_saved: list[bool] = []
"""Not empty where all that the command did is saved."""


@contextmanager
def if_interrupted(
    advice: Callable[[], str], *, is_saved: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Have `errors_as_sentences` say `advice()`, as it is then, where a signal ends the block.

    It follows the word "interrupted" or "terminated": ": the same command goes on from here". Where
    `is_saved()`, the command was not asked in vain: it exits with 0, unless by Ctrl-C.
    """
    _advice.append(advice)
    try:
        yield
    except BaseException as error:
        if is_stop(error):
            error.add_note(advice())
            if is_saved():
                _saved.append(True)
        raise
    finally:
        _advice.pop()


@contextmanager
def signals_raised() -> Iterator[None]:
    """Raise KeyboardInterrupt, with the signal, for SIGINT, SIGTERM, SIGHUP and SIGUSR1.

    In all processes of torchrun alike: one that dies in the middle of a collective leaves the
    others waiting on the GPU, deaf to signals.
    """
    before = {number: signal.getsignal(number) for number in _STOPPED}
    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        before = {}
    # What is ignored stays ignored, for example SIGHUP under nohup. But torchrun handles SIGHUP
    # even there, sends it on and kills its processes 30 seconds later.
    handled = {signal.SIGHUP} if place() is not None else set()
    before = {
        number: handler
        for number, handler in before.items()
        if handler != signal.SIG_IGN or number in handled
    }

    def stop(number: int, _: object) -> None:
        if number == signal.SIGHUP:
            leave_closed_terminals()
        if _noted:  # a second one
            if place() is None or time.monotonic() - _noted[0][1] > _ECHO:
                os._exit(128 + number)
            return
        if _noted is not None:
            _noted.append((number, time.monotonic()))
            for other in before:  # who else asks must wait, but for a second Ctrl-C
                if other != signal.SIGINT:
                    signal.signal(other, signal.SIG_IGN)
            return
        # A second Ctrl-C ends whatever the first began; torchrun sends each signal on to those who
        # have got it already, and kills them if they take too long.
        for other in before:
            signal.signal(other, signal.SIG_DFL if place() is None else signal.SIG_IGN)
        end_by(number)

    for number in before:
        signal.signal(number, stop)
    if before and place() is not None:
        _end_when_stuck()
    try:
        yield
    finally:
        if not _received:  # else this process ends
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def stops_noted() -> Iterator[Callable[[], int | None]]:
    """Within it, signals are noted instead of raised, for a block that looks for them itself.

    Gives a function that tells of the first signal, None before there is one. A second Ctrl-C ends
    the process at once.
    """
    global _noted
    noted: list[tuple[int, float]] = []
    _noted = noted
    try:
        yield lambda: noted[0][0] if noted else None
    finally:
        _noted = None


def end_by(number: int) -> NoReturn:
    """End the command as by this signal."""
    _received.append(number)
    raise KeyboardInterrupt


def is_stop(error: BaseException) -> bool:
    """Whether a signal ends the command, by this error or by what became of it on its way."""
    return isinstance(error, KeyboardInterrupt) or bool(_received)


def end_stopped(error: BaseException) -> NoReturn:
    """Say by which signal the command ends, and exit."""
    number = _received[0] if _received else signal.SIGINT
    if not _told:
        _tell(number, getattr(error, "__notes__", ()))
    if sys.flags.dev_mode:
        raise error
    raise SystemExit(0 if _saved and number != signal.SIGINT else 128 + number) from error


def place() -> int | None:
    """Which of torchrun's processes on this machine this is; None if torchrun did not start it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return int(os.environ["LOCAL_RANK"])


def _end_when_stuck() -> None:
    """From now on, say so and end after a signal whose handler does not come to run.

    Python calls it between two steps of the main thread, which may wait in NCCL for ever, for a
    process that has ended.
    """
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes)

    def watch() -> None:
        while (number := os.read(reads, 1)[0]) not in _STOPPED:
            pass
        noting = _noted is not None
        time.sleep(_KILLED if noting else _SOON)
        if not (_received or _noted):
            _told.append(number)
            _tell(number, [advice() for advice in reversed(_advice)])
        time.sleep(0 if noting else _LONG_STEP - _SOON)
        if not (_received or _noted):
            os._exit(128 + number)

    threading.Thread(target=watch, daemon=True).start()


def _tell(number: int, notes: Iterable[str]) -> None:
    if place() in (None, 0):
        sys.stderr.write("".join([_STOPPED[signal.Signals(number)], *notes, "\n"]))
        sys.stderr.flush()


def leave_closed_terminals() -> bool:
    """Send stdout and stderr to nowhere where their terminal was closed; whether one was.

    Any write to it would raise an error, in the middle of what is to be saved.
    """
    closed = [number for number in (1, 2) if _is_closed_terminal(number)]
    if closed:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in closed:
            os.dup2(nowhere, number)
        os.close(nowhere)
    return bool(closed)


class TerminalStream:
    """A text stream that survives the end of its terminal; otherwise it is `stream`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, or nothing where the terminal was closed."""
        try:
            return self._stream.write(text)
        except OSError as error:
            if error.errno != errno.EIO or not leave_closed_terminals():
                raise
            return len(text)

    def flush(self) -> None:
        """Write what is buffered, or nothing where the terminal was closed."""
        try:
            self._stream.flush()
        except OSError as error:
            if error.errno != errno.EIO or not leave_closed_terminals():
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _is_closed_terminal(number: int) -> bool:
    try:
        termios.tcgetattr(number)
    except termios.error as error:  # ENOTTY: a file or a pipe
        return error.args[0] == errno.EIO
    return False
