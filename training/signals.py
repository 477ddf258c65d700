"""Stop a command by a signal, at once or at a safe point, with a one-line message."""

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

_MESSAGES = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "hung up",  # the terminal was closed, or its ssh connection lost
    signal.SIGUSR1: "stopped by SIGUSR1",  # Slurm: --signal=USR1@SECONDS before a time limit
}
_received: list[int] = []
"""Signal that ends this process. Recorded because libraries may replace the error it raised."""
_deferred: list[tuple[int, float]] | None = None
"""First deferred signal and its time, while signals are deferred; None while they are raised."""
_MESSAGE_S, _EXIT_S, _EXIT_DEFERRED_S = 2.0, 10.0, 25.0
"""Seconds after a signal at which a stuck process prints its message, and at which it exits. The
last one applies to both while signals are deferred, as a step takes its time; torchrun kills after
30 seconds."""
_ECHO = 2.0
"""Seconds within which torchrun forwards a signal to processes that already received it."""
_AGAIN_S = 0.01
"""Seconds until the error of a signal is raised again where Python ignored it."""
_advice: list[Callable[[], str]] = []
"""Advice of the active `on_interrupt` blocks, the innermost last."""
_printed: list[int] = []
"""Signal whose message was printed while the main thread was stuck."""
_saved: list[bool] = []
"""Not empty if all work of the command is saved."""


@contextmanager
def on_interrupt(
    advice: Callable[[], str], *, is_saved: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Add `advice()` to the message of `user_errors_as_messages` if a signal ends this block.

    The text is evaluated at that time, and follows the word "interrupted" or "terminated", as in
    ": the same command resumes from here". If `is_saved()`, nothing is lost: the command exits with
    status 0, except after Ctrl-C.
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
def raise_on_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGINT, SIGTERM, SIGHUP and SIGUSR1, and record the signal.

    All processes of torchrun do the same. If one of them simply died in the middle of a collective,
    the others would wait on the GPU and ignore signals.
    """
    before = {number: signal.getsignal(number) for number in _MESSAGES}
    if threading.current_thread() is not threading.main_thread():  # only it may set handlers
        before = {}
    # Ignored signals stay ignored, for example SIGHUP under nohup. The exception is torchrun: it
    # handles SIGHUP even there, forwards it and kills its processes 30 seconds later.
    handled = {signal.SIGHUP} if launched_rank() is not None else set()
    before = {
        number: handler
        for number, handler in before.items()
        if handler != signal.SIG_IGN or number in handled
    }

    def stop(number: int, _: object) -> None:
        if number == signal.SIGHUP:
            redirect_closed_terminals()
        if _deferred:  # the second signal
            if launched_rank() is None or time.monotonic() - _deferred[0][1] > _ECHO:
                os._exit(128 + number)
            return
        if _deferred is not None:
            _deferred.append((number, time.monotonic()))
            for other in before:  # later signals must wait, except a second Ctrl-C
                if other != signal.SIGINT:
                    signal.signal(other, signal.SIG_IGN)
            return
        # A second Ctrl-C kills the process during cleanup. Under torchrun, further signals are
        # ignored: it forwards each to processes that already received it, and kills slow ones.
        for other in before:
            signal.signal(other, signal.SIG_DFL if launched_rank() is None else signal.SIG_IGN)
        stop_by_signal(number)

    hook = sys.unraisablehook

    def raise_again(ignored: "sys.UnraisableHookArgs") -> None:
        """Raise the error of a signal later if Python ignores it, as in a destructor."""
        if not (_received and isinstance(ignored.exc_value, KeyboardInterrupt)):
            return hook(ignored)
        number = _received[0]
        # By SIGALRM: the others are now fatal, or ignored as torchrun may forward them any time.
        signal.signal(signal.SIGALRM, lambda *_: stop_by_signal(number))
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)

    for number in before:
        signal.signal(number, stop)
    sys.unraisablehook = raise_again
    if before and launched_rank() is not None:
        _start_stuck_watchdog()
    try:
        yield
    finally:
        if not _received:  # otherwise this process is about to exit
            for number, handler in before.items():
                signal.signal(number, handler)
            sys.unraisablehook = hook


@contextmanager
def deferred_signals() -> Iterator[Callable[[], int | None]]:
    """Defer signals within this context, for a block that polls for them itself.

    Yields a function that returns the first signal, or None if there was none. A second Ctrl-C ends
    the process at once.
    """
    global _deferred
    deferred: list[tuple[int, float]] = []
    _deferred = deferred
    try:
        yield lambda: deferred[0][0] if deferred else None
    finally:
        _deferred = None


def stop_by_signal(number: int) -> NoReturn:
    """End the command as if this signal had just arrived."""
    _received.append(number)
    raise KeyboardInterrupt


def is_stop(error: BaseException) -> bool:
    """Whether a signal ends the command, even if a library has replaced its KeyboardInterrupt."""
    return isinstance(error, KeyboardInterrupt) or bool(_received)


def exit_stopped(error: BaseException) -> NoReturn:
    """Print the message of the signal that ended the command, and exit."""
    number = _received[0] if _received else signal.SIGINT
    if not _printed:
        _print_message(number, getattr(error, "__notes__", ()))
    if sys.flags.dev_mode:
        raise error
    raise SystemExit(0 if _saved and number != signal.SIGINT else 128 + number) from error


def launched_rank() -> int | None:
    """Local rank of this process under torchrun; None if torchrun did not start it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return int(os.environ["LOCAL_RANK"])


def _start_stuck_watchdog() -> None:
    """Start a thread that ends the process if a signal arrives and its handler never runs.

    Python runs handlers between two instructions of the main thread, which may be stuck in NCCL,
    waiting forever for a process that has ended.
    """
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes)

    def watch() -> None:
        while (number := os.read(reads, 1)[0]) not in _MESSAGES:
            pass
        deferring = _deferred is not None
        time.sleep(_EXIT_DEFERRED_S if deferring else _MESSAGE_S)
        if not (_received or _deferred):
            _printed.append(number)
            _print_message(number, [advice() for advice in reversed(_advice)])
        time.sleep(0 if deferring else _EXIT_S - _MESSAGE_S)
        if not (_received or _deferred):
            os._exit(128 + number)

    threading.Thread(target=watch, daemon=True).start()


def _print_message(number: int, notes: Iterable[str]) -> None:
    if launched_rank() in (None, 0):
        sys.stderr.write("".join([_MESSAGES[signal.Signals(number)], *notes, "\n"]))
        sys.stderr.flush()


def redirect_closed_terminals() -> bool:
    """Redirect output of a closed terminal to /dev/null; returns whether one was closed.

    Otherwise any write to it would raise an error, possibly while a checkpoint is being saved.
    """
    closed = [number for number in (1, 2) if _is_closed_terminal(number)]
    if closed:
        devnull = os.open(os.devnull, os.O_WRONLY)
        for number in closed:
            os.dup2(devnull, number)
        os.close(devnull)
    return bool(closed)


class TerminalStream:
    """Text stream that wraps `stream` and drops output once its terminal was closed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, or nothing if the terminal was closed."""
        try:
            return self._stream.write(text)
        except OSError as error:
            if error.errno != errno.EIO or not redirect_closed_terminals():
                raise
            return len(text)

    def flush(self) -> None:
        """Flush buffered text, or nothing if the terminal was closed."""
        try:
            self._stream.flush()
        except OSError as error:
            if error.errno != errno.EIO or not redirect_closed_terminals():
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _is_closed_terminal(number: int) -> bool:
    try:
        termios.tcgetattr(number)
    except termios.error as error:  # ENOTTY: a file or a pipe
        return error.args[0] == errno.EIO
    return False
