"""A text, images and runs that learn them in a second or two, and how a command ends on them."""

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
from training.command_line import errors_as_sentences
from training.metrics import read_metrics
from training.signals import is_stop

TIMES = ("tokens_per_s", "examples_per_s", "gpu_hours", "memory_gib", "wall_s")
FINE, SENTENCE, TRACEBACK, HANG = "fine", "sentence", "traceback", "hang"
TWO_MORE = ("optim.max_steps=10", "optim.schedule=constant", "optim.warmup_steps=0")
"""Two more steps of the GPT."""
PATIENCE = 60
"""Seconds for a command that takes one or two."""
MEMORY = 6 << 30
"""Bytes of address space that a command may take beyond what this process has."""


class World:
    """A folder with data, and finished runs to copy: `gpt` of 8 steps, `classifier` of 24."""

    def __init__(self, folder: Path) -> None:
        """Make and train all of it; takes some seconds."""
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
        """Copy a run or data, in place of an earlier copy."""
        shutil.rmtree(self.folder / to, ignore_errors=True)
        return shutil.copytree(self.folder / name, self.folder / to)


class Outcome(NamedTuple):
    """How a command ended."""

    ended: str
    """FINE, SENTENCE, TRACEBACK or HANG."""
    said: str
    """The error; empty for none."""
    printed: str
    """All that it printed, and the error."""


class _TooLongError(BaseException):
    """Raised by the alarm; no handler of the command takes it for an error of its own."""


def outcome(command: Callable[[list[str]], object], *arguments: object) -> Outcome:
    """Call a command as from a terminal, with limits on its time and its memory."""

    def ring(*_: object) -> None:
        raise _TooLongError

    printed, before = io.StringIO(), signal.signal(signal.SIGALRM, ring)
    ended, said = FINE, ""
    signal.alarm(PATIENCE)
    try:
        with (
            redirect_stdout(printed),
            redirect_stderr(printed),
            _little_memory(),
            errors_as_sentences(),
        ):
            command([*map(str, arguments)])
    except SystemExit as end:
        if is_stop(end):  # this command itself is to end
            raise
        said = str(end.code)
        ended = SENTENCE if said.startswith("error: ") or end.code == 2 else FINE
    except _TooLongError:
        ended = HANG
    except BaseException as error:  # noqa: BLE001 a panic of a library also counts
        ended, said = TRACEBACK, f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return Outcome(ended, said, printed.getvalue() + said)


@contextmanager
def _little_memory() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def records(run: Path) -> list[Row]:
    """The records of a run without what depends on the clock."""
    return [{k: v for k, v in r.items() if k not in TIMES} for r in read_metrics(run)]


def _has_records(run: Path, expected: list[Row]) -> bool:
    try:
        return records(run) == expected
    except (ValueError, OSError):
        return False


def remove(path: Path) -> None:
    """Remove a file, link, pipe or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class Tally:
    """Tries of one kind, and those that failed: a row of the result."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.tries = 0
        self.refused = 0
        self.failures: list[str] = []

    def add(self, ended: str, where: str, said: str) -> None:
        """Count a try; a traceback or a hang is a failure in any case."""
        self.tries += 1
        self.refused += ended != FINE
        if ended in (TRACEBACK, HANG):
            self.fail(ended, f"{where}: {said}")

    def compare(
        self, ended: str, where: str, said: str, run: Path, expected: list[Row], name: str = ""
    ) -> None:
        """Count a run that something happened to.

        It must have the `expected` records, or end with a sentence that has a `name` in it.
        """
        self.add(ended, where, said)
        if ended == FINE and not _has_records(run, expected):
            self.fail("silent", f"{where}: other records, exit status 0")
        elif ended == SENTENCE and name not in said:
            self.fail("silent", f"{where} is not named: {said}")

    def fail(self, kind: str, text: str) -> None:
        """Note a failure of a kind, one of table.KINDS."""
        self.failures.append(f"{kind}: {text}")

    def row(self, **counts: int) -> Row:
        """Row of the result."""
        failed = {"tries": self.tries, "failed": len(self.failures)}
        return {"what": self.what, **failed, **counts, "failures": self.failures}
