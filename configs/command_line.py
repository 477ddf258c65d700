"""How a command ends when its user can mend what went wrong."""

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
    except (ValueError, OSError, FloatingPointError) as error:
        if sys.flags.dev_mode:
            raise
        raise SystemExit(f"error: {error}") from error
