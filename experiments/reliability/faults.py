"""Faults during a run: in its folder, its data and its weights."""

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import train
from evaluation.results import Row
from experiments.reliability.dots import CPU
from experiments.reliability.processes import print_to, start_process
from experiments.reliability.world import (
    FINE,
    HANG,
    PATIENCE,
    SENTENCE,
    TRACEBACK,
    TWO_MORE,
    Tally,
    World,
    outcome,
    records,
    remove,
)
from training.checkpoint.folders import checkpoints, step_of
from training.checkpoint.reader import Checkpoint
from training.command_line import user_errors_as_messages
from training.metrics import METRICS, Record, read_metrics


def _train_until(argv: list[str], log: Path, at: int, fault: Callable[[], object]) -> None:
    """Train, and cause a fault after the record of training step `at`."""
    log.write_text("")
    print_to(log, log)
    record = train.Trainer.record

    def disturbed(self: train.Trainer, entry: Record, **values: Any) -> None:
        record(self, entry, **values)
        if self.step == at and "lr" in values:
            fault()

    train.Trainer.record = disturbed
    with user_errors_as_messages():
        train.main(argv)


def disturb(world: World, argv: list[str], at: int, fault: Callable[[], object]) -> tuple[str, str]:
    """Outcome of a run in a separate process after a fault, and its last line of output."""
    log = world.folder / "log"
    process = start_process(_train_until, argv, log, at, fault)
    process.join(PATIENCE)
    if process.is_alive():
        process.kill()
        process.join()
        return HANG, "still training"
    last_line = next(reversed(log.read_text().splitlines()), "")
    if process.exitcode == 0:
        return FINE, last_line
    if process.exitcode == 1 and last_line.startswith("error: "):
        return SENTENCE, last_line
    return TRACEBACK, f"exit status {process.exitcode}: {last_line}"


# Unreadable checkpoint folders


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


def missing_checkpoints(world: World) -> Row:
    """Unreadable checkpoints of a run with records: it must not start again at step 0."""
    tally, run = Tally("missing checkpoints"), world.folder / "missing"
    for name in ("gpt", "classifier"):
        start = [world.classes, *CPU] if name == "classifier" else [world.config]
        argv = [*start, f"run.out_dir={run}"]
        for fault, put in MISSING.items():
            world.copy(name, "missing")
            before = (run / METRICS).read_bytes()
            folder = (run / "checkpoints").rename(world.folder / "elsewhere")
            put(run / "checkpoints")
            ended, error, _ = outcome(train.main, *argv)
            place = f"{name}, {fault}"
            tally.add(ended, place, error)
            if ended == FINE or (run / METRICS).read_bytes() != before:
                tally.fail("silent", f"{place}: records were dropped")
            elif "checkpoints" not in error:
                tally.fail("silent", f"{place} is not named: {error}")
            remove(run / "checkpoints")
            folder.rename(run / "checkpoints")
            if outcome(train.main, *argv).ended != FINE:
                tally.fail("silent", f"{place}: does not resume once they are back")
    return tally.row()


# Records changed by another program


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


def _change_records(path: Path, change: str) -> None:
    RECORDS[change](path)


def changed_records(world: World) -> Row:
    """Change metrics.jsonl during a run: it must have all records, or the run must fail."""
    tally, run = Tally("changed records"), world.folder / "changed"
    expected = records(world.folder / "gpt")
    for change in RECORDS:
        for at in (1, 4, 8):  # the first record, at a checkpoint, the last
            shutil.rmtree(run, ignore_errors=True)
            fault = partial(_change_records, run / METRICS, change)
            ended, error = disturb(world, [str(world.config), f"run.out_dir={run}"], at, fault)
            tally.compare(ended, f"{change} at step {at}", error, run, expected)
    return tally.row(refused=tally.refused)


# Data changed during a run


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


def _change_data(path: Path, change: str, share: float) -> None:
    DATA[change](path, share)


def changed_data(world: World, n: int) -> Row:
    """Change a data file during a run: losses must be the same, or an error must name the file."""
    tally, generator = Tally("changed data"), random.Random("changed data")
    data, run = world.folder / "changed_text", world.folder / "changed"
    argv = [str(world.config), f"data.path={data}", f"run.out_dir={run}"]
    expected = records(world.folder / "gpt")
    for number in range(n):
        change = [*DATA][number % len(DATA)]
        split, at = generator.choice(["train", "val"]), generator.randrange(1, 8)
        world.copy("text", "changed_text")
        shutil.rmtree(run, ignore_errors=True)
        path = data / f"{split}_00000.bin"
        fault = partial(_change_data, path, change, generator.uniform(0.0, 0.99))
        ended, error = disturb(world, argv, at, fault)
        place = f"{path.name} {change} at step {at}"
        tally.compare(ended, place, error, run, expected, path.name)
    return tally.row(refused=tally.refused)


# Weights corrupted by a step


def ruined_weights(world: World, n: int) -> Row:
    """Corrupt the weights by a huge learning rate: a good checkpoint must be kept and named."""
    tally, generator = Tally("ruined weights"), random.Random("ruined weights")
    run = world.folder / "ruined"
    for number in range(n):
        shutil.rmtree(run, ignore_errors=True)
        good_steps, save_every = generator.randrange(2, 9), generator.randrange(1, 4)
        settings = (
            *(f"run.save_every={save_every}", f"run.keep_last={generator.randrange(1, 3)}"),
            *("run.max_skipped=6", f"run.log_every={generator.choice([1, 3])}"),
        )
        argv = [world.config, *TWO_MORE, f"run.out_dir={run}", *settings]
        assert outcome(train.main, *argv, f"optim.max_steps={good_steps}").ended == FINE
        ruin = ("optim.lr=1e20", f"run.eval_every={generator.randrange(1, 12)}")
        ended, error, _ = outcome(train.main, *argv, "optim.max_steps=60", *ruin)
        place = f"{number}: {good_steps} good steps, {' '.join([*settings, *ruin])}"
        tally.add(ended, place, error)
        named = re.search(r"(\S+) is the newest with a good step after it", error)
        good = next((f for f in checkpoints(run) if named and str(f) == named[1]), None)
        if good is None or (step_of(good) or 0) > good_steps:
            tally.fail("silent", f"{place}: no good checkpoint is named: {error}")
            continue
        if not all(x.isfinite().all() for x in Checkpoint.open(good).weights().values()):
            tally.fail("silent", f"{place}: {good} is not finite")
        for folder in checkpoints(run):
            if (step_of(folder) or 0) > (step_of(good) or 0):
                shutil.rmtree(folder)
        ended, error, _ = outcome(train.main, *argv)
        steps = read_metrics(run)
        losses = [json.dumps(r["loss"]) for r in steps if "loss" in r]
        if ended != FINE or "NaN" in losses or any("skipped" in r for r in steps):
            tally.fail("silent", f"{place}: does not resume from {good}: {error}")
    return tally.row()
