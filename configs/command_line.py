"""How a command ends when its user can mend what went wrong, or wants to know how to call it."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Print an error of the user's input, data or disk alone, without a stack trace, and exit 1.

    ValueError, OSError and FloatingPointError are raised for those throughout; any other exception
    is a defect and keeps its trace. `python -X dev` keeps all of them.
    """
    try:
        yield
    except BrokenPipeError as error:  # whoever reads what we print has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + 13) from error  # as SIGPIPE ends other commands
    except (ValueError, OSError, FloatingPointError) as error:
        if sys.flags.dev_mode:
            raise
        raise SystemExit(f"error: {error}") from error


def help_if_asked(text: str | None) -> None:
    """Print `text` and exit where -h or --help is an argument; argparse does so by itself."""
    if not {"-h", "--help"}.isdisjoint(sys.argv[1:]):
        print(text)
        raise SystemExit(0)
