"""Remember which files passed their check; repeat it only if their size or mtime changes."""

import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread

from data.files import parse_json, read_text, write_atomically

VERIFIED = ".verified.json"
"""File in the checked folder that records what passed; it can be deleted at any time."""


class Verified:
    """Record of the checks that files of a folder passed; kept in the folder if it is writable."""

    def __init__(self, folder: Path) -> None:
        """Read the record of earlier checks."""
        self._path = folder / VERIFIED
        self._stamps: dict[str, object] = {}
        with suppress(OSError, ValueError):  # without a record, every file is checked again
            record = parse_json(read_text(self._path))
            # Keep valid stamps only: the file may link to private data, which must not be copied.
            stamps = record.items() if isinstance(record, dict) else ()
            self._stamps = {name: stamp for name, stamp in stamps if _is_stamp(stamp)}

    def check_once(self, files: Sequence[Path], sha256: str, check: Callable[[], None]) -> None:
        """Call `check`, which raises if the files are damaged, unless they passed it before.

        The manifest says that the first file has this sha256; the others belong to that file.
        """
        states = [path.stat() for path in files]
        stamp = [sha256, *([state.st_size, state.st_mtime_ns] for state in states)]
        if self._stamps.get(files[0].name) == stamp:
            return
        check()
        self._stamps[files[0].name] = stamp
        with suppress(OSError):  # a read-only folder is checked again next time
            write_atomically(self._path, (json.dumps(self._stamps) + "\n").encode())


def _is_stamp(stamp: object) -> bool:
    """Whether a value is a list of a sha256, then a (size, mtime) pair for each file."""
    if not isinstance(stamp, list) or not stamp or not isinstance(stamp[0], str):
        return False
    pairs = [pair for pair in stamp[1:] if isinstance(pair, list)]
    numbers = all(type(number) is int for pair in pairs for number in pair)
    return len(pairs) == len(stamp) - 1 and numbers and bool(re.fullmatch(r"\w{1,64}", stamp[0]))


class BackgroundTask:
    """Background thread for work that reads files; `raise_if_failed` and `wait` raise its error."""

    def __init__(self, work: Callable[[], object]) -> None:
        """Start the work."""
        self._outcome: Future[object] = Future()
        # a daemon thread: unlike an executor's, it does not keep the process alive
        Thread(target=self._run, args=(work,), daemon=True).start()

    def raise_if_failed(self) -> None:
        """Raise the error of the work, if it has failed by now; does not wait."""
        if self._outcome.done():
            self._outcome.result()

    def wait(self) -> None:
        """Wait until the work is done, and raise its error if it failed."""
        self._outcome.result()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            self._outcome.set_result(work())
        except Exception as error:  # noqa: BLE001 any error must reach `raise_if_failed` and `wait`
            self._outcome.set_exception(error)
