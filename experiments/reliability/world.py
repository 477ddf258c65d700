"""Tiny data and finished runs for fault tests, and the outcome of a command on them."""

import io
import json
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import train
from data.text.prepare import prepare
from data.text.sources import open_source
from evaluation.results import Row
from experiments.reliability.dots import CPU, make_config
from training.command_line import user_errors_as_messages
from training.metrics import read_metrics
from training.signals import is_stop

TIMES = ("tokens_per_s", "examples_per_s", "gpu_hours", "memory_gib", "wall_s")
FINE, SENTENCE, TRACEBACK, HANG = "fine", "sentence", "traceback", "hang"
TWO_MORE = ("optim.max_steps=10", "optim.schedule=constant", "optim.warmup_steps=0")
"""Settings for two more steps of the GPT."""
PATIENCE = 60
"""Time limit in seconds, for a command that takes one or two."""
MEMORY = 6 << 30
"""Address space that a command may take in addition to that of this process, bytes."""


class World:
    """A folder with data and finished runs to copy: `gpt` (8 steps) and `classifier` (24)."""

    def __init__(self, folder: Path) -> None:
        """Create the data and train the runs, in a few seconds."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        generator = random.Random(0)
        words = ["the", "cat", "a", "dog", "one", "bird", "sees", "hears", "follows"]
        for name, count in (("train", 40), ("val", 8)):
            lines = [
                json.dumps({"text": " ".join(generator.choices(words, k=150))})
                for _ in range(count)
            ]
            (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        source = open_source([str(folder / "train.jsonl")], val=[str(folder / "val.jsonl")])
        prepare(source, folder / "text", train_bpe=300)
        self.config = folder / "gpt.yaml"
        self.config.write_text(
            f"""
            model: {{context_length: 32, n_layer: 2, n_head: 2, n_embd: 32, dropout: 0.1}}
            data: {{path: {folder / "text"}}}
            optim: {{max_steps: 8, batch_tokens: 256, micro_batch_size: 2, lr: 1.0e-2,
                     warmup_steps: 2}}
            run: {{out_dir: {folder / "gpt"}, device: cpu, dtype: float32, compile: false,
                   log_every: 1, eval_every: 4, save_every: 4}}
            """
        )
        self.classes = make_config(folder)
        for argv in (
            [self.config],
            [self.classes, *CPU, f"run.out_dir={folder / 'classifier'}"],
        ):
            assert outcome(train.main, *argv).ended == FINE

    def copy(self, name: str, to: str) -> Path:
        """Copy a run or data, replacing an earlier copy."""
        shutil.rmtree(self.folder / to, ignore_errors=True)
        return shutil.copytree(self.folder / name, self.folder / to)


class Outcome(NamedTuple):
    """Outcome of a command."""

    ended: str
    """FINE, SENTENCE, TRACEBACK or HANG."""
    error: str
    """Error message; empty for none."""
    printed: str
    """All output, including the error."""


class _TooLongError(BaseException):
    """Raised by the alarm. A BaseException, so that no handler of the command catches it."""


def outcome(command: Callable[[list[str]], object], *arguments: object) -> Outcome:
    """Call a command as from a terminal, with limits on time and memory."""

    def ring(*_: object) -> None:
        raise _TooLongError

    printed, before = io.StringIO(), signal.signal(signal.SIGALRM, ring)
    ended, error = FINE, ""
    signal.alarm(PATIENCE)
    try:
        with (
            redirect_stdout(printed),
            redirect_stderr(printed),
            _limited_memory(),
            user_errors_as_messages(),
        ):
            command([*map(str, arguments)])
    except SystemExit as end:
        if is_stop(end):  # a signal to this process
            raise
        error = str(end.code)
        ended = SENTENCE if error.startswith("error: ") or end.code == 2 else FINE
    except _TooLongError:
        ended = HANG
    except BaseException as defect:  # noqa: BLE001 a panic of a library also counts
        ended, error = TRACEBACK, f"{type(defect).__name__}: {defect}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return Outcome(ended, error, printed.getvalue() + error)


@contextmanager
def _limited_memory() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def records(run: Path) -> list[Row]:
    """Read the records of a run, without values that depend on the clock."""
    return [{k: v for k, v in r.items() if k not in TIMES} for r in read_metrics(run)]


def _has_records(run: Path, expected: list[Row]) -> bool:
    try:
        return records(run) == expected
    except (ValueError, OSError):
        return False


def remove(path: Path) -> None:
    """Remove a file, link, pipe or folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class Tally:
    """Counts of the tries and failures of one fault, a row of the result."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.tries = 0
        self.refused = 0
        self.failures: list[str] = []

    def add(self, ended: str, place: str, error: str) -> None:
        """Count a try. A traceback or a hang is always a failure."""
        self.tries += 1
        self.refused += ended != FINE
        if ended in (TRACEBACK, HANG):
            self.fail(ended, f"{place}: {error}")

    def compare(
        self, ended: str, place: str, error: str, run: Path, expected: list[Row], name: str = ""
    ) -> None:
        """Count a try of a run that had a fault.

        It must have the `expected` records, or end with a plain error message that has `name`.
        """
        self.add(ended, place, error)
        if ended == FINE and not _has_records(run, expected):
            self.fail("silent", f"{place}: other records, exit status 0")
        elif ended == SENTENCE and name not in error:
            self.fail("silent", f"{place} is not named: {error}")

    def fail(self, kind: str, text: str) -> None:
        """Record a failure of a kind, one of table.KINDS."""
        self.failures.append(f"{kind}: {text}")

    def row(self, **counts: int) -> Row:
        """Build the row of the result."""
        failed = {"tries": self.tries, "failed": len(self.failures)}
        return {"what": self.fault, **failed, **counts, "failures": self.failures}
