"""How a command ends when its user can mend what went wrong, or wants to know how to call it."""

import argparse
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Print an error of the user's input, data or disk alone, without a stack trace, and exit 1.

    ValueError, OSError and FloatingPointError are raised for those throughout; any other exception
    is a defect and keeps its trace. `python -X dev` keeps all of them.
    """
    try:
        yield
        sys.stdout.flush()
    except (ValueError, OSError, FloatingPointError) as error:
        if sys.flags.dev_mode:
            raise
        if isinstance(error, BrokenPipeError) and _nobody_reads():  # `head` has seen enough, say
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(128 + 13) from error  # as SIGPIPE ends other commands
        raise SystemExit(f"error: {error}") from error


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
        options()  # pyright: ignore[reportCallIssue]
    return options


def help_if_asked(text: str | None) -> None:
    """Print `text` and exit where -h or --help is an argument; argparse does so by itself."""
    if not {"-h", "--help"}.isdisjoint(sys.argv[1:]):
        print(text)
        raise SystemExit(0)
