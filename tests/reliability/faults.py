"""What goes wrong around a run while it trains: its folder, its data and its own weights."""

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import train
from tests.reliability.world import FINE, SENTENCE, TRACEBACK, World, counted, outcome, told
from tests.training.classification.tiny_classifier import CPU
from tests.training_runs import start_process
from training.checkpoint.folders import checkpoints, step_of
from training.checkpoint.reader import Checkpoint
from training.command_line import errors_as_sentences
from training.metrics import METRICS, read_metrics

HANG = "a hang"
PATIENCE = 60.0
"""Seconds for a run of one or two."""
ON = ("optim.max_steps=10", "optim.schedule=constant", "optim.warmup_steps=0")
"""Two more steps of the GPT."""


def _train_until(argv: list[str], log: Path, at: int, fault: Callable[[], object]) -> None:
    """Train, and do something after the record of step `at`, a step of training."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    record = train.Trainer.record

    def disturbed(self, what, **values):
        record(self, what, **values)
        if self.step == at and "lr" in values:
            fault()

    train.Trainer.record = disturbed
    with errors_as_sentences():
        train.main(argv)


def disturb(world: World, argv: list[str], at: int, fault: Callable[[], object]) -> tuple[str, str]:
    """How a run in a process of its own ends after a fault, and the last that it said."""
    log = world.folder / "log"
    process = start_process(_train_until, argv, log, at, fault)
    process.join(PATIENCE)
    if process.is_alive():
        process.kill()
        process.join()
        return HANG, "still trains"
    said = next(reversed(log.read_text().splitlines()), "")
    if process.exitcode == 0:
        return FINE, said
    if process.exitcode == 1 and said.startswith("error: "):
        return SENTENCE, said
    return TRACEBACK, f"exit status {process.exitcode}: {said}"


def _failed(ended: str, what: str, said: str) -> Iterator[str]:
    """A failure that is one whatever was tried."""
    if ended in (TRACEBACK, HANG):
        yield f"{'hang' if ended == HANG else 'traceback'}: {what}: {said}"


def _has_records(run: Path, expected: list[dict]) -> bool:
    try:
        return told(run) == expected
    except (ValueError, OSError):
        return False


# Folders of checkpoints that cannot be read


def _link(folder: Path) -> None:
    folder.symlink_to("/not/mounted")


def _empty_links(folder: Path) -> None:
    folder.mkdir()
    (folder / "step_00000008").symlink_to("/not/mounted")


MISSING: dict[str, Callable[[Path], object]] = {
    "not mounted": _link,
    "linked checkpoints not mounted": _empty_links,
    "a file": Path.touch,
    "an empty folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "gone": lambda folder: None,
}


def missing_checkpoints(world: World) -> dict:
    """Checkpoints that cannot be read, where there are records: neither starts at step 0."""
    tries, failures = 0, []
    for name in ("gpt", "classifier"):
        run = world.folder / "missing"
        start = [world.classes, *CPU] if name == "classifier" else [world.config]
        argv = [*start, f"run.out_dir={run}"]
        for what, put in MISSING.items():
            world.copy(name, "missing")
            before = (run / METRICS).read_bytes()
            folder = (run / "checkpoints").rename(world.folder / "elsewhere")
            put(run / "checkpoints")
            ended, said = outcome(train.main, *argv)
            tries += 1
            if ended == FINE or (run / METRICS).read_bytes() != before:
                failures.append(f"silent: {name}, {what}: records were dropped")
            elif "checkpoints" not in said:
                failures.append(f"silent: {name}, {what} is not named: {said}")
            failures += _failed(ended, f"{name}, {what}", said)
            _remove(run / "checkpoints")
            folder.rename(run / "checkpoints")
            if outcome(train.main, *argv)[0] != FINE:
                failures.append(f"silent: {name}, {what}: does not resume once they are back")
    return counted("missing checkpoints", tries, failures)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# Records that another program changes


def _replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_text('{"step": 1}\n')
    other.replace(path)


RECORDS: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "renamed": lambda path: path.rename(path.with_name("mine")),
    "replaced": _replace,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "appended to": lambda path: path.open("a").write('{"step": 1}\n'),
}


def _change_records(path: Path, what: str) -> None:
    RECORDS[what](path)


def changed_records(world: World) -> dict:
    """metrics.jsonl, changed during a run: all records are there, or the run does not end well."""
    tries, failures, refused = 0, [], 0
    expected = told(world.folder / "gpt")
    for what in RECORDS:
        for at in (1, 4, 8):  # the first record, at a checkpoint, the last
            run = world.folder / "changed"
            shutil.rmtree(run, ignore_errors=True)
            fault = partial(_change_records, run / METRICS, what)
            argv = [str(world.config), f"run.out_dir={run}"]
            ended, said = disturb(world, argv, at, fault)
            tries += 1
            refused += ended == SENTENCE
            if ended == FINE and not _has_records(run, expected):
                failures.append(f"silent: {what} at step {at}: other records, exit status 0")
            failures += _failed(ended, f"{what} at step {at}", said)
    return counted("changed records", tries, failures, refused=refused)


# Data that change


def _zero(path: Path, share: float) -> None:
    with path.open("r+b") as file:
        file.write(bytes(int(share * path.stat().st_size)))


def _renew(path: Path, share: float) -> None:
    other = path.with_name("other")
    other.write_bytes(bytes(path.stat().st_size))
    other.replace(path)


DATA: dict[str, Callable[[Path, float], object]] = {
    "cut": lambda path, share: os.truncate(path, int(share * path.stat().st_size)),
    "overwritten": _zero,
    "replaced": _renew,
    "deleted": lambda path, share: path.unlink(),
    "touched": lambda path, share: os.utime(path),
}


def _change_data(path: Path, what: str, share: float) -> None:
    DATA[what](path, share)


def changed_data(world: World, n: int) -> dict:
    """A file of the data, changed during a run: the same losses, or a sentence that names it."""
    generator = random.Random("changed data")
    data, run = world.folder / "changed_text", world.folder / "changed"
    argv = [str(world.config), f"data.path={data}", f"run.out_dir={run}"]
    expected, failures, refused = told(world.folder / "gpt"), [], 0
    for number in range(n):
        what = [*DATA][number % len(DATA)]
        split, at = generator.choice(["train", "val"]), generator.randrange(1, 8)
        world.copy("text", "changed_text")
        shutil.rmtree(run, ignore_errors=True)
        path = data / f"{split}_00000.bin"
        fault = partial(_change_data, path, what, generator.uniform(0.0, 0.99))
        ended, said = disturb(world, argv, at, fault)
        where = f"{path.name} {what} at step {at}"
        refused += ended == SENTENCE
        if ended == FINE and not _has_records(run, expected):
            failures.append(f"silent: {where}: other records")
        elif ended == SENTENCE and path.name not in said:
            failures.append(f"silent: {where} is not named: {said}")
        failures += _failed(ended, where, said)
    return counted("changed data", n, failures, refused=refused)


# Weights that a step ruins


def ruined_weights(world: World, n: int) -> dict:
    """A learning rate that ruins the weights: a good checkpoint is named, and kept."""
    generator = random.Random("ruined weights")
    run, failures = world.folder / "ruined", []
    for number in range(n):
        shutil.rmtree(run, ignore_errors=True)
        good_steps, save_every = generator.randrange(2, 9), generator.randrange(1, 4)
        argv = [
            *(world.config, *ON, f"run.out_dir={run}", f"run.save_every={save_every}"),
            *(f"run.keep_last={generator.randrange(1, 3)}", "run.max_skipped=6"),
            *(f"run.log_every={generator.choice([1, 3])}",),
        ]
        assert outcome(train.main, *argv, f"optim.max_steps={good_steps}")[0] == FINE
        ruin = ("optim.lr=1e20", f"run.eval_every={generator.randrange(1, 12)}")
        ended, said = outcome(train.main, *argv, "optim.max_steps=60", *ruin)
        where = f"{number}: {good_steps} good steps, {' '.join([*map(str, argv[4:]), *ruin])}"
        failures += _failed(ended, where, said)
        named = re.search(r"(\S+) is the newest with a good step after it", said)
        good = [] if named is None else [f for f in checkpoints(run) if str(f) == named[1]]
        if not good or (step_of(good[0]) or 0) > good_steps:
            failures.append(f"silent: {where}: no good checkpoint is named: {said}")
            continue
        if not all(x.isfinite().all() for x in Checkpoint.open(good[0]).weights().values()):
            failures.append(f"silent: {where}: {good[0]} is not finite")
        for folder in checkpoints(run):
            if (step_of(folder) or 0) > (step_of(good[0]) or 0):
                shutil.rmtree(folder)
        ended, said = outcome(train.main, *argv)
        losses = [json.dumps(r["loss"]) for r in read_metrics(run) if "loss" in r]
        if ended != FINE or "NaN" in losses or any("skipped" in r for r in read_metrics(run)):
            failures.append(f"silent: {where}: does not resume from {good[0]}: {said}")
    return counted("ruined weights", n, failures)
