"""Convert errors of the tokenizers library to errors about the file that it read."""

import mmap
import os
import threading
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_MAX_GROWTH = 1000
# Parts of a normalizer or decoder that are known to keep every character, except for its case, its
# accents and its Unicode form.
_KEEP_LETTERS = {"Sequence", "Replace", "Prepend", "Strip", "Fuse", "Lowercase", "StripAccents"}
_KEEP_LETTERS |= {"NFC", "NFD", "NFKC", "NFKD"}
_STDERR = threading.Lock()


@contextmanager
def tokenizer_errors(name: str | None = None, *, requirement: str | None = None) -> Iterator[None]:
    """Convert the tokenizers library's exceptions in the block to ValueError.

    The library raises ValueError and bare Exceptions. A malformed file can also make it panic.
    pyo3 raises a panic as a BaseException of a class that cannot be imported.

    Args:
        name: Name of the tokenizer.
        requirement: Beginning of the message, instead of the name.
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
    """Raise ValueError if a part of a tokenizer.json may make a text more than 1,000 times as long.

    Ten successive replacements of a letter by ten copies of itself would fill any memory.
    Replacements of different letters do not multiply, because each only applies to letters of the
    original text.
    """
    parts = list(_parts(spec))
    keep_letters = all(part["type"] in _KEEP_LETTERS for part in parts)
    largest, by_letter = 1, dict[str, int]()  # growth so far, overall and by replacement letter
    for part in parts:
        if part["type"] not in ("Replace", "Prepend"):
            continue
        content = part.get("content") or part.get("prepend") or ""
        pattern = part.get("pattern", {}).get("String")
        if pattern is None or not keep_letters:  # it may match anything
            before = largest
        else:
            before = max((by_letter.get(letter, 1) for letter in _letters(pattern)), default=1)
        growth = before * max(1, len(content))
        if growth > _MAX_GROWTH:
            raise ValueError(
                f"the {name} may make a text {growth:,} times as long, but at most {_MAX_GROWTH:,} "
                "is allowed; choose another tokenizer."
            )
        largest = max(largest, growth)
        by_letter |= {letter: max(growth, by_letter.get(letter, 1)) for letter in _letters(content)}


def _parts(spec: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer or decoder in the order of their application."""
    if isinstance(spec, list):
        for part in spec:
            yield from _parts(part)
    elif isinstance(spec, dict):
        if "type" in spec:
            yield spec
        for part in spec.values():
            yield from _parts(part)


def _letters(text: str) -> set[str]:
    """Set of characters of a text, ignoring accents, case and Unicode form."""
    return {*unicodedata.normalize("NFKD", text).casefold()}


def check_memory(n_bytes: int) -> None:
    """Check for the memory that the library will allocate; a failed allocation would abort.

    Raises:
        MemoryError: There is not enough, usually because of a limit (ulimit -v).
    """
    try:
        mmap.mmap(-1, n_bytes).close()  # reserves addresses only, no memory
    except OSError as error:
        raise MemoryError(
            f"tokenizing needs {n_bytes >> 20} MiB more: raise the limit, ulimit -v"
        ) from error


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Discard what native code in the block writes to stderr; a panic prints a stack trace there.

    Only one thread may enter at a time: a second one would save the silenced stderr as the original
    and restore that at the end.
    """
    with _STDERR:
        try:
            saved = os.dup(2)
        except OSError:  # stderr is closed
            yield
            return
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, 2)
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            os.close(null)
