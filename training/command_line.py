"""How a command ends when its user can mend what went wrong, stops it, or asks how to call it."""

import argparse
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import NoReturn, ParamSpec, TypeVar

from training.signals import end_stopped, is_stop, place, signals_raised

P = ParamSpec("P")
T = TypeVar("T")

_SENTENCES = (ValueError, OSError, FloatingPointError, MemoryError)
_PATIENCE = 3.0
"""Seconds within which torchrun ends the other processes of a machine when one of them fails."""


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Print an error of the user's input, data or disk alone, without a stack trace, and exit 1.

    ValueError, OSError, FloatingPointError and MemoryError are raised for those throughout; any
    other exception is a defect and keeps its trace. `python -X dev` keeps all of them. SIGINT
    (Ctrl-C), SIGTERM, SIGHUP and SIGUSR1 are a sentence as well, to which `if_interrupted` adds,
    and exit 130, 143, 129 and 138, or 0. Of the processes that torchrun started on a machine, the
    first speaks, and another only if that one does not.
    """
    with signals_raised():
        try:
            yield
            sys.stdout.flush()
        except BaseException as error:
            if is_stop(error):
                end_stopped(error)
            if isinstance(error, SystemExit):  # argparse has printed its help, perhaps
                _flush_if_read()
                raise
            if isinstance(error, BrokenPipeError) and _nobody_reads():
                _end_unread(error)
            is_sentence = isinstance(error, _SENTENCES)
            _let_another_speak(is_sentence)
            if sys.flags.dev_mode or not is_sentence:
                raise
            raise SystemExit(f"error: {_sentence(error)}") from error


def _sentence(error: BaseException) -> str:
    if isinstance(error, MemoryError):  # mostly without a word
        return f"not enough memory ({error})" if str(error) else "not enough memory"
    return str(error)


def _let_another_speak(is_sentence: bool) -> None:
    """Wait to be ended by torchrun, as it does when another process fails.

    The first waits with what is no sentence only: that may be the echo of another's end, as a
    connection that is closed.
    """
    if (rank := place()) is not None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_PATIENCE if rank else 0 if is_sentence else _PATIENCE / 3)


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


def add_checkpoint_option(parser: argparse.ArgumentParser) -> None:
    """Add --checkpoint, which `chosen_checkpoint` takes."""
    parser.add_argument(
        "--checkpoint",
        metavar="best|STEP|FOLDER",
        help="the one with the lowest validation loss, of a step, or in a folder (default: the "
        "newest)",
    )


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
