"""Command-line helpers: errors without a stack trace, Ctrl-C, closed pipes, --help."""

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

from training.signals import exit_stopped, is_stop, launched_rank, raise_on_signals

P = ParamSpec("P")
T = TypeVar("T")

_USER_ERRORS = (ValueError, OSError, FloatingPointError, MemoryError)
_TORCHRUN_GRACE_S = 3.0
"""Seconds that torchrun takes to end the other processes of a machine when one fails."""


@contextmanager
def user_errors_as_messages() -> Iterator[None]:
    """Print a user error as one line without a stack trace, and exit with status 1.

    Throughout the project ValueError, OSError, FloatingPointError and MemoryError mean a problem
    with the user's input, data or disk. Any other exception is a bug and keeps its trace.
    `python -X dev` keeps all traces. SIGINT (Ctrl-C), SIGTERM, SIGHUP and SIGUSR1 also print one
    line, which `on_interrupt` extends, and exit with 130, 143, 129 and 138, or 0. Under torchrun
    the first process of a machine prints; another does so only if the first does not.
    """
    with raise_on_signals():
        try:
            yield
            sys.stdout.flush()
        except BaseException as error:
            if is_stop(error):
                exit_stopped(error)
            if isinstance(error, SystemExit):  # argparse may have printed its help
                _flush_stdout()
                raise
            if isinstance(error, BrokenPipeError) and _reader_is_gone():
                _exit_broken_pipe(error)
            is_user_error = isinstance(error, _USER_ERRORS)
            _wait_for_torchrun(is_user_error)
            if sys.flags.dev_mode or not is_user_error:
                raise
            raise SystemExit(f"error: {_message(error)}") from error


def _message(error: BaseException) -> str:
    if isinstance(error, MemoryError):  # usually has no message
        return f"not enough memory ({error})" if str(error) else "not enough memory"
    return str(error)


def _wait_for_torchrun(is_user_error: bool) -> None:
    """Give torchrun time to end this process because another one failed first.

    The first process waits only before a stack trace: that error may be a consequence of the other
    failure, such as a closed connection.
    """
    if (rank := launched_rank()) is not None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_TORCHRUN_GRACE_S if rank else 0 if is_user_error else _TORCHRUN_GRACE_S / 3)


def _flush_stdout() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError as error:
        _exit_broken_pipe(error)


def _exit_broken_pipe(error: BrokenPipeError) -> NoReturn:
    """Exit because the reader of stdout has gone, for example `head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(
        128 + signal.SIGPIPE
    ) from error  # the status of other commands that SIGPIPE ends


def _reader_is_gone() -> bool:
    """Whether stdout is a pipe whose reader has gone."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def command_parser(text: str | None, module: ModuleSpec | None) -> argparse.ArgumentParser:
    """Argument parser whose help begins with `text`, the docstring of a command's module.

    The program name comes from the module's `__spec__`, which is None if a file is run directly.
    """
    name = None if module is None else f"python -m {module.name.removesuffix('.__main__')}"
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=name, description=text, formatter_class=raw)


def add_checkpoint_option(parser: argparse.ArgumentParser) -> None:
    """Add the --checkpoint option; its value is an argument of `find_checkpoint`."""
    parser.add_argument(
        "--checkpoint",
        metavar="best|STEP|FOLDER",
        help="best (lowest validation loss), a step, or the folder of a checkpoint (default: the "
        "newest checkpoint)",
    )


def parse_before_imports(options: Callable[P, T]) -> Callable[P, T]:
    """Decorator: call `options` immediately if its module is the command being run.

    Help and a wrong option then do not wait for the imports below it: PyTorch takes seconds.
    """
    if options.__module__ == "__main__":
        exit_on_ctrl_c()
        with user_errors_as_messages():
            options()  # pyright: ignore[reportCallIssue]
    return options


def handle_help(text: str | None) -> None:
    """Print `text` and exit if -h or --help is given, for commands without argparse."""
    exit_on_ctrl_c()
    if not {"-h", "--help"}.isdisjoint(sys.argv[1:]):
        with user_errors_as_messages():
            print(text)
            raise SystemExit(0)


def exit_on_ctrl_c() -> None:
    """Let Ctrl-C exit without a stack trace during imports.

    `user_errors_as_messages` takes over after them.

    An ignored SIGINT stays ignored: shells ignore it for background commands.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
