"""How a command ends when its user can mend what went wrong, stops it, or asks how to call it."""

import argparse
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_STOPPED = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
_received: list[int] = []
"""The signal that ends this process: what it raises, others may catch and raise anew."""
_PATIENCE = 3.0
"""Seconds within which torchrun ends the other processes of a machine when one of them fails."""
_SOON, _LONG_STEP = 2.0, 10.0
"""Seconds after a signal in which it is told, and in which the process ends, though the main thread
waits; torchrun kills after 30."""
_advice: list[Callable[[], str]] = []
"""Of the blocks of `if_interrupted` that run, the innermost last."""
_told: list[int] = []
"""The signal that was told while the main thread waited."""


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Print an error of the user's input, data or disk alone, without a stack trace, and exit 1.

    ValueError, OSError and FloatingPointError are raised for those throughout; any other exception
    is a defect and keeps its trace. `python -X dev` keeps all of them. SIGINT (Ctrl-C) and SIGTERM
    are a sentence, too, to which `if_interrupted` adds, and exit 130 and 143. Of the processes that
    torchrun started on a machine, the first speaks, and another only if that one does not.
    """
    with _signals_raised():
        try:
            yield
            sys.stdout.flush()
        except BaseException as error:
            if _is_stop(error):
                _end_stopped(error)
            if isinstance(error, SystemExit):  # argparse has printed its help, perhaps
                _flush_if_read()
                raise
            if isinstance(error, BrokenPipeError) and _nobody_reads():
                _end_unread(error)
            is_sentence = isinstance(error, (ValueError, OSError, FloatingPointError))
            _let_another_speak(is_sentence)
            if sys.flags.dev_mode or not is_sentence:
                raise
            raise SystemExit(f"error: {error}") from error


@contextmanager
def if_interrupted(advice: Callable[[], str]) -> Iterator[None]:
    """Have `errors_as_sentences` say `advice()`, as it is then, where a signal ends the block.

    It follows the word "interrupted" or "terminated": ": the same command goes on from here".
    """
    _advice.append(advice)
    try:
        yield
    except BaseException as error:
        if _is_stop(error):
            error.add_note(advice())
        raise
    finally:
        _advice.pop()


@contextmanager
def _signals_raised() -> Iterator[None]:
    """Raise KeyboardInterrupt, with the signal, for SIGINT and SIGTERM.

    In all processes of torchrun alike: one that dies in the middle of a collective leaves the
    others waiting on the GPU, deaf to signals.
    """
    before = {number: signal.getsignal(number) for number in _STOPPED}
    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        before = {}
    # what nohup, say, told to ignore stays ignored
    before = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}

    def stop(number: int, _: object) -> NoReturn:
        # A second Ctrl-C ends whatever the first began; torchrun sends each signal on to those who
        # have got it already, and kills them if they take too long.
        for other in before:
            signal.signal(other, signal.SIG_DFL if _place() is None else signal.SIG_IGN)
        _received.append(number)
        raise KeyboardInterrupt

    for number in before:
        signal.signal(number, stop)
    if before and _place() is not None:
        _end_when_stuck()
    try:
        yield
    finally:
        if not _received:  # else this process ends
            for number, handler in before.items():
                signal.signal(number, handler)


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
        time.sleep(_SOON)
        if not _received:
            _told.append(number)
            _tell(number, [advice() for advice in reversed(_advice)])
        time.sleep(_LONG_STEP - _SOON)
        if not _received:
            os._exit(128 + number)

    threading.Thread(target=watch, daemon=True).start()


def _is_stop(error: BaseException) -> bool:
    """Whether a signal ends the command, by this error or by what became of it on its way."""
    return isinstance(error, KeyboardInterrupt) or bool(_received)


def _end_stopped(error: BaseException) -> NoReturn:
    number = _received[0] if _received else signal.SIGINT
    if not _told:
        _tell(number, getattr(error, "__notes__", ()))
    if sys.flags.dev_mode:
        raise error
    raise SystemExit(128 + number) from error


def _tell(number: int, notes: Iterable[str]) -> None:
    if _place() in (None, 0):
        print("".join([_STOPPED[signal.Signals(number)], *notes]), file=sys.stderr, flush=True)


def _place() -> int | None:
    """Which of torchrun's processes on this machine this is; None if torchrun did not start it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return int(os.environ["LOCAL_RANK"])


def _let_another_speak(is_sentence: bool) -> None:
    """Wait to be ended by torchrun, as it does when another process fails.

    The first waits with what is no sentence only: that may be the echo of another's end, as a
    connection that is closed.
    """
    if (place := _place()) is not None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_PATIENCE if place else 0 if is_sentence else _PATIENCE / 3)


def _flush_if_read() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError as error:
        _end_unread(error)


def _end_unread(error: BrokenPipeError) -> NoReturn:
    """End because nobody reads what we print any more: `head` has seen enough, say."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(128 + signal.SIGPIPE) from error  # as SIGPIPE ends other commands


def _nobody_reads() -> bool:
    """Whether what we print goes into a pipe that nobody reads from any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def command_parser(text: str | None, module: ModuleSpec | None) -> argparse.ArgumentParser:
    """A parser whose help begins with `text`, the docstring of a command's module.

    Its name comes from the module's `__spec__`, which is None where a file is run.
    """
    name = None if module is None else f"python -m {module.name.removesuffix('.__main__')}"
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=name, description=text, formatter_class=raw)


def read_first(options: Callable[P, T]) -> Callable[P, T]:
    """Call `options` at once if its module is the command that runs.

    So help and a wrong option need not wait for what is imported below it: PyTorch takes seconds.
    """
    if options.__module__ == "__main__":
        end_at_once_on_ctrl_c()
        with errors_as_sentences():
            options()  # pyright: ignore[reportCallIssue]
    return options


def help_if_asked(text: str | None) -> None:
    """Print `text` and exit where -h or --help is an argument; argparse does so by itself."""
    end_at_once_on_ctrl_c()
    if not {"-h", "--help"}.isdisjoint(sys.argv[1:]):
        with errors_as_sentences():
            print(text)
            raise SystemExit(0)


def end_at_once_on_ctrl_c() -> None:
    """Without a trace of what is being imported, until `errors_as_sentences` has something to say.

    Not where SIGINT is ignored, as nohup's shell does for what runs behind it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
