"""Errors of the tokenizers library as errors of the file that it was given."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def tokenizer_errors(name: str | None = None, *, requirement: str | None = None) -> Iterator[None]:
    """Raise ValueError for what the tokenizers library raises in the block.

    It raises ValueError and bare Exceptions. Its panics, which pyo3 raises as a BaseException of a
    class that cannot be imported, are defects of the library that a malformed file reaches.

    Args:
        name: the tokenizer's.
        requirement: the beginning of the message, instead of the name.
    """
    try:
        yield
    except BaseException as error:
        kind = type(error)
        is_panic = kind.__name__ == "PanicException"
        if not (is_panic or kind in (Exception, ValueError)):
            raise
        reason = " ".join(str(error).split())
        if is_panic:
            reason = f"the tokenizers library panics: {reason}"
        subject = requirement or f"Tokenizer {name!r} cannot be used; choose another tokenizer.json"
        raise ValueError(f"{subject} ({reason}).") from error


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Drop what native code of the block writes to stderr: a panic prints its own stack trace."""
    try:
        saved = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
