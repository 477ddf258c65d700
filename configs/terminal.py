"""A terminal that is closed while a command runs: its output is lost, and nothing else."""

import errno
import os
import termios
from typing import Any, TextIO


def leave_closed_terminals() -> bool:
    """Send stdout and stderr to nowhere where their terminal was closed; whether one was.

    Any write to it would raise an error, in the middle of what is to be saved.
    """
    closed = [number for number in (1, 2) if _is_closed_terminal(number)]
    if closed:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in closed:
            os.dup2(nowhere, number)
        os.close(nowhere)
    return bool(closed)


class TerminalStream:
    """A text stream that survives the end of its terminal; otherwise it is `stream`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, or nothing where the terminal was closed."""
        try:
            return self._stream.write(text)
        except OSError as error:
            if error.errno != errno.EIO or not leave_closed_terminals():
                raise
            return len(text)

    def flush(self) -> None:
        """Write what is buffered, or nothing where the terminal was closed."""
        try:
            self._stream.flush()
        except OSError as error:
            if error.errno != errno.EIO or not leave_closed_terminals():
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _is_closed_terminal(number: int) -> bool:
    try:
        termios.tcgetattr(number)
    except termios.error as error:  # ENOTTY: a file or a pipe
        return error.args[0] == errno.EIO
    return False
