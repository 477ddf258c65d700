"""Errors of the tokenizers library as errors of the file that it was given."""

import mmap
import os
import threading
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MAX_GROWTH = 1000
# Parts of a normalizer or decoder of which it is known that they replace no character by another
# one, but for its case, its accents and its other forms in Unicode.
_KEEP_LETTERS = {"Sequence", "Replace", "Prepend", "Strip", "Fuse", "Lowercase", "StripAccents"}
_KEEP_LETTERS |= {"NFC", "NFD", "NFKC", "NFKD"}
_STDERR = threading.Lock()


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


def check_growth(spec: Any, name: str) -> None:
    """Refuse a part of a tokenizer.json that makes a text more than 1,000 times as long.

    Ten replacements of a letter by ten of it, one after the other, would fill any memory. Those of
    different letters do not add up: each replaces letters of the text alone.
    """
    parts = list(_parts(spec))
    keep_letters = all(part["type"] in _KEEP_LETTERS for part in parts)
    most, grown = 1, dict[str, int]()  # the growth so far, and by letter of the replacements
    for part in parts:
        if part["type"] not in ("Replace", "Prepend"):
            continue
        content = part.get("content") or part.get("prepend") or ""
        pattern = part.get("pattern", {}).get("String")
        if pattern is None or not keep_letters:  # it may match anything
            before = most
        else:
            before = max((grown.get(letter, 1) for letter in _letters(pattern)), default=1)
        growth = before * max(1, len(content))
        if growth > _MAX_GROWTH:
            raise ValueError(
                f"the {name} may make a text {growth:,} times as long, and at most {_MAX_GROWTH:,} "
                "is allowed; choose another tokenizer."
            )
        most = max(most, growth)
        grown |= {letter: max(growth, grown.get(letter, 1)) for letter in _letters(content)}


def _parts(spec: Any) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or decoder, in the order in which they are applied."""
    if isinstance(spec, list):
        for part in spec:
            yield from _parts(part)
    elif isinstance(spec, dict):
        if "type" in spec:
            yield spec
        for part in spec.values():
            yield from _parts(part)


def _letters(text: str) -> set[str]:
    """The characters of a text without accents, case and other differences of form."""
    return {*unicodedata.normalize("NFKD", text).casefold()}


def check_memory(n_bytes: int) -> None:
    """Look for room for what the library is to allocate: without it, it aborts the process.

    Raises:
        MemoryError: There is none, mostly because of a limit (ulimit -v).
    """
    try:
        mmap.mmap(-1, n_bytes).close()  # takes addresses alone, no memory
    except OSError as error:
        raise MemoryError(
            f"tokenizing needs {n_bytes >> 20} MiB more: raise the limit, ulimit -v"
        ) from error


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Drop what native code of the block writes to stderr: a panic prints its own stack trace.

    One thread at a time: a second one would save the silence as stderr, and restore it in the end.
    """
    with _STDERR:
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
