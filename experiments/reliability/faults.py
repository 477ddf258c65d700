"""Faults around a run while it trains: in its folder, its data and its own weights."""

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
from training.command_line import errors_as_sentences
from training.metrics import METRICS, Record, read_metrics


def _train_until(argv: list[str], log: Path, at: int, fault: Callable[[], object]) -> None:
    """Train, and do something after the record of step `at`, a step of training."""
    log.write_text("")
    print_to(log, log)
    record = train.Trainer.record

    def disturbed(self: train.Trainer, what: Record, **values: Any) -> None:
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


def missing_checkpoints(world: World) -> Row:
    """Checkpoints that cannot be read, where there are records: neither starts at step 0."""
    tally, run = Tally("missing checkpoints"), world.folder / "missing"
    for name in ("gpt", "classifier"):
        start = [world.classes, *CPU] if name == "classifier" else [world.config]
        argv = [*start, f"run.out_dir={run}"]
        for what, put in MISSING.items():
            world.copy(name, "missing")
            before = (run / METRICS).read_bytes()
            folder = (run / "checkpoints").rename(world.folder / "elsewhere")
            put(run / "checkpoints")
            ended, said, _ = outcome(train.main, *argv)
            where = f"{name}, {what}"
            tally.add(ended, where, said)
            if ended == FINE or (run / METRICS).read_bytes() != before:
                tally.fail("silent", f"{where}: records were dropped")
            elif "checkpoints" not in said:
                tally.fail("silent", f"{where} is not named: {said}")
            remove(run / "checkpoints")
            folder.rename(run / "checkpoints")
            if outcome(train.main, *argv).ended != FINE:
                tally.fail("silent", f"{where}: does not resume once they are back")
    return tally.row()


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


def changed_records(world: World) -> Row:
    """metrics.jsonl, changed during a run: all records are there, or the run does not end well."""
    tally, run = Tally("changed records"), world.folder / "changed"
    expected = records(world.folder / "gpt")
    for what in RECORDS:
        for at in (1, 4, 8):  # the first record, at a checkpoint, the last
            shutil.rmtree(run, ignore_errors=True)
            fault = partial(_change_records, run / METRICS, what)
            ended, said = disturb(world, [str(world.config), f"run.out_dir={run}"], at, fault)
            tally.compare(ended, f"{what} at step {at}", said, run, expected)
    return tally.row(refused=tally.refused)


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


def changed_data(world: World, n: int) -> Row:
    """A file of the data, changed during a run: the same losses, or a sentence that names it."""
    tally, generator = Tally("changed data"), random.Random("changed data")
    data, run = world.folder / "changed_text", world.folder / "changed"
    argv = [str(world.config), f"data.path={data}", f"run.out_dir={run}"]
    expected = records(world.folder / "gpt")
    for number in range(n):
        what = [*DATA][number % len(DATA)]
        split, at = generator.choice(["train", "val"]), generator.randrange(1, 8)
        world.copy("text", "changed_text")
        shutil.rmtree(run, ignore_errors=True)
        path = data / f"{split}_00000.bin"
        fault = partial(_change_data, path, what, generator.uniform(0.0, 0.99))
        ended, said = disturb(world, argv, at, fault)
        where = f"{path.name} {what} at step {at}"
        tally.compare(ended, where, said, run, expected, path.name)
    return tally.row(refused=tally.refused)


# Weights that a step ruins


def ruined_weights(world: World, n: int) -> Row:
    """A learning rate that ruins the weights: a good checkpoint is named, and kept."""
    tally, generator = Tally("ruined weights"), random.Random("ruined weights")
    run = world.folder / "ruined"
    for number in range(n):
        shutil.rmtree(run, ignore_errors=True)
        good_steps, save_every = generator.randrange(2, 9), generator.randrange(1, 4)
        how = (
            *(f"run.save_every={save_every}", f"run.keep_last={generator.randrange(1, 3)}"),
            *("run.max_skipped=6", f"run.log_every={generator.choice([1, 3])}"),
        )
        argv = [world.config, *TWO_MORE, f"run.out_dir={run}", *how]
        assert outcome(train.main, *argv, f"optim.max_steps={good_steps}").ended == FINE
        ruin = ("optim.lr=1e20", f"run.eval_every={generator.randrange(1, 12)}")
        ended, said, _ = outcome(train.main, *argv, "optim.max_steps=60", *ruin)
        where = f"{number}: {good_steps} good steps, {' '.join([*how, *ruin])}"
        tally.add(ended, where, said)
        named = re.search(r"(\S+) is the newest with a good step after it", said)
        good = next((f for f in checkpoints(run) if named and str(f) == named[1]), None)
        if good is None or (step_of(good) or 0) > good_steps:
            tally.fail("silent", f"{where}: no good checkpoint is named: {said}")
            continue
        if not all(x.isfinite().all() for x in Checkpoint.open(good).weights().values()):
            tally.fail("silent", f"{where}: {good} is not finite")
        for folder in checkpoints(run):
            if (step_of(folder) or 0) > (step_of(good) or 0):
                shutil.rmtree(folder)
        ended, said, _ = outcome(train.main, *argv)
        steps = read_metrics(run)
        losses = [json.dumps(r["loss"]) for r in steps if "loss" in r]
        if ended != FINE or "NaN" in losses or any("skipped" in r for r in steps):
            tally.fail("silent", f"{where}: does not resume from {good}: {said}")
    return tally.row()
