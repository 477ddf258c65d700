"""Files that are checked once: again only when their size or time of change is another."""

import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread

from data.files import parse_json, read_text, write_atomically

VERIFIED = ".verified.json"
"""File beside the checked ones that remembers them; it may be deleted at any time."""


class Verified:
    """What was found right in a folder before, as far as that could be written down there."""

    def __init__(self, folder: Path) -> None:
        """Read what is known."""
        self._path = folder / VERIFIED
        self._stamps: dict[str, object] = {}
        with suppress(OSError, ValueError):  # then all is checked anew
            known = parse_json(read_text(self._path))
            # what is not a stamp is not written again: the file may be a link to something private
            stamps = known.items() if isinstance(known, dict) else ()
            self._stamps = {name: stamp for name, stamp in stamps if _is_stamp(stamp)}

    def once(self, files: Sequence[Path], sha256: str, check: Callable[[], None]) -> None:
        """Call `check`, which raises where the files are not right, unless it passed before.

        The first file has this sha256, by the manifest; the others belong to it.
        """
        states = [path.stat() for path in files]
        stamp = [sha256, *([state.st_size, state.st_mtime_ns] for state in states)]
        if self._stamps.get(files[0].name) == stamp:
            return
        check()
        self._stamps[files[0].name] = stamp
        with suppress(OSError):  # a folder that others wrote: it is checked again next time
            write_atomically(self._path, (json.dumps(self._stamps) + "\n").encode())


def _is_stamp(stamp: object) -> bool:
    """Whether it is a sha256, and a size and a time for each file."""
    if not isinstance(stamp, list) or not stamp or not isinstance(stamp[0], str):
        return False
    pairs = [pair for pair in stamp[1:] if isinstance(pair, list)]
    numbers = all(type(number) is int for pair in pairs for number in pair)
    return len(pairs) == len(stamp) - 1 and numbers and bool(re.fullmatch(r"\w{1,64}", stamp[0]))


class InBackground:
    """Work that reads files while something else goes on; its error is raised to who asks."""

    def __init__(self, work: Callable[[], object]) -> None:
        """Begin it."""
        self._outcome: Future[object] = Future()
        # one that a command need not wait for to end, as it would for those of an executor
        Thread(target=self._run, args=(work,), daemon=True).start()

    def look(self) -> None:
        """Raise what has gone wrong so far."""
        if self._outcome.done():
            self._outcome.result()

    def wait(self) -> None:
        """Wait for the end of the work, and raise what went wrong."""
        self._outcome.result()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            self._outcome.set_result(work())
        except Exception as error:  # noqa: BLE001 whatever it is, who asks must not think all is well
            self._outcome.set_exception(error)
